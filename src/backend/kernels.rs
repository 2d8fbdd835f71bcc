// Made from kernels/instances.h by scripts/bindings; do not edit.
//! The kernels and their instances.
use super::abi;
use std::ffi::CStr;
/// What lists of tensors an instance is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InstanceKind {
    Fitted,
    Averaged,
    Generic,
}
/// The instances of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Instance {
    F32,
    F32Momentum,
    F32Averaged,
    Bf16Master,
    Bf16MasterMomentum,
    Bf16MasterAveraged,
    Bf16,
    F16Master,
    Generic,
}
/// A kernel, by its place in [`Kernel::NAMES`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kernel(usize);
impl Kernel {
    /// Names of all kernels.
    pub const NAMES: [&CStr; 36] = [
        c"rfd_step_f32",
        c"rfd_norm_f32",
        c"rfd_update_f32",
        c"rfd_step_f32_momentum",
        c"rfd_norm_f32_momentum",
        c"rfd_update_f32_momentum",
        c"rfd_step_f32_averaged",
        c"rfd_norm_f32_averaged",
        c"rfd_update_f32_averaged",
        c"rfd_step_bf16_master",
        c"rfd_norm_bf16_master",
        c"rfd_update_bf16_master",
        c"rfd_step_bf16_master_momentum",
        c"rfd_norm_bf16_master_momentum",
        c"rfd_update_bf16_master_momentum",
        c"rfd_step_bf16_master_averaged",
        c"rfd_norm_bf16_master_averaged",
        c"rfd_update_bf16_master_averaged",
        c"rfd_step_bf16",
        c"rfd_norm_bf16",
        c"rfd_update_bf16",
        c"rfd_step_f16_master",
        c"rfd_norm_f16_master",
        c"rfd_update_f16_master",
        c"rfd_step_generic",
        c"rfd_norm_generic",
        c"rfd_update_generic",
        c"rfd_rescale_max",
        c"rfd_rescale_norm",
        c"rfd_total",
        c"rfd_status",
        c"rfd_local_sums",
        c"rfd_take_sums",
        c"rfd_fill_masters",
        c"rfd_measure",
        c"rfd_store",
    ];
    /// The part of the device code that has it, by its place in [`PARTS`].
    pub const fn part(self) -> usize {
        const PART: [usize; 36] = [
            0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7, 7, 8, 9, 9, 10, 11, 11, 12, 13, 13, 14, 15, 15, 16, 17, 17, 17,
            17, 18, 18, 19, 19, 20, 20, 20,
        ];
        PART[self.0]
    }
    pub const RESCALE_MAX: Kernel = Kernel(27);
    pub const RESCALE_NORM: Kernel = Kernel(28);
    pub const TOTAL: Kernel = Kernel(29);
    pub const STATUS: Kernel = Kernel(30);
    pub const LOCAL_SUMS: Kernel = Kernel(31);
    pub const TAKE_SUMS: Kernel = Kernel(32);
    pub const FILL_MASTERS: Kernel = Kernel(33);
    pub const MEASURE: Kernel = Kernel(34);
    pub const STORE: Kernel = Kernel(35);
    pub const fn step(instance: Instance) -> Self {
        ENTRIES[instance as usize].step
    }
    pub const fn norm(instance: Instance) -> Self {
        ENTRIES[instance as usize].norm
    }
    pub const fn update(instance: Instance) -> Self {
        ENTRIES[instance as usize].update
    }
    /// The one at a place in [`Self::NAMES`].
    pub const fn at(index: usize) -> Self {
        Self(index)
    }
    /// Its place in [`Self::NAMES`].
    pub const fn index(self) -> usize {
        self.0
    }
}
/// The parts that device code is compiled and loaded in.
pub(crate) const PARTS: [&str; 21] = [
    "f32",
    "f32_apart",
    "f32_momentum",
    "f32_momentum_apart",
    "f32_averaged",
    "f32_averaged_apart",
    "bf16_master",
    "bf16_master_apart",
    "bf16_master_momentum",
    "bf16_master_momentum_apart",
    "bf16_master_averaged",
    "bf16_master_averaged_apart",
    "bf16",
    "bf16_apart",
    "f16_master",
    "f16_master_apart",
    "generic",
    "generic_apart",
    "apart",
    "halves",
    "common",
];
/// The place of the one that belongs to no instance.
pub(crate) const COMMON: usize = 20;
/// PTX for compute capability 7.0 and newer, part by part.
#[cfg(feature = "cuda")]
pub(crate) const PTX: [&str; PARTS.len()] = [
    include_str!("../../kernels/prebuilt/f32.ptx"),
    include_str!("../../kernels/prebuilt/f32_apart.ptx"),
    include_str!("../../kernels/prebuilt/f32_momentum.ptx"),
    include_str!("../../kernels/prebuilt/f32_momentum_apart.ptx"),
    include_str!("../../kernels/prebuilt/f32_averaged.ptx"),
    include_str!("../../kernels/prebuilt/f32_averaged_apart.ptx"),
    include_str!("../../kernels/prebuilt/bf16_master.ptx"),
    include_str!("../../kernels/prebuilt/bf16_master_apart.ptx"),
    include_str!("../../kernels/prebuilt/bf16_master_momentum.ptx"),
    include_str!("../../kernels/prebuilt/bf16_master_momentum_apart.ptx"),
    include_str!("../../kernels/prebuilt/bf16_master_averaged.ptx"),
    include_str!("../../kernels/prebuilt/bf16_master_averaged_apart.ptx"),
    include_str!("../../kernels/prebuilt/bf16.ptx"),
    include_str!("../../kernels/prebuilt/bf16_apart.ptx"),
    include_str!("../../kernels/prebuilt/f16_master.ptx"),
    include_str!("../../kernels/prebuilt/f16_master_apart.ptx"),
    include_str!("../../kernels/prebuilt/generic.ptx"),
    include_str!("../../kernels/prebuilt/generic_apart.ptx"),
    include_str!("../../kernels/prebuilt/apart.ptx"),
    include_str!("../../kernels/prebuilt/halves.ptx"),
    include_str!("../../kernels/prebuilt/common.ptx"),
];
/// Of each part a line of text and deflated machine code.
#[cfg(feature = "cuda")]
pub(crate) type Packed = [&'static [u8]; PARTS.len()];
/// Machine code, after the compute capability that it is for.
#[cfg(feature = "cuda")]
pub(crate) const MACHINE_CODE: [((i32, i32), Packed); 2] = [
    (
        (8, 0),
        [
            include_bytes!("../../kernels/prebuilt/f32.sm_80"),
            include_bytes!("../../kernels/prebuilt/f32_apart.sm_80"),
            include_bytes!("../../kernels/prebuilt/f32_momentum.sm_80"),
            include_bytes!("../../kernels/prebuilt/f32_momentum_apart.sm_80"),
            include_bytes!("../../kernels/prebuilt/f32_averaged.sm_80"),
            include_bytes!("../../kernels/prebuilt/f32_averaged_apart.sm_80"),
            include_bytes!("../../kernels/prebuilt/bf16_master.sm_80"),
            include_bytes!("../../kernels/prebuilt/bf16_master_apart.sm_80"),
            include_bytes!("../../kernels/prebuilt/bf16_master_momentum.sm_80"),
            include_bytes!("../../kernels/prebuilt/bf16_master_momentum_apart.sm_80"),
            include_bytes!("../../kernels/prebuilt/bf16_master_averaged.sm_80"),
            include_bytes!("../../kernels/prebuilt/bf16_master_averaged_apart.sm_80"),
            include_bytes!("../../kernels/prebuilt/bf16.sm_80"),
            include_bytes!("../../kernels/prebuilt/bf16_apart.sm_80"),
            include_bytes!("../../kernels/prebuilt/f16_master.sm_80"),
            include_bytes!("../../kernels/prebuilt/f16_master_apart.sm_80"),
            include_bytes!("../../kernels/prebuilt/generic.sm_80"),
            include_bytes!("../../kernels/prebuilt/generic_apart.sm_80"),
            include_bytes!("../../kernels/prebuilt/apart.sm_80"),
            include_bytes!("../../kernels/prebuilt/halves.sm_80"),
            include_bytes!("../../kernels/prebuilt/common.sm_80"),
        ],
    ),
    (
        (9, 0),
        [
            include_bytes!("../../kernels/prebuilt/f32.sm_90"),
            include_bytes!("../../kernels/prebuilt/f32_apart.sm_90"),
            include_bytes!("../../kernels/prebuilt/f32_momentum.sm_90"),
            include_bytes!("../../kernels/prebuilt/f32_momentum_apart.sm_90"),
            include_bytes!("../../kernels/prebuilt/f32_averaged.sm_90"),
            include_bytes!("../../kernels/prebuilt/f32_averaged_apart.sm_90"),
            include_bytes!("../../kernels/prebuilt/bf16_master.sm_90"),
            include_bytes!("../../kernels/prebuilt/bf16_master_apart.sm_90"),
            include_bytes!("../../kernels/prebuilt/bf16_master_momentum.sm_90"),
            include_bytes!("../../kernels/prebuilt/bf16_master_momentum_apart.sm_90"),
            include_bytes!("../../kernels/prebuilt/bf16_master_averaged.sm_90"),
            include_bytes!("../../kernels/prebuilt/bf16_master_averaged_apart.sm_90"),
            include_bytes!("../../kernels/prebuilt/bf16.sm_90"),
            include_bytes!("../../kernels/prebuilt/bf16_apart.sm_90"),
            include_bytes!("../../kernels/prebuilt/f16_master.sm_90"),
            include_bytes!("../../kernels/prebuilt/f16_master_apart.sm_90"),
            include_bytes!("../../kernels/prebuilt/generic.sm_90"),
            include_bytes!("../../kernels/prebuilt/generic_apart.sm_90"),
            include_bytes!("../../kernels/prebuilt/apart.sm_90"),
            include_bytes!("../../kernels/prebuilt/halves.sm_90"),
            include_bytes!("../../kernels/prebuilt/common.sm_90"),
        ],
    ),
];
/// What an instance is compiled for, and as.
#[derive(Debug)]
pub(crate) struct Entry {
    pub instance: Instance,
    pub kind: InstanceKind,
    /// Formats of parameters and gradients.
    pub param: u32,
    pub grad: u32,
    /// Whether there are master weights, and velocities.
    pub master: bool,
    pub velocity: bool,
    step: Kernel,
    norm: Kernel,
    update: Kernel,
}
/// In the order of [`Instance`].
pub(crate) const ENTRIES: [Entry; 9] = [
    Entry {
        instance: Instance::F32,
        kind: InstanceKind::Fitted,
        param: abi::RFD_DTYPE_F32,
        grad: abi::RFD_DTYPE_F32,
        master: false,
        velocity: false,
        step: Kernel(0),
        norm: Kernel(1),
        update: Kernel(2),
    },
    Entry {
        instance: Instance::F32Momentum,
        kind: InstanceKind::Fitted,
        param: abi::RFD_DTYPE_F32,
        grad: abi::RFD_DTYPE_F32,
        master: false,
        velocity: true,
        step: Kernel(3),
        norm: Kernel(4),
        update: Kernel(5),
    },
    Entry {
        instance: Instance::F32Averaged,
        kind: InstanceKind::Averaged,
        param: abi::RFD_DTYPE_F32,
        grad: abi::RFD_DTYPE_F32,
        master: false,
        velocity: true,
        step: Kernel(6),
        norm: Kernel(7),
        update: Kernel(8),
    },
    Entry {
        instance: Instance::Bf16Master,
        kind: InstanceKind::Fitted,
        param: abi::RFD_DTYPE_BF16,
        grad: abi::RFD_DTYPE_BF16,
        master: true,
        velocity: false,
        step: Kernel(9),
        norm: Kernel(10),
        update: Kernel(11),
    },
    Entry {
        instance: Instance::Bf16MasterMomentum,
        kind: InstanceKind::Fitted,
        param: abi::RFD_DTYPE_BF16,
        grad: abi::RFD_DTYPE_BF16,
        master: true,
        velocity: true,
        step: Kernel(12),
        norm: Kernel(13),
        update: Kernel(14),
    },
    Entry {
        instance: Instance::Bf16MasterAveraged,
        kind: InstanceKind::Averaged,
        param: abi::RFD_DTYPE_BF16,
        grad: abi::RFD_DTYPE_BF16,
        master: true,
        velocity: true,
        step: Kernel(15),
        norm: Kernel(16),
        update: Kernel(17),
    },
    Entry {
        instance: Instance::Bf16,
        kind: InstanceKind::Fitted,
        param: abi::RFD_DTYPE_BF16,
        grad: abi::RFD_DTYPE_BF16,
        master: false,
        velocity: false,
        step: Kernel(18),
        norm: Kernel(19),
        update: Kernel(20),
    },
    Entry {
        instance: Instance::F16Master,
        kind: InstanceKind::Fitted,
        param: abi::RFD_DTYPE_F16,
        grad: abi::RFD_DTYPE_F16,
        master: true,
        velocity: false,
        step: Kernel(21),
        norm: Kernel(22),
        update: Kernel(23),
    },
    Entry {
        instance: Instance::Generic,
        kind: InstanceKind::Generic,
        param: abi::RFD_DTYPE_F32,
        grad: abi::RFD_DTYPE_F32,
        master: true,
        velocity: true,
        step: Kernel(24),
        norm: Kernel(25),
        update: Kernel(26),
    },
];
/// The names in RFD_FAMILIES, each at the place that is its number.
pub(crate) const FAMILIES: &[&str] = &["SquaredExponential", "RationalQuadratic", "Matern32", "Matern52"];
/// The names in RFD_DTYPES, each at the place that is its number.
pub(crate) const DTYPES: &[&str] = &["F32", "F64", "F16", "BF16"];
/// Whether the host has the same list: its numbers are those of the kernels then.
pub(crate) const fn are_same(own: &[&str], kernels: &[&str]) -> bool {
    let mut i = 0;
    while i < own.len() && i < kernels.len() {
        if !own[i].eq_ignore_ascii_case(kernels[i]) {
            return false;
        }
        i += 1;
    }
    own.len() == kernels.len()
}
