//! Devices that are present, tensors on them, and random cases for the suites of devices.

#![allow(dead_code)] // each suite uses a part

use std::collections::HashMap;

use half::{bf16, f16};
use rfdescent::device::{Device, DeviceBuffer, Stream};
#[cfg(feature = "shim")]
use rfdescent::device::{Shim, ShimOptions};
use rfdescent::optimizer::{RawNumber, RawTensor, StepReport};
use rfdescent::{DType, GradRef};

use crate::common::Owned;

/// Something that executes steps.
pub struct Executor {
    pub device: Device,
    #[cfg(feature = "shim")]
    pub shim: Option<Shim>,
}

/// The shim where it is compiled in, and CUDA where a device is present.
pub fn executors() -> Vec<Executor> {
    let mut executors = Vec::new();
    #[cfg(feature = "shim")]
    {
        let shim = Shim::new(ShimOptions::default());
        executors.push(Executor { device: shim.device(), shim: Some(shim) });
    }
    executors.extend(cuda());
    executors
}

/// The CUDA device, opened once; a printed skip without one, unless RFDESCENT_REQUIRE_GPU=1 makes that a
/// failure.
pub fn cuda() -> Option<Executor> {
    #[cfg(feature = "cuda")]
    {
        static DEVICE: std::sync::OnceLock<Result<Device, String>> = std::sync::OnceLock::new();
        match DEVICE.get_or_init(|| rfdescent::cuda::device(0).map_err(|error| error.to_string())) {
            Ok(device) => {
                return Some(Executor {
                    device: device.clone(),
                    #[cfg(feature = "shim")]
                    shim: None,
                });
            }
            Err(problem) if std::env::var("RFDESCENT_REQUIRE_GPU").is_ok_and(|value| value == "1") => {
                panic!("RFDESCENT_REQUIRE_GPU=1, but: {problem}")
            }
            Err(problem) => say_skipped(format_args!("skipped on CUDA: {problem}")),
        }
    }
    None
}

impl Executor {
    /// Blocks and order for the next case; only a shim can be told how many it holds.
    pub fn set_schedule(&self, _seed: u64, _refuses: bool) {
        #[cfg(feature = "shim")]
        if let Some(shim) = &self.shim {
            Shim::set_schedule(_seed);
            shim.set_options(ShimOptions { blocks: 8, refuses: _refuses, ..ShimOptions::default() });
        }
    }
}

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

pub fn size_of(dtype: DType) -> usize {
    match dtype {
        DType::F32 => 4,
        DType::F64 => 8,
        DType::F16 | DType::BF16 => 2,
    }
}

pub fn bytes(tensor: &Owned) -> Vec<u8> {
    match tensor {
        Owned::F32(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Owned::F64(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Owned::F16(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Owned::BF16(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

pub fn from_bytes(dtype: DType, bytes: &[u8]) -> Owned {
    match dtype {
        DType::F32 => Owned::F32(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()),
        DType::F64 => Owned::F64(bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect()),
        DType::F16 => Owned::F16(bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b)).collect()),
        DType::BF16 => Owned::BF16(bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b)).collect()),
    }
}

/// Tensors on a device, each aligned to its element only, with guard bytes around.
pub struct Placed {
    buffer: DeviceBuffer,
    offsets: Vec<usize>,
    formats: Vec<(DType, usize)>,
    image: Vec<u8>,
}

const GUARD: u8 = 0xA5;

impl Placed {
    pub fn new(device: &Device, tensors: &[Owned], random: &mut Random, stream: Stream) -> Self {
        let aligned = random.one_in(3);
        let mut image = Vec::new();
        let mut offsets = Vec::new();
        let mut formats = Vec::new();
        for tensor in tensors {
            let size = size_of(tensor.dtype());
            let shift = if aligned { 0 } else { random.below(16 / size + 1) * size };
            image.resize(image.len().next_multiple_of(16) + shift, GUARD);
            offsets.push(image.len());
            let content = bytes(tensor);
            formats.push((tensor.dtype(), content.len()));
            image.extend(content);
        }
        image.resize(image.len() + 16, GUARD);
        let mut buffer = device.allocate(image.len()).unwrap();
        buffer.upload(0, &image, stream).unwrap();
        Self { buffer, offsets, formats, image }
    }

    pub fn address(&self, k: usize) -> u64 {
        self.buffer.address() + self.offsets[k] as u64
    }

    /// Replaces the tensors by others of the same formats and lengths.
    pub fn write(&mut self, tensors: &[Owned], stream: Stream) {
        for (tensor, &offset) in tensors.iter().zip(&self.offsets) {
            let content = bytes(tensor);
            self.image[offset..offset + content.len()].copy_from_slice(&content);
        }
        self.buffer.upload(0, &self.image, stream).unwrap();
    }

    /// The tensors as they are now; panics when something wrote beside them.
    pub fn read(&mut self, stream: Stream) -> Vec<Owned> {
        let mut image = vec![0; self.image.len()];
        self.buffer.download(0, &mut image, stream).unwrap();
        let tensors = self
            .offsets
            .iter()
            .zip(&self.formats)
            .map(|(&offset, &(dtype, len))| from_bytes(dtype, &image[offset..offset + len]))
            .collect();
        for (&offset, &(_, len)) in self.offsets.iter().zip(&self.formats) {
            self.image[offset..offset + len].copy_from_slice(&image[offset..offset + len]);
        }
        assert!(image == self.image, "a kernel wrote beside the tensors");
        tensors
    }
}

/// Addresses for a step; a gradient that is `None` is missing.
pub fn step_tensors(params: &Placed, grads: &Placed, present: &[Option<DType>]) -> Vec<RawTensor> {
    present
        .iter()
        .enumerate()
        .map(|(k, dtype)| match dtype {
            Some(dtype) => RawTensor::new(params.address(k), grads.address(k), *dtype),
            None => RawTensor::without_grad(params.address(k)),
        })
        .collect()
}

/// One number of the given format on the device.
pub fn scalar(device: &Device, dtype: DType, value: f64, stream: Stream) -> DeviceBuffer {
    let mut buffer = device.allocate(8).unwrap();
    buffer.upload(0, &bytes(&Owned::from_f64(dtype, &[value])), stream).unwrap();
    buffer
}

/// All fields of a report as bits; NaN payloads do not count.
pub fn report_bits(report: &StepReport) -> (String, Vec<u64>, u64, u64) {
    let bits = |x: f64| if x.is_nan() { u64::MAX } else { x.to_bits() };
    let numbers = [
        report.loss,
        report.grad_norm,
        report.sigma_norm,
        report.theta,
        report.step_size,
        report.learning_rate,
        report.trust,
    ];
    (
        format!("{:?} {:?}", report.outcome, report.limit),
        numbers.map(bits).to_vec(),
        report.applied_steps,
        report.skipped_steps,
    )
}

/// Runs `case` with many seeds on every executor.
pub fn for_seeds(name: &str, cases: usize, case: impl Fn(&Executor, u64)) {
    let number = |variable: &str| std::env::var(variable).ok().and_then(|value| value.parse::<u64>().ok());
    let first =
        name.bytes().fold(1_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0193)) << 20;
    let (first, count) = match number("RFDESCENT_DEVICE_SEED") {
        Some(seed) => (seed, 1),
        None => (first, number("RFDESCENT_DEVICE_CASES").unwrap_or(cases as u64)),
    };
    for executor in executors() {
        println!("{name} on {}: {count} cases, seeds from {first}", executor.device.name());
        for seed in first..first + count {
            let run = std::panic::AssertUnwindSafe(|| case(&executor, seed));
            if let Err(panic) = std::panic::catch_unwind(run) {
                eprintln!("{name} failed: RFDESCENT_DEVICE_SEED={seed} on {}", executor.device.name());
                std::panic::resume_unwind(panic);
            }
        }
    }
}

/// Velocities and master weights of a saved state, by name.
pub fn buffers(state: &[u8]) -> HashMap<String, Owned> {
    let state = safetensors::SafeTensors::deserialize(state).unwrap();
    let dtype = |view: &safetensors::tensor::TensorView<'_>| match view.dtype() {
        safetensors::Dtype::F64 => DType::F64,
        _ => DType::F32,
    };
    state.tensors().into_iter().map(|(name, view)| (name, from_bytes(dtype(&view), view.data()))).collect()
}

/// What the adaptive method remembers, as it lies in a saved state.
pub fn history(state: &[u8]) -> Vec<serde_json::Value> {
    let (_, metadata) = safetensors::SafeTensors::read_metadata(state).unwrap();
    let header = &metadata.metadata().as_ref().unwrap()["rfdescent_optimizer_state"];
    let header: serde_json::Value = serde_json::from_str(header).unwrap();
    let tensors = header["tensors"].as_array().unwrap().iter().map(|tensor| tensor["history"].clone());
    [header["history"].clone()].into_iter().chain(tensors).collect()
}

/// Both states hold the same. What one of them lacks is at rest in the other: a device has velocities from
/// the start and fills master weights in the first step with a gradient, applied or not; the CPU makes both
/// when a step is applied.
pub fn assert_same_state(device: &[u8], cpu: &[u8], params: &[Owned]) {
    assert_eq!(history(device), history(cpu));
    let (device, cpu) = (buffers(device), buffers(cpu));
    for name in device.keys().chain(cpu.keys()) {
        match (device.get(name), cpu.get(name)) {
            (Some(device), Some(cpu)) => assert_same(device, cpu, name),
            (Some(one), None) | (None, Some(one)) => match name.strip_prefix("master.t") {
                Some(k) => {
                    let param = params[k.parse::<usize>().unwrap()].to_f64();
                    assert_same(one, &Owned::from_f64(DType::F32, &param), name);
                }
                None => assert!(one.bits().iter().all(|&bits| bits == 0), "{name} is not at rest"),
            },
            (None, None) => {}
        }
    }
}

/// The same bits, but for those of NaN.
pub fn assert_same(device: &Owned, cpu: &Owned, what: &str) {
    for (i, (a, b)) in device.bits().into_iter().zip(cpu.bits()).enumerate() {
        if a != b {
            let (a, b) = (device.to_f64()[i], cpu.to_f64()[i]);
            assert!(a.is_nan() && b.is_nan(), "{what}: element {i} is {a:e}, on the CPU {b:e}");
        }
    }
    assert_eq!(device.bits().len(), cpu.bits().len(), "{what}");
}

pub fn assert_same_params(device: &[Owned], cpu: &[Owned], what: &str) {
    for (k, (device, cpu)) in device.iter().zip(cpu).enumerate() {
        assert_same(device, cpu, &format!("{what}: tensor {k}"));
    }
}

/// An f32 on the device.
pub fn number(buffer: &DeviceBuffer) -> RawNumber {
    RawNumber::Address { address: buffer.address(), dtype: DType::F32 }
}

pub fn assert_same_numbers(found: &[f64], expected: &[f64]) {
    let bits = |numbers: &[f64]| -> Vec<u64> {
        numbers.iter().map(|x| if x.is_nan() { u64::MAX } else { x.to_bits() }).collect()
    };
    assert_eq!(bits(found), bits(expected), "{found:?}, on the CPU {expected:?}");
}

pub fn grad_refs<'a>(grads: &'a [Owned], present: &[bool]) -> Vec<GradRef<'a>> {
    grads.iter().zip(present).map(|(g, &present)| if present { g.grad() } else { GradRef::Missing }).collect()
}

/// Straight to stderr: the test runner shows what passing tests print only when asked.
fn say_skipped(what: std::fmt::Arguments<'_>) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "{what}");
}
