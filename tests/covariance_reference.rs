//! The built-in covariances against values computed in 60 digits.

mod covariance_support;

use covariance_support::{OPAQUE_UNIT, opaque, relative_error, table};
use rfdescent::covariance::{Covariance, RationalQuadratic};

/// Each entry of a profile is a handful of operations; what they are applied to, e^−w for one, amplifies the
/// rounding of its argument by the argument, at most 145 here (the squared exponential's t at u = 12):
/// 145·1.1e-16·2.
const ARGUMENT: f64 = 3.2e-14;

#[test]
fn profiles() {
    let mut worst = [0.0f64; 6];
    for (family, row) in table("covariance_profiles.csv") {
        let covariance = family.covariance().unwrap();
        let u = row[0];
        let profile = covariance.profile(u);
        let values = [
            profile.rho,
            profile.drop,
            profile.kappa,
            profile.ukappa_slope,
            profile.unexplained,
            profile.unexplained_slope,
        ];
        for (k, (value, exact)) in values.into_iter().zip(&row[1..]).enumerate() {
            // (uκ)' has a zero, where it is a difference of terms of the size of κ.
            let scale = if k == 3 { profile.kappa.max(exact.abs()) } else { exact.abs() };
            let error = if value == *exact { 0.0 } else { (value - exact).abs() / scale };
            worst[k] = worst[k].max(error);
            assert!(error <= ARGUMENT, "{family} at u = {u}, value {k}: {value:e} is off by {error:e}");
        }
    }
    println!("largest errors {worst:?}");
}

/// The provided method, from C, C' and C'' alone: absolute errors of a few roundings times what is
/// subtracted.
#[test]
fn generic_profiles() {
    let unit = OPAQUE_UNIT.sqrt();
    for (family, row) in table("covariance_profiles.csv") {
        let profile = opaque(family).profile(row[0] * unit);
        let u = row[0];
        let slope = family.covariance().unwrap().slope();
        let absolute = [
            (profile.rho, row[1], 1.0),
            (profile.drop, row[2], 1.0),
            (profile.kappa, row[3], 1.0),
            (profile.ukappa_slope, row[4], 1.0),
            // Where κ > 1/2 it is an integral of D' ≈ u·(…), elsewhere a difference of numbers up to 1.
            (profile.unexplained, row[5], if profile.kappa > 0.5 { slope * u * u } else { 1.0 }),
            (profile.unexplained_slope * unit, row[6], 1.0f64.min(slope * u)),
        ];
        for (k, (value, exact, scale)) in absolute.into_iter().enumerate() {
            let error = (value - exact).abs();
            assert!(error <= 4e-14 * scale, "{family} at u = {u}, value {k}: {value:e}, off by {error:e}");
        }
    }
}

#[test]
fn unit_steps() {
    let mut worst = 0.0f64;
    for (family, row) in table("covariance_unit_steps.csv") {
        let (a, b, exact) = (row[0], row[1], row[2]);
        let step = family.covariance().unwrap().closed_form_step(a, b).unwrap();
        let error = relative_error(step, exact);
        worst = worst.max(error);
        assert!(error <= 2e-15, "{family}, a = {a:e}, b = {b:e}: {step:e} is off by {error:e}");
    }
    println!("largest error {worst:e}");
}

/// The fixed number of Newton iterations leaves nothing to gain, over all β and all ratios.
#[test]
fn rational_quadratic_iterations() {
    let mut worst = 0.0f64;
    for beta_exponent in -24..=24 {
        let beta = 10f64.powf(f64::from(beta_exponent) / 4.0);
        let covariance = RationalQuadratic::new(beta).unwrap();
        for exponent in -6000..=6000 {
            let ratio = 10f64.powf(f64::from(exponent) / 500.0);
            let (a, b) = if ratio <= 1.0 { (ratio, 1.0) } else { (1.0, 1.0 / ratio) };
            let u = covariance.closed_form_step(a, b).unwrap();
            // One more Newton step on the condition itself.
            let value = ((b / beta * u + a * (1.0 + 1.0 / beta)) * u + b) * u - a;
            let slope = (3.0 * b / beta * u + 2.0 * a * (1.0 + 1.0 / beta)) * u + b;
            worst = worst.max((value / slope / u).abs());
        }
    }
    println!("largest residual {worst:e}");
    assert!(worst < 1e-15);
}
