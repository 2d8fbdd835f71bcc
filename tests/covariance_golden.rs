//! Step sizes against the golden table, found there by minimising the definition in 50 digits.

mod covariance_support;

use covariance_support::{families, golden, opaque, relative_error};
use rfdescent::Moments;
use rfdescent::covariance::{Model, NoStep, Observation, StepMode, StepRule};

/// Some twenty roundings of 1.1e-16 each lie between the inputs and a closed form's step size.
const CLOSED_FORM: f64 = 1e-13;
/// Conservative steps add exponentials, the normal quantile and a root whose condition number is up to about
/// 1e3.
const CONSERVATIVE: f64 = 1e-9;

fn rule(conservatism: f64) -> StepRule {
    StepRule::new(StepMode::Rfd, conservatism).unwrap()
}

#[test]
fn golden_step_sizes() {
    let Some(rows) = golden() else { return };
    assert_eq!(rows.len(), 200);
    let mut worst = [0.0f64; 3];
    for row in rows {
        let model = Model::new(row.family, row.moments).unwrap();
        let step = model.step(&row.observation, &rule(row.conservatism)).unwrap();
        let (kind, tolerance) = if row.conservatism == 0.0 { (0, CLOSED_FORM) } else { (1, CONSERVATIVE) };
        let error = relative_error(step.step_size, row.step_size);
        assert!(error <= tolerance, "row {}: {} is off by {error:e}", row.number, row.family);
        worst[kind] = worst[kind].max(error);
        let error = relative_error(model.length_scale(), row.length_scale);
        assert!(error <= CLOSED_FORM, "row {}: length scale off by {error:e}", row.number);
        worst[2] = worst[2].max(error);
    }
    println!(
        "largest errors: risk-neutral {:e}, conservative {:e}, length scale {:e}",
        worst[0], worst[1], worst[2]
    );
}

/// The generic minimiser on the same table, knowing C, C' and C'' only.
#[test]
fn golden_step_sizes_by_the_generic_minimiser() {
    let Some(rows) = golden() else { return };
    let mut worst = [0.0f64; 2];
    for row in rows {
        let model = Model::with_covariance(opaque(row.family), row.moments).unwrap();
        let step = model.step(&row.observation, &rule(row.conservatism)).unwrap();
        // The search ends at rounding of F', whose root's condition is below 10 without conservatism. With it
        // the deviation comes from an integral of D' with an absolute error of a few roundings times u²,
        // against D ~ u³ at least: the table's shortest conservative steps, 1e-7 length scales, keep seven
        // digits.
        let (kind, tolerance) = if row.conservatism == 0.0 { (0, CLOSED_FORM) } else { (1, 1e-7) };
        let error = relative_error(step.step_size, row.step_size);
        worst[kind] = worst[kind].max(error);
        assert!(error <= tolerance, "row {}: {} is off by {error:e}", row.number, row.family);
    }
    println!("largest errors: risk-neutral {:e}, conservative {:e}", worst[0], worst[1]);
}

fn moments() -> Moments {
    Moments {
        mean: 2.5,
        variance: 0.04,
        noise_variance: 1.0,
        grad_variance: 400.0,
        noise_grad_variance: 9e4,
        dims: 1_000_000,
    }
}

/// Rows that the table lacks: from loss = μ on, the plateau of the paper's table, and with conservatism the
/// step at μ.
#[test]
fn plateau_at_and_above_the_mean() {
    // s² = 0.04·λ·1e6/400 = 100·λ, so the plateau is 10·√λ·u(∞).
    let sqrt = f64::sqrt;
    let plateau = |family| match family {
        rfdescent::covariance::Family::SquaredExponential => 10.0,
        rfdescent::covariance::Family::Matern32 => 10.0 * sqrt(3.0) / sqrt(3.0),
        rfdescent::covariance::Family::Matern52 => {
            10.0 * sqrt(5.0 / 3.0) * (1.0 + sqrt(5.0)) / (2.0 * sqrt(5.0))
        }
        rfdescent::covariance::Family::RationalQuadratic { beta } => 10.0 * sqrt(beta / (1.0 + beta)),
    };
    for family in families() {
        for model in [Model::new(family, moments()), Model::with_covariance(opaque(family), moments())] {
            let model = model.unwrap();
            assert!(relative_error(model.plateau_step_size(), plateau(family)) < 1e-13, "{model:?}");
            let step = |loss, mode, conservatism| {
                let rule = StepRule::new(mode, conservatism).unwrap();
                model.step(&Observation { loss, grad_norm: 0.3, inv_batch_size: 0.01 }, &rule).unwrap()
            };
            for loss in [2.5, 2.6, 1e300] {
                for mode in [StepMode::Rfd, StepMode::ARfd, StepMode::ClippedARfd] {
                    let step = step(loss, mode, 0.0);
                    assert_eq!(step.step_size, model.plateau_step_size());
                    assert_eq!(step.theta, f64::INFINITY);
                }
                for conservatism in [0.1, 0.9] {
                    let at = step(loss, StepMode::Rfd, conservatism);
                    assert_eq!(at, step(2.5, StepMode::Rfd, conservatism));
                    assert!(at.step_size < model.plateau_step_size());
                    // no jump at the mean: the objective changes by 1e-9 in 0.3·s, its minimiser by as little
                    let below = step(2.5 - 1e-9, StepMode::Rfd, conservatism);
                    assert!(
                        relative_error(below.step_size, at.step_size) < 1e-6,
                        "{family:?} {at:?} {below:?}"
                    );
                }
            }
        }
    }
}

/// Where no step exists the caller learns why.
#[test]
fn no_step() {
    for family in families() {
        for model in [Model::new(family, moments()), Model::with_covariance(opaque(family), moments())] {
            let model = model.unwrap();
            let step = |loss, grad_norm, inv_batch_size, conservatism| {
                let rule = StepRule { mode: StepMode::Rfd, conservatism };
                model.step(&Observation { loss, grad_norm, inv_batch_size }, &rule).unwrap_err()
            };
            for conservatism in [0.0, 0.5] {
                for loss in [1.0, 2.5, 3.0] {
                    assert_eq!(step(loss, 0.0, 0.1, conservatism), NoStep::ZeroGradient);
                    for norm in [f64::NAN, f64::INFINITY, -1.0] {
                        assert_eq!(step(loss, norm, 0.1, conservatism), NoStep::NonFiniteGradient);
                    }
                }
                for loss in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                    assert_eq!(step(loss, 1.0, 0.1, conservatism), NoStep::NonFiniteLoss);
                }
                for inv_batch_size in [f64::NAN, -1.0, 2.0, f64::INFINITY] {
                    assert_eq!(step(1.0, 1.0, inv_batch_size, conservatism), NoStep::InvalidArgument);
                }
            }
            for conservatism in [-0.1, 1.0, f64::NAN] {
                assert_eq!(step(1.0, 1.0, 0.1, conservatism), NoStep::InvalidArgument);
            }
        }
    }
}

/// A-RFD is Θ·C(0)/(−C'(0)) for every covariance; the clipped form ends at the plateau.
#[test]
fn asymptotic_steps() {
    for family in families() {
        let model = Model::new(family, moments()).unwrap();
        for grad_norm in [1e-9, 0.1, 1e3] {
            let observation = Observation { loss: 2.0, grad_norm, inv_batch_size: 0.01 };
            // q = 0.04/0.05, p = 400/1300, C(0)/(−C'(0)) = 100.
            let theta = (400.0 / 1300.0) / (0.04 / 0.05) * grad_norm / 0.5;
            let step = |mode| model.step(&observation, &StepRule::new(mode, 0.0).unwrap()).unwrap();
            let asymptotic = step(StepMode::ARfd);
            assert!(relative_error(asymptotic.theta, theta) < CLOSED_FORM);
            assert!(relative_error(asymptotic.step_size, 100.0 * theta) < CLOSED_FORM);
            let clipped = step(StepMode::ClippedARfd);
            assert_eq!(clipped.step_size, asymptotic.step_size.min(model.plateau_step_size()));
            assert!(step(StepMode::Rfd).step_size <= clipped.step_size * (1.0 + CLOSED_FORM));
            let rate = model.asymptotic_learning_rate(2.0, 0.01).unwrap();
            assert!(relative_error(rate, asymptotic.step_size / grad_norm) < CLOSED_FORM);
        }
        for limit in [2.5, 3.0, f64::NAN, f64::NEG_INFINITY] {
            let message = model.asymptotic_learning_rate(limit, 0.01).unwrap_err().to_string();
            assert!(message.contains("limiting_loss") && message.contains("2.5"), "{message}");
        }
    }
}
