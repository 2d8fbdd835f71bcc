//! What `relative_std` promises, against what repeated sampling does: how often the true C(0) is within two
//! stated standard deviations of the fitted one.
//!
//! `cargo test --release -p rfdescent --test estimation_coverage -- --ignored --nocapture` prints the table
//! of the documentation, from 1000 sets of each kind.

mod estimation_support;

use std::ops::ControlFlow;

use estimation_support::Random;
use rfdescent::estimation::*;

#[derive(Clone, Copy)]
enum Tails {
    Normal,
    /// Excess kurtosis 3.
    Laplace,
    /// Student's t with 5 degrees of freedom: excess kurtosis 6.
    Student,
    /// One loss in a hundred is 1e4.
    Blown,
}

impl Tails {
    /// A standardised loss.
    fn draw(self, random: &mut Random) -> f64 {
        match self {
            Tails::Normal => random.normal(),
            Tails::Laplace => {
                (random.uniform() - 0.5).signum() * -random.uniform().ln() / std::f64::consts::SQRT_2
            }
            Tails::Student => {
                let chi2: f64 = (0..5).map(|_| random.normal().powi(2)).sum();
                random.normal() * (3.0 / chi2).sqrt()
            }
            Tails::Blown if random.uniform() < 0.01 => 1e4,
            Tails::Blown => random.normal(),
        }
    }
}

struct Kind {
    name: &'static str,
    tails: Tails,
    /// 0 for auto-fit, which chooses batches until `relative_std` is below 0.3.
    batches: usize,
    sizes: &'static [u64],
    robust: bool,
}

const SEVEN: &[u64] = &[20, 50, 100, 200, 400, 800, 1600];

#[rustfmt::skip]
const KINDS: [Kind; 9] = [
    Kind { name: "Gaussian, 420 batches of 7 sizes", tails: Tails::Normal, batches: 420, sizes: SEVEN, robust: false },
    Kind { name: "Gaussian, 70 batches of 7 sizes", tails: Tails::Normal, batches: 70, sizes: SEVEN, robust: false },
    Kind { name: "Gaussian, 420 batches of 2 sizes", tails: Tails::Normal, batches: 420, sizes: &[20, 400], robust: false },
    Kind { name: "Gaussian, 70 batches of 2 sizes", tails: Tails::Normal, batches: 70, sizes: &[20, 400], robust: false },
    Kind { name: "Gaussian, auto-fit to 0.3", tails: Tails::Normal, batches: 0, sizes: &[], robust: false },
    Kind { name: "Laplace (kurtosis 3), 420 batches", tails: Tails::Laplace, batches: 420, sizes: SEVEN, robust: false },
    Kind { name: "Student t5 (kurtosis 6), 420 batches", tails: Tails::Student, batches: 420, sizes: SEVEN, robust: false },
    Kind { name: "Laplace, auto-fit to 0.3", tails: Tails::Laplace, batches: 0, sizes: &[], robust: false },
    Kind { name: "1 % at 1e4, 420 batches, robust", tails: Tails::Blown, batches: 420, sizes: SEVEN, robust: true },
];

const VARIANCE: f64 = 0.01;

fn sample(tails: Tails, batch_size: u64, random: &mut Random) -> Sample {
    let inverse = 1.0 / batch_size as f64;
    let loss = 2.7 + tails.draw(random) * (VARIANCE + 0.85 * inverse).sqrt();
    Sample { loss, sq_grad_norm: (500.0 + 9e4 * inverse) * (1.0 + 0.03 * random.normal()), batch_size }
}

/// The fit and its relative standard deviation with heavy tails allowed for.
fn fitted(kind: &Kind, seed: u64) -> Option<(Fit, f64)> {
    let Kind { tails, batches, sizes, robust, .. } = *kind;
    let (fit, statistics) = if batches == 0 {
        let draw = move |batch_size: u64, seed: u64| {
            let Sample { loss, sq_grad_norm, .. } = sample(tails, batch_size, &mut Random::new(seed));
            Ok(BatchSample { loss, sq_grad_norm })
        };
        let options = AutoFit { seed, max_batch_size: Some(4096), max_budget: 300_000, ..AutoFit::default() };
        let fitted = options.run(&mut (1000, draw), &mut |_| ControlFlow::Continue(())).ok()?;
        (fitted.fit, fitted.statistics)
    } else {
        let mut random = Random::new(seed);
        let samples: Vec<Sample> =
            (0..batches).map(|i| sample(tails, sizes[i % sizes.len()], &mut random)).collect();
        let SampleFit { fit, statistics, .. } =
            SampleTable::from(samples).fit(&FitOptions { robust }).ok()?;
        (fit, statistics)
    };
    let widened = Diagnostics::new(&statistics, &fit, None).relative_std(&fit);
    Some((fit, widened))
}

#[derive(Debug)]
struct Outcome {
    /// Shares of the sets.
    no_fit: f64,
    within_two: f64,
    within_two_widened: f64,
    /// Median of the stated relative standard deviations, and the actual one, of the sets with a fit.
    stated: f64,
    actual: f64,
    bias: f64,
}

fn outcome(kind: &Kind, sets: u64) -> Outcome {
    let fits: Vec<(Fit, f64)> = (0..sets).filter_map(|seed| fitted(kind, seed)).collect();
    let n = fits.len() as f64;
    let within = |std: &dyn Fn(&(Fit, f64)) -> f64| {
        let hits =
            fits.iter().filter(|fit| (fit.0.variance - VARIANCE).abs() <= 2.0 * std(fit) * fit.0.variance);
        hits.count() as f64 / n
    };
    let mean = fits.iter().map(|(fit, _)| fit.variance / VARIANCE).sum::<f64>() / n;
    let square = fits.iter().map(|(fit, _)| (fit.variance / VARIANCE - mean).powi(2)).sum::<f64>() / n;
    let mut stated: Vec<f64> = fits.iter().map(|(fit, _)| fit.relative_std).collect();
    stated.sort_by(f64::total_cmp);
    Outcome {
        no_fit: 1.0 - n / sets as f64,
        within_two: within(&|(fit, _)| fit.relative_std),
        within_two_widened: within(&|&(_, widened)| widened),
        stated: stated[stated.len() / 2],
        actual: square.sqrt(),
        bias: mean - 1.0,
    }
}

#[test]
#[ignore = "prints the table of the documentation; takes a minute"]
fn table() {
    println!("| samples | no fit | stated | actual | bias | within 2 stated | within 2, tails allowed for |");
    println!("|---|---|---|---|---|---|---|");
    for kind in &KINDS {
        let Outcome { no_fit, within_two, within_two_widened, stated, actual, bias } = outcome(kind, 1000);
        println!(
            "| {} | {:.1} % | {stated:.3} | {actual:.3} | {bias:+.3} | {:.1} % | {:.1} % |",
            kind.name,
            100.0 * no_fit,
            100.0 * within_two,
            100.0 * within_two_widened
        );
    }
}

/// Of 200 sets, the share within two standard deviations of a normal variable is 0.954 with a standard
/// deviation of 0.015. The fitted variance is skewed where it is known to a fifth only, which costs a few
/// percent; bounds at four standard deviations and five percent.
#[test]
fn two_stated_standard_deviations_cover_the_variance_of_gaussian_losses() {
    for kind in KINDS
        .iter()
        .filter(|kind| kind.batches == 420 && !matches!(kind.tails, Tails::Laplace | Tails::Student))
    {
        let found = outcome(kind, 200);
        assert!(found.no_fit == 0.0 && found.within_two > 0.954 - 0.11, "{}: {found:?}", kind.name);
        // The standard deviation of 200 sets is known to 1/√400, that of the stated one in each set less
        // well.
        assert!((found.actual / found.stated - 1.0).abs() < 0.25, "{}: {found:?}", kind.name);
    }
}

/// The variance of squares is (2 + κ)/2 times that of a Gaussian: with κ = 3 the actual standard deviation is
/// 1.58 times the stated one, with κ = 6 (whose estimate has no finite variance) about 2. Allowing for the
/// tails gets most of that back.
#[test]
fn heavy_tails_break_the_promise_and_allowing_for_them_restores_most_of_it() {
    for kind in KINDS
        .iter()
        .filter(|kind| kind.batches == 420 && matches!(kind.tails, Tails::Laplace | Tails::Student))
    {
        let found = outcome(kind, 200);
        assert!(found.actual / found.stated > 1.3 && found.within_two < 0.9, "{}: {found:?}", kind.name);
        assert!(found.within_two_widened > found.within_two + 0.04, "{}: {found:?}", kind.name);
        assert!(found.within_two_widened > 0.85 - 4.0 * 0.025, "{}: {found:?}", kind.name);
    }
}
