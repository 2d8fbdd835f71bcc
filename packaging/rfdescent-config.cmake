# Targets: rfdescent::shared, rfdescent::static, and rfdescent::rfdescent, which is the shared one unless
# BUILD_SHARED_LIBS is off.
get_filename_component(_rfdescent_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)

if(NOT TARGET rfdescent::shared)
    add_library(rfdescent::shared SHARED IMPORTED)
    set_target_properties(rfdescent::shared PROPERTIES
        IMPORTED_LOCATION "${_rfdescent_prefix}/lib/librfdescent.so"
        IMPORTED_SONAME "librfdescent.so.@ABI_VERSION@"
        INTERFACE_INCLUDE_DIRECTORIES "${_rfdescent_prefix}/include")

    add_library(rfdescent::static STATIC IMPORTED)
    set_target_properties(rfdescent::static PROPERTIES
        IMPORTED_LOCATION "${_rfdescent_prefix}/lib/librfdescent.a"
        INTERFACE_INCLUDE_DIRECTORIES "${_rfdescent_prefix}/include"
        INTERFACE_LINK_LIBRARIES "@SYSTEM_LIBRARIES@")

    add_library(rfdescent::rfdescent INTERFACE IMPORTED)
    if(DEFINED BUILD_SHARED_LIBS AND NOT BUILD_SHARED_LIBS)
        set_target_properties(rfdescent::rfdescent PROPERTIES INTERFACE_LINK_LIBRARIES rfdescent::static)
    else()
        set_target_properties(rfdescent::rfdescent PROPERTIES INTERFACE_LINK_LIBRARIES rfdescent::shared)
    endif()
endif()
unset(_rfdescent_prefix)
set(rfdescent_FOUND TRUE)
