// What cust calls beside the functions of tests/fake_cuda/driver.cpp, of which these are made. Only for
// programs that are linked with both: scripts/check-cust.

#include <cstddef>
#include <cstdint>

extern "C" {

int cuStreamCreate(void** stream, unsigned flags);
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t size, void* stream);
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t size, void* stream);
int cuMemsetD8Async(uint64_t address, unsigned char value, size_t count, void* stream);
int cuCtxPushCurrent_v2(void* context);

int cuStreamCreateWithPriority(void** stream, unsigned flags, int) { return cuStreamCreate(stream, flags); }

int cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t size) { return cuMemcpyHtoDAsync_v2(to, from, size, nullptr); }

int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t size) { return cuMemcpyDtoHAsync_v2(to, from, size, nullptr); }

int cuMemsetD8_v2(uint64_t address, unsigned char value, size_t count)
{
    return cuMemsetD8Async(address, value, count, nullptr);
}

int cuDevicePrimaryCtxSetFlags_v2(int, unsigned) { return 0; }

int cuCtxGetDevice(int* device)
{
    *device = 0;
    return 0;
}

// A context that is not the primary one.
int cuCtxCreate_v2(void** context, unsigned, int)
{
    static int other;
    *context = &other;
    return cuCtxPushCurrent_v2(*context);
}

int cuCtxDestroy_v2(void*) { return 0; }
}
