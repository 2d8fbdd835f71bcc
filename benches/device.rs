//! One optimizer step on a CUDA device: GPU time by events, host time of the call, and the card's own
//! ceilings in the same run.
//!
//! ```text
//! cargo bench --bench device [-- FILTER]
//! ```
//!
//! Each row: median GPU time of one step in µs, bytes moved (16 a parameter in f32), and the ratio to the
//! floor: the time that those bytes need at the rate of a kernel that reads, then reads, reads and writes and
//! does nothing else. "cold": the second-level cache was overwritten before each step. Every timed step is
//! checked: the outcome, the norm against f64 sums, and a sample of parameters. Prints a skip without a
//! device; RFDESCENT_REQUIRE_GPU=1 makes that a failure.

#[cfg(feature = "cuda")]
mod support {
    pub mod lists;
}

#[cfg(not(feature = "cuda"))]
fn main() {
    println!("skipped: this build has no CUDA; enable the feature `cuda`");
}

#[cfg(feature = "cuda")]
fn main() {
    match rfdescent::cuda::device(0) {
        Ok(device) => bench::run(&device),
        Err(error) if std::env::var("RFDESCENT_REQUIRE_GPU").is_ok_and(|value| value == "1") => {
            panic!("RFDESCENT_REQUIRE_GPU=1, but: {error}")
        }
        Err(error) => println!("skipped: {error}"),
    }
}

#[cfg(feature = "cuda")]
mod bench {
    use std::ptr;
    use std::time::Instant;

    use cudarc::driver::sys;
    use half::bf16;
    use rfdescent::covariance::{Family, Model};
    use rfdescent::device::{Device, DeviceBuffer, Stream};
    use rfdescent::optimizer::{DeviceOptimizer, Options, Outcome, RawInput, RawTensor, TensorSpec};
    use rfdescent::{DType, Moments};

    use super::support::lists;

    const REPEATS: usize = 30;
    /// More than the second-level cache of any card.
    const FLUSH: usize = 256 << 20;

    fn check(status: sys::CUresult) {
        assert_eq!(status, sys::CUresult::CUDA_SUCCESS);
    }

    /// A stream and two events in the device's primary context, which stays current.
    struct Clock {
        raw: sys::CUstream,
        events: [sys::CUevent; 2],
        flush: DeviceBuffer,
    }

    impl Clock {
        fn new(device: &Device) -> Self {
            let (mut handle, mut context, mut raw) = (0, ptr::null_mut(), ptr::null_mut());
            let mut events = [ptr::null_mut(); 2];
            // SAFETY: the driver is initialised, as a device is open; every call writes one handle.
            unsafe {
                check(sys::cuDeviceGet(&mut handle, 0));
                check(sys::cuDevicePrimaryCtxRetain(&mut context, handle));
                check(sys::cuCtxSetCurrent(context));
                check(sys::cuStreamCreate(&mut raw, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32));
                for event in &mut events {
                    check(sys::cuEventCreate(event, 0));
                }
            }
            Self { raw, events, flush: device.allocate(FLUSH).unwrap() }
        }

        fn stream(&self) -> Stream {
            Stream::from_raw(self.raw as u64)
        }

        /// Median GPU time and host time of the work, in µs.
        fn time(&self, cold: bool, mut work: impl FnMut()) -> (f64, f64) {
            let (mut gpu, mut host) = (Vec::new(), Vec::new());
            for repeat in 0..REPEATS + 3 {
                let mut elapsed = 0.0_f32;
                // SAFETY: stream, events and buffer are live; one number is written.
                unsafe {
                    if cold {
                        check(sys::cuMemsetD8Async(self.flush.address(), repeat as u8, FLUSH, self.raw));
                    }
                    check(sys::cuEventRecord(self.events[0], self.raw));
                    let start = Instant::now();
                    work();
                    host.push(start.elapsed().as_secs_f64() * 1e6);
                    check(sys::cuEventRecord(self.events[1], self.raw));
                    check(sys::cuStreamSynchronize(self.raw));
                    check(sys::cuEventElapsedTime(&mut elapsed, self.events[0], self.events[1]));
                }
                gpu.push(f64::from(elapsed) * 1e3);
            }
            (median(&gpu[3..]), median(&host[3..]))
        }
    }

    fn median(times: &[f64]) -> f64 {
        let mut sorted = times.to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    }

    /// Bytes a second of a kernel that reads one array, then reads two and writes one, as a step in f32 does.
    fn step_ceiling(device: &Device, clock: &Clock) -> f64 {
        const PTX: &str = concat!(include_str!("support/ceiling.ptx"), "\0");
        const THREADS: u32 = 512;
        let bytes = 1_usize << 30;
        let (Ok(p), Ok(g)) = (device.allocate(bytes), device.allocate(bytes)) else { return f64::NAN };
        let sink = device.allocate(4).unwrap();
        let (mut module, mut function, mut blocks) = (ptr::null_mut(), ptr::null_mut(), 0);
        let (mut handle, mut multiprocessors) = (0, 0);
        // SAFETY: the PTX ends with 0; every call writes one handle or number.
        unsafe {
            check(sys::cuModuleLoadData(&mut module, PTX.as_ptr().cast()));
            check(sys::cuModuleGetFunction(&mut function, module, c"ceiling".as_ptr()));
            check(sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, function, THREADS as i32, 0));
            check(sys::cuCtxGetDevice(&mut handle));
            let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
            check(sys::cuDeviceGetAttribute(&mut multiprocessors, attribute, handle));
        }
        let (mut p_address, mut g_address, mut sink_address) = (p.address(), g.address(), sink.address());
        let mut count = (bytes / 16) as u64;
        let (time, _) = clock.time(true, || {
            let mut parameters: [*mut std::ffi::c_void; 4] = [
                (&raw mut p_address).cast(),
                (&raw mut g_address).cast(),
                (&raw mut count).cast(),
                (&raw mut sink_address).cast(),
            ];
            // SAFETY: the kernel's four parameters, in order; the buffers are live and of this size.
            check(unsafe {
                sys::cuLaunchKernel(
                    function,
                    (blocks * multiprocessors) as u32,
                    1,
                    1,
                    THREADS,
                    1,
                    1,
                    0,
                    clock.raw,
                    parameters.as_mut_ptr(),
                    ptr::null_mut(),
                )
            });
        });
        4.0 * bytes as f64 / (time * 1e-6)
    }

    /// Bytes a second (read and written) of the driver's own copy.
    fn copy_ceiling(device: &Device, clock: &Clock) -> f64 {
        let bytes = 1_usize << 30;
        let (Ok(from), Ok(to)) = (device.allocate(bytes), device.allocate(bytes)) else { return f64::NAN };
        let (time, _) = clock.time(true, || {
            // SAFETY: both buffers are live and of this size.
            check(unsafe { sys::cuMemcpyDtoDAsync_v2(to.address(), from.address(), bytes, clock.raw) });
        });
        2.0 * bytes as f64 / (time * 1e-6)
    }

    fn model() -> Model {
        let moments = Moments {
            mean: 2.5,
            variance: 0.01,
            noise_variance: 0.9,
            grad_variance: 500.0,
            noise_grad_variance: 1e5,
            dims: 2_291_972,
        };
        Model::new(Family::SquaredExponential, moments).unwrap()
    }

    fn values(len: usize, seed: u32) -> impl Iterator<Item = f32> + Clone {
        (0..len as u32)
            .map(move |i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8) as f32 / 16_777_216.0 - 0.5)
    }

    fn encode(dtype: DType, values: impl Iterator<Item = f32>) -> Vec<u8> {
        match dtype {
            DType::BF16 => values.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
            _ => values.flat_map(f32::to_le_bytes).collect(),
        }
    }

    fn decode(dtype: DType, bytes: &[u8]) -> f64 {
        match dtype {
            DType::BF16 => bf16::from_le_bytes([bytes[0], bytes[1]]).into(),
            _ => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]).into(),
        }
    }

    /// What moves through memory: gradients twice, parameters and master weights read and written.
    fn bytes_moved(total: usize, param: DType, grad: DType, masters: bool) -> usize {
        let size = |dtype| if dtype == DType::F32 { 4 } else { 2 };
        // with master weights the half-precision parameter is written only
        let own = if masters { size(param) + 8 } else { 2 * size(param) };
        total * (2 * size(grad) + own)
    }

    struct Row<'a> {
        name: &'a str,
        lengths: &'a [usize],
        param: DType,
        grad: DType,
        masters: bool,
    }

    impl Row<'_> {
        fn run(&self, device: &Device, clock: &Clock, ceiling: f64) {
            let &Row { name, lengths, param, grad, masters } = self;
            let total: usize = lengths.iter().sum();
            let size = |dtype| if dtype == DType::F32 { 4 } else { 2 };
            let stream = clock.stream();
            let (Ok(mut p), Ok(mut g)) =
                (device.allocate(total * size(param)), device.allocate(total * size(grad)))
            else {
                println!("{name:<28} skipped: the device has not enough memory");
                return;
            };
            let start = encode(param, values(total, 1));
            let gradient = encode(grad, values(total, 2));
            p.upload(0, &start, stream).unwrap();
            g.upload(0, &gradient, stream).unwrap();
            let specs =
                lengths.iter().enumerate().map(|(k, &len)| TensorSpec::new(format!("t{k}"), &[len], param));
            let options = Options { master_weights: masters, ..Options::default() };
            let Ok(mut optimizer) = DeviceOptimizer::new(model(), options, specs.collect(), device) else {
                println!("{name:<28} skipped: the device has not enough memory");
                return;
            };
            let mut offset = 0;
            let tensors: Vec<RawTensor> = lengths
                .iter()
                .map(|&len| {
                    let (param, grad_at) = (offset * size(param), offset * size(grad));
                    offset += len;
                    RawTensor::new(p.address() + param as u64, g.address() + grad_at as u64, grad)
                })
                .collect();
            let input = RawInput::new(2.0);
            let mut step = || {
                // SAFETY: both buffers are live, and `check` waits before they go.
                unsafe { optimizer.step(&tensors, &input, stream).unwrap() };
            };
            step();
            device.synchronize(stream).unwrap();
            let mut after = vec![0; start.len()];
            p.download(0, &mut after, stream).unwrap();
            let (warm, host) = clock.time(false, &mut step);
            let (cold, _) = clock.time(true, &mut step);

            // The first step against f64: the norm of all, a sample of the parameters.
            let report = optimizer.wait_report(stream).unwrap().unwrap();
            assert_eq!(report.outcome, Outcome::Applied, "{name}");
            assert_eq!(report.applied_steps as usize, 1 + 2 * (REPEATS + 3), "{name}");
            let norm =
                gradient.chunks_exact(size(grad)).map(|b| decode(grad, b)).map(|g| g * g).sum::<f64>().sqrt();
            assert!(
                (report.grad_norm / norm - 1.0).abs() < 1e-9,
                "{name}: norm {}, not {norm}",
                report.grad_norm
            );
            // 2⁻⁸ for bf16, 2⁻²³ for f32: coefficient, product and result round once each
            let slack = if param == DType::BF16 { 2f64.powi(-8) } else { 2f64.powi(-22) };
            for i in (0..total).step_by(1 + total / 1000) {
                let (before, after) =
                    (decode(param, &start[i * size(param)..]), decode(param, &after[i * size(param)..]));
                let expected = before - report.learning_rate * decode(grad, &gradient[i * size(grad)..]);
                assert!(
                    (after - expected).abs() <= slack,
                    "{name}: element {i} is {after}, expected {expected}"
                );
            }
            let bytes = bytes_moved(total, param, grad, masters);
            let floor = bytes as f64 / ceiling * 1e6;
            println!(
                "{name:<28} {total:>11} {bytes:>12} {warm:>9.1} {cold:>9.1} {floor:>9.1} {:>7.3} {:>7.3} {host:>7.1}",
                warm / floor,
                cold / floor,
            );
        }
    }

    pub fn run(device: &Device) {
        let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
        let clock = Clock::new(device);
        println!("{}", device.name());
        let ceiling = step_ceiling(device, &clock);
        println!("ceiling of read, then read, read, write over 1 GiB: {:.0} GB/s", ceiling / 1e9);
        println!("ceiling of the driver's copy of 1 GiB: {:.0} GB/s", copy_ceiling(device, &clock) / 1e9);
        println!("times in µs, medians of {REPEATS}; floor: the bytes at the first ceiling");
        println!(
            "{:<28} {:>11} {:>12} {:>9} {:>9} {:>9} {:>7} {:>7} {:>7}",
            "list", "parameters", "bytes", "warm", "cold", "floor", "warm/f", "cold/f", "host"
        );
        let mut all: Vec<(String, Vec<usize>)> =
            (4..=9).map(|e| (format!("flat 1e{e}"), vec![10_usize.pow(e)])).collect();
        all.push(("M7".into(), lists::m7()));
        all.push(("ResNet-50".into(), lists::resnet50()));
        all.push(("GPT-2 124M".into(), lists::gpt2()));
        all.push(("Llama 1.1B".into(), lists::llama()));
        let kinds = [
            ("f32", DType::F32, DType::F32, false),
            ("bf16", DType::BF16, DType::BF16, false),
            ("bf16, f32 masters", DType::BF16, DType::BF16, true),
            ("f32, bf16 gradients", DType::F32, DType::BF16, false),
        ];
        for (kind, param, grad, masters) in kinds {
            for (list, lengths) in &all {
                let name = format!("{list} {kind}");
                // 10⁹ parameters once: making and checking them takes longer than everything else.
                let repeated = list.ends_with("1e9") && kind != "f32";
                if name.contains(&filter) && !repeated {
                    Row { name: &name, lengths, param, grad, masters }.run(device, &clock, ceiling);
                }
            }
        }
    }
}
