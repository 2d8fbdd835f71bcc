//! Auto-fit: repeatable, resumable at any moment, and clear about what stops it.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use rfdescent::Error;
use rfdescent::estimation::*;
use std::ops::ControlFlow;
use std::path::Path;

/// Gaussian losses and nearly Gaussian squared norms of a cost with known moments; counts its calls.
struct Simulated {
    variance: f64,
    noise: f64,
    calls: u64,
    fail_at: Option<u64>,
}

impl Simulated {
    fn new(variance: f64, noise: f64) -> Self {
        Simulated { variance, noise, calls: 0, fail_at: None }
    }
}

impl Sampler for Simulated {
    fn dims(&self) -> u64 {
        1000
    }

    fn sample(&mut self, batch_size: u64, seed: u64) -> Result<BatchSample, SamplerError> {
        if Some(self.calls) == self.fail_at {
            return Err("out of memory".into());
        }
        self.calls += 1;
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut uniform = || ((rng.next_u64() >> 11) + 1) as f64 / (1u64 << 53) as f64;
        let radius = (-2.0 * uniform().ln()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * uniform()).sin_cos();
        let inverse = 1.0 / batch_size as f64;
        Ok(BatchSample {
            loss: 2.7 + radius * sin * (self.variance + self.noise * inverse).sqrt(),
            sq_grad_norm: (500.0 + 9e4 * inverse) * (1.0 + 0.03 * radius * cos),
        })
    }
}

/// Draws up to 7 at once, and fails in the middle of some.
struct Many(Simulated);

impl Sampler for Many {
    fn dims(&self) -> u64 {
        self.0.dims()
    }

    fn sample(&mut self, batch_size: u64, seed: u64) -> Result<BatchSample, SamplerError> {
        self.0.sample(batch_size, seed)
    }

    fn most_at_once(&self) -> usize {
        7
    }
}

/// Draws all it is asked for, and fails then.
struct Late(Simulated);

impl Sampler for Late {
    fn dims(&self) -> u64 {
        self.0.dims()
    }

    fn sample(&mut self, batch_size: u64, seed: u64) -> Result<BatchSample, SamplerError> {
        self.0.sample(batch_size, seed)
    }

    fn sample_many(
        &mut self,
        requests: &[BatchRequest],
        drawn: &mut Vec<BatchSample>,
    ) -> Result<(), SamplerError> {
        for request in requests {
            drawn.push(self.sample(request.batch_size, request.seed)?);
        }
        Err("the device was lost".into())
    }
}

fn go_on(_: &Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn small(cache: Option<&Path>) -> AutoFit {
    AutoFit {
        tolerance: 0.6,
        initial_budget: 600,
        max_budget: 100_000,
        min_batch_size: 20,
        max_batch_size: Some(5_000),
        seed: 11,
        cache: cache.map(Into::into),
        ..Default::default()
    }
}

fn cost() -> Simulated {
    Simulated::new(0.05, 0.85)
}

#[test]
fn reaches_the_tolerance_with_the_right_moments() {
    for design in [DesignKind::Gibbs, DesignKind::COptimal] {
        let options = AutoFit { tolerance: 0.1, design, ..small(None) };
        let mut seen = Vec::new();
        let fitted = options
            .run(&mut cost(), &mut |p| {
                seen.push(*p);
                ControlFlow::Continue(())
            })
            .unwrap();
        assert!(fitted.fit.relative_std < 0.1 && fitted.warnings.is_empty());
        // Five standard deviations of the estimate.
        assert!((fitted.fit.variance / 0.05 - 1.0).abs() < 0.5, "{:?}", fitted.fit);
        assert_eq!(fitted.moments().dims, 1000);
        // One report before the first sample and one after each.
        assert_eq!(seen.len() as u64, fitted.fit.batches + 1);
        assert_eq!((seen[0].examples, seen[0].needed), (0, None));
        assert!(seen.is_sorted_by(|a, b| a.examples < b.examples));
        let last = seen.last().unwrap();
        assert_eq!((last.examples, last.batches), (fitted.fit.examples, fitted.fit.batches));
        println!("{design}: {} examples", fitted.fit.examples);
    }
}

#[test]
fn a_failure_after_the_last_sample_ends_the_run_and_keeps_the_sample() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("samples.csv");
    let error = small(Some(&cache)).run(&mut Late(cost()), &mut go_on).unwrap_err();
    assert!(error.to_string().contains("the device was lost"), "{error}");
    assert_eq!(std::fs::read_to_string(&cache).unwrap().lines().count(), 2); // header and sample
}

#[test]
fn many_at_once_are_the_same_samples_and_what_came_before_a_failure_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let one_by_one = small(None).run(&mut cost(), &mut go_on).unwrap();
    let mut reports = 0;
    let together = small(None).run(&mut Many(cost()), &mut |_| {
        reports += 1;
        ControlFlow::Continue(())
    });
    let together = together.unwrap();
    assert_eq!((&together.fit, &together.statistics), (&one_by_one.fit, &one_by_one.statistics));
    assert!(reports > one_by_one.fit.batches / 7 && reports < one_by_one.fit.batches, "{reports}");

    let cache = folder.path().join("samples.csv");
    let fail_at = Some(10); // the fourth of the second seven
    let error = small(Some(&cache)).run(&mut Many(Simulated { fail_at, ..cost() }), &mut go_on).unwrap_err();
    assert!(error.to_string().contains("out of memory"), "{error}");
    assert_eq!(read_samples(&cache).unwrap().len(), 10);
    let resumed = small(Some(&cache)).run(&mut Many(cost()), &mut go_on).unwrap();
    assert_eq!(resumed.fit, one_by_one.fit);

    // The budget ends within seven: as many samples, so the same fit or the same failure.
    let budget = AutoFit { max_budget: 5000, tolerance: 1e-3, ..small(None) };
    let outcome =
        |run: rfdescent::Result<AutoFitted>| run.map(|run| run.fit).map_err(|error| error.to_string());
    assert_eq!(
        outcome(budget.run(&mut Many(cost()), &mut go_on)),
        outcome(budget.run(&mut cost(), &mut go_on))
    );
}

#[test]
fn a_run_interrupted_anywhere_and_resumed_ends_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let mut cuts = [0, 0];
    // Seeds for which a run goes through four designs; the first one has a chunk in between without any fit.
    for (design, seed) in [(DesignKind::Gibbs, 3), (DesignKind::COptimal, 8)] {
        let in_memory =
            AutoFit { design, seed, tolerance: 0.5, ..small(None) }.run(&mut cost(), &mut go_on).unwrap();
        let total = in_memory.fit.batches;
        assert!(total > 25, "too short to prove anything: {total}");
        for k in 0..=total {
            let path = folder.path().join(format!("{design}-{k}.csv"));
            let options = AutoFit { design, seed, tolerance: 0.5, ..small(Some(&path)) };
            let stopped = options.run(&mut cost(), &mut |p| match p.batches >= k {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            });
            match stopped {
                Err(Error::Estimation(EstimationError::Interrupted { batches, ref cache, .. })) => {
                    assert_eq!((batches, cache.as_deref()), (k, Some(path.as_path())));
                }
                other => panic!("{other:?}"),
            }
            // Every third time, the power went in the middle of a row.
            // The row is only lost where the cut hit a number in front of the time.
            let mut lost = 0;
            if k % 3 == 1 {
                let content = std::fs::read_to_string(&path).unwrap();
                let cut = &content[..content.len() - 1 - k as usize % 20 * 2];
                std::fs::write(&path, cut).unwrap();
                lost = u64::from(cut.rsplit('\n').next().unwrap().matches(',').count() < 3);
                cuts[lost as usize] += 1;
            }
            let mut sampler = cost();
            let resumed = options.run(&mut sampler, &mut go_on).unwrap();
            assert_eq!(resumed.fit, in_memory.fit, "interrupted after {k}");
            assert_eq!(resumed.statistics, in_memory.statistics);
            assert_eq!(sampler.calls, total - k + lost);
            assert_eq!(resumed.warnings.len(), lost as usize, "{:?}", resumed.warnings);
            // Whole again: a third run draws nothing.
            let mut sampler = cost();
            assert_eq!(options.run(&mut sampler, &mut go_on).unwrap().fit, in_memory.fit);
            assert_eq!(sampler.calls, 0);
        }
    }
    assert!(cuts[0] > 2 && cuts[1] > 2, "rows kept and lost: {cuts:?}");
}

#[test]
fn the_cache_is_a_sample_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache.csv");
    let fitted = small(Some(&path)).run(&mut cost(), &mut go_on).unwrap();
    let content = std::fs::read_to_string(&path).unwrap();
    assert!(content.starts_with("loss,grad_norm,batchsize,time\n"));
    let mut statistics = SampleStatistics::new();
    for sample in read_samples(&path).unwrap() {
        statistics.push(&sample).unwrap();
    }
    assert_eq!(fit(&statistics).unwrap(), fitted.fit);
}

#[test]
fn caches_of_others_are_read_and_kept_in_their_form() {
    let folder = tempfile::tempdir().unwrap();
    for (header, row) in [
        ("run,time,batchsize,grad_norm,loss", "7,0.5,30,50.25,2.5"),
        ("loss,sq_grad_norm,grad_norm,batchsize,time,note", "2.5,2525.0625,50.25,30,0.5,\"x, y\""),
        ("Loss;Grad_Norm;Batch_Size;Time", "2.5;50.25;30.0;0.5"),
        ("loss\tbatch size\tgrad-norm", "2.5\t3e1\t50.25"),
        ("# by hand\n# loss,grad_norm,batchsize", "# seed 3\n2.5,50.25,3.0e+01"),
        ("loss,grad_norm,batchsize", "2.5,50.25,30\n# to be gone on with"),
    ] {
        let path = folder.path().join("other.csv");
        std::fs::write(&path, format!("{header}\n{row}\n")).unwrap();
        let fitted = small(Some(&path)).run(&mut cost(), &mut go_on).unwrap();
        let content = std::fs::read_to_string(&path).unwrap();
        assert!(content.starts_with(&format!("{header}\n{row}\n")));
        assert!(content.ends_with('\n'));
        let samples = read_samples(&path).unwrap();
        assert_eq!(samples.len() as u64, fitted.fit.batches);
        assert_eq!(samples[0], Sample { loss: 2.5, sq_grad_norm: 2525.0625, batch_size: 30 });
        let mut sampler = cost();
        assert_eq!(small(Some(&path)).run(&mut sampler, &mut go_on).unwrap().fit, fitted.fit);
        assert_eq!(sampler.calls, 0);
    }
}

#[test]
fn rows_are_not_added_to_a_comment() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache.csv");
    let content = "loss,grad_norm,batchsize\r\n2.5,50.25,30\r\n# to be gone on with";
    std::fs::write(&path, content).unwrap();
    let fitted = small(Some(&path)).run(&mut cost(), &mut go_on).unwrap();
    assert!(std::fs::read_to_string(&path).unwrap().starts_with(&format!("{content}\r\n")));
    assert_eq!(read_samples(&path).unwrap().len() as u64, fitted.fit.batches);
}

#[test]
fn a_cache_with_more_than_needed_is_used_as_a_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache.csv");
    let long = AutoFit { tolerance: 0.2, ..small(Some(&path)) }.run(&mut cost(), &mut go_on).unwrap();
    let mut sampler = cost();
    let again = small(Some(&path)).run(&mut sampler, &mut go_on).unwrap();
    assert_eq!((again.statistics, sampler.calls), (long.statistics, 0));
}

#[test]
fn seeds_tell_runs_apart() {
    let run = |seed| AutoFit { seed, ..small(None) }.run(&mut cost(), &mut go_on).unwrap().fit;
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
}

#[test]
fn a_failing_sampler_is_named_and_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache.csv");
    let mut sampler = Simulated { fail_at: Some(7), ..cost() };
    let error = small(Some(&path)).run(&mut sampler, &mut go_on).unwrap_err().to_string();
    assert!(
        error.contains("sample 7") && error.contains("out of memory") && error.contains("cache.csv"),
        "{error}"
    );
    assert_eq!(read_samples(&path).unwrap().len(), 7);

    for (loss, sq_grad_norm, word) in [
        (f64::NAN, 1.0, "loss"),
        (1.0, f64::INFINITY, "sq_grad_norm"),
        (1.0, -1.0, "sq_grad_norm"),
        (1e200, 1.0, "loss"),
    ] {
        let mut sampler = (10, move |_, _| Ok(BatchSample { loss, sq_grad_norm }));
        let error = small(Some(&path)).run(&mut sampler, &mut go_on).unwrap_err().to_string();
        assert!(error.contains(word) && error.contains("sample 7"), "{error}");
        assert_eq!(read_samples(&path).unwrap().len(), 7);
    }
    assert_eq!(
        small(Some(&path)).run(&mut cost(), &mut go_on).unwrap().fit,
        small(None).run(&mut cost(), &mut go_on).unwrap().fit
    );
}

#[test]
fn a_budget_too_small_returns_the_fit_with_a_warning() {
    let options = AutoFit { tolerance: 0.05, max_budget: 50_000, ..small(None) };
    let fitted = options.run(&mut Simulated::new(0.01, 0.85), &mut go_on).unwrap();
    assert!((45_000..=50_000).contains(&fitted.fit.examples));
    let [warning] = &fitted.warnings[..] else { panic!("{:?}", fitted.warnings) };
    assert!(warning.contains("max_budget = 50000") && warning.contains("more are needed"), "{warning}");
}

#[test]
fn a_budget_without_any_fit_is_an_error_with_the_reason() {
    // Losses whose variance falls faster than 1/b.
    let mut sign = 1.0;
    let mut sampler = (10, move |b: u64, _| {
        sign = -sign;
        Ok(BatchSample { loss: sign * 20.0 / b as f64, sq_grad_norm: 1.0 + 1.0 / b as f64 })
    });
    let options = AutoFit { max_budget: 20_000, ..small(None) };
    match options.run(&mut sampler, &mut go_on) {
        Err(Error::Estimation(EstimationError::BudgetExhausted {
            max_budget: 20_000, ref source, ..
        })) => {
            assert!(matches!(**source, EstimationError::NonPositiveIntercept { quantity: "variance", .. }));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn caches_that_cannot_be_used_stop_the_run_before_any_sample() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    };
    let mut cases = vec![
        (folder.path().join("missing/cache.csv"), "missing"),
        (folder.path().to_path_buf(), ""),
        (file("bad.csv", "loss,grad_norm,batchsize,time\n1,1,0,0\n1,1,20,0\n"), "row 2"),
        (file("nan.csv", "loss,grad_norm,batchsize,time\nnan,1,20,0\n"), "row 2"),
        (file("other.csv", "a,b\n1,2\n"), "row 1"),
        (file("quote.csv", "loss,grad_norm,batchsize,time\n1,2,20,\"a\n"), "row 2: a quote"),
        (file("torn quote.csv", "loss,grad_norm,batchsize,time\n1,2,20,\"a"), "row 2: a quote"),
        (
            file("quotes.csv", "loss,grad_norm,batchsize,time\n1,2,20,\"a\n1,2,20,0\n1,2,20,\"b\n"),
            "row 2: a quote",
        ),
        (file("short.csv", "loss,grad_norm,batchsize,time\n1,2,20\n"), "row 2: 3 fields"),
        (file("twice.csv", "loss,grad_norm,batchsize,loss\n1,2,20,1\n"), "`loss` more than once"),
        (file("header.csv", "loss,sq_grad_norm,batchsize"), "row 1"),
    ];
    if cfg!(target_os = "linux") {
        cases.extend([("/dev/full".into(), "/dev/full"), ("/dev/zero".into(), "not a regular file")]);
    }
    let content = |path: &Path| path.is_file().then(|| std::fs::read(path).unwrap());
    for (path, word) in cases {
        let before = content(&path);
        let mut sampler = cost();
        let error = small(Some(&path)).run(&mut sampler, &mut go_on).unwrap_err();
        assert!(matches!(error, Error::Io { .. } | Error::File { .. }), "{error:?}");
        assert!(error.to_string().contains(word), "{error}");
        assert_eq!(sampler.calls, 0);
        assert_eq!(before, content(&path));
    }
}

#[test]
fn a_cache_cut_off_in_its_header_starts_afresh() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache.csv");
    for header in ["", "loss,gra", "loss,grad_norm,batchsize,time"] {
        std::fs::write(&path, header).unwrap();
        small(Some(&path)).run(&mut cost(), &mut go_on).unwrap();
        assert!(read_samples(&path).unwrap().len() > 10);
    }
}

/// What a user's own file may look like, and what the first row drawn is preceded by.
#[test]
fn a_last_row_without_a_line_break_is_kept_where_all_its_numbers_are_followed_by_a_separator() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache.csv");
    let long = "loss,grad_norm,batchsize,time,note,host";
    for (content, mended, samples) in [
        ("loss,grad_norm,batchsize,time\n1,2,20,", "1,2,20,\n", 1),
        ("loss,grad_norm,batchsize,time\n1,2,20,17.", "1,2,20,17.\n", 1),
        ("loss,grad_norm,batchsize,time\r\n1,2,20,17.5", "1,2,20,17.5\r\n", 1),
        ("loss,grad_norm,batchsize,time\r1,2,20,17.5", "1,2,20,17.5\r", 1),
        (&format!("{long}\n1,2,20,0,\"a, b\""), "1,2,20,0,\"a, b\",\n", 1),
        (&format!("{long}\n1,2,20,"), "1,2,20,,,\n", 1),
        // A batch size of 20, or the beginning of one of 200.
        ("loss,grad_norm,batchsize,time\n1,2,20", "time\n", 0),
        ("loss,batchsize,grad_norm\n1,20,3\n1,20,3.5", "1,20,3\n", 1),
        ("time,loss,batchsize,grad_norm\r\n0,1,20,3\r\n0,1,20,3.5", "0,1,20,3\r\n", 1),
    ] {
        std::fs::write(&path, content).unwrap();
        let mut lines = String::new();
        let stopped = small(Some(&path)).run(&mut cost(), &mut |p| match p.batches > samples {
            true => ControlFlow::Break(()),
            false => {
                lines = std::fs::read_to_string(&path).unwrap();
                ControlFlow::Continue(())
            }
        });
        assert!(
            matches!(stopped, Err(Error::Estimation(EstimationError::Interrupted { .. }))),
            "{stopped:?}"
        );
        assert!(lines.ends_with(mended), "{content:?} became {lines:?}");
        // Rows drawn end as the others do.
        let whole = std::fs::read_to_string(&path).unwrap();
        let line_break = &mended[mended.find(['\r', '\n']).unwrap()..];
        assert!(whole.ends_with(line_break) && whole.len() > lines.len(), "{whole:?}");
        assert_eq!(read_samples(&path).unwrap().len() as u64, samples + 1, "{whole:?}");
        assert!(line_break != "\r" || !whole.contains('\n'), "{whole:?}");
    }
}

/// Losses whose variance falls faster than 1/b: no fit ever, and batch sizes up to the largest there are.
/// Between samples next to nothing may happen.
#[test]
fn a_budget_without_end_costs_no_time_between_samples() {
    let start = std::time::Instant::now();
    let mut sign = 1.0;
    let mut sampler = (10, move |b: u64, _| {
        sign = -sign;
        Ok(BatchSample { loss: sign * 20.0 / b as f64, sq_grad_norm: 1.0 + 1.0 / b as f64 })
    });
    let options = AutoFit { max_batch_size: None, max_budget: u64::MAX, ..small(None) };
    let stopped = options.run(&mut sampler, &mut |p| match p.batches >= 1000 {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    });
    assert!(matches!(stopped, Err(Error::Estimation(EstimationError::Interrupted { batches: 1000, .. }))));
    let took = start.elapsed().as_secs_f64();
    println!("1000 samples in {took} s");
    // Some 60 fits with designs over a million batch sizes each; it would be a thousand.
    let bound = if cfg!(debug_assertions) { 200.0 } else { 20.0 };
    assert!(took < bound, "{took} s");
}

#[test]
fn losses_too_small_for_squares_stop_the_run_at_the_first_fit() {
    let mut calls = 0u32;
    let mut sampler = (10, |b: u64, seed: u64| {
        calls += 1;
        Ok(BatchSample { loss: (seed % 97) as f64 * 1e-160, sq_grad_norm: 1.0 + 1.0 / b as f64 })
    });
    let options = AutoFit { max_batch_size: None, max_budget: u64::MAX, ..small(None) };
    let error = options.run(&mut sampler, &mut go_on).unwrap_err();
    assert!(matches!(
        error,
        Error::Estimation(EstimationError::TooSmall { quantity: "variance", value }) if value < 1e-310
    ));
    assert!(error.to_string().contains("multiply the loss"), "{error}");
    assert!(calls < 100, "{calls}");
}

#[test]
fn a_tolerance_out_of_reach_is_said_to_be_so() {
    let options = AutoFit { tolerance: 1e-200, ..small(None) };
    let fitted = options.run(&mut cost(), &mut go_on).unwrap();
    let [warning] = &fitted.warnings[..] else { panic!("{:?}", fitted.warnings) };
    assert!(warning.contains("more than 1e15 more would be needed"), "{warning}");
}

#[test]
fn two_runs_do_not_share_a_cache() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache.csv");
    let options = small(Some(&path));
    let mut nested = None;
    let mut report = |_: &Progress| {
        nested.get_or_insert_with(|| options.run(&mut cost(), &mut go_on).unwrap_err().to_string());
        ControlFlow::Continue(())
    };
    options.run(&mut cost(), &mut report).unwrap();
    assert!(nested.unwrap().contains("another process"));
}

#[test]
fn bad_options_are_named() {
    let cases = [
        (AutoFit { tolerance: 0.0, ..small(None) }, "tolerance"),
        (AutoFit { tolerance: f64::NAN, ..small(None) }, "tolerance"),
        (AutoFit { initial_budget: 0, ..small(None) }, "initial_budget"),
        (AutoFit { min_batch_size: 0, ..small(None) }, "min_batch_size"),
        (AutoFit { max_batch_size: Some(20), ..small(None) }, "max_batch_size"),
        (AutoFit { max_budget: 20, ..small(None) }, "max_budget"),
        (
            AutoFit { min_batch_size: 2_000_000, max_batch_size: None, max_budget: u64::MAX, ..small(None) },
            "min_batch_size",
        ),
    ];
    for (options, word) in cases {
        match options.run(&mut cost(), &mut go_on) {
            Err(Error::InvalidArgument { name, .. }) => assert_eq!(name, word),
            other => panic!("{other:?}"),
        }
    }
    let mut sampler = (0, |_, _| Ok(BatchSample { loss: 1.0, sq_grad_norm: 1.0 }));
    assert!(small(None).run(&mut sampler, &mut go_on).unwrap_err().to_string().contains("dims"));
}

fn tensor(name: &str, dims: u64) -> TensorDims {
    TensorDims { name: name.into(), dims }
}

/// [`cost`] with two tensors that share ‖g‖² 1 : 3, by a closure.
fn blocks() -> impl Sampler {
    (vec![tensor("weight, first", 600), tensor("bias", 400)], shares())
}

fn shares() -> impl FnMut(u64, u64) -> Result<(f64, Vec<f64>), SamplerError> {
    let mut simulated = cost();
    move |batch_size, seed| {
        let BatchSample { loss, sq_grad_norm } = simulated.sample(batch_size, seed)?;
        Ok((loss, vec![0.25 * sq_grad_norm, 0.75 * sq_grad_norm]))
    }
}

#[test]
fn norms_of_tensors_are_recorded_and_a_resumed_run_has_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let in_memory = small(None).run(&mut blocks(), &mut go_on).unwrap();
    // Multiples of 1/4 add up without rounding.
    assert_eq!(in_memory.fit, small(None).run(&mut cost(), &mut go_on).unwrap().fit);
    let fits = in_memory.fit_tensors().unwrap();
    // All ‖g_k‖² are the same multiple of ‖g‖², so the variances are: v_k ∝ 0.25/600 and 0.75/400 around
    // 1/1000.
    for (fit, share) in fits.tensors.iter().zip([0.25, 0.75]) {
        assert!((fit.grad_variance / (share * in_memory.fit.grad_variance) - 1.0).abs() < 1e-11, "{fit:?}");
        let factor = (fit.dims as f64 / 1000.0 / share).sqrt();
        assert!((fit.length_scale_factor / factor - 1.0).abs() < 1e-11, "{fit:?}");
    }

    for k in [0, 1, 7, 20] {
        let path = folder.path().join(format!("{k}.csv"));
        let stopped = small(Some(&path)).run(&mut blocks(), &mut |p| match p.batches >= k {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        });
        assert!(matches!(stopped, Err(Error::Estimation(EstimationError::Interrupted { .. }))));
        let content = std::fs::read_to_string(&path).unwrap();
        assert!(
            content.starts_with(
                "loss,grad_norm,batchsize,time,\"sq_grad_norm:weight, first\",sq_grad_norm:bias\n"
            ),
            "{content}"
        );
        // The power went in the middle of the last row, or of the header.
        std::fs::write(&path, &content[..content.len() - 2]).unwrap();
        let resumed = small(Some(&path)).run(&mut blocks(), &mut go_on).unwrap();
        assert_eq!((&resumed.fit, &resumed.statistics), (&in_memory.fit, &in_memory.statistics));
        assert_eq!(SampleTable::read(&path).unwrap().statistics().unwrap(), in_memory.statistics);
    }
}

#[test]
fn caches_keep_their_columns_and_those_of_other_tensors_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache.csv");
    // Without columns of tensors: gone on with as it is.
    let row = "2.5,50.25,30,0.5";
    std::fs::write(&path, format!("loss,grad_norm,batchsize,time\n{row}\n")).unwrap();
    let fitted = small(Some(&path)).run(&mut blocks(), &mut go_on).unwrap();
    let table = SampleTable::read(&path).unwrap();
    assert_eq!((table.samples.len() as u64, table.tensors.len()), (fitted.fit.batches, 0));
    let error = fitted.fit_tensors().unwrap_err();
    assert!(matches!(error, Error::Estimation(EstimationError::NoTensors)), "{error}");

    // In another order: by name.
    let header = "sq_grad_norm:bias,loss,batchsize,note,grad_norm,\"sq_grad_norm:weight, first\"";
    std::fs::write(&path, format!("{header}\n1875,2.5,30,x,50,625\n")).unwrap();
    let fitted = small(Some(&path)).run(&mut blocks(), &mut go_on).unwrap();
    let table = SampleTable::read(&path).unwrap();
    assert_eq!(table.tensors, ["bias", "weight, first"]);
    assert!(table.samples.len() > 10);
    // Norms are stored as roots, so ‖g‖² of a row is off by a few roundings.
    let thirds = |row: &Vec<f64>| (row[0] / row[1] / 3.0 - 1.0).abs() < 1e-15;
    assert!(table.sq_grad_norms.iter().all(thirds), "{:?}", table.sq_grad_norms);
    assert_eq!(table.statistics().unwrap(), fitted.statistics);
    let found: Vec<f64> = fitted.fit_tensors().unwrap().tensors.iter().map(|t| t.grad_variance).collect();
    assert!((found[1] / found[0] / 3.0 - 1.0).abs() < 1e-11, "{found:?}");

    let before = std::fs::read(&path).unwrap();
    let others = |names: [&str; 2]| (vec![tensor(names[0], 600), tensor(names[1], 400)], shares());
    for (error, words) in [
        (small(Some(&path)).run(&mut cost(), &mut go_on), "`sq_grad_norm:bias` is of a tensor"),
        (small(Some(&path)).run(&mut others(["weight, first", "x"]), &mut go_on), "`sq_grad_norm:bias`"),
    ] {
        let error = error.unwrap_err();
        assert!(matches!(error, Error::File { .. }) && error.to_string().contains(words), "{error}");
    }
    std::fs::write(&path, "loss,grad_norm,batchsize,sq_grad_norm:bias\n").unwrap();
    let error = small(Some(&path)).run(&mut blocks(), &mut go_on).unwrap_err().to_string();
    assert!(error.contains("no column `sq_grad_norm:weight, first`"), "{error}");
    std::fs::write(&path, &before).unwrap();
    assert_eq!(small(Some(&path)).run(&mut blocks(), &mut go_on).unwrap().statistics, fitted.statistics);
}

#[test]
fn tensors_that_cannot_be_are_named() {
    for (tensors, words) in [
        (vec![tensor("", 600), tensor("b", 400)], "no name for a column"),
        (vec![tensor("a\nb", 600), tensor("b", 400)], "line breaks"),
        (vec![tensor(" a", 600), tensor("b", 400)], "white space"),
        (vec![tensor("a", 600), tensor("a", 400)], "`a`: is listed twice"),
        (vec![tensor("a", 1000), tensor("b", 0)], "`b`: has no elements"),
        (vec![tensor("a", u64::MAX), tensor("b", u64::MAX)], "sum of the tensors' sizes"),
    ] {
        let error = small(None).run(&mut (tensors, shares()), &mut go_on).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    for (squares, words) in [
        (vec![1.0], "1 squared gradient norms for 2 tensors"),
        (vec![1.0, f64::INFINITY], "sq_grad_norm = inf"),
        (vec![-1.0, 2.0], "tensor `a`"),
    ] {
        let sample = move |_: u64, _: u64| Ok((1.0, squares.clone()));
        let mut sampler = (vec![tensor("a", 6), tensor("b", 4)], sample);
        let error = small(None).run(&mut sampler, &mut go_on).unwrap_err().to_string();
        assert!(error.contains("sample 0") && error.contains(words), "{error}");
    }
}
