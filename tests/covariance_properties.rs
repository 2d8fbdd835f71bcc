//! What every step size has to satisfy, on random models and observations and on extreme ones.

mod covariance_support;

use std::sync::Arc;

use covariance_support::{families, opaque, relative_error};
use proptest::prelude::*;
use rfdescent::Moments;
use rfdescent::covariance::{
    Covariance, Family, Model, Observation, SquaredExponential, StepMode, StepRule, sigma_norm,
};

fn rule(conservatism: f64) -> StepRule {
    StepRule::new(StepMode::Rfd, conservatism).unwrap()
}

fn step_size(model: &Model, observation: &Observation, conservatism: f64) -> f64 {
    model.step(observation, &rule(conservatism)).unwrap().step_size
}

fn family() -> impl Strategy<Value = Family> {
    prop_oneof![
        Just(Family::SquaredExponential),
        Just(Family::Matern32),
        Just(Family::Matern52),
        (-6.0..6.0f64).prop_map(|exponent| Family::RationalQuadratic { beta: 10f64.powf(exponent) }),
    ]
}

fn power(range: std::ops::Range<f64>) -> impl Strategy<Value = f64> {
    range.prop_map(|exponent| 10f64.powf(exponent))
}

/// Zero once in a while, else of any magnitude.
fn noise() -> impl Strategy<Value = f64> {
    prop_oneof![1 => Just(0.0), 4 => power(-12.0..8.0)]
}

prop_compose! {
    fn moments()(
        mean in -10.0..10.0f64,
        variance in power(-6.0..6.0),
        loss_noise in noise(),
        grad_variance in power(-6.0..8.0),
        grad_noise in noise(),
        dims in 1u64..1_000_000_000,
    ) -> Moments {
        Moments {
            mean,
            variance,
            noise_variance: variance * loss_noise,
            grad_variance,
            noise_grad_variance: grad_variance * grad_noise,
            dims,
        }
    }
}

prop_compose! {
    /// A loss up to 1e4 standard deviations below the mean, a gradient between 1e-6 and 1e3 times its usual
    /// length.
    fn situation()(
        family in family(),
        moments in moments(),
        below in power(-6.0..4.0),
        length in power(-6.0..3.0),
        inv_batch_size in prop_oneof![Just(0.0), Just(1.0), power(-6.0..0.0)],
    ) -> (Family, Moments, Observation) {
        let loss = moments.mean - below * moments.variance.sqrt();
        (family, moments, Observation { loss, grad_norm: length * moments.grad_variance.sqrt(), inv_batch_size })
    }
}

/// The objective of the definition, in units of the standard deviation of the cost.
fn bound(model: &Model, observation: &Observation, quantile: f64, step_size: f64) -> f64 {
    let mean = model.conditional_mean(observation, step_size).unwrap().value - model.moments().mean;
    let variance = model.conditional_variance(observation.inv_batch_size, step_size).unwrap().value;
    mean / model.moments().variance.sqrt() + quantile * (variance / model.moments().variance).sqrt()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(1000) })]

    #[test]
    fn risk_neutral_steps_lie_below_the_plateau_and_grow_with_the_gradient((family, moments, observation) in situation()) {
        let model = Model::new(family, moments).unwrap();
        let step = step_size(&model, &observation, 0.0);
        prop_assert!(step > 0.0 && step <= model.plateau_step_size());
        let longer = Observation { grad_norm: observation.grad_norm * 1.001, ..observation };
        // Each result is within 1e-15 of an increasing function.
        prop_assert!(step_size(&model, &longer, 0.0) >= step * (1.0 - 2e-15));
        let lower = Observation { loss: observation.loss - 0.001 * moments.variance.sqrt(), ..observation };
        prop_assert!(step_size(&model, &lower, 0.0) <= step * (1.0 + 2e-15));
    }

    /// Advantage "Scale invariance", with powers of two so that nothing but the model's own arithmetic can
    /// differ.
    #[test]
    fn scaling_the_cost_changes_nothing((family, moments, observation) in situation(), exponent in -40i32..40) {
        let scale = 2f64.powi(exponent);
        let square = scale * scale;
        let scaled = Moments {
            mean: moments.mean * scale,
            variance: moments.variance * square,
            noise_variance: moments.noise_variance * square,
            grad_variance: moments.grad_variance * square,
            noise_grad_variance: moments.noise_grad_variance * square,
            ..moments
        };
        let seen = Observation {
            loss: observation.loss * scale,
            grad_norm: observation.grad_norm * scale,
            ..observation
        };
        let (model, scaled) = (Model::new(family, moments).unwrap(), Model::new(family, scaled).unwrap());
        prop_assert_eq!(step_size(&model, &observation, 0.0), step_size(&scaled, &seen, 0.0));
        let (one, other) = (step_size(&model, &observation, 0.5), step_size(&scaled, &seen, 0.5));
        prop_assert!(relative_error(one, other) < 1e-9, "{} {}", one, other);
    }

    /// Only μ − loss enters; its rounding, 2⁻⁵³ of the numbers it is the difference of, is all that may be
    /// seen.
    #[test]
    fn shifting_the_cost_changes_nothing((family, moments, observation) in situation(), shift in -100.0..100.0f64) {
        let shifted = Moments { mean: moments.mean + shift, ..moments };
        let seen = Observation { loss: observation.loss + shift, ..observation };
        let one = step_size(&Model::new(family, moments).unwrap(), &observation, 0.0);
        let other = step_size(&Model::new(family, shifted).unwrap(), &seen, 0.0);
        let gap = moments.mean - observation.loss;
        let rounding = 4.0 * f64::EPSILON * (moments.mean.abs() + observation.loss.abs() + shift.abs()) / gap;
        prop_assert!(relative_error(other, one) < 1e-14 + rounding, "{} {}", one, other);
    }

    /// Parameters in another unit: lengths scale, gradients inversely.
    #[test]
    fn scaling_the_parameters_scales_the_step((family, moments, observation) in situation(), exponent in -40i32..40) {
        let scale = 2f64.powi(exponent);
        let scaled = Moments {
            grad_variance: moments.grad_variance / (scale * scale),
            noise_grad_variance: moments.noise_grad_variance / (scale * scale),
            ..moments
        };
        let seen = Observation { grad_norm: observation.grad_norm / scale, ..observation };
        let one = step_size(&Model::new(family, moments).unwrap(), &observation, 0.0);
        let other = step_size(&Model::new(family, scaled).unwrap(), &seen, 0.0);
        prop_assert!(relative_error(other, one * scale) < 2e-15, "{} {}", one * scale, other);
    }

    #[test]
    fn the_generic_minimiser_agrees_with_the_closed_forms((family, moments, observation) in situation()) {
        let closed = step_size(&Model::new(family, moments).unwrap(), &observation, 0.0);
        let generic = step_size(&Model::with_covariance(opaque(family), moments).unwrap(), &observation, 0.0);
        // The unit of length differs by the factor 3, as does the rounding of C'(h); the root's condition is
        // below 10.
        prop_assert!(relative_error(generic, closed) < 2e-14, "{} {}", generic, closed);
    }

    /// Nothing on a fine grid over 12 decades below twice the plateau is better than a conservative step.
    #[test]
    fn conservative_steps_are_global_minima(
        (family, moments, observation) in situation(),
        conservatism in prop_oneof![0.001..0.999f64, Just(0.01), Just(1.0 - 1e-9)],
    ) {
        let model = Model::new(family, moments).unwrap();
        let step = step_size(&model, &observation, conservatism);
        let plateau = model.plateau_step_size();
        prop_assert!(step >= 0.0 && step <= plateau);
        let quantile = std::f64::consts::SQRT_2 * statrs::function::erf::erf_inv(conservatism);
        let least = bound(&model, &observation, quantile, step);
        // The bound is a sum of terms of the sizes added up here, each to a few roundings; the mean itself is
        // added and taken away again.
        let size = bound(&model, &observation, 0.0, 0.0).abs()
            + quantile
            + observation.grad_norm * plateau / moments.variance.sqrt()
            + moments.mean.abs() / moments.variance.sqrt();
        let tolerance = 64.0 * f64::EPSILON * size;
        for i in 0..=4000 {
            let other = 2.0 * plateau * (-f64::from(i) * 12.0 * std::f64::consts::LN_10 / 4000.0).exp();
            prop_assert!(
                least <= bound(&model, &observation, quantile, other) + tolerance,
                "step {} has {}, {} has {}", step, least, other, bound(&model, &observation, quantile, other)
            );
        }
    }

    /// Mean and variance from C and C' as the definition has them, and their derivatives from central
    /// differences.
    #[test]
    fn conditional_moments((family, moments, observation) in situation(), u in power(-2.0..0.7)) {
        let model = Model::new(family, moments).unwrap();
        let covariance = model.covariance();
        let step_size = u * model.length_scale();
        let (q, p) = (
            moments.variance / (moments.variance + moments.noise_variance * observation.inv_batch_size),
            moments.grad_variance / (moments.grad_variance + moments.noise_grad_variance * observation.inv_batch_size),
        );
        let (rho, kappa) = (covariance.c(u * u / 2.0), covariance.dc(u * u / 2.0) / covariance.dc(0.0));
        let mean = model.conditional_mean(&observation, step_size).unwrap();
        let (cost, gradient) = (q * (observation.loss - moments.mean), p * observation.grad_norm);
        let expected = moments.mean + cost * rho - gradient * step_size * kappa;
        let size = moments.mean.abs() + cost.abs() + gradient * step_size;
        prop_assert!((mean.value - expected).abs() < 1e-14 * size);
        let variance = model.conditional_variance(observation.inv_batch_size, step_size).unwrap();
        let expected = 1.0 - q * rho * rho - p * covariance.slope() * (u * kappa).powi(2);
        prop_assert!((variance.value / moments.variance - expected).abs() < 1e-13);
        prop_assert!(variance.value >= 0.0 && variance.value <= moments.variance * (1.0 + 1e-15));

        // A central difference with relative step d errs by d²/6 of the third derivative, and by rounding/d.
        // In units of u the functions' third derivatives are below 1e3 but for the rational quadratic's with
        // small β, whose own unit is √β; there is nothing else to see below u = 0.1·√β.
        let d = 1e-5;
        let at = |factor: f64| step_size * factor;
        let difference = |f: &dyn Fn(f64) -> f64| (f(at(1.0 + d)) - f(at(1.0 - d))) / (at(1.0 + d) - at(1.0 - d));
        let numeric = difference(&|x| model.conditional_mean(&observation, x).unwrap().value);
        let tolerance = (1e-7 * (cost.abs() + gradient * step_size) + 1e-10 * size) / step_size;
        prop_assert!((mean.slope - numeric).abs() <= tolerance, "mean {} {}", mean.slope, numeric);
        let numeric =
            difference(&|x| model.conditional_variance(observation.inv_batch_size, x).unwrap().value);
        let tolerance = 1e-7 * moments.variance / step_size;
        prop_assert!((variance.slope - numeric).abs() <= tolerance, "variance {} {}", variance.slope, numeric);
    }
}

/// Values at the ends of the range of f64: finite, at most the plateau, growing with the gradient's norm.
#[test]
fn extreme_observations() {
    for family in families() {
        for (variance, grad_variance) in [(1.0, 1.0), (1e-100, 1e100), (1e100, 1e-100), (1e300, 1e300)] {
            for noise in [0.0, 1e-6] {
                let moments = Moments {
                    mean: 1.0,
                    variance,
                    noise_variance: noise * variance,
                    grad_variance,
                    noise_grad_variance: 2.0 * noise * grad_variance,
                    dims: 1 << 40,
                };
                // The generic search over 300 decades costs milliseconds, so it gets a part of the cases.
                let generic = (variance == 1.0).then(|| Model::with_covariance(opaque(family), moments));
                for model in std::iter::once(Model::new(family, moments)).chain(generic) {
                    let model = model.unwrap();
                    for loss in [-f64::MAX, -1e300, 0.0, 1.0 - 1e-15, 1.0, f64::MAX] {
                        let conservative =
                            if model.family().is_some() { 1.0 - f64::EPSILON / 2.0 } else { 0.0 };
                        for conservatism in [0.0, conservative] {
                            let mut previous = 0.0;
                            for grad_norm in [5e-324, 1e-300, 1e-20, 1.0, 1e150, f64::MAX] {
                                let observation = Observation { loss, grad_norm, inv_batch_size: 1.0 };
                                let step = model.step(&observation, &rule(conservatism)).unwrap();
                                let description = format!("{family} {moments:?} {observation:?} {step:?}");
                                assert!(!step.theta.is_nan() && step.theta >= 0.0, "{description}");
                                assert!(
                                    step.step_size >= 0.0 && step.step_size <= model.plateau_step_size(),
                                    "{description}"
                                );
                                if conservatism == 0.0 {
                                    assert!(
                                        step.step_size >= previous * (1.0 - 1e-14),
                                        "{description} {previous}"
                                    );
                                }
                                previous = step.step_size;
                                for mode in [StepMode::ARfd, StepMode::ClippedARfd] {
                                    let rule = StepRule::new(mode, 0.0).unwrap();
                                    assert!(model.step(&observation, &rule).unwrap().step_size.is_finite());
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// An exact loss and a noisy gradient: the deviation starts with a kink, and a weak gradient is not worth a
/// step.
#[test]
fn a_conservative_step_may_be_zero() {
    for family in families() {
        let moments = Moments {
            mean: 1.0,
            variance: 1.0,
            noise_variance: 0.0,
            grad_variance: 1.0,
            noise_grad_variance: 1.0,
            dims: 1,
        };
        // Near 0 the bound changes by (z·√((1 − p)·C(0)·λ)/s − p·‖g‖)·η with z = Φ⁻¹(0.75) = 0.674, p = 1/2,
        // s² = λ: by (0.674·√(1/2) − ‖g‖/2)·η, positive for ‖g‖ < 0.954.
        let model = Model::new(family, moments).unwrap();
        let step =
            |grad_norm| step_size(&model, &Observation { loss: 0.0, grad_norm, inv_batch_size: 1.0 }, 0.5);
        assert_eq!(step(0.95), 0.0, "{family}");
        assert!(step(0.96) > 0.0, "{family}");
    }
}

/// What a user's covariance can get wrong is named.
#[test]
fn user_covariances_are_checked() {
    #[derive(Debug)]
    struct Line([f64; 2]);
    impl Covariance for Line {
        fn name(&self) -> String {
            "line".into()
        }
        fn c(&self, h: f64) -> f64 {
            if h == 0.0 { self.0[0] } else { self.0[0] + self.0[1] * h }
        }
        fn dc(&self, _: f64) -> f64 {
            self.0[1]
        }
        fn ddc(&self, _: f64) -> f64 {
            0.0
        }
    }
    let moments = Moments {
        mean: 1.0,
        variance: 1.0,
        noise_variance: 0.0,
        grad_variance: 1.0,
        noise_grad_variance: 1.0,
        dims: 1,
    };
    for (coefficients, named) in [
        ([0.0, -1.0], "C(0) of covariance `line`"),
        ([f64::NAN, -1.0], "C(0) of covariance `line`"),
        ([1.0, 0.0], "C'(0) of covariance `line`"),
        ([1.0, f64::NEG_INFINITY], "C'(0) of covariance `line`"),
        ([1.0, -1.0], "no step at loss = mean"),
    ] {
        let error = Model::with_covariance(Arc::new(Line(coefficients)), moments).unwrap_err();
        assert!(error.to_string().contains(named), "{error}");
    }
}

/// A squared exponential whose user got the closed form wrong where a lies in a range.
#[derive(Debug)]
struct Wrong {
    step: f64,
    at: std::ops::Range<f64>,
}

impl Covariance for Wrong {
    fn name(&self) -> String {
        "wrong".into()
    }
    fn c(&self, h: f64) -> f64 {
        SquaredExponential.c(h)
    }
    fn dc(&self, h: f64) -> f64 {
        SquaredExponential.dc(h)
    }
    fn ddc(&self, h: f64) -> f64 {
        SquaredExponential.ddc(h)
    }
    fn closed_form_step(&self, a: f64, b: f64) -> Option<f64> {
        if self.at.contains(&a) { Some(self.step) } else { SquaredExponential.closed_form_step(a, b) }
    }
}

#[test]
fn closed_forms_of_users_are_checked_and_never_trusted() {
    let moments = Moments {
        mean: 1.0,
        variance: 1.0,
        noise_variance: 0.0,
        grad_variance: 1.0,
        noise_grad_variance: 0.0,
        dims: 1,
    };
    let exact = Model::new(Family::SquaredExponential, moments).unwrap();
    let observation = Observation { loss: 0.0, grad_norm: 3e-13, inv_batch_size: 0.0 };
    for step in [f64::NAN, -1.0, f64::INFINITY, f64::NEG_INFINITY] {
        // From the plateau on, only for weak gradients, only where there is none.
        for end in [2.0, 0.01, 1e-300] {
            let covariance = Wrong { step, at: 0.0..end };
            let error = Model::with_covariance(Arc::new(covariance), moments).unwrap_err().to_string();
            assert!(error.contains("closed_form_step(") && error.contains("`wrong`"), "{error}");
        }
        // Right at all points tried, wrong at the step: searched instead.
        let model = Model::with_covariance(Arc::new(Wrong { step, at: 1e-13..1e-12 }), moments).unwrap();
        let (got, want) = (step_size(&model, &observation, 0.0), step_size(&exact, &observation, 0.0));
        assert!(relative_error(got, want) < 2e-14, "{step}: {got} {want}");
    }
    assert!(Model::with_covariance(Arc::new(Wrong { step: 0.0, at: 0.0..2.0 }), moments).is_err());
}

/// Noise so large that the signal's share vanishes is named when the model is made; up to there all is
/// finite.
#[test]
fn signals_lost_in_the_noise_are_refused() {
    let with = |variance: f64, noise_variance: f64, grad_variance: f64, noise_grad_variance: f64| Moments {
        mean: 1.0,
        variance,
        noise_variance,
        grad_variance,
        noise_grad_variance,
        dims: 1000,
    };
    for (moments, named) in [
        (with(0.01, 1e307, 1.0, 1.0), "noise_variance = "),
        (with(1.0, 1.0, 1e-150, 1e308), "noise_grad_variance = "),
        (with(1.0, 1.1e100, 1.0, 1.0), "noise_variance = "),
    ] {
        let error = Model::new(Family::Matern32, moments).unwrap_err().to_string();
        assert!(error.starts_with(named) && error.contains("1e100 times"), "{error}");
    }
    for family in families() {
        let model = Model::new(family, with(0.01, 0.9e98, 500.0, 4e102)).unwrap();
        for inv_batch_size in [0.0, 1e-300, 1e-50, 1.0] {
            for step in [0.0, 1e-3, 1.0, 1e3, 1e150].map(|u| u * model.length_scale()) {
                let variance = model.conditional_variance(inv_batch_size, step).unwrap();
                assert!((0.0..=0.01 * (1.0 + 1e-15)).contains(&variance.value), "{family} {variance:?}");
                assert!(variance.slope.is_finite());
            }
            let observation = Observation { loss: 0.5, grad_norm: 20.0, inv_batch_size };
            let step = step_size(&model, &observation, 0.5);
            assert!((0.0..=model.plateau_step_size()).contains(&step), "{family} {step}");
        }
        // Without noise at b = ∞ the noise's variance is nothing to the step.
        let quiet = Model::new(family, with(0.01, 0.0, 500.0, 0.0)).unwrap();
        let observation = Observation { loss: 0.5, grad_norm: 20.0, inv_batch_size: 0.0 };
        assert_eq!(step_size(&model, &observation, 0.5), step_size(&quiet, &observation, 0.5), "{family}");
    }
}

/// Θ where its numerator and denominator both underflow: the smallest numbers there are, and shares of 1/3.
#[test]
fn theta_of_the_smallest_numbers() {
    let moments = Moments {
        mean: 0.0,
        variance: 1.0,
        noise_variance: 2.0,
        grad_variance: 1.0,
        noise_grad_variance: 2.0,
        dims: 1,
    };
    for family in families() {
        let model = Model::new(family, moments).unwrap();
        // Where only one of the two products underflows Θ is 0 or ∞, both as close as its digits allow.
        for (grad_norm, loss, theta) in
            [(5e-324, -5e-324, 1.0), (5e-324, -1e-323, 0.0), (1e-323, -5e-324, f64::INFINITY)]
        {
            let observation = Observation { loss, grad_norm, inv_batch_size: 1.0 };
            let step = model.step(&observation, &rule(0.0)).unwrap();
            assert_eq!(step.theta, theta, "{family}");
            assert!(step.step_size > 0.0 && step.step_size <= model.plateau_step_size());
        }
        let faint = Moments { noise_variance: 0.9e100, noise_grad_variance: 0.9e100, ..moments };
        let model = Model::new(family, faint).unwrap();
        let observation = Observation { loss: -1e-230, grad_norm: 1e-230, inv_batch_size: 1.0 };
        assert_eq!(model.step(&observation, &rule(0.0)).unwrap().theta, 1.0, "{family}");
    }
}

/// Either a finite number or an error, never NaN, at numbers from end to end of the range.
#[test]
fn conditional_moments_beyond_the_range_of_f64_are_errors() {
    for family in families() {
        let moments = Moments {
            mean: 1e308,
            variance: 1e300,
            noise_variance: 1e300,
            grad_variance: 1.0,
            noise_grad_variance: 0.0,
            dims: 1,
        };
        let model = Model::new(family, moments).unwrap();
        let (mut finite, mut refused) = (0, 0);
        for loss in [-f64::MAX, 0.0, 1e308] {
            for grad_norm in [0.0, 1.0, f64::MAX] {
                for step_size in [0.0, 1.0, 1e150, 1e300] {
                    let observation = Observation { loss, grad_norm, inv_batch_size: 1.0 };
                    match model.conditional_mean(&observation, step_size) {
                        Ok(mean) => {
                            assert!(mean.value.is_finite() && mean.slope.is_finite());
                            finite += 1;
                        }
                        Err(error) => {
                            assert!(error.to_string().contains("range of f64"), "{error}");
                            refused += 1;
                        }
                    }
                }
            }
        }
        assert!(finite > 10 && refused > 0, "{family}: {finite} {refused}");
    }
}

#[test]
fn norm_with_length_scale_factors() {
    assert_eq!(sigma_norm(&[]), 0.0);
    assert_eq!(sigma_norm(&[(1.0, 9.0), (2.0, 4.0)]), 5.0);
}

/// Two squared exponentials whose gradients are equally strong at scales a factor 100 apart: the expected
/// cost has two minima, and which one is lower depends on the observation.
#[derive(Debug)]
struct TwoScales {
    weight: f64,
}

impl Covariance for TwoScales {
    fn name(&self) -> String {
        "two scales".into()
    }
    fn c(&self, h: f64) -> f64 {
        self.weight * (-h).exp() + (-h * 1e-4).exp()
    }
    fn dc(&self, h: f64) -> f64 {
        -self.weight * (-h).exp() - 1e-4 * (-h * 1e-4).exp()
    }
    fn ddc(&self, h: f64) -> f64 {
        self.weight * (-h).exp() + 1e-8 * (-h * 1e-4).exp()
    }
}

#[test]
fn the_generic_minimiser_is_global() {
    let moments = Moments {
        mean: 1.0,
        variance: 1.0,
        noise_variance: 1.0,
        grad_variance: 1.0,
        noise_grad_variance: 2.0,
        dims: 1,
    };
    let (mut short, mut long) = (0, 0);
    for weight in [0.008, 0.0095, 0.0099, 0.0101, 0.0105, 0.012] {
        let model = Model::with_covariance(Arc::new(TwoScales { weight }), moments).unwrap();
        for grad_norm in [0.01, 0.3, 1.0, 3.0, 10.0, 1e3] {
            for loss in [-3.0, 0.0, 0.9, 0.9999] {
                for conservatism in [0.0, 0.1, 0.5] {
                    let observation = Observation { loss, grad_norm, inv_batch_size: 0.01 };
                    let quantile = std::f64::consts::SQRT_2 * statrs::function::erf::erf_inv(conservatism);
                    let step = step_size(&model, &observation, conservatism);
                    let least = bound(&model, &observation, quantile, step);
                    for i in 0..=4000 {
                        let other = 4.0 * model.plateau_step_size() * 10f64.powf(-f64::from(i) / 500.0);
                        // Ten roundings of the largest term.
                        let tolerance = 2e-15 * (3.0 + grad_norm * model.plateau_step_size());
                        let value = bound(&model, &observation, quantile, other);
                        assert!(
                            least <= value + tolerance,
                            "weight {weight} {observation:?}: {step} {other}"
                        );
                    }
                    if step < 5.0 * model.length_scale() { short += 1 } else { long += 1 }
                }
            }
        }
    }
    assert!(short > 50 && long > 20, "{short} short and {long} long steps: the test should see both");
}
