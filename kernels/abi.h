// What host and device share: plain structs, the same bytes on both sides, and the numbers that both need.
// The Rust side is made from this file (src/backend/abi.rs, src/backend/kernels.rs), the kernels include it.
//
// "address" is a device pointer as an integer; 0 means that there is none. Sizes, offsets and indices over
// elements are 64-bit. Field order leaves no padding.
#pragma once

#ifdef __CUDACC_RTC__
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif

#include "instances.h"

// The order of summation (docs/summation.md).
#define RFD_THREADS 256           // threads of a block: one for each leaf of the tree
#define RFD_COLUMNS 1024          // elements of a row of a chunk; a leaf adds 4 neighbouring ones
#define RFD_ROWS 4                // rows of a chunk
#define RFD_CHUNK 4096            // elements of a chunk
#define RFD_CHUNKS_PER_SEGMENT 256
#define RFD_SAMPLED_CHUNKS 16     // of a tensor, that tell of its columns in one step, at most

// Squares of f64 gradients are formed again, scaled, where they add up to less than 2^RFD_TINY_EXPONENT: they
// may have lost terms to underflow. The square of the smallest f32 is 2^-298.
#define RFD_TINY_EXPONENT (-900)
// Gradient norms with exponents up to this need no prescaling: coefficients stay far inside the range of f32.
#define RFD_COMFORTABLE_EXPONENT 32

// Number formats, as src/tensor.rs has them; below 16, as two of them share the byte `formats` of a tensor.
// X(NAME, number)
#define RFD_DTYPES(X) \
    X(F32, 0)         \
    X(F64, 1)         \
    X(F16, 2)         \
    X(BF16, 3)

typedef enum RfdDtype {
#define RFD_DTYPE_NUMBER(NAME, NUMBER) RFD_DTYPE_##NAME = NUMBER,
    RFD_DTYPES(RFD_DTYPE_NUMBER)
#undef RFD_DTYPE_NUMBER
} RfdDtype;

// Methods (kernels/methods).
#define RFD_METHOD_FITTED 0
#define RFD_METHOD_ADAPTIVE 1

// Covariance families. kernels/families.cuh has a struct for each, or does not compile.
// X(NAME, number, struct)
#define RFD_FAMILIES(X)                            \
    X(SQUARED_EXPONENTIAL, 0, SquaredExponential)  \
    X(RATIONAL_QUADRATIC, 1, RationalQuadratic)    \
    X(MATERN32, 2, Matern32)                       \
    X(MATERN52, 3, Matern52)

typedef enum RfdFamily {
#define RFD_FAMILY_NUMBER(NAME, NUMBER, STRUCT) RFD_FAMILY_##NAME = NUMBER,
    RFD_FAMILIES(RFD_FAMILY_NUMBER)
#undef RFD_FAMILY_NUMBER
} RfdFamily;

// sqrt(3) and sqrt(5), correctly rounded.
#define RFD_SQRT_3 1.7320508075688772
#define RFD_SQRT_5 2.23606797749979
// Of the rational quadratic's step: four reach rounding, the fifth is reserve.
#define RFD_NEWTON_ITERATIONS 5

// The search for conservative steps (src/covariance/search.rs).
#define RFD_POINTS_PER_E 10.0    // points of the grid per factor e
#define RFD_FORCE_EXPONENT 512   // forces out of range are scaled by 2 to this, or to minus this
#define RFD_SMALL_FORCE 1e-150   // both forces below are out of range
#define RFD_MARGIN 1e-3          // the grid starts this far below the shortest length at which F can turn
#define RFD_SHORTEST 1e-300      // no step is looked for below
#define RFD_VANISHED 1e4         // where e^-x times a power of x is 0: capping x keeps infinity times 0 away
#define RFD_ROOT_ITERATIONS 120  // of Chandrupatla's method; some 50 bisections would do

// Step-size modes.
#define RFD_MODE_RFD 0
#define RFD_MODE_A_RFD 1
#define RFD_MODE_CLIPPED_A_RFD 2

// What a step did; the numbers that front ends use as well (include/rfdescent.h).
#define RFD_OUTCOME_NONE 0
#define RFD_OUTCOME_APPLIED 1
#define RFD_OUTCOME_FOUND_INF 2
#define RFD_OUTCOME_NON_FINITE_LOSS 3
#define RFD_OUTCOME_NON_FINITE_GRADIENT 4
#define RFD_OUTCOME_ZERO_GRADIENT 5
#define RFD_OUTCOME_INVALID_OPTION 6
#define RFD_OUTCOME_OUT_OF_RANGE 7
#define RFD_OUTCOME_LOSS_BELOW_BOUND 8
#define RFD_OUTCOME_TORN_TENSOR 9  // what ranks added up of a tensor is not all of it; hosts make it an error

// What limits a step of the adaptive method; the numbers that front ends use as well.
#define RFD_LIMIT_NONE 0    // skipped, or of another method
#define RFD_LIMIT_RATE 1    // the largest rate
#define RFD_LIMIT_LOSS 2    // the share of the loss that a step may promise
#define RFD_LIMIT_SIZE 3    // max_step_size

// Flags of a tensor.
#define RFD_TENSOR_COUNTS 1   // its gradient counts in the norm
#define RFD_TENSOR_LOCK 2     // norm lock, and more than one element
#define RFD_TENSOR_MATRIX 4   // it has two dimensions or more
#define RFD_TENSOR_COLUMNS 8  // elements at the same place of all rows belong together

// One tensor of the list, in the optimizer's order; its index is the tensor id of stochastic rounding. Empty
// tensors and those without a gradient have no chunks.
typedef struct RfdTensor {
    uint64_t param;          // address of the parameter, aligned to its element
    uint64_t grad;           // address of the gradient, 0 when it is missing
    uint64_t velocity;       // address of the velocity (f64 for f64 parameters, else f32), 0 without one
    uint64_t master;         // address of the f32 master weights of an f16 or bf16 parameter, 0 without
    uint64_t variances;      // address of two sides and a workspace (kernels/rows.cuh), 0 without rows
    uint64_t len;            // elements
    uint64_t offset;         // index in the whole tensor of a shard's first element, for stochastic rounding
    uint64_t first_chunk;    // chunks of all tensors before this one
    uint32_t first_segment;  // segments of all tensors before this one
    uint16_t group;          // index into the groups
    uint8_t formats;         // RFD_DTYPE of the parameter | RFD_DTYPE of the gradient << 4
    uint8_t flags;           // RFD_TENSOR_*
    uint32_t row;            // elements of a row, of which chunks are made up; RFD_CHUNK for chunks as such
    uint32_t rows;           // how many there are
} RfdTensor;

// Settings of a group; on the device, where they may change between replays of a captured step.
typedef struct RfdGroup {
    double length_scale_factor;
    double multiplier;
    double velocity_decay;  // the momentum, or the averaging of the adaptive method; 0 for no velocity
    double weight_decay;
} RfdGroup;

// Settings of all tensors; on the device, like the groups.
typedef struct RfdSettings {
    double multiplier;
    double inv_batch_size;
    double max_step_size;  // +infinity for no cap
} RfdSettings;

// The fitted covariance model (src/covariance/model/mod.rs). All 0 for other methods.
typedef struct RfdModel {
    double mean;
    double variance;
    double noise_variance;
    double grad_variance;
    double noise_grad_variance;
    double length_scale;
    double slope;     // -rho'(0) of the correlation in units of the length scale
    double plateau;   // the step at loss = mean, in length scales
    double beta;      // of the rational quadratic
    double quantile;  // of the normal distribution for conservative steps; 0 for risk-neutral ones
    uint32_t family;  // RfdFamily
    uint32_t mode;    // RFD_MODE_*
} RfdModel;

// What the last step did; on the device, with a copy in pinned host memory.
//
// Reading it while a step may be writing: the writer begins with the two counts and ends with the sequence,
// which is their sum. So read the sequence first and the counts last; all in between belongs to one step if
// the sum still holds.
typedef struct RfdStatus {
    uint64_t sequence;  // steps seen: applied + skipped
    uint64_t applied;
    uint64_t skipped;
    double loss;
    double grad_norm;
    double sigma_norm;
    double theta;
    double step_size;
    double learning_rate;
    double trust;       // of the adaptive method, as is the limit
    uint64_t limit;     // RFD_LIMIT_*; with RFD_OUTCOME_TORN_TENSOR which tensor
    uint64_t outcome;   // RFD_OUTCOME_*
} RfdStatus;

// What ranks add up between the two halves of a step: of a method without rows the squared norms of gradients
// as given.
typedef struct RfdSquaredNorm {
    double euclidean;
    double sigma;
} RfdSquaredNorm;

// Of one with rows this for each tensor (src/optimizer/sums.rs). A double for each column of the whole tensor
// follows, then two for each row that ranks share.
typedef struct RfdTensorNumbers {
    double elements;
    double squares;
    double direction;
    double sampled;
    double parameter;
    double present;
    double missing;
} RfdTensorNumbers;

// What a tensor of this rank is of a whole one, which it may be itself (src/optimizer/part.rs).
typedef struct RfdPart {
    uint64_t first_number;   // of all numbers that ranks add up, the one with which the tensor's begin
    uint64_t places;         // address of a uint32_t for each column: its place in the whole tensor; 0 where it is
                             // the same
    double elements;         // of the whole tensor
    double share;            // of these, that the part has
    double height_share;     // of what a column holds, that the part has
    double row;              // elements of a row that ranks share
    uint32_t whole_columns;  // of the whole tensor
    uint32_t shared_rows;    // rows that ranks share, of which each keeps all; 0 where rows are whole
    uint32_t first_row;      // the one of them that the part begins in
    uint32_t pieces;         // rows of the part that are pieces of one of them
} RfdPart;

// Sums over a chunk, a segment or a tensor; d is the gradient or minus the new velocity. With rows, d is
// weighted: each row of it has a factor w, which is its own (docs/summation.md, section 6). The adaptive
// method needs the first two, norm lock all but the last, both together all, anything else only the first.
#define RFD_SUM_SQUARES 0    // |g|^2
#define RFD_SUM_DIRECTION 1  // with rows the sum of w |d|^2, else |d|^2
#define RFD_SUM_PARAMETER 2  // |p|^2
#define RFD_SUM_PRODUCT 3    // <p, w d>
#define RFD_SUM_WEIGHTED 4   // |w d|^2
#define RFD_MOST_SUMS 5

// What the adaptive method remembers (src/optimizer/method/adaptive.rs); one RfdTensorHistory for each tensor
// follows. On the device lie two of these: a step reads the one and, if it is applied, writes the other, for
// the step after it. The first is that after an even number of applied steps.
typedef struct RfdHistory {
    double loss;             // average of losses, and the weight that it still lacks
    double loss_rest;
    double below;            // not 0: there was a loss below 0, and no lower bound is known
    double cut;              // losses in a row above what counts, up to cut_losses + 1
    double trust;
    double last;             // loss of the last step
    double high;             // losses in a row above what noise explains, up to alarm_losses
    double steps;            // in this window
    double windows;          // that are complete
    double sum;              // of this window's losses
    double squares;          // of differences between each of them and the one before
    double promised;         // what this window's steps were to lower the loss by
    double sum_before;       // the three of the window before
    double squares_before;
    double promised_before;
} RfdHistory;

typedef struct RfdTensorHistory {
    double squares;          // average of |g|^2, and the weight that it still lacks; the latter is also that of
    double squares_rest;     // the rows' variances
    double average_rest;     // the weight that the averaged gradient still lacks
    double length;           // length scale, taken from the parameters before the first step; 0 until then
    double column_mean;      // average of g^2 over the elements that tell of columns
    double turn;             // which of the two sides of variances is that of now
} RfdTensorHistory;

// The adaptive method and its numbers, which exist in src/optimizer/method/ alone. All 0 for other methods.
typedef struct RfdAdaptive {
    uint64_t history;          // address of two RfdHistory with their tensors
    double averaging;          // decay of the averages of gradients and losses; 0 for none
    double loss_bound;         // losses below it are skipped; -infinity when none is known
    double largest_rate;
    double loss_share;         // of the loss, that a step promises at most
    double variance_decay;     // of the averages of |g|^2
    double variance_floor;     // what a row's variance counts at least, as a share of its tensor's
    double loss_growth;        // of the averaged loss: what a loss counts at most above it
    double noise_growth;       // the same where there is no lower bound, in standard deviations
    double cut_losses;         // so many in a row are cut to that
    double settled;            // steps before any is
    double window;             // steps whose losses are compared with those before
    double share;              // of the promised fall that has to come
    double after_less;         // what the trust is multiplied with after less
    double after_more;         // and after more
    double smallest_trust;
    double largest_trust;
    double alarm_losses;       // so many losses in a row
    double alarm_deviations;   // so far above the mean lower the trust
    double decay_share;        // of the rate, in weight decay
    double length_share;       // of a tensor's size, that is its length scale squared
    double smallest_matrix;    // root mean square of a matrix's elements that counts at least
    double smallest_vector;    // the same of what is no matrix
    uint64_t ramp;             // the first step is 2^(1 - ramp) of the rule's
} RfdAdaptive;

// Everything a launch needs beside the table of tensors. Passed by value.
typedef struct RfdStep {
    RfdModel model;
    RfdAdaptive adaptive;
    uint64_t tensors;        // address of the table of RfdTensor, 0 when it is passed by value
    uint64_t groups;         // address of the RfdGroup
    uint64_t settings;       // address of the RfdSettings
    uint64_t status;         // address of the RfdStatus
    uint64_t mirror;         // address of its copy in pinned host memory, as the device sees it; 0 for none
    uint64_t loss;           // address of the loss, 0 when loss_value holds it
    uint64_t grad_scale;     // address of the gradient scale (f32), 0 for none
    uint64_t found_inf;      // address of found_inf (f32), 0 for none
    uint64_t rank_sums;      // in the two halves of a step the address of what ranks add up, 0 otherwise
    uint64_t parts;          // there, with rows, the address of an RfdPart for each tensor, 0 otherwise
    uint64_t chunk_sums;     // addresses of workspace: double[chunks * sums]
    uint64_t segment_sums;   // double[segments * sums]
    uint64_t tensor_sums;    // double[tensor_count * sums]
    uint64_t segment_done;   // uint32_t[segments], zero between launches: chunks of a segment that are summed
    uint64_t tensor_done;    // uint32_t[tensor_count], zero between launches: segments of one that are summed
    uint64_t largest_grad;   // address of a double, 0 between launches: the largest |g| of f64 gradients
    uint64_t chunks;         // chunks of all tensors
    uint64_t seed;           // of stochastic rounding
    double loss_value;
    uint32_t segments;       // segments of all tensors
    uint32_t tensor_count;
    uint32_t group_count;
    uint32_t loss_dtype;     // RFD_DTYPE_*
    uint32_t stochastic;     // not 0: f16 and bf16 parameters without master weights round stochastically
    uint32_t method;         // RFD_METHOD_*
} RfdStep;

// As many tensors as fit with RfdStep into the 32,764 bytes that the parameters of a kernel may have.
#define RFD_INLINE_TENSORS 400

typedef struct RfdTable {
    RfdTensor tensor[RFD_INLINE_TENSORS];
} RfdTable;
