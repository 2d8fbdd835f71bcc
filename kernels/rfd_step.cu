// A step of Random Function Descent: norms, step size and update of all tensors.
//
// As one launch, rfd_step_*, cooperative where it has several blocks. The same as launches one after the
// other: rfd_norm_*, for lists with f64 gradients rfd_rescale_max and rfd_rescale_norm, then rfd_update_* and
// rfd_status. In the split form for sharded training rfd_total stands between: it writes what ranks add up,
// and the update reads the sum. With rows, rfd_local_sums writes it, and rfd_take_sums puts the sum in the
// place of what the norm launches have left.
//
// 256 threads a block, any number of blocks: the bits of the result don't depend on it.

#include "halves.cuh"
#include "rescale.cuh"
#include "update.cuh"

template <Kind KIND>
struct Scratch {
    NormScratch<KIND> norms;
    DecisionScratch<KIND> decision;
};

template <Kind KIND>
struct UpdateScratch {
    DecisionScratch<KIND> decision;
    RowScratch<KIND> rows;
};

// What a step leaves behind beside its tensors. By one block, when no other one needs the old counts any
// more.
template <Kind KIND>
__device__ __forceinline__ void finish(const Launch& launch, DecisionScratch<KIND>& scratch)
{
    if (scratch.decision.outcome == RFD_OUTCOME_APPLIED) {
        store_history<KIND>(launch, scratch);
    }
    if (threadIdx.x == 0) {
        write_status<KIND>(launch, scratch);
    }
}

template <class I>
__device__ __forceinline__ void step_kernel(const RfdStep& step, const RfdTable& table)
{
    auto& scratch = block_shared<Scratch<I::KIND>>();
    const Launch launch(step, table);
    prefetch_settings(step);
    const bool reads = !found_inf(step);
    int exponent = 0;
    // A second time only where squares of f64 gradients overflow or underflow.
    for (bool again = true; again;) {
        if (reads) {
            norm_pass<I>(launch, scratch.norms, power_of_two(-exponent));
        }
        if (!is_generic<I>() || exponent == 0) {
            load_settings<I::KIND>(launch, scratch.decision);
        }
        if (reads) {
            prefetch_update<I>(launch, scratch.decision);
            grid_barrier();
        }
        again = false;
        if constexpr (is_generic<I>()) {
            if (reads && exponent == 0) {
                exponent = find_exponent(launch, scratch.decision);
                again = exponent != 0;
            }
        }
    }
    decide<I::KIND>(launch, scratch.decision, exponent);
    const bool applied = scratch.decision.decision.outcome == RFD_OUTCOME_APPLIED;
    if (applied) {
        update_pass<I>(launch, scratch.decision, scratch.norms.rows);
    }
    // Last, and by the block that has as few chunks as any: nobody waits for it.
    if (blockIdx.x == 0) {
        finish<I::KIND>(launch, scratch.decision);
    }
}

template <class I>
__device__ __forceinline__ void norm_kernel(const RfdStep& step, const RfdTable& table)
{
    auto& scratch = block_shared<NormScratch<I::KIND>>();
    if (!found_inf(step)) {
        norm_pass<I>(Launch(step, table, step.parts), scratch, 1.0);
    }
}

// Counts no step: another block may still have to read how many were applied.
template <class I>
__device__ __forceinline__ void update_kernel(const RfdStep& step, const RfdTable& table)
{
    auto& scratch = block_shared<UpdateScratch<I::KIND>>();
    const Launch launch(step, table, I::KIND == Kind::fitted ? 0 : step.parts);
    load_settings<I::KIND>(launch, scratch.decision);
    decide<I::KIND>(launch, scratch.decision, is_generic<I>() ? rescale_exponent(read_largest(step)) : 0);
    if (scratch.decision.decision.outcome == RFD_OUTCOME_APPLIED) {
        update_pass<I>(launch, scratch.decision, scratch.rows);
    }
}

#define RFD_KERNEL(NAME, BLOCKS)                                       \
    extern "C" __global__ void __launch_bounds__(RFD_THREADS, BLOCKS)    \
        NAME(RFD_PARAMETER(RfdStep) step, RFD_PARAMETER(RfdTable) table)

#define RFD_DEFINE_STEP(NAME, ...) \
    RFD_KERNEL(rfd_step_##NAME, instance::NAME::BLOCKS) { step_kernel<instance::NAME>(step, table); }
#define RFD_DEFINE_APART(NAME, ...)                                                                                    \
    RFD_KERNEL(rfd_norm_##NAME, instance::NAME::BLOCKS) { norm_kernel<instance::NAME>(step, table); }            \
    RFD_KERNEL(rfd_update_##NAME, instance::NAME::BLOCKS) { update_kernel<instance::NAME>(step, table); }

// A part of the device code alone (instances.h): RFD_PART_STEP and RFD_PART_APART name an instance.
#define RFD_STEP_OF(NAME) RFD_DEFINE_STEP(NAME)
#define RFD_APART_OF(NAME) RFD_DEFINE_APART(NAME)
#if defined(RFD_PART_STEP)
RFD_STEP_OF(RFD_PART_STEP)
#elif defined(RFD_PART_APART)
RFD_APART_OF(RFD_PART_APART)
#elif !defined(RFD_PART_COMMON) && !defined(RFD_PART_SEPARATE) && !defined(RFD_PART_HALVES)
#define RFD_PART_COMMON
#define RFD_PART_SEPARATE
#define RFD_PART_HALVES
#define RFD_PART_RESCALES
RFD_INSTANCES(RFD_DEFINE_STEP)
RFD_INSTANCES(RFD_DEFINE_APART)
#endif

#ifdef RFD_PART_RESCALES

// After rfd_norm_generic: the largest f64 gradient, if squares overflowed or underflowed.
RFD_KERNEL(rfd_rescale_max, instance::generic::BLOCKS)
{
    auto& scratch = block_shared<DecisionScratch<Kind::generic>>();
    const Launch launch(step, table);
    if (!found_inf(step) && needs_rescale(launch, scratch)) {
        find_largest(launch);
    }
}

// After rfd_rescale_max: the sums again, if it found something.
RFD_KERNEL(rfd_rescale_norm, instance::generic::BLOCKS)
{
    auto& scratch = block_shared<NormScratch<Kind::generic>>();
    const int exponent = rescale_exponent(read_largest(step));
    if (exponent != 0) {
        norm_pass<instance::generic>(Launch(step, table), scratch, power_of_two(-exponent));
    }
}

#endif
#ifdef RFD_PART_SEPARATE

// One block, last of the separate launches: counts the step, which it decides again as the update did, and
// remembers what the method needs of it.
RFD_KERNEL(rfd_status, 1)
{
    auto& scratch = block_shared<DecisionScratch<Kind::generic>>();
    const Launch launch(step, table, step.parts);
    // Before a barrier, as it is forgotten at the end.
    const int exponent = rescale_exponent(read_largest(step));
    load_settings<Kind::generic>(launch, scratch);
    decide<Kind::generic>(launch, scratch, exponent);
    finish<Kind::generic>(launch, scratch);
    if (threadIdx.x == 0) {
        forget_largest(step);
    }
}

// One block, after the norm launches: the squared norms of this rank's gradients, to where `rank_sums`
// points.
RFD_KERNEL(rfd_total, 1)
{
    auto& scratch = block_shared<DecisionScratch<Kind::generic>>();
    const Launch launch(step, table);
    load_settings<Kind::generic>(launch, scratch);
    const int exponent = rescale_exponent(read_largest(step));
    const Totals totals = total_squares<Kind::generic>(launch, scratch, exponent);
    if (threadIdx.x == 0) {
        const double unit = power_of_two(exponent);
        RfdSquaredNorm* norm = reinterpret_cast<RfdSquaredNorm*>(step.rank_sums);
        // NaN also where a tensor that does not count isn't finite: then every rank has to skip.
        const double spoilt = totals.finite ? 0.0 : RFD_F64_INFINITY - RFD_F64_INFINITY;
        norm->euclidean = totals.euclidean * unit * unit + spoilt;
        norm->sigma = totals.sigma * unit * unit + spoilt;
        forget_largest(step);
    }
}

#endif
#ifdef RFD_PART_HALVES

// After rfd_norm_* of a method with rows, and over zeros: what ranks add up.
RFD_KERNEL(rfd_local_sums, 1)
{
    write_local_sums(Launch(step, table, step.parts));
}

// Before rfd_update_* of a method with rows.
RFD_KERNEL(rfd_take_sums, 1)
{
    auto& scratch = block_shared<FoldScratch>();
    if (!found_inf(step)) {
        take_sums(Launch(step, table, step.parts), scratch);
    }
}

#endif
#ifdef RFD_PART_COMMON

// One block, after rfd_norm_* over parameters in the place of gradients.
RFD_KERNEL(rfd_measure, 1)
{
    Adaptive::measure(Launch(step, table, step.parts));
}

// Fills master weights from the parameters they belong to.
RFD_KERNEL(rfd_fill_masters, instance::generic::BLOCKS)
{
    fill_masters(Launch(step, table));
}

// One block: writes what is passed by value in the place of tensors, `chunks` words of it, to the address
// `tensors`. So lists too long to be passed by value, and settings, get there without memory of the host that
// would have to stay, also when the launch is captured.
RFD_KERNEL(rfd_store, 1)
{
    const uint64_t* from = reinterpret_cast<const uint64_t*>(table.tensor);
    uint64_t* to = reinterpret_cast<uint64_t*>(step.tensors);
    for (uint64_t k = threadIdx.x; k < step.chunks; k += RFD_THREADS) {
        to[k] = from[k];
    }
}

#endif
