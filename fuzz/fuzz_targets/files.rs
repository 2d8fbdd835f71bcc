//! Every kind of file that the library reads, through the C interface; the first byte says which. For as long
//! as one likes:
//!
//!     cargo install cargo-fuzz
//!     cargo +nightly fuzz run files -- -max_len=65536 -rss_limit_mb=1024 -malloc_limit_mb=256
#![no_main]

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::ptr;

use libfuzzer_sys::fuzz_target;
// The C library is none that Rust can link with, so its source is compiled here.
#[path = "../../capi/src/lib.rs"]
mod capi;

use capi::*;

/// An optimizer whose states are attacked; its tensors are those of a small network.
unsafe fn with_optimizer(use_it: impl FnOnce(*mut rfd_optimizer)) {
    let moments = rfd_moments {
        size: size_of::<rfd_moments>(),
        mean: 2.5,
        variance: 0.01,
        noise_variance: 0.9,
        grad_variance: 5.0,
        noise_grad_variance: 300.0,
        dims: 1000,
    };
    let shape = [5_u64, 3];
    let spec = |name: &'static std::ffi::CStr, dtype| rfd_tensor_spec {
        size: size_of::<rfd_tensor_spec>(),
        name: name.as_ptr(),
        shape: shape.as_ptr(),
        rank: 2,
        dtype,
        // SAFETY: numbers and pointers, for which 0 is a value.
        ..unsafe { std::mem::zeroed() }
    };
    let specs = [spec(c"a", RFD_DTYPE_F32), spec(c"b", RFD_DTYPE_BF16), spec(c"c", RFD_DTYPE_F64)];
    let (mut model, mut optimizer) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: all pointers are to live values of the sizes given.
    unsafe {
        assert_eq!(rfd_model_create(c"se".as_ptr(), &moments, &mut model), RFD_OK);
        let mut fitted: rfd_fitted = std::mem::zeroed();
        fitted.size = size_of::<rfd_fitted>();
        fitted.model = model;
        let made = rfd_fitted_optimizer_create(&fitted, ptr::null(), specs.as_ptr(), 3, &mut optimizer);
        assert_eq!(made, RFD_OK);
        use_it(optimizer);
        rfd_optimizer_destroy(optimizer);
        rfd_model_destroy(model);
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((&kind, bytes)) = data.split_first() else { return };
    let (text, size) = (bytes.as_ptr().cast(), bytes.len());
    // SAFETY: all pointers are to live values of the sizes given; handles are used before they are destroyed.
    unsafe {
        match kind % 4 {
            0 => {
                let (mut model, mut step, mut theta) = (ptr::null_mut(), 0.0, 0.0);
                if rfd_model_from_json(text, size, &mut model) == RFD_OK {
                    let status = rfd_model_step(model, 1.0, 3.0, 0.1, RFD_MODE_RFD, 0.0, &mut step, &mut theta);
                    assert!(status == RFD_OK && step >= 0.0 && step.is_finite());
                    rfd_model_destroy(model);
                }
            }
            1 => {
                let mut statistics = ptr::null_mut();
                if rfd_statistics_from_json(text, size, &mut statistics) == RFD_OK {
                    let mut fit: rfd_fit = std::mem::zeroed();
                    fit.size = size_of::<rfd_fit>();
                    assert_ne!(rfd_statistics_fit(statistics, &mut fit), RFD_ERROR_PANIC);
                    assert_eq!(rfd_statistics_merge(statistics, statistics), RFD_OK);
                    rfd_statistics_destroy(statistics);
                }
            }
            2 => {
                let file = tempfile::NamedTempFile::new().unwrap();
                std::fs::write(file.path(), bytes).unwrap();
                let path = CString::new(file.path().as_os_str().as_bytes()).unwrap();
                let mut fit: rfd_fit = std::mem::zeroed();
                fit.size = size_of::<rfd_fit>();
                for flags in [0, RFD_FIT_ROBUST] {
                    let status = rfd_fit_csv(path.as_ptr(), flags, &mut fit, ptr::null_mut());
                    assert_ne!(status, RFD_ERROR_PANIC);
                }
            }
            _ => with_optimizer(|optimizer| {
                let status = rfd_optimizer_set_state(optimizer, text.cast(), size, ptr::null_mut());
                assert!(status == RFD_OK || status == RFD_ERROR_STATE, "{status}");
            }),
        }
    }
});
