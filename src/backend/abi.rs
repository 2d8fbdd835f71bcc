// Made from kernels/abi.h by scripts/bindings; do not edit.
pub const RFD_THREADS: u32 = 256;
pub const RFD_COLUMNS: u32 = 1024;
pub const RFD_ROWS: u32 = 4;
pub const RFD_CHUNK: u32 = 4096;
pub const RFD_CHUNKS_PER_SEGMENT: u32 = 256;
pub const RFD_SAMPLED_CHUNKS: u32 = 16;
pub const RFD_TINY_EXPONENT: i32 = -900;
pub const RFD_COMFORTABLE_EXPONENT: u32 = 32;
pub const RFD_METHOD_FITTED: u32 = 0;
pub const RFD_METHOD_ADAPTIVE: u32 = 1;
pub const RFD_SQRT_3: f64 = 1.7320508075688772;
pub const RFD_SQRT_5: f64 = 2.23606797749979;
pub const RFD_NEWTON_ITERATIONS: u32 = 5;
pub const RFD_POINTS_PER_E: f64 = 10.0;
pub const RFD_FORCE_EXPONENT: u32 = 512;
pub const RFD_SMALL_FORCE: f64 = 1e-150;
pub const RFD_MARGIN: f64 = 0.001;
pub const RFD_SHORTEST: f64 = 1e-300;
pub const RFD_VANISHED: f64 = 10000.0;
pub const RFD_ROOT_ITERATIONS: u32 = 120;
pub const RFD_MODE_RFD: u32 = 0;
pub const RFD_MODE_A_RFD: u32 = 1;
pub const RFD_MODE_CLIPPED_A_RFD: u32 = 2;
pub const RFD_OUTCOME_NONE: u32 = 0;
pub const RFD_OUTCOME_APPLIED: u32 = 1;
pub const RFD_OUTCOME_FOUND_INF: u32 = 2;
pub const RFD_OUTCOME_NON_FINITE_LOSS: u32 = 3;
pub const RFD_OUTCOME_NON_FINITE_GRADIENT: u32 = 4;
pub const RFD_OUTCOME_ZERO_GRADIENT: u32 = 5;
pub const RFD_OUTCOME_INVALID_OPTION: u32 = 6;
pub const RFD_OUTCOME_OUT_OF_RANGE: u32 = 7;
pub const RFD_OUTCOME_LOSS_BELOW_BOUND: u32 = 8;
pub const RFD_OUTCOME_TORN_TENSOR: u32 = 9;
pub const RFD_LIMIT_NONE: u32 = 0;
pub const RFD_LIMIT_RATE: u32 = 1;
pub const RFD_LIMIT_LOSS: u32 = 2;
pub const RFD_LIMIT_SIZE: u32 = 3;
pub const RFD_TENSOR_COUNTS: u32 = 1;
pub const RFD_TENSOR_LOCK: u32 = 2;
pub const RFD_TENSOR_MATRIX: u32 = 4;
pub const RFD_TENSOR_COLUMNS: u32 = 8;
pub const RFD_SUM_SQUARES: u32 = 0;
pub const RFD_SUM_DIRECTION: u32 = 1;
pub const RFD_SUM_PARAMETER: u32 = 2;
pub const RFD_SUM_PRODUCT: u32 = 3;
pub const RFD_SUM_WEIGHTED: u32 = 4;
pub const RFD_MOST_SUMS: u32 = 5;
pub const RFD_INLINE_TENSORS: u32 = 400;
pub const RFD_DTYPE_F32: RfdDtype = 0;
pub const RFD_DTYPE_F64: RfdDtype = 1;
pub const RFD_DTYPE_F16: RfdDtype = 2;
pub const RFD_DTYPE_BF16: RfdDtype = 3;
pub type RfdDtype = ::core::ffi::c_uint;
pub const RFD_FAMILY_SQUARED_EXPONENTIAL: RfdFamily = 0;
pub const RFD_FAMILY_RATIONAL_QUADRATIC: RfdFamily = 1;
pub const RFD_FAMILY_MATERN32: RfdFamily = 2;
pub const RFD_FAMILY_MATERN52: RfdFamily = 3;
pub type RfdFamily = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Default, Copy, Clone, PartialEq)]
pub struct RfdTensor {
    pub param: u64,
    pub grad: u64,
    pub velocity: u64,
    pub master: u64,
    pub variances: u64,
    pub len: u64,
    pub offset: u64,
    pub first_chunk: u64,
    pub first_segment: u32,
    pub group: u16,
    pub formats: u8,
    pub flags: u8,
    pub row: u32,
    pub rows: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of RfdTensor"][::core::mem::size_of::<RfdTensor>() - 80usize];
    ["Alignment of RfdTensor"][::core::mem::align_of::<RfdTensor>() - 8usize];
    ["Offset of field: RfdTensor::param"][::core::mem::offset_of!(RfdTensor, param) - 0usize];
    ["Offset of field: RfdTensor::grad"][::core::mem::offset_of!(RfdTensor, grad) - 8usize];
    ["Offset of field: RfdTensor::velocity"][::core::mem::offset_of!(RfdTensor, velocity) - 16usize];
    ["Offset of field: RfdTensor::master"][::core::mem::offset_of!(RfdTensor, master) - 24usize];
    ["Offset of field: RfdTensor::variances"][::core::mem::offset_of!(RfdTensor, variances) - 32usize];
    ["Offset of field: RfdTensor::len"][::core::mem::offset_of!(RfdTensor, len) - 40usize];
    ["Offset of field: RfdTensor::offset"][::core::mem::offset_of!(RfdTensor, offset) - 48usize];
    ["Offset of field: RfdTensor::first_chunk"][::core::mem::offset_of!(RfdTensor, first_chunk) - 56usize];
    ["Offset of field: RfdTensor::first_segment"]
        [::core::mem::offset_of!(RfdTensor, first_segment) - 64usize];
    ["Offset of field: RfdTensor::group"][::core::mem::offset_of!(RfdTensor, group) - 68usize];
    ["Offset of field: RfdTensor::formats"][::core::mem::offset_of!(RfdTensor, formats) - 70usize];
    ["Offset of field: RfdTensor::flags"][::core::mem::offset_of!(RfdTensor, flags) - 71usize];
    ["Offset of field: RfdTensor::row"][::core::mem::offset_of!(RfdTensor, row) - 72usize];
    ["Offset of field: RfdTensor::rows"][::core::mem::offset_of!(RfdTensor, rows) - 76usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone, PartialEq)]
pub struct RfdGroup {
    pub length_scale_factor: f64,
    pub multiplier: f64,
    pub velocity_decay: f64,
    pub weight_decay: f64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of RfdGroup"][::core::mem::size_of::<RfdGroup>() - 32usize];
    ["Alignment of RfdGroup"][::core::mem::align_of::<RfdGroup>() - 8usize];
    ["Offset of field: RfdGroup::length_scale_factor"]
        [::core::mem::offset_of!(RfdGroup, length_scale_factor) - 0usize];
    ["Offset of field: RfdGroup::multiplier"][::core::mem::offset_of!(RfdGroup, multiplier) - 8usize];
    ["Offset of field: RfdGroup::velocity_decay"]
        [::core::mem::offset_of!(RfdGroup, velocity_decay) - 16usize];
    ["Offset of field: RfdGroup::weight_decay"][::core::mem::offset_of!(RfdGroup, weight_decay) - 24usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone, PartialEq)]
pub struct RfdSettings {
    pub multiplier: f64,
    pub inv_batch_size: f64,
    pub max_step_size: f64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of RfdSettings"][::core::mem::size_of::<RfdSettings>() - 24usize];
    ["Alignment of RfdSettings"][::core::mem::align_of::<RfdSettings>() - 8usize];
    ["Offset of field: RfdSettings::multiplier"][::core::mem::offset_of!(RfdSettings, multiplier) - 0usize];
    ["Offset of field: RfdSettings::inv_batch_size"]
        [::core::mem::offset_of!(RfdSettings, inv_batch_size) - 8usize];
    ["Offset of field: RfdSettings::max_step_size"]
        [::core::mem::offset_of!(RfdSettings, max_step_size) - 16usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone, PartialEq)]
pub struct RfdModel {
    pub mean: f64,
    pub variance: f64,
    pub noise_variance: f64,
    pub grad_variance: f64,
    pub noise_grad_variance: f64,
    pub length_scale: f64,
    pub slope: f64,
    pub plateau: f64,
    pub beta: f64,
    pub quantile: f64,
    pub family: u32,
    pub mode: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of RfdModel"][::core::mem::size_of::<RfdModel>() - 88usize];
    ["Alignment of RfdModel"][::core::mem::align_of::<RfdModel>() - 8usize];
    ["Offset of field: RfdModel::mean"][::core::mem::offset_of!(RfdModel, mean) - 0usize];
    ["Offset of field: RfdModel::variance"][::core::mem::offset_of!(RfdModel, variance) - 8usize];
    ["Offset of field: RfdModel::noise_variance"]
        [::core::mem::offset_of!(RfdModel, noise_variance) - 16usize];
    ["Offset of field: RfdModel::grad_variance"][::core::mem::offset_of!(RfdModel, grad_variance) - 24usize];
    ["Offset of field: RfdModel::noise_grad_variance"]
        [::core::mem::offset_of!(RfdModel, noise_grad_variance) - 32usize];
    ["Offset of field: RfdModel::length_scale"][::core::mem::offset_of!(RfdModel, length_scale) - 40usize];
    ["Offset of field: RfdModel::slope"][::core::mem::offset_of!(RfdModel, slope) - 48usize];
    ["Offset of field: RfdModel::plateau"][::core::mem::offset_of!(RfdModel, plateau) - 56usize];
    ["Offset of field: RfdModel::beta"][::core::mem::offset_of!(RfdModel, beta) - 64usize];
    ["Offset of field: RfdModel::quantile"][::core::mem::offset_of!(RfdModel, quantile) - 72usize];
    ["Offset of field: RfdModel::family"][::core::mem::offset_of!(RfdModel, family) - 80usize];
    ["Offset of field: RfdModel::mode"][::core::mem::offset_of!(RfdModel, mode) - 84usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone, PartialEq)]
pub struct RfdStatus {
    pub sequence: u64,
    pub applied: u64,
    pub skipped: u64,
    pub loss: f64,
    pub grad_norm: f64,
    pub sigma_norm: f64,
    pub theta: f64,
    pub step_size: f64,
    pub learning_rate: f64,
    pub trust: f64,
    pub limit: u64,
    pub outcome: u64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of RfdStatus"][::core::mem::size_of::<RfdStatus>() - 96usize];
    ["Alignment of RfdStatus"][::core::mem::align_of::<RfdStatus>() - 8usize];
    ["Offset of field: RfdStatus::sequence"][::core::mem::offset_of!(RfdStatus, sequence) - 0usize];
    ["Offset of field: RfdStatus::applied"][::core::mem::offset_of!(RfdStatus, applied) - 8usize];
    ["Offset of field: RfdStatus::skipped"][::core::mem::offset_of!(RfdStatus, skipped) - 16usize];
    ["Offset of field: RfdStatus::loss"][::core::mem::offset_of!(RfdStatus, loss) - 24usize];
    ["Offset of field: RfdStatus::grad_norm"][::core::mem::offset_of!(RfdStatus, grad_norm) - 32usize];
    ["Offset of field: RfdStatus::sigma_norm"][::core::mem::offset_of!(RfdStatus, sigma_norm) - 40usize];
    ["Offset of field: RfdStatus::theta"][::core::mem::offset_of!(RfdStatus, theta) - 48usize];
    ["Offset of field: RfdStatus::step_size"][::core::mem::offset_of!(RfdStatus, step_size) - 56usize];
    ["Offset of field: RfdStatus::learning_rate"]
        [::core::mem::offset_of!(RfdStatus, learning_rate) - 64usize];
    ["Offset of field: RfdStatus::trust"][::core::mem::offset_of!(RfdStatus, trust) - 72usize];
    ["Offset of field: RfdStatus::limit"][::core::mem::offset_of!(RfdStatus, limit) - 80usize];
    ["Offset of field: RfdStatus::outcome"][::core::mem::offset_of!(RfdStatus, outcome) - 88usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone, PartialEq)]
pub struct RfdSquaredNorm {
    pub euclidean: f64,
    pub sigma: f64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of RfdSquaredNorm"][::core::mem::size_of::<RfdSquaredNorm>() - 16usize];
    ["Alignment of RfdSquaredNorm"][::core::mem::align_of::<RfdSquaredNorm>() - 8usize];
    ["Offset of field: RfdSquaredNorm::euclidean"]
        [::core::mem::offset_of!(RfdSquaredNorm, euclidean) - 0usize];
    ["Offset of field: RfdSquaredNorm::sigma"][::core::mem::offset_of!(RfdSquaredNorm, sigma) - 8usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone, PartialEq)]
pub struct RfdTensorNumbers {
    pub elements: f64,
    pub squares: f64,
    pub direction: f64,
    pub sampled: f64,
    pub parameter: f64,
    pub present: f64,
    pub missing: f64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of RfdTensorNumbers"][::core::mem::size_of::<RfdTensorNumbers>() - 56usize];
    ["Alignment of RfdTensorNumbers"][::core::mem::align_of::<RfdTensorNumbers>() - 8usize];
    ["Offset of field: RfdTensorNumbers::elements"]
        [::core::mem::offset_of!(RfdTensorNumbers, elements) - 0usize];
    ["Offset of field: RfdTensorNumbers::squares"]
        [::core::mem::offset_of!(RfdTensorNumbers, squares) - 8usize];
    ["Offset of field: RfdTensorNumbers::direction"]
        [::core::mem::offset_of!(RfdTensorNumbers, direction) - 16usize];
    ["Offset of field: RfdTensorNumbers::sampled"]
        [::core::mem::offset_of!(RfdTensorNumbers, sampled) - 24usize];
    ["Offset of field: RfdTensorNumbers::parameter"]
        [::core::mem::offset_of!(RfdTensorNumbers, parameter) - 32usize];
    ["Offset of field: RfdTensorNumbers::present"]
        [::core::mem::offset_of!(RfdTensorNumbers, present) - 40usize];
    ["Offset of field: RfdTensorNumbers::missing"]
        [::core::mem::offset_of!(RfdTensorNumbers, missing) - 48usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone, PartialEq)]
pub struct RfdPart {
    pub first_number: u64,
    pub places: u64,
    pub elements: f64,
    pub share: f64,
    pub height_share: f64,
    pub row: f64,
    pub whole_columns: u32,
    pub shared_rows: u32,
    pub first_row: u32,
    pub pieces: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of RfdPart"][::core::mem::size_of::<RfdPart>() - 64usize];
    ["Alignment of RfdPart"][::core::mem::align_of::<RfdPart>() - 8usize];
    ["Offset of field: RfdPart::first_number"][::core::mem::offset_of!(RfdPart, first_number) - 0usize];
    ["Offset of field: RfdPart::places"][::core::mem::offset_of!(RfdPart, places) - 8usize];
    ["Offset of field: RfdPart::elements"][::core::mem::offset_of!(RfdPart, elements) - 16usize];
    ["Offset of field: RfdPart::share"][::core::mem::offset_of!(RfdPart, share) - 24usize];
    ["Offset of field: RfdPart::height_share"][::core::mem::offset_of!(RfdPart, height_share) - 32usize];
    ["Offset of field: RfdPart::row"][::core::mem::offset_of!(RfdPart, row) - 40usize];
    ["Offset of field: RfdPart::whole_columns"][::core::mem::offset_of!(RfdPart, whole_columns) - 48usize];
    ["Offset of field: RfdPart::shared_rows"][::core::mem::offset_of!(RfdPart, shared_rows) - 52usize];
    ["Offset of field: RfdPart::first_row"][::core::mem::offset_of!(RfdPart, first_row) - 56usize];
    ["Offset of field: RfdPart::pieces"][::core::mem::offset_of!(RfdPart, pieces) - 60usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone, PartialEq)]
pub struct RfdHistory {
    pub loss: f64,
    pub loss_rest: f64,
    pub below: f64,
    pub cut: f64,
    pub trust: f64,
    pub last: f64,
    pub high: f64,
    pub steps: f64,
    pub windows: f64,
    pub sum: f64,
    pub squares: f64,
    pub promised: f64,
    pub sum_before: f64,
    pub squares_before: f64,
    pub promised_before: f64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of RfdHistory"][::core::mem::size_of::<RfdHistory>() - 120usize];
    ["Alignment of RfdHistory"][::core::mem::align_of::<RfdHistory>() - 8usize];
    ["Offset of field: RfdHistory::loss"][::core::mem::offset_of!(RfdHistory, loss) - 0usize];
    ["Offset of field: RfdHistory::loss_rest"][::core::mem::offset_of!(RfdHistory, loss_rest) - 8usize];
    ["Offset of field: RfdHistory::below"][::core::mem::offset_of!(RfdHistory, below) - 16usize];
    ["Offset of field: RfdHistory::cut"][::core::mem::offset_of!(RfdHistory, cut) - 24usize];
    ["Offset of field: RfdHistory::trust"][::core::mem::offset_of!(RfdHistory, trust) - 32usize];
    ["Offset of field: RfdHistory::last"][::core::mem::offset_of!(RfdHistory, last) - 40usize];
    ["Offset of field: RfdHistory::high"][::core::mem::offset_of!(RfdHistory, high) - 48usize];
    ["Offset of field: RfdHistory::steps"][::core::mem::offset_of!(RfdHistory, steps) - 56usize];
    ["Offset of field: RfdHistory::windows"][::core::mem::offset_of!(RfdHistory, windows) - 64usize];
    ["Offset of field: RfdHistory::sum"][::core::mem::offset_of!(RfdHistory, sum) - 72usize];
    ["Offset of field: RfdHistory::squares"][::core::mem::offset_of!(RfdHistory, squares) - 80usize];
    ["Offset of field: RfdHistory::promised"][::core::mem::offset_of!(RfdHistory, promised) - 88usize];
    ["Offset of field: RfdHistory::sum_before"][::core::mem::offset_of!(RfdHistory, sum_before) - 96usize];
    ["Offset of field: RfdHistory::squares_before"]
        [::core::mem::offset_of!(RfdHistory, squares_before) - 104usize];
    ["Offset of field: RfdHistory::promised_before"]
        [::core::mem::offset_of!(RfdHistory, promised_before) - 112usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone, PartialEq)]
pub struct RfdTensorHistory {
    pub squares: f64,
    pub squares_rest: f64,
    pub average_rest: f64,
    pub length: f64,
    pub column_mean: f64,
    pub turn: f64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of RfdTensorHistory"][::core::mem::size_of::<RfdTensorHistory>() - 48usize];
    ["Alignment of RfdTensorHistory"][::core::mem::align_of::<RfdTensorHistory>() - 8usize];
    ["Offset of field: RfdTensorHistory::squares"]
        [::core::mem::offset_of!(RfdTensorHistory, squares) - 0usize];
    ["Offset of field: RfdTensorHistory::squares_rest"]
        [::core::mem::offset_of!(RfdTensorHistory, squares_rest) - 8usize];
    ["Offset of field: RfdTensorHistory::average_rest"]
        [::core::mem::offset_of!(RfdTensorHistory, average_rest) - 16usize];
    ["Offset of field: RfdTensorHistory::length"]
        [::core::mem::offset_of!(RfdTensorHistory, length) - 24usize];
    ["Offset of field: RfdTensorHistory::column_mean"]
        [::core::mem::offset_of!(RfdTensorHistory, column_mean) - 32usize];
    ["Offset of field: RfdTensorHistory::turn"][::core::mem::offset_of!(RfdTensorHistory, turn) - 40usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone, PartialEq)]
pub struct RfdAdaptive {
    pub history: u64,
    pub averaging: f64,
    pub loss_bound: f64,
    pub largest_rate: f64,
    pub loss_share: f64,
    pub variance_decay: f64,
    pub variance_floor: f64,
    pub loss_growth: f64,
    pub noise_growth: f64,
    pub cut_losses: f64,
    pub settled: f64,
    pub window: f64,
    pub share: f64,
    pub after_less: f64,
    pub after_more: f64,
    pub smallest_trust: f64,
    pub largest_trust: f64,
    pub alarm_losses: f64,
    pub alarm_deviations: f64,
    pub decay_share: f64,
    pub length_share: f64,
    pub smallest_matrix: f64,
    pub smallest_vector: f64,
    pub ramp: u64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of RfdAdaptive"][::core::mem::size_of::<RfdAdaptive>() - 192usize];
    ["Alignment of RfdAdaptive"][::core::mem::align_of::<RfdAdaptive>() - 8usize];
    ["Offset of field: RfdAdaptive::history"][::core::mem::offset_of!(RfdAdaptive, history) - 0usize];
    ["Offset of field: RfdAdaptive::averaging"][::core::mem::offset_of!(RfdAdaptive, averaging) - 8usize];
    ["Offset of field: RfdAdaptive::loss_bound"][::core::mem::offset_of!(RfdAdaptive, loss_bound) - 16usize];
    ["Offset of field: RfdAdaptive::largest_rate"]
        [::core::mem::offset_of!(RfdAdaptive, largest_rate) - 24usize];
    ["Offset of field: RfdAdaptive::loss_share"][::core::mem::offset_of!(RfdAdaptive, loss_share) - 32usize];
    ["Offset of field: RfdAdaptive::variance_decay"]
        [::core::mem::offset_of!(RfdAdaptive, variance_decay) - 40usize];
    ["Offset of field: RfdAdaptive::variance_floor"]
        [::core::mem::offset_of!(RfdAdaptive, variance_floor) - 48usize];
    ["Offset of field: RfdAdaptive::loss_growth"]
        [::core::mem::offset_of!(RfdAdaptive, loss_growth) - 56usize];
    ["Offset of field: RfdAdaptive::noise_growth"]
        [::core::mem::offset_of!(RfdAdaptive, noise_growth) - 64usize];
    ["Offset of field: RfdAdaptive::cut_losses"][::core::mem::offset_of!(RfdAdaptive, cut_losses) - 72usize];
    ["Offset of field: RfdAdaptive::settled"][::core::mem::offset_of!(RfdAdaptive, settled) - 80usize];
    ["Offset of field: RfdAdaptive::window"][::core::mem::offset_of!(RfdAdaptive, window) - 88usize];
    ["Offset of field: RfdAdaptive::share"][::core::mem::offset_of!(RfdAdaptive, share) - 96usize];
    ["Offset of field: RfdAdaptive::after_less"][::core::mem::offset_of!(RfdAdaptive, after_less) - 104usize];
    ["Offset of field: RfdAdaptive::after_more"][::core::mem::offset_of!(RfdAdaptive, after_more) - 112usize];
    ["Offset of field: RfdAdaptive::smallest_trust"]
        [::core::mem::offset_of!(RfdAdaptive, smallest_trust) - 120usize];
    ["Offset of field: RfdAdaptive::largest_trust"]
        [::core::mem::offset_of!(RfdAdaptive, largest_trust) - 128usize];
    ["Offset of field: RfdAdaptive::alarm_losses"]
        [::core::mem::offset_of!(RfdAdaptive, alarm_losses) - 136usize];
    ["Offset of field: RfdAdaptive::alarm_deviations"]
        [::core::mem::offset_of!(RfdAdaptive, alarm_deviations) - 144usize];
    ["Offset of field: RfdAdaptive::decay_share"]
        [::core::mem::offset_of!(RfdAdaptive, decay_share) - 152usize];
    ["Offset of field: RfdAdaptive::length_share"]
        [::core::mem::offset_of!(RfdAdaptive, length_share) - 160usize];
    ["Offset of field: RfdAdaptive::smallest_matrix"]
        [::core::mem::offset_of!(RfdAdaptive, smallest_matrix) - 168usize];
    ["Offset of field: RfdAdaptive::smallest_vector"]
        [::core::mem::offset_of!(RfdAdaptive, smallest_vector) - 176usize];
    ["Offset of field: RfdAdaptive::ramp"][::core::mem::offset_of!(RfdAdaptive, ramp) - 184usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone, PartialEq)]
pub struct RfdStep {
    pub model: RfdModel,
    pub adaptive: RfdAdaptive,
    pub tensors: u64,
    pub groups: u64,
    pub settings: u64,
    pub status: u64,
    pub mirror: u64,
    pub loss: u64,
    pub grad_scale: u64,
    pub found_inf: u64,
    pub rank_sums: u64,
    pub parts: u64,
    pub chunk_sums: u64,
    pub segment_sums: u64,
    pub tensor_sums: u64,
    pub segment_done: u64,
    pub tensor_done: u64,
    pub largest_grad: u64,
    pub chunks: u64,
    pub seed: u64,
    pub loss_value: f64,
    pub segments: u32,
    pub tensor_count: u32,
    pub group_count: u32,
    pub loss_dtype: u32,
    pub stochastic: u32,
    pub method: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of RfdStep"][::core::mem::size_of::<RfdStep>() - 456usize];
    ["Alignment of RfdStep"][::core::mem::align_of::<RfdStep>() - 8usize];
    ["Offset of field: RfdStep::model"][::core::mem::offset_of!(RfdStep, model) - 0usize];
    ["Offset of field: RfdStep::adaptive"][::core::mem::offset_of!(RfdStep, adaptive) - 88usize];
    ["Offset of field: RfdStep::tensors"][::core::mem::offset_of!(RfdStep, tensors) - 280usize];
    ["Offset of field: RfdStep::groups"][::core::mem::offset_of!(RfdStep, groups) - 288usize];
    ["Offset of field: RfdStep::settings"][::core::mem::offset_of!(RfdStep, settings) - 296usize];
    ["Offset of field: RfdStep::status"][::core::mem::offset_of!(RfdStep, status) - 304usize];
    ["Offset of field: RfdStep::mirror"][::core::mem::offset_of!(RfdStep, mirror) - 312usize];
    ["Offset of field: RfdStep::loss"][::core::mem::offset_of!(RfdStep, loss) - 320usize];
    ["Offset of field: RfdStep::grad_scale"][::core::mem::offset_of!(RfdStep, grad_scale) - 328usize];
    ["Offset of field: RfdStep::found_inf"][::core::mem::offset_of!(RfdStep, found_inf) - 336usize];
    ["Offset of field: RfdStep::rank_sums"][::core::mem::offset_of!(RfdStep, rank_sums) - 344usize];
    ["Offset of field: RfdStep::parts"][::core::mem::offset_of!(RfdStep, parts) - 352usize];
    ["Offset of field: RfdStep::chunk_sums"][::core::mem::offset_of!(RfdStep, chunk_sums) - 360usize];
    ["Offset of field: RfdStep::segment_sums"][::core::mem::offset_of!(RfdStep, segment_sums) - 368usize];
    ["Offset of field: RfdStep::tensor_sums"][::core::mem::offset_of!(RfdStep, tensor_sums) - 376usize];
    ["Offset of field: RfdStep::segment_done"][::core::mem::offset_of!(RfdStep, segment_done) - 384usize];
    ["Offset of field: RfdStep::tensor_done"][::core::mem::offset_of!(RfdStep, tensor_done) - 392usize];
    ["Offset of field: RfdStep::largest_grad"][::core::mem::offset_of!(RfdStep, largest_grad) - 400usize];
    ["Offset of field: RfdStep::chunks"][::core::mem::offset_of!(RfdStep, chunks) - 408usize];
    ["Offset of field: RfdStep::seed"][::core::mem::offset_of!(RfdStep, seed) - 416usize];
    ["Offset of field: RfdStep::loss_value"][::core::mem::offset_of!(RfdStep, loss_value) - 424usize];
    ["Offset of field: RfdStep::segments"][::core::mem::offset_of!(RfdStep, segments) - 432usize];
    ["Offset of field: RfdStep::tensor_count"][::core::mem::offset_of!(RfdStep, tensor_count) - 436usize];
    ["Offset of field: RfdStep::group_count"][::core::mem::offset_of!(RfdStep, group_count) - 440usize];
    ["Offset of field: RfdStep::loss_dtype"][::core::mem::offset_of!(RfdStep, loss_dtype) - 444usize];
    ["Offset of field: RfdStep::stochastic"][::core::mem::offset_of!(RfdStep, stochastic) - 448usize];
    ["Offset of field: RfdStep::method"][::core::mem::offset_of!(RfdStep, method) - 452usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone, PartialEq)]
pub struct RfdTable {
    pub tensor: [RfdTensor; 400usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of RfdTable"][::core::mem::size_of::<RfdTable>() - 32000usize];
    ["Alignment of RfdTable"][::core::mem::align_of::<RfdTable>() - 8usize];
    ["Offset of field: RfdTable::tensor"][::core::mem::offset_of!(RfdTable, tensor) - 0usize];
};
impl Default for RfdTable {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
macro_rules! each_struct { ($macro:ident) => { $macro! {
RfdTensor { param, grad, velocity, master, variances, len, offset, first_chunk, first_segment, group, formats, flags, row, rows }
RfdGroup { length_scale_factor, multiplier, velocity_decay, weight_decay }
RfdSettings { multiplier, inv_batch_size, max_step_size }
RfdModel { mean, variance, noise_variance, grad_variance, noise_grad_variance, length_scale, slope, plateau, beta, quantile, family, mode }
RfdStatus { sequence, applied, skipped, loss, grad_norm, sigma_norm, theta, step_size, learning_rate, trust, limit, outcome }
RfdSquaredNorm { euclidean, sigma }
RfdTensorNumbers { elements, squares, direction, sampled, parameter, present, missing }
RfdPart { first_number, places, elements, share, height_share, row, whole_columns, shared_rows, first_row, pieces }
RfdHistory { loss, loss_rest, below, cut, trust, last, high, steps, windows, sum, squares, promised, sum_before, squares_before, promised_before }
RfdTensorHistory { squares, squares_rest, average_rest, length, column_mean, turn }
RfdAdaptive { history, averaging, loss_bound, largest_rate, loss_share, variance_decay, variance_floor, loss_growth, noise_growth, cut_losses, settled, window, share, after_less, after_more, smallest_trust, largest_trust, alarm_losses, alarm_deviations, decay_share, length_share, smallest_matrix, smallest_vector, ramp }
RfdStep { model, adaptive, tensors, groups, settings, status, mirror, loss, grad_scale, found_inf, rank_sums, parts, chunk_sums, segment_sums, tensor_sums, segment_done, tensor_done, largest_grad, chunks, seed, loss_value, segments, tensor_count, group_count, loss_dtype, stochastic, method }
} }; }
pub(crate) use each_struct;
