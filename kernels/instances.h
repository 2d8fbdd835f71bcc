// The instances of the kernels: lean ones for lists whose tensors are all alike, a generic one for everything
// else; and the kernels that there are once. The only list of both: kernels, shim and the host's tables
// (src/backend/kernels.rs) are made from it.
#pragma once

// KIND: the lean ones are for one method each, without norm lock, f64 or conservative steps: `fitted`, or
// `averaged` for the adaptive method with averaged gradients. In the `generic` one formats, velocities and
// master weights may differ from tensor to tensor, so that only the numbers count that do not name a
// property.
//
// PARAM, GRAD: formats. MASTER: whether there are master weights. VELOCITY: whether tensors move by a
// velocity.
//
// WIDTH: neighbouring elements that a thread updates at a time. 4, that is 16 bytes of f32, so that the
// threads of a warp touch neighbouring addresses; 8 where nothing is f32 in memory, which is 16 bytes of bf16
// and one call of Philox.
//
// ROWS: of the 16/WIDTH rows of a chunk, how many the update loads before the first is stored. SUMMED: of its
// 4 rows, how many the sums load before the first is added. In averaged ones and the generic one, of the up
// to 4 lines of a row; where the generic one sums directions half of SUMMED, and of f64 half as many as of
// other formats. As many as fit into the registers; docs/performance.md has a table of what that comes to.
// Chosen by it, not measured.
//
// BLOCKS: of 256 threads a multiprocessor. 4, that is half of its threads on most GPUs, leave 64 registers a
// thread. 3 in averaged ones, whose sums by rows spill with 64. Half as many in the generic one: double
// precision and the search of conservative steps take registers.
//
// X(name, KIND, PARAM, GRAD, MASTER, VELOCITY, WIDTH, ROWS, SUMMED, BLOCKS)
#define RFD_INSTANCES(X)                                                   \
    X(f32, fitted, F32, F32, 0, 0, 4, 4, 4, 4)                             \
    X(f32_momentum, fitted, F32, F32, 0, 1, 4, 2, 4, 4)                    \
    X(f32_averaged, averaged, F32, F32, 0, 1, 4, 2, 2, 3)                  \
    X(bf16_master, fitted, BF16, BF16, 1, 0, 4, 4, 4, 4)                   \
    X(bf16_master_momentum, fitted, BF16, BF16, 1, 1, 4, 1, 4, 4)          \
    X(bf16_master_averaged, averaged, BF16, BF16, 1, 1, 4, 2, 2, 3)        \
    X(bf16, fitted, BF16, BF16, 0, 0, 8, 2, 4, 4)                          \
    X(f16_master, fitted, F16, F16, 1, 0, 4, 4, 4, 4)                      \
    X(generic, generic, F32, F32, 1, 1, 4, 2, 4, 2)

// What each instance is compiled as: rfd_step_<name>, rfd_norm_<name>, rfd_update_<name>.
// X(name)
#define RFD_PHASES(X) X(step) X(norm) X(update)

// Kernels that there are once: rfd_<name>. Device code is compiled, and loaded when it is needed, in parts:
// of each instance the kernel for a step in one launch, <name>, and those for separate launches,
// <name>_apart; `apart`, which all separate launches need; `halves`, for steps in two halves of a method with
// rows; and `common`. PART: the one that they belong to.
// X(name, PART)
#define RFD_SINGLE_KERNELS(X)  \
    X(rescale_max, generic_apart)  \
    X(rescale_norm, generic_apart) \
    X(total, apart)            \
    X(status, apart)           \
    X(local_sums, halves)      \
    X(take_sums, halves)       \
    X(fill_masters, common)    \
    X(measure, common)         \
    X(store, common)
