/// Version of the C ABI. It changes when a program that was compiled with an older header can no longer run
/// with the new shared library; the library's soname ends in it.
pub const RFD_ABI_VERSION: u32 = 1;
