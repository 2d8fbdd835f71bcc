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

// The elements of a chunk that are this thread's, and what they weigh beside their coefficient.
struct PlainUnits {
    static constexpr bool WEIGHED = false, KNOWN = true;
    Chunk chunk;

    template <int N>
    __device__ __forceinline__ constexpr int rows() const
    {
        return RFD_CHUNK / (RFD_THREADS * N);
    }

    template <int N, bool FULL>
    __device__ __forceinline__ Unit unit(int row) const
    {
        return unit_of<N, FULL>(chunk, row);
    }

    template <bool FULL>
    __device__ __forceinline__ void scales(float (&)[RFD_QUAD], int) const
    {
    }
};

// LINES, of full rows, is how many each has.
template <int LINES = 0>
struct WeighedUnits {
    static constexpr bool WEIGHED = true, KNOWN = LINES > 0;
    RowUnits units;
    const float* of_columns;
    int lines;

    template <int N>
    __device__ __forceinline__ int rows() const
    {
        static_assert(N == RFD_QUAD, "as in the sums");
        return KNOWN ? LINES : lines;
    }

    template <int N, bool FULL>
    __device__ __forceinline__ Unit unit(int line) const
    {
        return units.unit<FULL>(line);
    }

    template <bool FULL>
    __device__ __forceinline__ void scales(float (&u)[RFD_QUAD], int line) const
    {
        units.scales<FULL>(u, of_columns, line);
    }
};

// What has_velocity has said before, known when the instance is compiled where it can be.
template <class I>
__device__ __forceinline__ bool moves_by(bool said)
{
    return I::KIND == Kind::averaged || (I::VELOCITY && said);
}

template <class I, class T, bool FULL, Lies GRAD = Lies::aligned, class Units>
__device__ __forceinline__ void update_chunk(const RfdTensor& tensor, const Units& units, const Factors<T>& by,
                                             bool moves, const Rounding& rounding)
{
    constexpr int N = I::WIDTH, AT_ONCE = FULL ? I::ROWS_AT_ONCE : 1;
    static_assert(AT_ONCE == 1 || Units::KNOWN);
    const View<I> view(tensor);
    const int rows = units.template rows<N>();
    // Of a row whose lines are 3 or 4 the last step may have fewer than the others: then steps are written
    // out.
    [[maybe_unused]] constexpr int STEPS = Units::WEIGHED && AT_ONCE > 1 ? RFD_ROWS : 1;
#pragma unroll STEPS
    for (int first = 0; first < rows; first += AT_ONCE) {
        [[maybe_unused]] float u[AT_ONCE][RFD_QUAD];
        T p[AT_ONCE][N], g[AT_ONCE][N], v[AT_ONCE][N];
        // All loads before the first store: the compiler can't know that they don't overlap.
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (Units::WEIGHED && AT_ONCE > 1 && first + i >= rows) {
                continue;
            }
            units.template scales<FULL>(u[i], first + i);
            const Unit unit = units.template unit<N, FULL>(first + i);
            load<Reuse::never>(p[i], view.param, view.weights, unit);
            load<Reuse::never>(g[i], view.grad, tensor.grad, lying<GRAD>(unit));
            if (moves_by<I>(moves)) {
                load<Reuse::never>(v[i], view.state(), tensor.velocity, unit);
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (Units::WEIGHED && AT_ONCE > 1 && first + i >= rows) {
                continue;
            }
            const Unit unit = units.template unit<N, FULL>(first + i);
            if (moves_by<I>(moves)) {
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    v[i][j] = next_velocity(v[i][j], g[i][j], by.velocity_decay, by.unscale, view.state());
                    const T d = Units::WEIGHED ? v[i][j] * static_cast<T>(u[i][j % RFD_QUAD]) : v[i][j];
                    p[i][j] = p[i][j] * by.decay + d * by.coefficient;
                }
                store(v[i], view.state(), tensor.velocity, unit, to_nearest());
            } else {
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    const T g_scaled = g[i][j] * by.prescale;
                    const T d = Units::WEIGHED ? g_scaled * static_cast<T>(u[i][j % RFD_QUAD]) : g_scaled;
                    p[i][j] = p[i][j] * by.decay - d * by.coefficient;
                }
            }
            store(p[i], view.param, view.weights, unit, rounding);
            if (view.has_master) {
                // From the master as it is stored, in f32.
                store(p[i], view.half, tensor.param, unit, to_nearest());
            }
        }
    }
}

// A chunk of rows: each has a coefficient of its own.
template <class I>
__device__ __forceinline__ void update_rows(const RowTensor& here, const RowPlaces& places, uint64_t chunk,
                                            uint64_t addresses, const Rounding& rounding)
{
    const RowUnits units = here.units(chunk, addresses);
    const float* of_columns = here.variances.scales();
    const int lines = static_cast<int>(here.lines);
    const double w = units.length > 0 ? row_scale(here, places.of(here.row_of(chunk))) : 0.0;
    const double coefficient = here.change.coefficient * w;
    if (View<I>(here.tensor).in_f64()) {
        if constexpr (is_generic<I>()) {
            Factors<double> by = here.change.wide;
            by.coefficient = narrowed<double>(coefficient);
            update_chunk<I, double, false>(here.tensor, WeighedUnits<>{units, of_columns, lines}, by, here.change.moves,
                                           rounding);
        }
    } else {
        Factors<float> by = here.change.single;
        by.coefficient = narrowed<float>(coefficient);
        const bool full = !is_generic<I>() && here.is_full(chunk, addresses);
        if (full && lines == 4) {
            update_chunk<I, float, true>(here.tensor, WeighedUnits<4>{units, of_columns, lines}, by, here.change.moves,
                                         rounding);
        } else if (full && lines == 3) {
            update_chunk<I, float, true>(here.tensor, WeighedUnits<3>{units, of_columns, lines}, by, here.change.moves,
                                         rounding);
        } else {
            update_chunk<I, float, false>(here.tensor, WeighedUnits<>{units, of_columns, lines}, by, here.change.moves,
                                          rounding);
        }
    }
}

// Updates this block's chunks of rows, and what columns are left to them.
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
        const RfdTensor& tensor = memory.tensor;
        const View<I> view(tensor);
        const uint64_t master = view.has_master ? tensor.param : 0;
        const uint64_t velocity = moves_by<I>(memory.change.moves) ? tensor.velocity : 0;
        const Rounding rounding{launch.step.stochastic != 0, cursor.index(), static_cast<uint32_t>(decision.applied),
                                launch.step.seed, tensor.offset};
        const RowPlaces places(launch, cursor.index());
        update_rows<I>(memory, places, chunk, view.weights | tensor.grad | master | velocity, rounding);
        const uint64_t slices = (memory.variances.columns + RFD_THREADS - 1) / RFD_THREADS;
        for (uint64_t slice = chunk - tensor.first_chunk; slice < slices; slice += memory.chunks) {
            fold_columns<I::KIND>(launch, decision, cursor.index(), memory.variances, slice);
        }
    }
}

// Updates a whole chunk of a tensor of a mixed list, whose formats are those of an Alike.
struct WholeUpdate {
    const RfdTensor& tensor;
    const PlainUnits& units;
    const Change& change;
    const Rounding& rounding;

    template <class Formats>
    __device__ __forceinline__ void operator()(Formats) const
    {
        update_chunk<Formats, float, true>(tensor, units, change.single, change.moves, rounding);
    }
};

// Updates this block's chunks. In reverse: what the norm pass read last is still in the second-level cache.
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
        PlainUnits units{cursor.chunk(index, view.weights | master | velocity)};
        const bool full = is_full(units.chunk), grad_aligned = tensor.grad % 16 == 0;
        units.chunk.aligned = units.chunk.aligned && grad_aligned;
        const Rounding rounding{launch.step.stochastic != 0, cursor.index(), static_cast<uint32_t>(decision.applied),
                                launch.step.seed, tensor.offset};
        if constexpr (is_generic<I>()) {
            if (view.in_f64()) {
                update_chunk<I, double, false>(tensor, units, change.wide, change.moves, rounding);
                continue;
            }
        }
        // Of mixed lists only those that lie well: code for all others would be as long again.
        if (!full || (is_generic<I>() && !grad_aligned)) {
            update_chunk<I, float, false>(tensor, units, change.single, change.moves, rounding);
        } else if constexpr (is_generic<I>()) {
            with_formats(tensor, WholeUpdate{tensor, units, change, rounding});
        } else if (grad_aligned) {
            update_chunk<I, float, true>(tensor, units, change.single, change.moves, rounding);
        } else {
            update_chunk<I, float, true, Lies::anyhow>(tensor, units, change.single, change.moves, rounding);
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
    } else if (I::KIND == Kind::averaged || has_rows<I::KIND>(launch.step)) {
        update_all_rows<I>(launch, shared, rows.own());
    } else if constexpr (is_generic<I>()) {
        update_plain<I>(launch, shared);
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
