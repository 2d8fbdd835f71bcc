//! The adaptive method: against a reference in f64, and what users rely on.

mod common;

use common::*;
use proptest::prelude::*;
use rfdescent::optimizer::{
    Adaptive, Group, Limit, Method, Optimizer, Options, Outcome, SkipReason, StepInput, StepReport,
    TensorSpec,
};
use rfdescent::{DType, GradRef};

/// Vectors, and of some lengths matrices.
fn specs(tensors: &[Owned]) -> Vec<TensorSpec> {
    let spec = |(k, t): (usize, &Owned)| {
        let shape = match t.to_f64().len() {
            4097 => vec![17, 241],
            70_000 => vec![700, 5, 5, 4],
            1025 => vec![205, 5],
            len => vec![len],
        };
        TensorSpec::new(format!("t{k}"), &shape, t.dtype()).in_group(k % 2)
    };
    tensors.iter().enumerate().map(spec).collect()
}

fn options(groups: [Group; 2]) -> Options {
    Options { groups: groups.to_vec(), ..Options::default() }
}

fn optimizer(adaptive: Adaptive, tensors: &[Owned]) -> Optimizer {
    Optimizer::new(adaptive, options([Group::default(); 2]), specs(tensors)).unwrap()
}

fn step(optimizer: &mut Optimizer, values: &mut [Owned], gradient: &[Owned], loss: f64) -> StepReport {
    optimizer.step(&mut params(values), &grads(gradient), &StepInput::new(loss)).unwrap()
}

/// docs/adaptive.md, rule by rule, from all losses and gradients so far.
struct Reference {
    adaptive: Adaptive,
    groups: [Group; 2],
    tensors: Vec<Shape>,
    /// Of each step: the loss, and what it counts as.
    losses: Vec<f64>,
    counted: Vec<f64>,
    /// Whether each loss was above what counts.
    above: Vec<bool>,
    /// What it was to lower the loss by.
    promised: Vec<f64>,
    /// By tensor, the gradients of the steps that it took part in, with the number of steps before each.
    gradients: Vec<Vec<(usize, Vec<f64>)>>,
}

/// What the rule has to know of a tensor.
#[derive(Clone, Debug)]
struct Shape {
    /// Elements of a row.
    row: usize,
    /// Whether there are averages of columns.
    columns: bool,
    counts_in_norm: bool,
    /// Of the root mean square of its elements before the first step.
    length: f64,
}

/// An average with decay β over a list, corrected for its start.
fn average(beta: f64, list: impl DoubleEndedIterator<Item = f64>) -> f64 {
    let (mut sum, mut weights, mut weight) = (0.0, 0.0, 1.0);
    for value in list.rev() {
        sum += weight * value;
        weights += weight;
        weight *= beta;
    }
    sum / weights
}

/// The same, element by element.
fn averages<'a>(beta: f64, list: impl DoubleEndedIterator<Item = &'a Vec<f64>>) -> Vec<f64> {
    let (mut sum, mut weights, mut weight) = (Vec::new(), 0.0, 1.0);
    for values in list.rev() {
        sum.resize(values.len(), 0.0);
        sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += weight * value);
        weights += weight;
        weight *= beta;
    }
    sum.iter().map(|sum| sum / weights).collect()
}

fn mean_square(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64
}

impl Shape {
    /// Of a tensor described like this, with these elements before the first step.
    fn new(spec: &TensorSpec, start: &[f64]) -> Self {
        let row = spec.row.or((spec.shape.len() > 1).then(|| spec.shape[1..].iter().product()));
        let whole = row.unwrap_or(start.len()).max(1);
        // The fewest equal parts of at most 4096 elements, unless they had less than 256.
        let parts = (1..=whole).find(|&parts| whole.is_multiple_of(parts) && whole / parts <= 4096).unwrap();
        let cut = if whole <= 4096 || whole / parts >= 256 { whole / parts } else { 4096 };
        let length = match row {
            Some(_) => (0.1 * mean_square(start).sqrt().max(0.01)).sqrt(),
            None => (0.1 * mean_square(start).sqrt().max(0.1)).sqrt(),
        };
        let counts_in_norm = spec.counts_in_norm;
        Self { row: cut, columns: row == Some(cut), counts_in_norm, length }
    }

    /// The elements that tell of columns in the step after so many, and how many rows they are.
    fn sample(&self, elements: usize, applied: usize) -> (Vec<usize>, f64) {
        let lanes = (0..9).map(|k| 1 << k).find(|lanes| 16 * lanes >= self.row).unwrap();
        let chunk = 256 / lanes * self.row;
        let stride = elements.div_ceil(chunk).div_ceil(16);
        let sampled = |i: &usize| (i / chunk) % stride == applied % stride;
        let places: Vec<usize> = (0..elements).filter(sampled).collect();
        let rows = (places.len() / self.row).max(1) as f64;
        (places, rows)
    }

    /// What each element's step is scaled with, by all gradients of the tensor.
    fn weights(&self, gradients: &[(usize, Vec<f64>)]) -> Vec<f64> {
        let before = &gradients[..gradients.len() - 1];
        let elements = gradients[0].1.len();
        let mean = match before {
            [] => 0.0,
            _ => average(0.98, before.iter().map(|(_, g)| mean_square(g))),
        };
        let rows: Vec<f64> = (0..elements.div_ceil(self.row))
            .map(|i| {
                let place = i * self.row..elements.min((i + 1) * self.row);
                let row = average(0.98, gradients.iter().map(|(_, g)| mean_square(&g[place.clone()])));
                1.0 / (row + 0.03 * mean).sqrt()
            })
            .collect();
        let columns = if self.columns { self.columns(before) } else { Vec::new() };
        (0..elements).map(|i| rows[i / self.row] * columns.get(i % self.row).unwrap_or(&1.0)).collect()
    }

    /// What columns are scaled with after these gradients.
    fn columns(&self, gradients: &[(usize, Vec<f64>)]) -> Vec<f64> {
        if gradients.is_empty() {
            return Vec::new();
        }
        let (mut squares, mut means) = (Vec::new(), Vec::new());
        for (applied, g) in gradients {
            let (places, rows) = self.sample(g.len(), *applied);
            let mut columns = vec![0.0; self.row];
            places.iter().for_each(|&i| columns[i % self.row] += g[i] * g[i] / rows);
            means.push(places.iter().map(|&i| g[i] * g[i]).sum::<f64>() / places.len() as f64);
            squares.push(columns);
        }
        let mean = average(0.98, means.into_iter());
        let scale = |square: f64| (mean / (square + 0.03 * mean)).sqrt();
        averages(0.98, squares.iter()).into_iter().map(scale).collect()
    }
}

/// Sum, squared differences and promises of one window.
struct Window {
    sum: f64,
    squares: f64,
    promised: f64,
}

impl Reference {
    fn new(adaptive: Adaptive, groups: [Group; 2], specs: &[TensorSpec], start: &[Owned]) -> Self {
        let tensors: Vec<Shape> =
            specs.iter().zip(start).map(|(spec, start)| Shape::new(spec, &start.to_f64())).collect();
        let gradients = vec![Vec::new(); tensors.len()];
        let (losses, counted, promised) = (Vec::new(), Vec::new(), Vec::new());
        Self { adaptive, groups, tensors, losses, counted, above: Vec::new(), promised, gradients }
    }

    /// The bound below the losses so far.
    fn floor(&self) -> Option<f64> {
        let negative = self.losses.iter().any(|&loss| loss < 0.0);
        self.adaptive.loss_bound.or((!negative).then_some(0.0))
    }

    fn window(&self, w: usize) -> Window {
        let steps = 16 * w..16 * (w + 1);
        let difference = |i: usize| if i == 0 { 0.0 } else { self.counted[i] - self.counted[i - 1] };
        Window {
            sum: self.counted[steps.clone()].iter().sum(),
            squares: steps.clone().map(|i| difference(i).powi(2)).sum(),
            // A step's promise is about the loss after it.
            promised: steps.filter(|&i| i > 0).map(|i| self.promised[i - 1]).sum(),
        }
    }

    fn observe(&mut self, loss: f64) {
        let steps = self.counted.len();
        let most = match self.floor() {
            _ if steps < 10 => f64::INFINITY,
            Some(floor) => {
                let average = average(self.adaptive.averaging, self.counted.iter().copied());
                if average > floor { floor + 3.0 * (average - floor) } else { f64::INFINITY }
            }
            None if steps < 16 => f64::INFINITY,
            None => {
                let average = average(self.adaptive.averaging, self.counted.iter().copied());
                average + 10.0 * (self.window(steps / 16 - 1).squares / 32.0).sqrt()
            }
        };
        // Three in a row.
        self.above.push(loss > most);
        let outlier = self.above.iter().rev().take_while(|&&above| above).count() <= 3;
        self.losses.push(loss);
        self.counted.push(if outlier { loss.min(most) } else { loss });
    }

    fn trust(&self) -> f64 {
        let (mut trust, mut high) = (1.0_f64, 0);
        for (i, &loss) in self.counted.iter().enumerate() {
            if i >= 16 {
                let last = self.window(i / 16 - 1);
                let is_high = loss > last.sum / 16.0 + 3.0 * (last.squares / 32.0).sqrt();
                // Once in a window.
                if i % 16 == 0 {
                    high = 0;
                }
                if high < 3 {
                    high = if is_high { high + 1 } else { 0 };
                    trust = if high == 3 { (trust / 2.0).max(1e-3) } else { trust };
                }
            }
            if i >= 31 && i % 16 == 15 {
                let (before, now) = (self.window(i / 16 - 1), self.window(i / 16));
                let fall = before.sum - now.sum;
                let promise = 0.05 * 16.0 * (before.promised + now.promised) / 2.0;
                let noise = ((before.squares + now.squares) / 2.0).sqrt();
                trust *= match fall {
                    _ if promise == 0.0 => 1.0,
                    _ if fall < promise - noise => 0.5,
                    _ if fall > promise => 1.5,
                    _ => 1.0,
                };
                trust = trust.clamp(1e-3, 4.0);
            }
        }
        trust
    }

    /// The change of each parameter, `None` for a tensor without gradient.
    fn step(
        &mut self,
        loss: f64,
        gradients: &[Option<Vec<f64>>],
        values: &[Owned],
        options: &Options,
    ) -> Vec<Vec<f64>> {
        let applied = self.losses.len();
        self.observe(loss);
        for (all, gradient) in self.gradients.iter_mut().zip(gradients) {
            all.extend(gradient.clone().map(|gradient| (applied, gradient)));
        }
        // What lr is multiplied with, and the averaged gradient.
        let directions: Vec<Option<(Vec<f64>, Vec<f64>)>> = (0..self.tensors.len())
            .map(|k| {
                let (shape, group) = (&self.tensors[k], self.groups[k % 2]);
                gradients[k].as_ref().filter(|gradient| !gradient.is_empty())?;
                let scale = group.multiplier * group.length_scale_factor.powi(2) * shape.length;
                let weights = shape.weights(&self.gradients[k]).iter().map(|w| scale * w).collect();
                Some((weights, averages(self.adaptive.averaging, self.gradients[k].iter().map(|(_, g)| g))))
            })
            .collect();
        let counted = directions.iter().zip(&self.tensors).filter(|(_, shape)| shape.counts_in_norm);
        let squared: f64 = counted
            .filter_map(|(direction, _)| direction.as_ref())
            .flat_map(|(weights, g)| weights.iter().zip(g).map(|(w, g)| w * g * g))
            .sum();
        let loss = average(self.adaptive.averaging, self.counted.iter().copied());
        let bound = self.floor().map_or(f64::INFINITY, |floor| 0.5 * (loss - floor).max(0.0) / squared);
        let ramp = 2f64.powi(applied as i32 - 7).min(1.0);
        let rate = self.trust() * ramp * bound.min(0.03) * options.multiplier;
        let rate = rate.min(options.max_step_size.unwrap_or(f64::MAX) / squared.sqrt());
        self.promised.push(rate * squared);
        (0..self.tensors.len())
            .map(|k| {
                let Some((weights, g)) = &directions[k] else { return Vec::new() };
                let group = self.groups[k % 2];
                let decay = (0.1 * rate * group.multiplier * group.weight_decay).min(1.0);
                let change = |((p, w), g): ((f64, &f64), &f64)| -decay * p - rate * w * g;
                values[k].to_f64().into_iter().zip(weights).zip(g).map(change).collect()
            })
            .collect()
    }
}

/// Shapes of all kinds, by name where rows are given: one element, none, vectors beyond a chunk, images,
/// single columns; rows that are cut in three, and such as have no equal parts.
fn shapes() -> Vec<(Vec<usize>, Option<usize>)> {
    let plain: [&[usize]; 11] = [
        &[1],
        &[33],
        &[5000],
        &[7, 33],
        &[6, 3, 3, 3],
        &[40, 1],
        &[0, 5],
        &[2, 9000],
        &[3, 4099],
        &[700, 16],
        &[64, 64],
    ];
    let given = [(vec![100], Some(13)), (vec![12, 10], Some(20)), (vec![10], Some(10))];
    plain.iter().map(|shape| (shape.to_vec(), None)).chain(given).collect()
}

/// Losses of a run, each of which leads another way through the rule.
#[derive(Clone, Copy, Debug)]
enum Losses {
    Falling,
    Flat,
    Rising,
    /// To where no bound is known any more.
    Negative,
    /// With single ones that are far too large.
    Spikes,
}

impl Losses {
    fn at(self, seed: u64, n: u64) -> f64 {
        let (noise, n) = (0.1 * uniform(seed ^ (n << 8), 1)[0], n as f64);
        match self {
            Losses::Falling => 2.0 * 0.9_f64.powf(n) * (1.0 + noise),
            Losses::Flat => 2.0 + noise,
            Losses::Rising => 2.0 * 1.05_f64.powf(n) * (1.0 + noise),
            Losses::Negative => 1.0 - n / 20.0 + noise + if n == 50.0 { 30.0 } else { 0.0 },
            Losses::Spikes => (2.0 - n / 50.0 + noise) * if n % 13.0 == 12.0 { 1e4 } else { 1.0 },
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// f64 tensors, so that little but rounding of f64 differs: sums of up to 80 000 terms and 72 steps of
    /// averages, each relative to its own size as all terms are positive; averages of gradients cancel by at
    /// most √(their number), and the velocity's rounding is relative to its terms. What columns weigh is
    /// rounded to f32: by 2⁻²⁴ of it in each of their steps, and as much in N².
    #[test]
    fn steps_follow_the_reference(
        seed in any::<u64>(),
        chosen in prop::collection::vec((prop::sample::select(shapes()), 0.0..1.0_f64), 1..4),
        averaging in prop::sample::select(vec![0.0, 0.5, 0.9]),
        (losses, loss_bound) in prop::sample::select(vec![
            (Losses::Falling, None), (Losses::Falling, Some(-1.5)), (Losses::Flat, None), (Losses::Flat, Some(1.5)),
            (Losses::Rising, None), (Losses::Negative, None), (Losses::Negative, Some(-4.0)),
            (Losses::Spikes, None), (Losses::Spikes, Some(0.1)),
        ]),
        factor in prop::sample::select(vec![1.0, 0.5, 2.0]),
        multiplier in prop::sample::select(vec![1.0, 0.3, 0.0]),
        weight_decay in prop::sample::select(vec![0.0, 0.1]),
        all in prop::sample::select(vec![1.0, 0.4]),
        max_step_size in prop::sample::select(vec![None, None, Some(1e-3)]),
        grad_size in prop::sample::select(vec![1.0, 1e-3]),
    ) {
        let chosen = chosen.into_iter().map(|(shape, counts)| (shape, counts < 0.8));
        let chosen: Vec<Chosen> = std::iter::once(((vec![9], None), true)).chain(chosen).collect();
        let setup = Setup { averaging, loss_bound, factor, multiplier, weight_decay, all, max_step_size };
        compare(seed, &chosen, setup, losses, grad_size, 72)?;
    }
}

/// The chunks that tell of columns change from step to step.
#[test]
fn large_matrices_follow_the_reference() {
    let setup = Setup {
        averaging: 0.9,
        loss_bound: None,
        factor: 1.0,
        multiplier: 1.0,
        weight_decay: 0.0,
        all: 1.0,
        max_step_size: None,
    };
    // 8 rows a chunk, 38 chunks, every third of which counts; 19 chunks, the last one short; given rows.
    for (shape, row) in [(vec![300, 257], None), (vec![4700, 16], None), (vec![70_000], Some(7))] {
        compare(3, &[((shape, row), true), ((vec![5], None), true)], setup, Losses::Flat, 1.0, 20).unwrap();
    }
}

/// What a comparison sets.
#[derive(Clone, Copy, Debug)]
struct Setup {
    averaging: f64,
    loss_bound: Option<f64>,
    /// Of the second group.
    factor: f64,
    multiplier: f64,
    weight_decay: f64,
    /// The multiplier of all.
    all: f64,
    max_step_size: Option<f64>,
}

/// Shape and given rows of a tensor, and whether it counts in the norm.
type Chosen = ((Vec<usize>, Option<usize>), bool);

/// A run beside its reference. The first tensor has a gradient in each step.
fn compare(
    seed: u64,
    chosen: &[Chosen],
    setup: Setup,
    losses: Losses,
    grad_size: f64,
    steps: u64,
) -> Result<(), TestCaseError> {
    let Setup { averaging, loss_bound, factor, multiplier, weight_decay, all, max_step_size } = setup;
    let adaptive = Adaptive { averaging, loss_bound };
    let second = Group { length_scale_factor: factor, multiplier, weight_decay, ..Group::default() };
    let groups = [Group::default(), second];
    let options = Options { max_step_size, multiplier: all, ..options(groups) };
    let specs: Vec<TensorSpec> = (chosen.iter().enumerate())
        .map(|(k, ((shape, row), counts))| {
            let spec = TensorSpec::new(format!("t{k}"), shape, DType::F64).in_group(k % 2);
            TensorSpec { row: *row, counts_in_norm: *counts, ..spec }
        })
        .collect();
    let sizes: Vec<usize> = specs.iter().map(|spec| spec.len().unwrap()).collect();
    let mut values: Vec<Owned> = (sizes.iter().enumerate())
        .map(|(k, &n)| Owned::F64(uniform(seed ^ (k as u64) << 40, n).iter().map(|x| x * 0.3).collect()))
        .collect();
    let mut reference = Reference::new(adaptive, groups, &specs, &values);
    let mut optimizer = Optimizer::new(adaptive, options.clone(), specs).unwrap();
    for n in 0..steps {
        // Sizes of gradients differ by tensor, row and column.
        let gradients: Vec<Option<Vec<f64>>> = (sizes.iter().enumerate())
            .map(|(k, &len)| {
                let draws = uniform(seed ^ (n * 10 + k as u64 + 1) << 20, len + 1);
                let row = reference.tensors[k].row;
                let size = |i: usize| (1.0 + (i / row % 3) as f64) * (0.1 + (i % row % 4) as f64);
                let scale = grad_size * 10f64.powi(k as i32 - 2);
                let gradient = (0..len).map(|i| scale * size(i) * (draws[i] + 0.3)).collect();
                (k == 0 || draws[len] < 0.7).then_some(gradient)
            })
            .collect();
        let given: Vec<Option<Owned>> = gradients.iter().map(|g| g.clone().map(Owned::F64)).collect();
        let given: Vec<GradRef<'_>> =
            given.iter().map(|g| g.as_ref().map_or(GradRef::Missing, Owned::grad)).collect();
        let before = values.clone();
        let loss = losses.at(seed, n);
        let report = optimizer.step(&mut params(&mut values), &given, &StepInput::new(loss)).unwrap();
        prop_assert_eq!(report.outcome, Outcome::Applied);
        prop_assert!(max_step_size.is_none_or(|cap| report.step_size <= cap));
        let product = report.learning_rate * report.sigma_norm;
        prop_assert!((product - report.step_size).abs() <= 1e-15 * product);
        let expected = reference.step(loss, &gradients, &before, &options);
        let trust = reference.trust();
        prop_assert!((report.trust / trust - 1.0).abs() < 1e-14, "step {n}: {} {trust}", report.trust);
        let tolerance =
            if reference.tensors.iter().any(|shape| shape.columns) { 2f64.powi(-23) } else { 1e-11 };
        for k in 0..sizes.len() {
            if expected[k].is_empty() {
                prop_assert!(values[k].bits() == before[k].bits());
                continue;
            }
            let largest = expected[k].iter().fold(0.0, |m: f64, x| m.max(x.abs()));
            let before = before[k].to_f64();
            for ((value, before), change) in values[k].to_f64().into_iter().zip(before).zip(&expected[k]) {
                let error = (value - (before + change)).abs();
                let allowed = tolerance * largest + 1e-15 * value.abs();
                prop_assert!(error <= allowed, "step {n}, tensor {k}: {error:e} > {allowed:e}");
            }
        }
    }
    Ok(())
}

/// One tensor of each format with gradients of each format.
fn mixture(seed: u64) -> Vec<Owned> {
    let sizes = [0, 1, 33, 4097, 70_000, 8192, 0, 1025];
    let format = |k: usize| DTYPES[(k + (seed as usize) * (k / 4)) % 4];
    (0..8).map(|k| Owned::from_f64(format(k), &uniform(seed + 20 * k as u64, sizes[k]))).collect()
}

/// Steps with gradients of different sizes, so that some variances are at their bounds, and losses whose
/// trend changes, so that trust does.
fn run(optimizer: &mut Optimizer, values: &mut [Owned], steps: std::ops::Range<u64>) {
    for n in steps {
        let gradient: Vec<Owned> = (mixture(n).iter().enumerate())
            .map(|(k, g)| {
                let scale = [1.0, 0.03, 4.0, 0.25][k % 4];
                Owned::from_f64(g.dtype(), &g.to_f64().iter().map(|x| scale * x).collect::<Vec<_>>())
            })
            .collect();
        let trend = if n < 40 { -0.02 } else { 0.01 } * n as f64;
        let report = step(optimizer, values, &gradient, 2.0 + trend + 0.1 * uniform(n, 1)[0]);
        assert_eq!(report.outcome, Outcome::Applied);
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let run_on = |threads| {
        rfdescent::set_threads(threads);
        let mut values = mixture(0);
        let options = Options { stochastic_rounding: Some(3), ..options([Group::default(); 2]) };
        let mut optimizer = Optimizer::new(Adaptive::default(), options, specs(&values)).unwrap();
        run(&mut optimizer, &mut values, 0..20);
        bits(&values)
    };
    let one = run_on(1);
    assert!(run_on(2) == one && run_on(5) == one);
}

/// The logarithm of a cost changes by a constant when the cost is scaled, so nothing else may. Powers of two
/// change no bit.
#[test]
fn scaled_losses_and_scaled_gradients_change_no_bit() {
    let sizes = [5000, 33, 1];
    let run = |loss_factor: f64, grad_scale: f64| {
        let mut values: Vec<Owned> = sizes.iter().map(|&n| Owned::F32(vec![0.5; n])).collect();
        let mut optimizer = optimizer(Adaptive::default(), &values);
        for n in 0..40 {
            let gradient: Vec<Owned> = (0..3)
                .map(|k| {
                    let g = uniform(n * 3 + k, sizes[k as usize]);
                    Owned::from_f64(
                        DType::F32,
                        &g.iter()
                            .map(|x| f64::from(*x as f32) * loss_factor * grad_scale)
                            .collect::<Vec<_>>(),
                    )
                })
                .collect();
            let loss = loss_factor * (2.0 + uniform(n, 1)[0]);
            let input = StepInput { grad_scale, ..StepInput::new(loss) };
            let report = optimizer.step(&mut params(&mut values), &grads(&gradient), &input).unwrap();
            assert_eq!(report.outcome, Outcome::Applied);
        }
        bits(&values)
    };
    let plain = run(1.0, 1.0);
    assert!(run(4.0, 1.0) == plain);
    assert!(run(2f64.powi(-20), 1.0) == plain);
    assert!(run(1.0, 65536.0) == plain);
}

#[test]
fn every_reason_to_skip_leaves_everything_as_it_was() {
    let mut values = mixture(0);
    let adaptive = Adaptive { loss_bound: Some(0.0), ..Adaptive::default() };
    let mut optimizer = optimizer(adaptive, &values);
    run(&mut optimizer, &mut values, 0..17);
    let (before, state) = (bits(&values), optimizer.state_to_bytes().unwrap());
    let good = mixture(1);
    let with = |value: f64| {
        let mut gradient = mixture(1);
        gradient[2] = Owned::F64(vec![value; 33]);
        gradient
    };
    let zero: Vec<Owned> =
        good.iter().map(|g| Owned::from_f64(g.dtype(), &vec![0.0; g.to_f64().len()])).collect();
    let cases = [
        (good.clone(), f64::NAN, 0.0, SkipReason::NonFiniteLoss),
        (good.clone(), f64::INFINITY, 0.0, SkipReason::NonFiniteLoss),
        (good.clone(), -1e-9, 0.0, SkipReason::LossBelowBound),
        (good.clone(), 1.0, 1.0, SkipReason::FoundInf),
        (with(f64::NAN), 1.0, 0.0, SkipReason::NonFiniteGradient),
        (with(f64::INFINITY), 1.0, 0.0, SkipReason::NonFiniteGradient),
        (zero, 1.0, 0.0, SkipReason::ZeroGradient),
        // beyond f32, in which velocities are kept; beyond the range of squares
        (with(1e39), 1.0, 0.0, SkipReason::OutOfRange),
        (with(1e200), 1.0, 0.0, SkipReason::OutOfRange),
    ];
    for (skipped, (gradient, loss, found_inf, reason)) in cases.into_iter().enumerate() {
        let input = StepInput { found_inf, ..StepInput::new(loss) };
        let report = optimizer.step(&mut params(&mut values), &grads(&gradient), &input).unwrap();
        assert_eq!(report.outcome, Outcome::Skipped(reason));
        assert_eq!((report.applied_steps, report.skipped_steps), (17, skipped as u64 + 1));
        assert_eq!((report.step_size, report.learning_rate, report.trust), (0.0, 0.0, 0.0));
        assert_eq!(report.limit, Limit::None);
        assert!(bits(&values) == before, "{reason:?}");
    }
    // But for the count of skipped steps the state is what it was: loaded, it goes on to the same bits.
    let mut other = self::optimizer(adaptive, &values);
    other.load_state_from_bytes(&state).unwrap();
    let mut copy = values.clone();
    run(&mut optimizer, &mut values, 17..40);
    run(&mut other, &mut copy, 17..40);
    assert!(bits(&values) == bits(&copy));
}

/// What is remembered stays finite, or a saved state could not be read: also where a loss is too large to be
/// squared, and where a tensor's variance overflows that does not count in the norm.
#[test]
fn what_is_remembered_stays_finite() {
    let mut values = vec![Owned::F32(vec![1.0; 3]), Owned::F64(vec![1.0; 3])];
    let mut specs = specs(&values);
    specs[1].counts_in_norm = false;
    let mut optimizer = Optimizer::new(Adaptive::default(), options([Group::default(); 2]), specs).unwrap();
    let gradient = |x: f64| [Owned::F32(vec![1.0; 3]), Owned::F64(vec![x; 3])];
    // one less than make a large loss count as less
    for _ in 0..9 {
        step(&mut optimizer, &mut values, &gradient(1.0), 1.0);
    }
    let report = step(&mut optimizer, &mut values, &gradient(1.0), 1e200);
    assert_eq!(report.outcome, Outcome::Skipped(SkipReason::OutOfRange));
    let input = StepInput { grad_scale: 1e-30, ..StepInput::new(1.0) };
    let report = optimizer.step(&mut params(&mut values), &grads(&gradient(1e130)), &input).unwrap();
    assert_eq!(report.outcome, Outcome::Skipped(SkipReason::OutOfRange));
    assert_eq!(report.applied_steps, 9);
    let state = optimizer.state_to_bytes().unwrap();
    optimizer.load_state_from_bytes(&state).unwrap();
}

#[test]
fn tiny_f64_gradients_are_refused_rather_than_lost() {
    let mut values = vec![Owned::F64(vec![1.0; 10])];
    let mut optimizer = optimizer(Adaptive::default(), &values);
    let report = step(&mut optimizer, &mut values, &[Owned::F64(vec![1e-200; 10])], 1.0);
    assert_eq!(report.outcome, Outcome::Skipped(SkipReason::OutOfRange));
}

#[test]
fn a_saved_state_continues_to_the_same_bits() {
    for (master_weights, averaging) in [(false, 0.9), (true, 0.9), (true, 0.0)] {
        let adaptive = Adaptive { averaging, ..Adaptive::default() };
        let options = Options { master_weights, ..options([Group::default(); 2]) };
        let mut values = mixture(0);
        let mut whole = Optimizer::new(adaptive, options.clone(), specs(&values)).unwrap();
        // stops within a window, after some
        run(&mut whole, &mut values, 0..43);
        let mut copy = values.clone();
        let mut second = Optimizer::new(adaptive, options, specs(&values)).unwrap();
        second.load_state_from_bytes(&whole.state_to_bytes().unwrap()).unwrap();
        run(&mut whole, &mut values, 43..60);
        run(&mut second, &mut copy, 43..60);
        assert!(bits(&values) == bits(&copy));
    }
}

#[test]
fn a_state_of_the_other_method_is_refused() {
    let values = mixture(0);
    let mut fitted = Optimizer::new(moving(0.9), options([Group::default(); 2]), specs(&values)).unwrap();
    let mut adaptive = optimizer(Adaptive::default(), &values);
    let message = |error: rfdescent::Result<()>| error.unwrap_err().to_string();
    let (of_fitted, of_adaptive) = (fitted.state_to_bytes().unwrap(), adaptive.state_to_bytes().unwrap());
    assert!(message(adaptive.load_state_from_bytes(&of_fitted)).contains("by the fitted method"));
    assert!(message(fitted.load_state_from_bytes(&of_adaptive)).contains("by the adaptive method"));
}

/// The velocity holds an average with another decay: its size would be taken wrongly.
#[test]
fn a_state_of_another_averaging_or_with_impossible_values_is_refused() {
    let mut values = mixture(0);
    let mut saved = optimizer(Adaptive::default(), &values);
    run(&mut saved, &mut values, 0..5);
    let state = saved.state_to_bytes().unwrap();
    let mut other = optimizer(Adaptive { averaging: 0.5, ..Adaptive::default() }, &values);
    let text = other.load_state_from_bytes(&state).unwrap_err().to_string();
    assert!(text.contains("averaging 0.85") && text.contains("0.5"), "{text}");

    // Edited in place, to a text of the same length.
    let edited = |from: &str, to: &str| {
        let at = state.windows(from.len()).position(|bytes| bytes == from.as_bytes()).unwrap();
        let mut bytes = state.clone();
        bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
        bytes
    };
    for (from, to) in [
        (r#"\"trust\":1.0"#, r#"\"trust\":-10"#),
        (r#"\"trust\":1.0"#, r#"\"trust\":4.1"#),
        (r#"\"below\":0.0"#, r#"\"below\":0.5"#),
        (r#"\"high\":0.0"#, r#"\"high\":3.5"#),
        (r#"\"steps\":5.0"#, r#"\"steps\":-10"#),
        (r#"\"steps\":5.0"#, r#"\"steps\":1e9"#),
        (r#"\"windows\":0.0"#, r#"\"windows\":-10"#),
    ] {
        let text = saved.load_state_from_bytes(&edited(from, to)).unwrap_err().to_string();
        assert!(text.contains("`history`") && text.contains("domain"), "{text}");
    }
    saved.load_state_from_bytes(&state).unwrap();
}

/// A tensor that gets no gradient for a while takes no part: its average and its variance go on where they
/// were.
#[test]
fn missing_gradients_leave_their_tensor_out() {
    let mut values = vec![Owned::F64(vec![0.0; 3]), Owned::F64(vec![0.0; 2])];
    let mut alone = vec![values[0].clone()];
    let mut both = optimizer(Adaptive::default(), &values);
    let mut single = optimizer(Adaptive::default(), &alone);
    for n in 0..20 {
        let gradient = Owned::F64(uniform(n, 3));
        let grads = [gradient.grad(), GradRef::Missing];
        both.step(&mut params(&mut values), &grads, &StepInput::new(1.0)).unwrap();
        step(&mut single, &mut alone, std::slice::from_ref(&gradient), 1.0);
    }
    assert!(values[0].bits() == alone[0].bits());
    assert_eq!(values[1].to_f64(), [0.0; 2]);
    // Its first gradient counts in full, as its averages have only that one: vectors have the length scale
    // 0.1.
    let report = step(&mut both, &mut values, &[Owned::F64(vec![0.0; 3]), Owned::F64(vec![2.0; 2])], 1.0);
    let expected = -report.learning_rate * 0.1;
    values[1].to_f64().iter().for_each(|moved| assert!((moved / expected - 1.0).abs() < 1e-14, "{moved}"));
}

/// By hand: the first step moves a row by its length scale times r, whatever its gradient's size. The next
/// one knows the mean over the tensor, and what the columns have shown.
#[test]
fn the_first_two_steps_of_a_matrix() {
    let mut values = vec![Owned::F64(vec![0.4; 6])];
    let specs = vec![TensorSpec::new("w", &[3, 2], DType::F64)];
    let adaptive = Adaptive { averaging: 0.0, ..Adaptive::default() };
    let mut optimizer = Optimizer::new(adaptive, Options::default(), specs).unwrap();
    let gradient = [Owned::F64(vec![3.0, 4.0, 0.0, 0.0, 0.3, 0.4])];
    let length = (0.1 * 0.4_f64).sqrt();
    let mut rate = 0.03 / 128.0;
    let near = |values: &Owned, expected: [f64; 6], tolerance: f64| {
        for (value, expected) in values.to_f64().iter().zip(expected) {
            assert!((value - expected).abs() < tolerance, "{value} {expected}");
        }
    };
    let report = step(&mut optimizer, &mut values, &gradient, 100.0);
    assert!((report.learning_rate / rate - 1.0).abs() < 1e-15);
    assert_eq!((report.trust, report.limit), (1.0, Limit::Rate));
    // The root mean squares of the rows are √12.5, 0, √0.125; N² is Σ ℓ·g²/√v.
    let scale = |g: f64, v: f64| length * g / f64::sqrt(v);
    let moves = [scale(3.0, 12.5), scale(4.0, 12.5), 0.0, 0.0, scale(0.3, 0.125), scale(0.4, 0.125)];
    let moved = moves.map(|x| 0.4 - rate * x);
    near(&values[0], moved, 1e-15);
    let squared = length * (25.0 / 12.5_f64.sqrt() + 0.25 / 0.125_f64.sqrt());
    assert!((report.sigma_norm / squared.sqrt() - 1.0).abs() < 1e-15);
    // With the same gradient variances stay as they are, and 0.03 of their mean comes to those of rows and of
    // columns.
    rate *= 2.0;
    step(&mut optimizer, &mut values, &gradient, 100.0);
    let mean = 25.25 / 6.0;
    let columns = [9.09, 16.16].map(|sum: f64| (mean / (sum / 3.0 + 0.03 * mean)).sqrt());
    let scale = |g: f64, v: f64, column: usize| length * g / f64::sqrt(v + 0.03 * mean) * columns[column];
    let moves =
        [scale(3.0, 12.5, 0), scale(4.0, 12.5, 1), 0.0, 0.0, scale(0.3, 0.125, 0), scale(0.4, 0.125, 1)];
    near(&values[0], std::array::from_fn(|i| moved[i] - rate * moves[i]), 1e-10);
}

/// What a report says of the step: the limit that held, and trust that windows have changed.
#[test]
fn reports_say_what_limits_the_step() {
    let gradient = [Owned::F32(uniform(1, 64).iter().map(|&x| x as f32).collect())];
    let run = |options: Options, loss: &dyn Fn(u64) -> f64| {
        let mut values = vec![Owned::F32(vec![0.5; 64])];
        let specs = vec![TensorSpec::new("w", &[8, 8], DType::F32)];
        let mut optimizer = Optimizer::new(Adaptive::default(), options, specs).unwrap();
        (0..48).map(|n| step(&mut optimizer, &mut values, &gradient, loss(n))).collect::<Vec<_>>()
    };
    let limits = |reports: &[StepReport]| reports.iter().map(|report| report.limit).collect::<Vec<_>>();
    // No step promises more than half of a large loss, nor less than that of a tiny one.
    let large = run(Options::default(), &|n| 1e3 - n as f64);
    assert_eq!(limits(&large), [Limit::Rate; 48]);
    let tiny = run(Options::default(), &|n| 1e-3 - 1e-6 * n as f64);
    assert_eq!(limits(&tiny), [Limit::Loss; 48]);
    let promise = |report: &StepReport| report.step_size * report.sigma_norm;
    assert!((promise(&tiny[7]) / (0.5 * 1e-3) - 1.0).abs() < 0.01);
    let capped = run(Options { max_step_size: Some(1e-6), ..Options::default() }, &|n| 1e3 - n as f64);
    assert_eq!(limits(&capped), [Limit::Size; 48]);
    assert!(capped.iter().all(|report| report.step_size == 1e-6));
    // Two windows of 16 make the first verdict.
    let trust = |reports: &[StepReport]| reports.iter().map(|report| report.trust).collect::<Vec<_>>();
    assert_eq!(trust(&large)[30..=47], [&[1.0][..], &[1.5; 16], &[1.5 * 1.5]].concat());
    let rising = run(Options::default(), &|n| 1.0 + (n / 16) as f64);
    // Three losses above those of the window before are an alarm, of which there is one in a window.
    let expected = [[1.0; 18].as_slice(), &[0.5; 13], &[0.25; 3], &[0.125; 13], &[0.0625]].concat();
    assert_eq!(trust(&rising), expected);
}

/// A row that gets no gradient stays where it is, as those of an embedding do, and so does one that never had
/// any.
#[test]
fn rows_without_gradient_rest() {
    let mut values = vec![Owned::F32(vec![0.5; 40])];
    let specs = vec![TensorSpec::new("embedding", &[10, 4], DType::F32)];
    let adaptive = Adaptive { averaging: 0.0, ..Adaptive::default() };
    let mut optimizer = Optimizer::new(adaptive, Options::default(), specs).unwrap();
    for n in 0..40 {
        let mut gradient = vec![0.0_f32; 40];
        let row = 3 * n as usize % 9;
        gradient[4 * row..4 * row + 4].iter_mut().zip(uniform(n, 4)).for_each(|(g, x)| *g = x as f32);
        let before = values[0].to_f64();
        step(&mut optimizer, &mut values, &[Owned::F32(gradient)], 1.0);
        for (i, (after, before)) in values[0].to_f64().iter().zip(before).enumerate() {
            assert_eq!(*after != before, i / 4 == row, "step {n}, element {i}");
        }
    }
}

/// Rows of so many elements are what a shape with that last dimension says.
#[test]
fn rows_may_be_given() {
    let gradient = |n| [Owned::F32(uniform(n, 96).iter().map(|&x| x as f32).collect())];
    let run = |spec: TensorSpec| {
        let mut values = vec![Owned::F32(uniform(99, 96).iter().map(|&x| x as f32).collect())];
        let mut optimizer = Optimizer::new(Adaptive::default(), Options::default(), vec![spec]).unwrap();
        for n in 0..20 {
            step(&mut optimizer, &mut values, &gradient(n), 1.0);
        }
        bits(&values)
    };
    let spec = |shape: &[usize]| TensorSpec::new("w", shape, DType::F32);
    let plain = run(spec(&[12, 8]));
    assert!(run(spec(&[96]).with_row(8)) == plain);
    assert!(run(spec(&[4, 3, 8]).with_row(8)) == plain);
    assert!(run(spec(&[12, 4, 2])) == plain);
    assert!(run(spec(&[96])) != plain && run(spec(&[4, 24])) != plain);
    let make = |spec| Optimizer::new(Adaptive::default(), Options::default(), vec![spec]);
    for (row, part) in [(0, "at least 1"), (97, "96 elements in all"), (usize::MAX, "96 elements in all")] {
        let error = make(spec(&[12, 8]).with_row(row)).unwrap_err().to_string();
        assert!(
            error.contains("`w`") && error.contains(&format!("rows of {row} ")) && error.contains(part),
            "{error}"
        );
    }
    make(spec(&[12, 8]).with_row(96)).unwrap();
    make(spec(&[0, 8]).with_row(8)).unwrap();
}

/// Length scales are those of the parameters at the first step, and stay.
#[test]
fn length_scales_are_those_of_the_first_step() {
    let first = |size: f64| {
        let mut values = vec![Owned::F64(vec![size; 4]), Owned::F64(vec![size; 2])];
        let specs = vec![TensorSpec::new("w", &[2, 2], DType::F64), TensorSpec::new("b", &[2], DType::F64)];
        let mut optimizer = Optimizer::new(Adaptive::default(), Options::default(), specs).unwrap();
        let gradient = [Owned::F64(vec![1.0; 4]), Owned::F64(vec![1.0; 2])];
        let report = step(&mut optimizer, &mut values, &gradient, 100.0);
        let moved = |k: usize| (size - values[k].to_f64()[0]) / report.learning_rate;
        (moved(0), moved(1))
    };
    // Matrices count as at least 0.01, vectors as 0.1.
    for (size, of_matrix, of_vector) in
        [(4.0, 0.4, 0.4), (0.2, 0.02, 0.02), (0.02, 0.002, 0.01), (1e-3, 0.001, 0.01), (0.0, 0.001, 0.01)]
    {
        let (matrix, vector) = first(size);
        let near = |length: f64, squared: f64| (length * length / squared - 1.0).abs() < 1e-10;
        assert!(near(matrix, of_matrix) && near(vector, of_vector), "{matrix} {vector}");
    }
}

#[test]
fn norm_lock_and_weight_decay_work_along_the_average() {
    let groups =
        [Group { norm_lock: true, ..Group::default() }, Group { weight_decay: 0.5, ..Group::default() }];
    let mut values = vec![Owned::F64(uniform(1, 50)), Owned::F64(vec![3.0; 4])];
    let mut optimizer = Optimizer::new(Adaptive::default(), options(groups), specs(&values)).unwrap();
    let norm = |t: &Owned| t.to_f64().iter().map(|x| x * x).sum::<f64>().sqrt();
    let locked = norm(&values[0]);
    let mut expected = 3.0;
    for n in 0..20 {
        let report =
            step(&mut optimizer, &mut values, &[Owned::F64(uniform(n, 50)), Owned::F64(vec![0.0; 4])], 1.0);
        assert!((norm(&values[0]) / locked - 1.0).abs() < 1e-14);
        expected *= 1.0 - 0.1 * 0.5 * report.learning_rate;
        assert!((values[1].to_f64()[0] / expected - 1.0).abs() < 1e-14);
    }
}

#[test]
fn settings_outside_their_domain_or_of_another_method_are_refused_by_name() {
    let new = |adaptive: Adaptive, options: Options| {
        let specs = vec![TensorSpec::new("w", &[2], DType::F32)];
        Optimizer::new(adaptive, options, specs).map(|_| ()).map_err(|e| e.to_string())
    };
    for averaging in [-0.1, 1.0, f64::NAN] {
        let adaptive = Adaptive { averaging, ..Adaptive::default() };
        assert!(new(adaptive, Options::default()).unwrap_err().contains("averaging"));
    }
    for loss_bound in [f64::NAN, f64::NEG_INFINITY] {
        let adaptive = Adaptive { loss_bound: Some(loss_bound), ..Adaptive::default() };
        assert!(new(adaptive, Options::default()).unwrap_err().contains("loss_bound"));
    }
    let mut optimizer = optimizer(Adaptive::default(), &[Owned::F32(vec![0.0; 2])]);
    for (name, method) in [
        ("adaptive method", moving(0.0).into()),
        ("averaging", Method::from(Adaptive { averaging: 0.5, ..Adaptive::default() })),
        ("loss_bound", Adaptive { loss_bound: Some(-1.0), ..Adaptive::default() }.into()),
    ] {
        let message = optimizer.set_method(method).unwrap_err().to_string();
        assert!(message.contains(name), "{message}");
    }
    optimizer.set_method(Adaptive::default()).unwrap();
}

/// No value was computed by hand: recorded, so that another machine, another backend and a later release give
/// the same bits.
#[test]
fn bits_of_a_run_are_fixed() {
    let mut values = mixture(0);
    let mut optimizer = optimizer(Adaptive::default(), &values);
    run(&mut optimizer, &mut values, 0..80);
    let hash = bits(&values)
        .concat()
        .iter()
        .fold(0xCBF2_9CE4_8422_2325_u64, |hash, &word| (hash ^ word).wrapping_mul(0x0100_0000_01B3));
    assert_eq!(format!("{hash:016x}"), "ddf6f0d38c3a8561");
}
