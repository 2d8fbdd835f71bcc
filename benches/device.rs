//! One optimizer step on a CUDA device: GPU time by events, host time of the call, and the card's own
//! ceilings in the same run.
//!
//! ```text
//! cargo bench --bench device [-- FILTER]
//! ```
//!
//! Each row: median GPU time of one step in µs, bytes moved (16 a parameter in f32), and the ratio to the
//! floor: the time that those bytes need at the rate of a kernel that reads, then reads, reads and writes and
//! does nothing else. The stream is kept busy while the host queues a step, so its time is the device's
//! alone. "cold": other memory was read before each step, so that the second-level cache holds nothing of it
//! and has nothing to write back. Every timed step is checked: the outcome, the norm against f64 sums, and,
//! of the fitted method without momentum, a sample of parameters. Rows are also printed as JSON, one a line.
//! Prints a skip without a device; RFDESCENT_REQUIRE_GPU=1 makes that a failure.

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
    use rfdescent::optimizer::{
        Adaptive, DeviceOptimizer, Fitted, Method, Options, Outcome, RawInput, RawTensor, TensorSpec,
    };
    use rfdescent::{DType, Moments};

    use super::support::lists;

    const REPEATS: usize = 30;
    /// More than the second-level cache of any card.
    const FLUSH: usize = 256 << 20;
    /// Nanoseconds for which the stream is busy while the host queues a step.
    const BUSY: u64 = 100_000;
    const THREADS: u32 = 512;

    fn check(status: sys::CUresult) {
        assert_eq!(status, sys::CUresult::CUDA_SUCCESS);
    }

    /// A stream and two events in the device's primary context, which stays current, and kernels of its own.
    struct Clock {
        raw: sys::CUstream,
        events: [sys::CUevent; 2],
        flush: DeviceBuffer,
        sink: DeviceBuffer,
        module: sys::CUmodule,
        multiprocessors: u32,
    }

    impl Clock {
        fn new(device: &Device) -> Self {
            let (mut handle, mut context, mut raw) = (0, ptr::null_mut(), ptr::null_mut());
            const PTX: &str = concat!(include_str!("support/ceiling.ptx"), "\0");
            let mut events = [ptr::null_mut(); 2];
            let (mut module, mut multiprocessors) = (ptr::null_mut(), 0);
            // SAFETY: the driver is initialised, as a device is open; the PTX ends with 0; every call writes
            // one handle or number.
            unsafe {
                check(sys::cuDeviceGet(&mut handle, 0));
                check(sys::cuDevicePrimaryCtxRetain(&mut context, handle));
                check(sys::cuCtxSetCurrent(context));
                check(sys::cuStreamCreate(&mut raw, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32));
                for event in &mut events {
                    check(sys::cuEventCreate(event, 0));
                }
                check(sys::cuModuleLoadData(&mut module, PTX.as_ptr().cast()));
                let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
                check(sys::cuDeviceGetAttribute(&mut multiprocessors, attribute, handle));
            }
            let (flush, sink) = (device.allocate(FLUSH).unwrap(), device.allocate(4).unwrap());
            Self { raw, events, flush, sink, module, multiprocessors: multiprocessors as u32 }
        }

        /// Queues one of the kernels of `support/ceiling.cu`, whose parameters are 8 bytes each.
        ///
        /// # Safety
        /// The words are the kernel's parameters, in order, its addresses live and of the size that it is
        /// told.
        unsafe fn launch(&self, name: &std::ffi::CStr, grid: u32, parameters: &mut [u64]) {
            let mut function = ptr::null_mut();
            let mut pointers: Vec<*mut std::ffi::c_void> =
                parameters.iter_mut().map(|word| ptr::from_mut(word).cast()).collect();
            // SAFETY: the module is loaded, the name ends with 0; the caller vouches for the parameters.
            unsafe {
                check(sys::cuModuleGetFunction(&mut function, self.module, name.as_ptr()));
                let (raw, pointers) = (self.raw, pointers.as_mut_ptr());
                check(sys::cuLaunchKernel(
                    function,
                    grid,
                    1,
                    1,
                    THREADS,
                    1,
                    1,
                    0,
                    raw,
                    pointers,
                    ptr::null_mut(),
                ));
            }
        }

        fn stream(&self) -> Stream {
            Stream::from_raw(self.raw as u64)
        }

        /// Median GPU time and host time of the work, in µs.
        fn time(&self, cold: bool, mut work: impl FnMut()) -> (f64, f64) {
            let (mut gpu, mut host) = (Vec::new(), Vec::new());
            for _ in 0..REPEATS + 3 {
                let mut elapsed = 0.0_f32;
                // SAFETY: stream, events and buffer are live; one number is written.
                unsafe {
                    if cold {
                        let mut array = [self.flush.address(), (FLUSH / 16) as u64, self.sink.address()];
                        self.launch(c"sweep", 4 * self.multiprocessors, &mut array);
                    }
                    self.launch(c"spin", 1, &mut [BUSY]);
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
        let bytes = 1_usize << 30;
        let (Ok(p), Ok(g)) = (device.allocate(bytes), device.allocate(bytes)) else { return f64::NAN };
        let (time, _) = clock.time(true, || {
            let mut parameters = [p.address(), g.address(), (bytes / 16) as u64, clock.sink.address()];
            // SAFETY: the kernel's four parameters, in order; the buffers are live and of this size.
            unsafe { clock.launch(c"ceiling", 4 * clock.multiprocessors, &mut parameters) };
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

    /// What decides, and what it remembers of each parameter.
    #[derive(Clone, Copy, PartialEq)]
    enum Rule {
        Published,
        Momentum,
        Adaptive,
    }

    /// A kind of list.
    #[derive(Clone, Copy)]
    struct Kind {
        name: &'static str,
        param: DType,
        grad: DType,
        masters: bool,
        rule: Rule,
        /// Elements that gradients begin behind a multiple of 16 bytes.
        shift: usize,
    }

    impl Kind {
        const fn new(name: &'static str, param: DType, grad: DType) -> Self {
            Self { name, param, grad, masters: false, rule: Rule::Published, shift: 0 }
        }

        /// What moves through memory for a parameter: gradients twice, parameters and master weights read and
        /// written, velocities too, with averages once more.
        fn bytes(&self) -> usize {
            let size = |dtype| if dtype == DType::F32 { 4 } else { 2 };
            // with master weights the half-precision parameter is written only
            let own = if self.masters { size(self.param) + 8 } else { 2 * size(self.param) };
            let state = match self.rule {
                Rule::Published => 0,
                Rule::Momentum => 8,
                Rule::Adaptive => 12,
            };
            2 * size(self.grad) + own + state
        }
    }

    struct Row<'a> {
        name: &'a str,
        lengths: &'a [usize],
        kind: Kind,
    }

    impl Row<'_> {
        fn run(&self, device: &Device, clock: &Clock, ceiling: f64) {
            let &Row { name, lengths, kind: Kind { param, grad, masters, rule, shift, .. } } = self;
            let total: usize = lengths.iter().sum();
            let size = |dtype| if dtype == DType::F32 { 4 } else { 2 };
            let stream = clock.stream();
            let (Ok(mut p), Ok(mut g)) =
                (device.allocate(total * size(param)), device.allocate((total + shift) * size(grad)))
            else {
                println!("{name:<32} skipped: the device has not enough memory");
                return;
            };
            let start = encode(param, values(total, 1));
            let gradient = encode(grad, values(total, 2));
            p.upload(0, &start, stream).unwrap();
            g.upload(shift * size(grad), &gradient, stream).unwrap();
            let specs =
                lengths.iter().enumerate().map(|(k, &len)| TensorSpec::new(format!("t{k}"), &[len], param));
            let options = Options { master_weights: masters, ..Options::default() };
            let method: Method = match rule {
                Rule::Published => model().into(),
                Rule::Momentum => Fitted::new(model()).with_momentum(0.9).into(),
                Rule::Adaptive => Adaptive::default().into(),
            };
            let Ok(mut optimizer) = DeviceOptimizer::new(method, options, specs.collect(), device) else {
                println!("{name:<32} skipped: the device has not enough memory");
                return;
            };
            let mut offset = 0;
            let tensors: Vec<RawTensor> = lengths
                .iter()
                .map(|&len| {
                    let (param, grad_at) = (offset * size(param), (shift + offset) * size(grad));
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
            let bytes = total * self.kind.bytes();
            let floor = bytes as f64 / ceiling * 1e6;
            let kernels = optimizer.kernels();
            println!(
                "{name:<32} {kernels:<21} {total:>11} {bytes:>12} {warm:>9.1} {cold:>9.1} {floor:>9.1} {:>7.3} {:>7.3} \
                 {host:>7.1}",
                warm / floor,
                cold / floor,
            );
            println!(
                "{{\"list\":\"{name}\",\"kernels\":\"{kernels}\",\"parameters\":{total},\"bytes\":{bytes},\
                 \"warm_us\":{warm},\"cold_us\":{cold},\"floor_us\":{floor},\"host_us\":{host}}}"
            );
            if rule != Rule::Published {
                return;
            }
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
            "{:<32} {:<21} {:>11} {:>12} {:>9} {:>9} {:>9} {:>7} {:>7} {:>7}",
            "list", "kernels", "parameters", "bytes", "warm", "cold", "floor", "warm/f", "cold/f", "host"
        );
        let mut all: Vec<(String, Vec<usize>)> =
            (4..=9).map(|e| (format!("flat 1e{e}"), vec![10_usize.pow(e)])).collect();
        all.push(("M7".into(), lists::m7()));
        all.push(("ResNet-50".into(), lists::resnet50()));
        all.push(("GPT-2 124M".into(), lists::gpt2()));
        all.push(("Llama 1.1B".into(), lists::llama()));
        let (f32, bf16) = (DType::F32, DType::BF16);
        let masters = Kind { masters: true, ..Kind::new("bf16, f32 masters", bf16, bf16) };
        let kinds = [
            Kind::new("f32", f32, f32),
            Kind { rule: Rule::Momentum, ..Kind::new("f32, momentum", f32, f32) },
            Kind { rule: Rule::Adaptive, ..Kind::new("f32, adaptive", f32, f32) },
            Kind { shift: 1, ..Kind::new("f32, misaligned gradients", f32, f32) },
            Kind::new("bf16", bf16, bf16),
            masters,
            Kind { name: "bf16, masters, momentum", rule: Rule::Momentum, ..masters },
            Kind { name: "bf16, masters, adaptive", rule: Rule::Adaptive, ..masters },
            Kind::new("f32, bf16 gradients", f32, bf16),
        ];
        for kind in kinds {
            for (list, lengths) in &all {
                let name = format!("{list} {}", kind.name);
                // 10⁹ parameters once: making and checking them takes longer than everything else.
                let repeated = list.ends_with("1e9") && kind.name != "f32";
                if name.contains(&filter) && !repeated {
                    Row { name: &name, lengths, kind }.run(device, &clock, ceiling);
                }
            }
        }
    }
}
