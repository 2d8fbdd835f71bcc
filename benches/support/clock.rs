//! GPU time by events, and what the card's memory gives to a kernel that does nothing else.

use std::ffi::{CStr, c_void};
use std::ptr;
use std::time::Instant;

use cudarc::driver::sys;
use rfdescent::device::{Device, DeviceBuffer, Stream};

const THREADS: u32 = 512;
/// Nanoseconds for which the stream is busy at least while the host queues what is timed.
const BUSY: u64 = 50_000;
/// Runs before those that count.
const WARM_UP: usize = 3;

/// How much is run.
#[derive(Clone, Copy)]
pub struct Amount {
    /// Runs that a median is of.
    pub repeats: usize,
    /// Bytes read to empty the second-level cache: more than that of any card.
    pub flush: usize,
    /// Bytes of each array that ceilings are measured with.
    pub ceiling: usize,
    /// Parameters of the largest list.
    pub largest: usize,
}

impl Amount {
    /// What figures are taken with.
    pub const FULL: Self = Self { repeats: 30, flush: 256 << 20, ceiling: 1 << 30, largest: usize::MAX };
    /// Enough to see that everything runs.
    pub const QUICK: Self = Self { repeats: 2, flush: 1 << 20, ceiling: 1 << 20, largest: 110_000 };

    /// How often [`Clock::time`] runs what it times.
    pub fn runs(&self) -> usize {
        self.repeats + WARM_UP
    }
}

/// A stream and two events in the device's primary context, which stays current, and kernels of its own.
pub struct Clock {
    pub amount: Amount,
    raw: sys::CUstream,
    events: [sys::CUevent; 2],
    flush: DeviceBuffer,
    sink: DeviceBuffer,
    module: sys::CUmodule,
    multiprocessors: u32,
}

fn check(status: sys::CUresult) {
    assert_eq!(status, sys::CUresult::CUDA_SUCCESS);
}

fn median(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

impl Clock {
    pub fn new(device: &Device, amount: Amount) -> Self {
        const PTX: &str = concat!(include_str!("ceiling.ptx"), "\0");
        let (mut handle, mut context, mut raw) = (0, ptr::null_mut(), ptr::null_mut());
        let mut events = [ptr::null_mut(); 2];
        let (mut module, mut multiprocessors) = (ptr::null_mut(), 0);
        // SAFETY: the driver is initialised, as a device is open; the PTX ends with 0; every call writes one
        // handle or number.
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
        let (flush, sink) = (device.allocate(amount.flush).unwrap(), device.allocate(4).unwrap());
        Self { amount, raw, events, flush, sink, module, multiprocessors: multiprocessors as u32 }
    }

    pub fn stream(&self) -> Stream {
        Stream::from_raw(self.raw as u64)
    }

    /// Queues one of the kernels of `ceiling.cu`, whose parameters are 8 bytes each.
    ///
    /// # Safety
    /// The words are the kernel's parameters, in order, its addresses live and of the size that it is told.
    unsafe fn launch(&self, name: &CStr, grid: u32, parameters: &mut [u64]) {
        let mut function = ptr::null_mut();
        let mut pointers: Vec<*mut c_void> =
            parameters.iter_mut().map(|word| ptr::from_mut(word).cast()).collect();
        // SAFETY: the module is loaded, the name ends with 0; the caller vouches for the parameters.
        unsafe {
            check(sys::cuModuleGetFunction(&mut function, self.module, name.as_ptr()));
            let (raw, pointers, none) = (self.raw, pointers.as_mut_ptr(), ptr::null_mut());
            check(sys::cuLaunchKernel(function, grid, 1, 1, THREADS, 1, 1, 0, raw, pointers, none));
        }
    }

    /// Median GPU time and host time of the work, in µs; it is told the number of the run.
    pub fn time(&self, cold: bool, mut work: impl FnMut(usize)) -> (f64, f64) {
        let (mut gpu, mut host) = (Vec::new(), Vec::new());
        // The first run may prepare a lot.
        let mut busy = 20 * BUSY;
        for run in 0..self.amount.runs() {
            let mut elapsed = 0.0_f32;
            // SAFETY: stream, events and buffers are live, and of the sizes that the kernels are told; one
            // number is written.
            unsafe {
                if cold {
                    let count = (self.amount.flush / 16) as u64;
                    let mut array = [self.flush.address(), count, self.sink.address()];
                    self.launch(c"sweep", 4 * self.multiprocessors, &mut array);
                }
                self.launch(c"spin", 1, &mut [busy]);
                check(sys::cuEventRecord(self.events[0], self.raw));
                let start = Instant::now();
                work(run);
                let taken = start.elapsed();
                check(sys::cuEventRecord(self.events[1], self.raw));
                check(sys::cuStreamSynchronize(self.raw));
                check(sys::cuEventElapsedTime(&mut elapsed, self.events[0], self.events[1]));
                busy = BUSY + 2 * u64::try_from(taken.as_nanos()).unwrap_or(0);
                host.push(taken.as_secs_f64() * 1e6);
            }
            gpu.push(f64::from(elapsed) * 1e3);
        }
        (median(&gpu[WARM_UP..]), median(&host[WARM_UP..]))
    }

    /// Bytes a second of a kernel that reads one array, then reads two and writes one, as a step in f32 does.
    pub fn step_ceiling(&self, device: &Device) -> f64 {
        let bytes = self.amount.ceiling;
        let (Ok(p), Ok(g)) = (device.allocate(bytes), device.allocate(bytes)) else { return f64::NAN };
        let (time, _) = self.time(true, |_| {
            let mut parameters = [p.address(), g.address(), (bytes / 16) as u64, self.sink.address()];
            // SAFETY: the kernel's four parameters, in order; the buffers are live and of this size.
            unsafe { self.launch(c"ceiling", 4 * self.multiprocessors, &mut parameters) };
        });
        4.0 * bytes as f64 / (time * 1e-6)
    }

    /// Bytes a second (read and written) of the driver's own copy.
    pub fn copy_ceiling(&self, device: &Device) -> f64 {
        let bytes = self.amount.ceiling;
        let (Ok(from), Ok(to)) = (device.allocate(bytes), device.allocate(bytes)) else { return f64::NAN };
        let (time, _) = self.time(true, |_| {
            // SAFETY: both buffers are live and of this size.
            check(unsafe { sys::cuMemcpyDtoDAsync_v2(to.address(), from.address(), bytes, self.raw) });
        });
        2.0 * bytes as f64 / (time * 1e-6)
    }
}
