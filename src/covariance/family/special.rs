//! Elementary functions in forms that do not cancel.

/// e⁻ᶻ·Σ_{k≥n} zᵏ/k! = 1 − e⁻ᶻ·Σ_{k<n} zᵏ/k! for z ≥ 0, to a few units in the last place also where it is
/// tiny.
pub(super) fn exp_tail(n: u32, z: f64) -> f64 {
    let head_or_tail_threshold = f64::from(n) + 2.0;
    if z < head_or_tail_threshold {
        // First term zⁿ/n!, each further one z/(k+1) of the one before; all positive.
        let mut term = (1..=n).fold(1.0, |product, k| product * z / f64::from(k));
        let (mut sum, mut k) = (term, n);
        while term > sum * (0.25 * f64::EPSILON) {
            k += 1;
            term = term * z / f64::from(k);
            sum += term;
        }
        sum * (-z).exp()
    } else {
        // More than half of the mass lies in the tail here, so the difference is harmless.
        let (mut term, mut head) = (1.0, 0.0);
        for k in 0..n {
            head += term;
            term = term * z / f64::from(k + 1);
        }
        1.0 - head * (-z).exp()
    }
}

/// ln(1 + x) − x for x ≥ 0 without cancellation.
pub(super) fn ln_1p_minus(x: f64) -> f64 {
    if x > 0.5 {
        return x.ln_1p() - x;
    }
    // With s = x/(2+x): ln(1+x) = 2·artanh(s) and x = 2s/(1−s), so the difference is −s·x + 2(s³/3 + s⁵/5 +
    // …). s ≤ 1/5, so 12 terms leave less than 25⁻¹² of the first.
    let s = x / (2.0 + x);
    let s2 = s * s;
    let series = (0..12).rev().fold(0.0, |sum, k| sum * s2 + 1.0 / f64::from(2 * k + 3));
    2.0 * s * s2 * series - s * x
}
