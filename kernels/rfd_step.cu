// A step of Random Function Descent: norms, step size and update of all tensors.
//
// As one cooperative launch, rfd_step_*. The same as launches one after the other: rfd_norm_*, for lists with f64
// gradients rfd_rescue_max and rfd_rescue_norm, then rfd_update_* and rfd_status. In the split form for sharded training
// rfd_total stands between: it writes what ranks add up, and the update reads the sum.
//
// 256 threads a block, any number of blocks: the bits of the result don't depend on it.

#include "rescue.cuh"
#include "update.cuh"

template <class I>
struct Scratch {
    NormScratch<I> norms;
    DecisionScratch<I> decision;
};

__device__ __forceinline__ uint64_t applied_steps(const RfdStep& step)
{
    return reinterpret_cast<const volatile RfdStatus*>(step.status)->applied;
}

template <class I>
__device__ __forceinline__ void step_kernel(const RfdStep& step, const RfdTable& table)
{
    Scratch<I>& scratch = block_shared<Scratch<I>>();
    const Launch launch(step, table);
    Cursor cursor(launch, chunks_of_block(step.chunks).begin);
    // Before the barrier, behind which the first block counts this step.
    const uint64_t applied = applied_steps(step);
    const bool skipped = found_inf(step);
    if (!skipped) {
        norm_pass<I>(launch, scratch.norms, cursor, 1.0);
    }
    grid_barrier();
    int exponent = 0;
    if constexpr (I::GENERIC) {
        exponent = skipped ? 0 : rescue<I>(launch, scratch.norms, scratch.decision, cursor);
    }
    decide<I>(launch, scratch.decision, exponent);
    const Decision& decision = scratch.decision.decision;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        write_status(step, decision);
    }
    if (decision.reason == RFD_REASON_APPLIED) {
        update_pass<I>(launch, decision, cursor, applied);
    }
}

template <class I>
__device__ __forceinline__ void norm_kernel(const RfdStep& step, const RfdTable& table)
{
    Scratch<I>& scratch = block_shared<Scratch<I>>();
    const Launch launch(step, table);
    if (!found_inf(step)) {
        Cursor cursor(launch, chunks_of_block(step.chunks).begin);
        norm_pass<I>(launch, scratch.norms, cursor, 1.0);
    }
}

// Counts no step: another block may still have to read how many were applied.
template <class I>
__device__ __forceinline__ void update_kernel(const RfdStep& step, const RfdTable& table)
{
    Scratch<I>& scratch = block_shared<Scratch<I>>();
    const Launch launch(step, table);
    decide<I>(launch, scratch.decision, I::GENERIC ? rescue_exponent(read_largest(step)) : 0);
    const Decision& decision = scratch.decision.decision;
    if (decision.reason == RFD_REASON_APPLIED) {
        Cursor cursor(launch, chunks_of_block(step.chunks).begin);
        update_pass<I>(launch, decision, cursor, applied_steps(step));
    }
}

#define RFD_KERNEL(NAME, BLOCKS)                                       \
    extern "C" __global__ void __launch_bounds__(RFD_LANES, BLOCKS)    \
        NAME(RFD_PARAMETER(RfdStep) step, RFD_PARAMETER(RfdTable) table)

#define RFD_DEFINE_INSTANCE(NAME, I)                                          \
    RFD_KERNEL(rfd_step_##NAME, I::BLOCKS) { step_kernel<I>(step, table); }   \
    RFD_KERNEL(rfd_norm_##NAME, I::BLOCKS) { norm_kernel<I>(step, table); }   \
    RFD_KERNEL(rfd_update_##NAME, I::BLOCKS) { update_kernel<I>(step, table); }

RFD_INSTANCES(RFD_DEFINE_INSTANCE)

// After rfd_norm_generic: the largest f64 gradient, if squares overflowed or underflowed.
RFD_KERNEL(rfd_rescue_max, InstanceGeneric::BLOCKS)
{
    Scratch<InstanceGeneric>& scratch = block_shared<Scratch<InstanceGeneric>>();
    const Launch launch(step, table);
    if (!found_inf(step) && needs_rescue<InstanceGeneric>(launch, scratch.decision)) {
        Cursor cursor(launch, chunks_of_block(step.chunks).begin);
        find_largest(launch, cursor);
    }
}

// After rfd_rescue_max: the sums again, if it found something.
RFD_KERNEL(rfd_rescue_norm, InstanceGeneric::BLOCKS)
{
    Scratch<InstanceGeneric>& scratch = block_shared<Scratch<InstanceGeneric>>();
    const Launch launch(step, table);
    const int exponent = rescue_exponent(read_largest(step));
    if (exponent != 0) {
        Cursor cursor(launch, chunks_of_block(step.chunks).begin);
        norm_pass<InstanceGeneric>(launch, scratch.norms, cursor, power_of_two(-exponent));
    }
}

// One block, last of the separate launches: counts the step, which it decides again as the update did.
RFD_KERNEL(rfd_status, 1)
{
    Scratch<InstanceGeneric>& scratch = block_shared<Scratch<InstanceGeneric>>();
    const Launch launch(step, table);
    decide<InstanceGeneric>(launch, scratch.decision, rescue_exponent(read_largest(step)));
    if (threadIdx.x == 0) {
        write_status(step, scratch.decision.decision);
        forget_largest(step);
    }
}

// One block, after the norm launches: the squared norms of this rank's gradients, to where `given_norm` points.
RFD_KERNEL(rfd_total, 1)
{
    Scratch<InstanceGeneric>& scratch = block_shared<Scratch<InstanceGeneric>>();
    const Launch launch(step, table);
    const int exponent = rescue_exponent(read_largest(step));
    const Totals totals = total_squares<InstanceGeneric>(launch, scratch.decision, exponent);
    if (threadIdx.x == 0) {
        const double unit = power_of_two(exponent);
        RfdSquaredNorm* norm = reinterpret_cast<RfdSquaredNorm*>(step.given_norm);
        norm->euclidean = totals.euclidean * unit * unit;
        norm->sigma = totals.sigma * unit * unit;
        forget_largest(step);
    }
}

// Fills master weights from the parameters they belong to.
RFD_KERNEL(rfd_fill_masters, InstanceGeneric::BLOCKS)
{
    const Launch launch(step, table);
    Cursor cursor(launch, chunks_of_block(step.chunks).begin);
    fill_masters(launch, cursor);
}

// One block: writes tensors that are passed by value into a table on the device. So a list too long to be passed by value
// gets there without memory of the host that would have to stay, also when the launch is captured.
RFD_KERNEL(rfd_store_table, 1)
{
    RfdTensor* to = reinterpret_cast<RfdTensor*>(step.tensors);
    for (uint32_t k = threadIdx.x; k < step.tensor_count; k += RFD_LANES) {
        to[k] = table.tensor[k];
    }
}
