// The update pass (docs/summation.md, sections 3 to 5).
#pragma once

#include "decision.cuh"

// Norm lock: scales the update so that the parameter keeps its norm; ‖αp − βd‖² = α²‖p‖² − 2αβ⟨p, d⟩ +
// β²‖d‖².
__device__ __forceinline__ void lock(Scalars& scalars, const RfdStep& step, uint32_t index, bool rows)
{
    const double parameter = __ldcg(tensor_sums(step, RFD_SUM_PARAMETER) + index);
    const double product = __ldcg(tensor_sums(step, RFD_SUM_PRODUCT) + index);
    const double direction = __ldcg(tensor_sums(step, rows ? RFD_SUM_WEIGHTED : RFD_SUM_DIRECTION) + index);
    const double alpha = scalars.decay;
    const double beta =
        scalars.velocity_decay > 0.0 ? scalars.coefficient : scalars.coefficient * scalars.prescale;
    const double moved = alpha * alpha * parameter - 2.0 * (alpha * beta) * product + beta * beta * direction;
    const double ratio = sqrt(parameter / moved);
    // Norm 0 before or after the step, or sums beyond the range of f64: there is nothing to scale back to.
    if (ratio > 0.0 && is_finite(ratio)) {
        scalars.decay *= ratio;
        scalars.coefficient *= ratio;
    }
}

template <class I>
__device__ __forceinline__ Change change_of(const Launch& launch, const SharedDecision& shared, uint32_t index)
{
    const RfdTensor& tensor = launch.tensors[index];
    const double scale = scale_of<I::KIND>(launch, shared.decision, index);
    Scalars scalars = scalars_of(shared.decision, shared.group(launch, tensor.group), scale);
    if (is_generic<I>() && tensor.flags & RFD_TENSOR_LOCK) {
        lock(scalars, launch.step, index, has_rows<I::KIND>(launch.step));
    }
    return {scalars, has_velocity<I>(scalars.velocity_decay)};
}

// What has_velocity has said before, known when the instance is compiled where it can be.
template <class I>
__device__ __forceinline__ bool moves_by(bool said)
{
    return I::KIND == Kind::averaged || (I::VELOCITY && said);
}

// What parameters become, and velocities where there are some, which `keep` stores: a second branch for that
// would spill registers. `u` weighs them beside their coefficient.
template <class T, int N, class Keep, class... Weights>
__device__ __forceinline__ void move(T (&p)[N], const T (&g)[N], T (&v)[N], bool moves, const Factors<T>& by, int state,
                                     const Keep& keep, const Weights&... u)
{
    if (moves) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
            v[j] = next_velocity(v[j], g[j], by.velocity_decay, by.unscale, state);
            const T d = (v[j] * ... * static_cast<T>(u[j]));
            p[j] = p[j] * by.decay + d * by.coefficient;
        }
        keep();
    } else {
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const T d = ((g[j] * by.prescale) * ... * static_cast<T>(u[j]));
            p[j] = p[j] * by.decay - d * by.coefficient;
        }
    }
}

// A chunk in a lean instance without rows.
template <class I, bool FULL, Lies GRAD = Lies::aligned>
__device__ __forceinline__ void update_chunk(const RfdTensor& tensor, const Chunk& chunk, const Change& change,
                                             const Rounding& rounding)
{
    constexpr int N = I::WIDTH, AT_ONCE = FULL ? I::ROWS_AT_ONCE : 1;
    static_assert(RFD_CHUNK / (RFD_THREADS * N) % AT_ONCE == 0, "whole steps");
    const View<I> view(tensor);
    const bool moves = moves_by<I>(change.moves);
    // Both steps written out, registers would spill.
#pragma unroll 1
    for (int first = 0; first < RFD_CHUNK / (RFD_THREADS * N); first += AT_ONCE) {
        float p[AT_ONCE][N], g[AT_ONCE][N], v[AT_ONCE][N];
        // All loads before the first store: the compiler can't know that they don't overlap.
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const Unit unit = unit_of<N, FULL>(chunk, first + i);
            load<Reuse::never>(p[i], view.param, view.weights, unit);
            load<Reuse::never>(g[i], view.grad, tensor.grad, lying<GRAD>(unit));
            if (moves) {
                load<Reuse::never>(v[i], view.state(), tensor.velocity, unit);
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const Unit unit = unit_of<N, FULL>(chunk, first + i);
            const auto keep = [&] { store(v[i], view.state(), tensor.velocity, unit, to_nearest()); };
            move(p[i], g[i], v[i], moves, change.single, view.state(), keep);
            store(p[i], view.param, view.weights, unit, rounding);
            if (view.has_master) {
                // From the master as it is stored, in f32.
                store(p[i], view.half, tensor.param, unit, to_nearest());
            }
        }
    }
}

// This thread's part of a row; LINES, of a full one, is how many it has.
template <class I, int LINES, class T>
__device__ __forceinline__ void update_row(const RowTensor& here, const RowUnits& units, const Factors<T>& by,
                                           const Rounding& rounding)
{
    constexpr int AT_ONCE = lines_at_once<T>(I::ROWS_AT_ONCE);
    constexpr bool FULL = LINES > 0;
    [[maybe_unused]] constexpr int STEPS = FULL ? RFD_ROWS : 1;
    const RfdTensor& tensor = here.tensor;
    const View<I> view(tensor);
    const bool moves = moves_by<I>(here.change.moves);
    const float* of_columns = here.variances.scales();
    const Array weights = array_of<LINES>(units, view.weights, view.param),
                grad = array_of<LINES>(units, tensor.grad, view.grad),
                velocity = array_of<LINES>(units, tensor.velocity, view.state(), moves),
                half = array_of<LINES>(units, tensor.param, view.half, view.has_master);
#pragma unroll STEPS
    for (int first = 0; FULL ? first < LINES : units.has(first); first += AT_ONCE) {
        // All loads before the first store: the compiler can't know that they don't overlap.
        Quad<T> of_weights[AT_ONCE] = {}, of_grad[AT_ONCE] = {}, of_velocity[AT_ONCE] = {};
        read_arrays<LINES, Reuse::never>(units, first, of_weights, weights, of_grad, grad, of_velocity, velocity);
        T p[AT_ONCE][RFD_QUAD], g[AT_ONCE][RFD_QUAD], v[AT_ONCE][RFD_QUAD];
        widen_lines(p, of_weights, weights);
        widen_lines(g, of_grad, grad);
        if (moves) {
            widen_lines(v, of_velocity, velocity);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const Unit unit = units.unit<FULL>(first + i);
            if (FULL ? first + i >= LINES : !units.has(first + i)) {
                continue;
            }
            float u[RFD_QUAD];
            units.scales<FULL>(u, of_columns, first + i);
            const auto keep = [&] { store(v[i], view.state(), tensor.velocity, velocity.at(unit), to_nearest()); };
            move(p[i], g[i], v[i], moves, by, view.state(), keep, u);
            store(p[i], view.param, view.weights, weights.at(unit), rounding);
            if (view.has_master) {
                // From the master as it is stored, in f32.
                store(p[i], view.half, tensor.param, half.at(unit), to_nearest());
            }
        }
    }
}

// A chunk of rows: each has a coefficient of its own. Without rows it is the tensor's.
template <class I>
__device__ __forceinline__ void update_rows(const RowTensor& here, const RowPlaces& places, bool rows, uint64_t chunk,
                                            const Rounding& rounding)
{
    const RowUnits units = here.units(chunk);
    double coefficient = here.change.coefficient;
    if (rows) {
        coefficient *= units.length > 0 ? row_scale(here, places.of(here.row_of(chunk))) : 0.0;
    }
    if (View<I>(here.tensor).in_f64()) {
        if constexpr (is_generic<I>()) {
            Factors<double> by = here.change.wide;
            by.coefficient = narrowed<double>(coefficient);
            update_row<I, 0>(here, units, by, rounding);
        }
    } else {
        Factors<float> by = here.change.single;
        by.coefficient = narrowed<float>(coefficient);
        const RfdTensor& tensor = here.tensor;
        const View<I> view(tensor);
        const uint64_t master = view.has_master ? tensor.param : 0;
        const uint64_t addresses = tensor.grad | tensor.velocity | view.weights | master;
        const bool full = I::KIND == Kind::averaged && addresses % 16 == 0 && here.is_full(chunk);
        if (full && here.lines == 4) {
            update_row<I, 4>(here, units, by, rounding);
        } else if (full && here.lines == 3) {
            update_row<I, 3>(here, units, by, rounding);
        } else {
            update_row<I, 0>(here, units, by, rounding);
        }
    }
}

// Updates this block's chunks of rows, and what columns are left to them; in the generic instance also chunks
// as such. In reverse: what the norm pass read last is still in the second-level cache.
template <class I>
__device__ __forceinline__ void update_all_rows(const Launch& launch, const SharedDecision& shared, RowTensor& memory)
{
    const Decision& decision = shared.decision;
    const Range range = chunks_of_block(launch.step.chunks);
    if (range.begin == range.end) {
        return;
    }
    RowCursor<I::KIND> cursor(launch, memory, shared.last_index, decision.applied);
    bool known = false;
    for (uint64_t chunk = range.end; chunk > range.begin;) {
        --chunk;
        if (cursor.retreat(launch, chunk) || !known) {
            if (threadIdx.x % 32 == 0) {
                memory.change = change_of<I>(launch, shared, cursor.index());
            }
            __syncwarp();
            known = true;
        }
        const Rounding rounding{launch.step.stochastic != 0, cursor.index(), static_cast<uint32_t>(decision.applied),
                                launch.step.seed, memory.tensor.offset};
        const RowPlaces places(launch, cursor.index());
        update_rows<I>(memory, places, has_rows<I::KIND>(launch.step), chunk, rounding);
        const uint64_t slices = (memory.variances.columns + RFD_THREADS - 1) / RFD_THREADS;
        for (uint64_t slice = chunk - memory.tensor.first_chunk; slice < slices; slice += memory.chunks) {
            fold_columns<I::KIND>(launch, decision, cursor.index(), memory.variances, slice);
        }
    }
}

// Updates this block's chunks in a lean instance without rows, in reverse as well.
template <class I>
__device__ __forceinline__ void update_plain(const Launch& launch, const SharedDecision& shared)
{
    const Decision& decision = shared.decision;
    const Range range = chunks_of_block(launch.step.chunks);
    if (range.begin == range.end) {
        return;
    }
    Cursor cursor(shared.last_index, shared.last);
    Change change;
    bool known = false;
    for (uint64_t index = range.end; index > range.begin;) {
        --index;
        if (cursor.retreat(launch, index) || !known) {
            change = change_of<I>(launch, shared, cursor.index());
            known = true;
        }
        const RfdTensor& tensor = cursor.tensor();
        const View<I> view(tensor);
        const uint64_t master = view.has_master ? tensor.param : 0;
        const uint64_t velocity = moves_by<I>(change.moves) ? tensor.velocity : 0;
        Chunk chunk = cursor.chunk(index, view.weights | master | velocity);
        const bool full = is_full(chunk), grad_aligned = tensor.grad % 16 == 0;
        chunk.aligned = chunk.aligned && grad_aligned;
        const Rounding rounding{launch.step.stochastic != 0, cursor.index(), static_cast<uint32_t>(decision.applied),
                                launch.step.seed, tensor.offset};
        if (!full) {
            update_chunk<I, false>(tensor, chunk, change, rounding);
        } else if (grad_aligned) {
            update_chunk<I, true>(tensor, chunk, change, rounding);
        } else {
            update_chunk<I, true, Lies::anyhow>(tensor, chunk, change, rounding);
        }
    }
}

// Has brought near what the update will read first and the norm pass has not read: the last chunk's
// parameters, and its velocities or the parameters before them. While blocks wait for one another.
template <class I>
__device__ __forceinline__ void prefetch_update(const Launch& launch, const SharedDecision& shared)
{
    constexpr uint32_t UNITS = 128, ELEMENTS = RFD_CHUNK / UNITS;  // 128 bytes of f32
    const Range range = chunks_of_block(launch.step.chunks);
    if (range.begin == range.end) {
        return;
    }
    const RfdTensor& tensor = shared.last;
    const View<I> view(tensor);
    const uint32_t size = I::KIND == Kind::fitted ? RFD_CHUNK : chunk_size(tensor.row);
    const uint64_t chunk = range.end - 1 - tensor.first_chunk, before = chunk > 0 ? chunk - 1 : 0;
    const bool with_velocity = I::KIND != Kind::averaged && I::VELOCITY && tensor.velocity != 0;
    static_assert(2 * UNITS == RFD_THREADS);
    const bool second = threadIdx.x >= UNITS;
    const uint64_t first = (second && !with_velocity ? before : chunk) * size + threadIdx.x % UNITS * ELEMENTS;
    if (first < tensor.len) {
        prefetch(second && with_velocity ? tensor.velocity + first * size_of(view.state())
                                         : view.weights + first * size_of(view.param));
    }
}

template <class I>
__device__ __forceinline__ void update_pass(const Launch& launch, const SharedDecision& shared,
                                            [[maybe_unused]] RowScratch<I::KIND>& rows)
{
    if constexpr (I::KIND == Kind::fitted) {
        update_plain<I>(launch, shared);
    } else {
        update_all_rows<I>(launch, shared, rows.own());
    }
}

// Fills the master weights of the tensors that have some.
__device__ __forceinline__ void fill_masters(const Launch& launch)
{
    const Range range = chunks_of_block(launch.step.chunks);
    Cursor cursor(launch, range.begin);
    for (uint64_t index = range.begin; index < range.end; ++index) {
        cursor.advance(launch, index);
        const RfdTensor& tensor = cursor.tensor();
        if (tensor.master == 0) {
            continue;
        }
        const Chunk chunk = cursor.chunk(index, tensor.param | tensor.master);
#pragma unroll 1
        for (int row = 0; row < RFD_ROWS; ++row) {
            const Unit unit = unit_of<RFD_QUAD, false>(chunk, row);
            float p[RFD_QUAD];
            load<Reuse::later>(p, param_format(tensor), tensor.param, unit);
            store(p, RFD_DTYPE_F32, tensor.master, unit, to_nearest());
        }
    }
}
