//! Samples that do not belong to the others, and what fits and auto-fit say and do about them.

mod estimation_support;

use std::ops::ControlFlow;
use std::path::PathBuf;

use estimation_support::Random;
use rfdescent::Error;
use rfdescent::estimation::*;

const SIZES: [u64; 7] = [20, 50, 100, 200, 400, 800, 1600];
const VARIANCE: f64 = 0.01;

fn loss_std(batch_size: u64) -> f64 {
    (VARIANCE + 0.85 / batch_size as f64).sqrt()
}

fn sq_grad_norm(batch_size: u64) -> f64 {
    500.0 + 9e4 / batch_size as f64
}

/// Gaussian losses, squared norms that are a scaled χ² with `dims` degrees of freedom.
fn clean_of(seed: u64, n: usize, dims: usize, sizes: &[u64]) -> Vec<Sample> {
    let mut random = Random::new(seed);
    (0..n)
        .map(|i| {
            let batch_size = sizes[i % sizes.len()];
            let loss = 2.7 + random.normal() * loss_std(batch_size);
            let chi2: f64 = (0..dims).map(|_| random.normal().powi(2)).sum();
            Sample { loss, sq_grad_norm: sq_grad_norm(batch_size) * chi2 / dims as f64, batch_size }
        })
        .collect()
}

fn clean(seed: u64) -> Vec<Sample> {
    clean_of(seed, 420, 30, &SIZES)
}

fn fitted(samples: &[Sample], robust: bool) -> rfdescent::Result<SampleFit> {
    SampleTable::from(samples.to_vec()).fit(&FitOptions { robust })
}

fn plain(samples: &[Sample]) -> Fit {
    let mut statistics = SampleStatistics::new();
    samples.iter().for_each(|sample| statistics.push(sample).unwrap());
    fit(&statistics).unwrap()
}

fn without(samples: &[Sample], places: &[usize]) -> Vec<Sample> {
    let kept = samples.iter().enumerate().filter(|(i, _)| !places.contains(i));
    kept.map(|(_, sample)| *sample).collect()
}

fn places(findings: &Findings, quantity: Quantity) -> Vec<usize> {
    let of = findings.foreign.iter().filter(|foreign| foreign.quantity == quantity);
    of.map(|foreign| foreign.index).collect()
}

/// Blank lines and a line break of Windows, so that a row is not simply the sample's place.
fn table_of(samples: &[Sample]) -> SampleTable {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("samples.csv");
    let mut text = String::from("batchsize,sq_grad_norm,loss,time\r\n\r\n");
    for Sample { loss, sq_grad_norm, batch_size } in samples {
        text += &format!("{batch_size},{sq_grad_norm:?},{loss:?},0\r\n");
    }
    std::fs::write(&path, text).unwrap();
    SampleTable::read(&path).unwrap()
}

#[test]
fn one_initialisation_in_a_hundred_that_blows_up_is_named_and_left_out() {
    let mut samples = clean(1);
    // At batch sizes of 20, 50, 100, 200 and 1600, so that there is a fit with them.
    let blown = [49, 78, 121, 234, 412];
    blown.iter().for_each(|&i| samples[i].loss = 1e4);
    let found = fitted(&samples, false).unwrap();
    assert_eq!(places(&found.findings, Quantity::Loss), blown);
    assert!(places(&found.findings, Quantity::GradNorm).is_empty() && found.findings.is_separable());
    // As published: the fit is what the samples say.
    assert_eq!(found.fit, plain(&samples));
    assert!(found.fit.variance > 1e4);
    let exact = plain(&without(&samples, &blown));
    assert_eq!(found.without_foreign.as_ref(), Some(&exact));
    let first = &found.findings.foreign[0];
    assert_eq!((first.row, first.batch_size, first.value), (None, 20, 1e4));
    assert!((first.expected - 2.7).abs() < 0.05, "{first:?}");
    let off = first.deviations * loss_std(first.batch_size) / (1e4 - 2.7);
    assert!((off - 1.0).abs() < 0.2, "{first:?}");

    let robust = fitted(&samples, true).unwrap();
    assert_eq!(robust.fit, exact);
    assert_eq!((robust.findings, robust.statistics.batches()), (found.findings, 415));
    assert!((robust.fit.variance / VARIANCE - 1.0).abs() < 4.0 * robust.fit.relative_std, "{:?}", robust.fit);

    let rows = table_of(&samples).fit(&FitOptions::default()).unwrap().findings;
    let text = rows.to_string();
    assert!(
        text.starts_with("5 of 420 samples look foreign: rows 52, 81, 124, 237 and 415 (loss up to"),
        "{text}"
    );
    assert!(text.contains("10000 where about 2.") && text.ends_with(" is usual)"), "{text}");
}

#[test]
fn warnings_say_what_was_found_what_it_does_and_what_to_do() {
    let mut samples = clean(11);
    assert_eq!(fitted(&samples, false).unwrap().warnings(0.3), Vec::<String>::new());
    for place in [49, 78, 121, 234, 412] {
        samples[place].loss = 1e4;
    }
    let text = |samples: &[Sample], robust| fitted(samples, robust).unwrap().warnings(0.3).join("\n");
    let plain = text(&samples, false);
    for part in
        ["samples 49, 78, 121, 234 and 412 (loss", "they decide over the fit: without them variance = "]
    {
        assert!(plain.contains(part), "{plain}");
    }
    assert!(
        plain.ends_with("look at these samples, then delete them, or leave them out with a robust fit"),
        "{plain}"
    );
    let robust = text(&samples, true);
    assert!(robust.ends_with("; left out of the fit"), "{robust}");

    // Five standard deviations away is foreign and no more.
    let mut samples = clean(11);
    let away = samples[10].loss.signum() * 5.5 * loss_std(samples[10].batch_size);
    samples[10].loss = 2.7 + away;
    let slight = text(&samples, false);
    assert!(slight.contains("they hardly change the fit: without them"), "{slight}");

    // Tails that are heavy, but with no loss that is far from the next one.
    let mut heavy = clean_of(11, 2100, 30, &SIZES);
    for (place, sample) in heavy.iter_mut().enumerate() {
        let factor = if place % 4 == 0 { 1.5 } else { 0.8 };
        sample.loss = 2.7 + factor * (sample.loss - 2.7);
    }
    let heavy = text(&heavy, false);
    assert!(heavy.starts_with("the losses have heavy tails (excess kurtosis"), "{heavy}");
}

#[test]
fn the_case_of_a_public_report() {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../shared/cases/outliers.csv"));
    if !path.exists() {
        say_skipped(format_args!("skipped: {} not found", path.display()));
        return;
    }
    let table = SampleTable::read(&path).unwrap();
    let rows: Vec<_> = table.findings().foreign.iter().map(|foreign| foreign.row.unwrap()).collect();
    assert_eq!(rows, [55, 83, 122, 237, 411]);
    let robust = table.fit(&FitOptions { robust: true }).unwrap().fit;
    // The squared-exponential length scale for 10,000 parameters.
    let length_scale = (robust.variance * 1e4 / robust.grad_variance).sqrt();
    assert!((length_scale - 10.6).abs() < 0.05, "{length_scale}");
    assert!((robust.relative_std - 0.149).abs() < 0.001, "{robust:?}");
}

#[test]
fn without_foreign_samples_a_robust_fit_is_the_same_to_the_bit() {
    for seed in 0..20 {
        let samples = clean(seed);
        let (robust, all) = (fitted(&samples, true).unwrap(), fitted(&samples, false).unwrap());
        assert!(robust.findings.is_empty(), "{seed}: {}", robust.findings);
        assert_eq!(robust.fit, plain(&samples));
        assert_eq!(robust, all);
    }
}

/// Published samples of networks: the norms of one row in 14 files are beyond doubt, and matter little.
#[test]
fn samples_of_real_networks_are_not_foreign() {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../shared/data/covariance"));
    let Ok(files) = std::fs::read_dir(&folder) else {
        say_skipped(format_args!("skipped: {} not found", folder.display()));
        return;
    };
    for path in files.map(|file| file.unwrap().path()).filter(|path| path.extension() == Some("csv".as_ref()))
    {
        let found = SampleTable::read(&path).unwrap().fit(&FitOptions::default()).unwrap();
        let rows: Vec<_> = found.findings.foreign.iter().map(|foreign| foreign.row.unwrap()).collect();
        let expected: &[u64] = if path.ends_with("mnist_cnn7.csv") { &[254] } else { &[] };
        assert_eq!(rows, expected, "{}: {}", path.display(), found.findings);
        assert!(found.findings.shifted.is_empty() && found.findings.populations.is_none());
        if let Some(without) = found.without_foreign {
            assert!((without.variance / found.fit.variance - 1.0).abs() < 1e-3);
            assert!((without.grad_variance / found.fit.grad_variance - 1.0).abs() < 0.02);
        }
    }
}

/// At most 1e-3 of clean sets are to have a foreign sample. Measured: fewer than that; four expected in 4000.
#[test]
fn clean_samples_are_rarely_called_foreign() {
    let mut alarms = 0;
    for (n, runs) in [(10, 1000), (20, 1000), (60, 1000), (300, 1000)] {
        for seed in 0..runs {
            let sizes = if seed % 2 == 0 { &SIZES[..] } else { &[20, 1000] };
            let samples = clean_of(seed, n, if seed % 3 == 0 { 3 } else { 30 }, sizes);
            alarms += usize::from(!SampleTable::from(samples).findings().is_empty());
        }
    }
    assert!(alarms <= 12, "{alarms}");
}

#[test]
fn one_huge_gradient_norm() {
    let mut samples = clean(2);
    samples[100].sq_grad_norm = 1e12;
    match fitted(&samples, false) {
        Err(Error::Estimation(EstimationError::Foreign { findings, .. })) => {
            assert_eq!(places(&findings, Quantity::GradNorm), [100]);
            assert!(findings.to_string().contains("sample 100 (grad_norm"), "{findings}");
        }
        other => panic!("{other:?}"),
    }
    let robust = fitted(&samples, true).unwrap().fit;
    assert_eq!(robust, plain(&without(&samples, &[100])));
    assert!((robust.grad_variance / 500.0 - 1.0).abs() < 0.2, "{robust:?}");
    // Of a sample that is foreign twice, both are said; it is left out once.
    samples[100].loss = -50.0;
    let found = fitted(&samples, true).unwrap();
    assert_eq!((found.findings.foreign.len(), found.findings.left_out()), (2, 1));
    let text = found.findings.to_string();
    assert!(text.starts_with("1 of 420 samples looks foreign: sample 100 (loss"), "{text}");
    assert!(text.contains(", sample 100 (grad_norm"), "{text}");
}

#[test]
fn a_gradient_of_0_is_foreign_among_others() {
    let mut samples = clean_of(3, 420, 1000, &SIZES);
    samples[7].sq_grad_norm = 0.0;
    assert_eq!(places(&fitted(&samples, false).unwrap().findings, Quantity::GradNorm), [7]);
}

/// One loss that leaves no fit: the cause is that loss, not too much noise.
#[test]
fn a_single_foreign_loss_that_prevents_the_fit_is_the_reason_given() {
    for place in [0, 1, 6] {
        let mut samples = clean(4);
        samples[place].loss = 1e4;
        let text = match fitted(&samples, false) {
            Err(error @ Error::Estimation(EstimationError::Foreign { .. })) => error.to_string(),
            Ok(found) => {
                assert_eq!(places(&found.findings, Quantity::Loss), [place]);
                continue;
            }
            other => panic!("{place}: {other:?}"),
        };
        assert!(text.contains(&format!("sample {place} (loss")) && text.contains("robust fit"), "{text}");
    }
    // At the smallest batch size the intercept is negative, at the largest one the slope.
    let mut samples = clean(4);
    samples[0].loss = 1e4;
    let error = table_of(&samples).fit(&FitOptions::default()).unwrap_err().to_string();
    assert!(error.contains("row 3 (loss") && error.contains("with them variance = -"), "{error}");
    assert_eq!(fitted(&samples, true).unwrap().fit, plain(&samples[1..]));
}

#[test]
fn a_column_of_one_number_is_no_random_function() {
    let mut samples = clean(5);
    samples.iter_mut().for_each(|sample| sample.loss = 2.3);
    let error = fitted(&samples, false).unwrap_err().to_string();
    assert!(error.contains("all 420 samples have the loss 2.3") && error.contains("initialise"), "{error}");
    let mut samples = clean(5);
    samples.iter_mut().for_each(|sample| sample.sq_grad_norm = 1.0);
    for robust in [false, true] {
        let error = fitted(&samples, robust).unwrap_err().to_string();
        assert!(
            error.contains("all 420 samples have the grad_norm 1") && error.contains("clipping"),
            "{error}"
        );
    }
    let mut samples = clean(5);
    samples.iter_mut().for_each(|sample| sample.batch_size = 20);
    let error = fitted(&samples, false).unwrap_err().to_string();
    assert!(error.contains("1 distinct batch size"), "{error}");
}

#[test]
fn one_batch_size_from_elsewhere() {
    // Its losses are all higher, each by less than would be foreign.
    let mut samples = clean(6);
    samples.iter_mut().filter(|sample| sample.batch_size == 800).for_each(|sample| sample.loss += 0.18);
    let findings = fitted(&samples, false).unwrap().findings;
    assert!(findings.foreign.is_empty(), "{findings}");
    let [shifted] = &findings.shifted[..] else { panic!("{findings}") };
    assert_eq!((shifted.batch_size, shifted.count), (800, 60));
    assert!(shifted.deviations > 8.0 && (shifted.mean - 2.88).abs() < 0.06, "{shifted:?}");
    let text = table_of(&samples).findings().to_string();
    assert!(
        text.contains("the 60 samples at batch size 800, from row 8 on, have a mean loss of 2."),
        "{text}"
    );

    // A batch size with zeros too many: a loss of a small batch that claims to be one of a large one.
    let mut samples = clean(6);
    samples[0] = Sample { loss: 3.6, batch_size: 20_000, ..samples[0] };
    assert_eq!(places(&table_of(&samples).findings(), Quantity::Loss), [0]);

    // A single sample at a batch size far from all others decides over the intercept: said to be uncertain.
    let mut samples = clean_of(7, 200, 30, &[20, 22, 25]);
    samples.push(Sample { loss: 2.9, sq_grad_norm: 500.0, batch_size: 100_000 });
    let found = fitted(&samples, false).unwrap();
    assert!(found.findings.is_empty() && found.fit.reliability(0.3).is_some(), "{found:?}");
    assert!(found.fit.relative_std > 0.8, "{found:?}");
}

#[test]
fn two_populations() {
    for (share, seed) in [(2, 8), (3, 9), (5, 10)] {
        let mut samples = clean(seed);
        let second: Vec<usize> = (0..samples.len()).filter(|i| i % share == 1).collect();
        second.iter().for_each(|&i| samples[i].loss += 4.0);
        let table = table_of(&samples);
        let findings = table.findings();
        let found = findings.populations.as_ref().unwrap_or_else(|| panic!("{share}: {findings}"));
        assert_eq!(found.counts, [samples.len() - second.len(), second.len()]);
        assert_eq!(found.first[1], second[..10]);
        assert_eq!(found.first_rows[1][0], 4);
        assert!((found.means[0] - 2.7).abs() < 0.1 && (found.means[1] - 6.7).abs() < 0.1, "{found:?}");
        let text = findings.to_string();
        assert!(text.starts_with("the losses are of two populations: rows 3, "), "{text}");
        match table.fit(&FitOptions { robust: true }) {
            Err(Error::Estimation(EstimationError::Inseparable { .. })) => {}
            other => panic!("{other:?}"),
        }
        assert!(table.fit(&FitOptions::default()).is_ok());
    }
}

/// Noise alone may give a negative variance: then nothing is blamed on samples.
#[test]
fn a_negative_variance_of_clean_samples_is_no_foreign_sample() {
    let samples = clean_of(14, 30, 30, &[20, 22]);
    let mut noisy = samples.clone();
    // Losses of the larger batches spread less than any variance of the cost would allow.
    noisy.iter_mut().filter(|sample| sample.batch_size == 22).for_each(|sample| {
        sample.loss = 2.7 + 0.3 * (sample.loss - 2.7);
    });
    match fitted(&noisy, false) {
        Err(Error::Estimation(EstimationError::NonPositiveIntercept { quantity: "variance", .. })) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn tensors_are_those_of_the_samples_that_are_left() {
    let samples = clean(11);
    let mut table = SampleTable {
        tensors: vec!["weight".into()],
        sq_grad_norms: samples.iter().map(|sample| vec![sample.sq_grad_norm]).collect(),
        ..SampleTable::from(samples)
    };
    let before = tensor_variances(&table.statistics().unwrap()).unwrap()[0].grad_variance;
    table.samples[3].sq_grad_norm = 1e15;
    table.sq_grad_norms[3] = vec![1e15];
    let robust = table.fit(&FitOptions { robust: true }).unwrap();
    let after = tensor_variances(&robust.statistics).unwrap()[0].grad_variance;
    assert!((after / before - 1.0).abs() < 0.05, "{before} {after}");
}

/// A network whose loss is `other` at one initialisation in `every`, with Laplace losses where `heavy`.
fn sampler(every: u64, other: f64, heavy: bool) -> impl Sampler {
    let sample = move |batch_size: u64, seed: u64| {
        let mut random = Random::new(seed);
        let noise = match heavy {
            true => (random.uniform() - 0.5).signum() * -random.uniform().ln() / 2f64.sqrt(),
            false => random.normal(),
        };
        let chance = random.uniform();
        let sq_grad_norm = sq_grad_norm(batch_size) * (1.0 + 0.03 * random.normal());
        let loss = match chance * (every as f64) < 1.0 {
            true => other,
            false => 2.7 + noise * loss_std(batch_size),
        };
        Ok(BatchSample { loss, sq_grad_norm })
    };
    (1000, sample)
}

fn run(options: &AutoFit, sampler: &mut dyn Sampler) -> rfdescent::Result<AutoFitted> {
    options.run(sampler, &mut |_| ControlFlow::Continue(()))
}

const NEVER: u64 = u64::MAX;

fn options(on_foreign: OnForeign) -> AutoFit {
    AutoFit { max_batch_size: Some(4096), seed: 3, max_budget: 300_000, on_foreign, ..AutoFit::default() }
}

#[test]
fn auto_fit_refuses_foreign_samples_that_decide_over_the_fit() {
    for seed in 0..5 {
        let options = AutoFit { seed, ..options(OnForeign::Refuse) };
        match run(&options, &mut sampler(60, 1e4, false)) {
            Err(Error::Estimation(EstimationError::Foreign { findings, consequence })) => {
                assert!(!findings.foreign.is_empty() && consequence.contains("with them"), "{consequence}");
                assert!(findings.foreign.iter().all(|foreign| foreign.value == 1e4), "{findings}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn auto_fit_leaves_them_out_on_request() {
    let options = options(OnForeign::LeaveOut);
    let fitted = run(&options, &mut sampler(60, 1e4, false)).unwrap();
    assert!(fitted.converged && fitted.fit.relative_std < 0.3);
    assert!((fitted.fit.variance / VARIANCE - 1.0).abs() < 1.2, "{:?}", fitted.fit);
    assert_eq!(fitted.statistics.batches(), fitted.fit.batches);
    let left_out = fitted.findings.left_out();
    assert!(left_out > 0 && fitted.findings.samples as u64 == fitted.fit.batches + left_out as u64);
    let [warning] = &fitted.warnings[..] else { panic!("{:?}", fitted.warnings) };
    assert!(warning.contains("look") && warning.ends_with("; these are left out of the fit"), "{warning}");

    // Interrupted anywhere and resumed: the same bits.
    let folder = tempfile::tempdir().unwrap();
    let options = AutoFit { cache: Some(folder.path().join("samples.csv")), ..options };
    for stop in [20, 90] {
        let stopped =
            options.run(&mut sampler(60, 1e4, false), &mut |progress| match progress.batches < stop {
                true => ControlFlow::Continue(()),
                false => ControlFlow::Break(()),
            });
        assert!(stopped.is_err());
    }
    assert_eq!(run(&options, &mut sampler(60, 1e4, false)).unwrap().fit, fitted.fit);
}

#[test]
fn auto_fit_keeps_them_on_request_and_warns() {
    let fitted = run(&options(OnForeign::Keep), &mut sampler(60, 1e4, false));
    // With them there may be a fit or none, but each way they are no error of their own.
    match fitted {
        Ok(fitted) => {
            let text = fitted.warnings.join("\n");
            assert!(!fitted.converged && text.contains("foreign") && text.contains("heavy tails"), "{text}");
        }
        Err(Error::Estimation(EstimationError::BudgetExhausted { .. })) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn auto_fit_goes_on_where_heavy_tails_make_the_fit_less_precise_than_it_says() {
    let (mut went_on, mut examples) = (0, [0; 2]);
    for seed in 0..10 {
        let options = AutoFit { seed, tolerance: 0.2, ..options(OnForeign::Refuse) };
        let light = run(&options, &mut sampler(NEVER, 0.0, false)).unwrap();
        let heavy = match run(&options, &mut sampler(NEVER, 0.0, true)) {
            Ok(heavy) => heavy,
            Err(error) => panic!("{seed}: {error}"),
        };
        assert!(light.converged && heavy.converged, "{seed}");
        let diagnostics = Diagnostics::new(&heavy.statistics, &heavy.fit, None);
        assert!(diagnostics.relative_std(&heavy.fit) < 0.2);
        went_on += usize::from(diagnostics.heavy_tails());
        examples[0] += light.fit.examples;
        examples[1] += heavy.fit.examples;
    }
    // Laplace losses have an excess kurtosis of 3: 2.5 times as many examples where it is beyond doubt, which
    // it is in about half of the runs when they reach the tolerance.
    assert!(went_on >= 3 && examples[1] > examples[0] * 5 / 4, "{went_on} {examples:?}");
}

/// A sampler that forgets to initialise anew, or to draw: no further sample helps.
#[test]
fn auto_fit_does_not_go_on_with_a_loss_that_never_changes() {
    let mut calls = 0;
    let mut sampler = (10, |batch_size: u64, _| {
        calls += 1;
        Ok(BatchSample { loss: 10f64.ln(), sq_grad_norm: sq_grad_norm(batch_size) })
    });
    let error = run(&options(OnForeign::Refuse), &mut sampler).map(|fitted| fitted.fit).unwrap_err();
    assert!(error.to_string().contains("have the loss 2.302585092994046: the column"), "{error}");
    assert!(calls < 200, "{calls}");
}

#[test]
fn what_a_run_will_take_and_what_it_took() {
    let folder = tempfile::tempdir().unwrap();
    let options = AutoFit { cache: Some(folder.path().join("samples.csv")), ..options(OnForeign::Refuse) };
    let mut seen: Vec<Progress> = Vec::new();
    let fitted = options.run(&mut sampler(NEVER, 0.0, false), &mut |progress| {
        seen.push(*progress);
        ControlFlow::Continue(())
    });
    let fitted = fitted.unwrap();
    // Before the first sample: a number of examples, and no time yet.
    assert!(seen[0].examples == 0 && seen[0].expected >= 6000 && seen[0].remaining_seconds.is_none());
    assert!(
        seen[1..].iter().all(|p| p.expected >= p.examples && p.remaining_seconds.is_some_and(|s| s >= 0.0))
    );
    let cost = fitted.cost;
    assert_eq!((cost.batches, cost.examples), (fitted.fit.batches, fitted.fit.examples));
    assert!(cost.seconds > 0.0 && cost.halving_examples == 3 * cost.examples);
    let times = cost.halving_seconds.unwrap() / cost.seconds;
    assert!((2.5..5.0).contains(&times), "{times}");
    assert!(cost.to_string().contains("half the error would take"), "{cost}");
    // From the cache: nothing was drawn, and how long more of it takes is not known.
    let again = run(&options, &mut sampler(NEVER, 0.0, false)).unwrap();
    assert_eq!(again.fit, fitted.fit);
    assert_eq!((again.cost.batches, again.cost.seconds, again.cost.halving_seconds), (0, 0.0, None));
    // Twice the precision does take about four times the examples.
    let half = AutoFit { tolerance: fitted.fit.relative_std / 2.0, ..options };
    let half = run(&half, &mut sampler(NEVER, 0.0, false)).unwrap();
    let factor = half.fit.examples as f64 / fitted.fit.examples as f64;
    assert!((2.0..8.0).contains(&factor), "{factor}");
}

#[test]
fn auto_fit_does_not_call_two_populations_converged() {
    let fitted = run(&options(OnForeign::Refuse), &mut sampler(2, 30.0, false)).unwrap();
    assert!(!fitted.converged && fitted.findings.populations.is_some(), "{:?}", fitted.findings);
    assert!(fitted.warnings.join("\n").contains("two populations"), "{:?}", fitted.warnings);
}

/// Straight to stderr: the test runner shows what passing tests print only when asked.
fn say_skipped(what: std::fmt::Arguments<'_>) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "{what}");
}
