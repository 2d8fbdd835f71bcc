//! A function that another library might have, with a crate that both use.

/// The sum of `count` numbers.
///
/// # Safety
/// `values` points to them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn beside_sum(values: *const f64, count: usize) -> f64 {
    // SAFETY: the caller vouches for them.
    let values = unsafe { std::slice::from_raw_parts(values, count) };
    values.iter().map(|&value| half::f16::from_f64(value).to_f64()).sum()
}
