// What the benchmark of the step on a device needs beside it. The PTX beside this was made by NVRTC 12.1 with
// --gpu-architecture=compute_70.

// What a step does to memory without doing anything else: reads one array, then reads two and writes one.
extern "C" __global__ void ceiling(float4* __restrict__ p, const float4* __restrict__ g, unsigned long long count,
                                   float* sink)
{
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    const unsigned long long first = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    float sum = 0.0f;
#pragma unroll 4
    for (unsigned long long i = first; i < count; i += stride) {
        const float4 x = g[i];
        sum += x.x + x.y + x.z + x.w;
    }
    // Never true of finite numbers, which the compiler can't know.
    if (sum == 1e38f) {
        *sink = sum;
    }
#pragma unroll 4
    for (unsigned long long i = first; i < count; i += stride) {
        const float4 x = g[i];
        float4 y = p[i];
        y.x -= x.x;
        y.y -= x.y;
        y.z -= x.z;
        y.w -= x.w;
        p[i] = y;
    }
}

// Reads an array: what the second-level cache held before is gone then, and nothing is left to be written
// back.
extern "C" __global__ void sweep(const float4* __restrict__ from, unsigned long long count, float* sink)
{
    float sum = 0.0f;
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (unsigned long long)gridDim.x * blockDim.x) {
        const float4 x = from[i];
        sum += x.x + x.y + x.z + x.w;
    }
    if (sum == 1e38f) {
        *sink = sum;
    }
}

// Keeps the stream busy for so long, while the host queues what is to be timed.
extern "C" __global__ void spin(unsigned long long nanoseconds)
{
    unsigned long long now, end;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    end = now + nanoseconds;
    while (now < end) {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    }
}
