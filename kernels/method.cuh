// The methods, and the one place that asks which it is. Each is a struct in methods/ with the same entry
// points:
//
//   Scratch<KIND>                          what a block shares while it decides
//   accepts(step, settings), accepts(step, group)   whether the settings are in its domain
//   prepare<KIND>(launch, scratch)         forms what needs no sums, before decide, by one thread
//   has_rows(step)                         whether chunks consist of rows, which have variances (rows.cuh:
//                                          WithoutRows has this and the next three for those without);
//                                          never in instances of kind `fitted`
//   averaging(step)                        with rows: the decay of velocities
//   variances(launch, tensor, applied)     with rows: those of a tensor in the step after so many
//   fold_columns(...)                      with rows: writes averages and scales of columns, after decide
//   decide<KIND>(launch, scratch, totals)  from the sums of all tensors to the step, by all threads
//   complete_report<KIND>(launch, scratch) forms what only the report tells, after decide, by one thread
//   scale(launch, decision, tensor)        what a tensor's coefficient is multiplied with, after decide
//   store_history<KIND>(launch, scratch)   writes what is remembered after an applied step, by one block
//
// A new method is such a header and a line in RFD_METHODS, with its number (RFD_METHOD_*) and what it is
// passed (in RfdStep) in abi.h.
#pragma once

#include "methods/adaptive.cuh"
#include "methods/fitted.cuh"

// X(number, struct)
#define RFD_METHODS(X)               \
    X(RFD_METHOD_FITTED, Fitted)     \
    X(RFD_METHOD_ADAPTIVE, Adaptive)

#define RFD_METHOD_SCRATCH(NUMBER, METHOD) , METHOD::Scratch<KIND>
template <Kind KIND>
struct DecisionScratch : SharedDecision RFD_METHODS(RFD_METHOD_SCRATCH) {};
#undef RFD_METHOD_SCRATCH

__device__ __forceinline__ bool is_method(uint32_t number)
{
#define RFD_METHOD_IS(NUMBER, METHOD) number == NUMBER ||
    return RFD_METHODS(RFD_METHOD_IS) false;
#undef RFD_METHOD_IS
}

// Returns RFD_CALL of the step's method, which lean instances know when they are compiled. A number that is
// no method's comes to Fitted, after load_settings has found the step invalid.
#define RFD_CALL_IF(NUMBER, METHOD)                             \
    if (NUMBER != RFD_METHOD_FITTED && step.method == NUMBER) { \
        return RFD_CALL(METHOD);                                \
    }
#define RFD_DISPATCH(KIND)                         \
    if constexpr (KIND == Kind::fitted) {          \
        return RFD_CALL(Fitted);                   \
    } else if constexpr (KIND == Kind::averaged) { \
        return RFD_CALL(Adaptive);                 \
    } else {                                       \
        RFD_METHODS(RFD_CALL_IF)                   \
        return RFD_CALL(Fitted);                   \
    }

// The entry points, of the step's method.

template <Kind KIND>
__device__ __forceinline__ bool method_accepts(const RfdStep& step, const RfdSettings& settings)
{
#define RFD_CALL(METHOD) METHOD::accepts(step, settings)
    RFD_DISPATCH(KIND)
#undef RFD_CALL
}

template <Kind KIND>
__device__ __forceinline__ bool method_accepts(const RfdStep& step, const RfdGroup& group)
{
#define RFD_CALL(METHOD) METHOD::accepts(step, group)
    RFD_DISPATCH(KIND)
#undef RFD_CALL
}

template <Kind KIND>
__device__ __forceinline__ double averaging_of(const RfdStep& step)
{
#define RFD_CALL(METHOD) METHOD::averaging(step)
    RFD_DISPATCH(KIND)
#undef RFD_CALL
}

template <Kind KIND>
__device__ __forceinline__ bool has_rows(const RfdStep& step)
{
#define RFD_CALL(METHOD) METHOD::has_rows(step)
    RFD_DISPATCH(KIND)
#undef RFD_CALL
}

template <Kind KIND>
__device__ __forceinline__ Variances variances_of(const Launch& launch, uint32_t k, uint64_t applied)
{
    [[maybe_unused]] const RfdStep& step = launch.step;
#define RFD_CALL(METHOD) METHOD::variances(launch, k, applied)
    RFD_DISPATCH(KIND)
#undef RFD_CALL
}

template <Kind KIND>
__device__ __forceinline__ void fold_columns(const Launch& launch, const Decision& decision, uint32_t k,
                                             const Variances& variances, uint64_t slice)
{
    [[maybe_unused]] const RfdStep& step = launch.step;
#define RFD_CALL(METHOD) METHOD::fold_columns(launch, decision, k, variances, slice)
    RFD_DISPATCH(KIND)
#undef RFD_CALL
}

template <Kind KIND>
__device__ __forceinline__ void decide_by_method(const Launch& launch, DecisionScratch<KIND>& scratch,
                                                 const Totals& totals)
{
    [[maybe_unused]] const RfdStep& step = launch.step;
#define RFD_CALL(METHOD) METHOD::decide<KIND>(launch, scratch, totals)
    RFD_DISPATCH(KIND)
#undef RFD_CALL
}

template <Kind KIND>
__device__ __forceinline__ void prepare(const Launch& launch, DecisionScratch<KIND>& scratch)
{
    [[maybe_unused]] const RfdStep& step = launch.step;
#define RFD_CALL(METHOD) METHOD::prepare<KIND>(launch, scratch)
    RFD_DISPATCH(KIND)
#undef RFD_CALL
}

template <Kind KIND>
__device__ __forceinline__ void complete_report(const Launch& launch, DecisionScratch<KIND>& scratch)
{
    [[maybe_unused]] const RfdStep& step = launch.step;
#define RFD_CALL(METHOD) METHOD::complete_report<KIND>(launch, scratch)
    RFD_DISPATCH(KIND)
#undef RFD_CALL
}

template <Kind KIND>
__device__ __forceinline__ double scale_of(const Launch& launch, const Decision& decision, uint32_t k)
{
    [[maybe_unused]] const RfdStep& step = launch.step;
#define RFD_CALL(METHOD) METHOD::scale(launch, decision, k)
    RFD_DISPATCH(KIND)
#undef RFD_CALL
}

template <Kind KIND>
__device__ __forceinline__ void store_history(const Launch& launch, const DecisionScratch<KIND>& scratch)
{
    [[maybe_unused]] const RfdStep& step = launch.step;
#define RFD_CALL(METHOD) METHOD::store_history<KIND>(launch, scratch)
    RFD_DISPATCH(KIND)
#undef RFD_CALL
}

// Reads a tensor with its rows, in the step after so many. By one thread.
template <Kind KIND>
__device__ __forceinline__ void read_row_tensor(const Launch launch, RowTensor& to, uint32_t index, uint64_t applied)
{
    to.tensor = launch.tensors[index];
    to.variances = variances_of<KIND>(launch, index, applied);
    to.applied = applied;
    to.chunks = launch.chunks_of(index);
    to.lanes = lanes_of(to.tensor.row);
    to.lines = (to.tensor.row + to.lanes * RFD_QUAD - 1) / (to.lanes * RFD_QUAD);
}

// Moves a warp's RowTensor along with a pass over chunks of rows.
template <Kind KIND>
class RowCursor {
public:
    RowTensor& here;

    __device__ __forceinline__ RowCursor(const Launch& launch, RowTensor& here, uint32_t index, uint64_t applied)
        : here(here), applied_(applied), index_(index)
    {
        open(launch);
    }

    // To the tensor of a chunk that lies not before the one it is at.
    __device__ __forceinline__ void advance(const Launch& launch, uint64_t chunk)
    {
        if (chunk >= here.tensor.first_chunk + here.chunks) {
            do {
                ++index_;
            } while (chunk >= launch.end_of(index_));
            open(launch);
        }
    }

    // To the tensor of a chunk that lies not behind the one it is at; whether that is another one.
    __device__ __forceinline__ bool retreat(const Launch& launch, uint64_t chunk)
    {
        if (chunk >= here.tensor.first_chunk) {
            return false;
        }
        do {
            --index_;
        } while (chunk < launch.tensors[index_].first_chunk);
        open(launch);
        return true;
    }

    __device__ __forceinline__ uint32_t index() const { return index_; }

private:
    uint64_t applied_;
    uint32_t index_;

    __device__ __forceinline__ void open(const Launch& launch)
    {
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            read_row_tensor<KIND>(launch, here, index_, applied_);
        }
        __syncwarp();
    }
};
