// The instances as types (instances.h).
#pragma once

#include "platform.cuh"

enum class Kind { fitted, averaged, generic };

// instance::f32 and so on.
namespace instance {

#define RFD_INSTANCE_TYPE(NAME, KIND_OF, PARAM_OF, GRAD_OF, MASTER_OF, VELOCITY_OF, WIDTH_OF, ROWS, SUMMED, HELD)   \
    struct NAME {                                                                                                     \
        static constexpr Kind KIND = Kind::KIND_OF;                                                                   \
        static constexpr int PARAM = RFD_DTYPE_##PARAM_OF, GRAD = RFD_DTYPE_##GRAD_OF;                                \
        static constexpr bool MASTER = MASTER_OF, VELOCITY = VELOCITY_OF;                                             \
        static constexpr int WIDTH = WIDTH_OF, ROWS_AT_ONCE = ROWS, SUMMED_AT_ONCE = SUMMED, BLOCKS = HELD;           \
    };
RFD_INSTANCES(RFD_INSTANCE_TYPE)
#undef RFD_INSTANCE_TYPE

}  // namespace instance

template <class I>
__device__ constexpr bool is_generic()
{
    return I::KIND == Kind::generic;
}

// Sums that the norm pass forms of each chunk, at most.
__device__ constexpr int sums_of(Kind kind)
{
    return kind == Kind::generic ? RFD_MOST_SUMS : kind == Kind::averaged ? 2 : 1;
}
