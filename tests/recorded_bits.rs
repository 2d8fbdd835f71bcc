//! Bits of many short runs, of fits and of step sizes, as they were recorded. Whatever is moved or renamed,
//! these stay.
//!
//! `RFDESCENT_RECORD=1 cargo test --release --test recorded_bits` writes `tests/data/recorded_bits.txt` anew.
//! Do that only when bits are meant to change, and say in the commit which ones and why. Runs that are added
//! here are recorded by the same way: then all other lines have to stay.
//!
//! Conservative steps use exponentials and have other last bits on other machines: their step sizes are
//! recorded as numbers, which have to come out within 1e-9 of themselves (`tests/covariance_golden.rs` says
//! why so much).

mod common;
mod recorded;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

use common::{DTYPES, uniform};
use recorded::*;
use rfdescent::DType;
use rfdescent::covariance::{Family, Model, Observation, StepMode, StepRule};
use rfdescent::estimation::{Sample, SampleStatistics, TensorDims, fit, fit_tensors};

const CONSERVATIVE: f64 = 1e-9;
const MODES: [StepMode; 3] = [StepMode::Rfd, StepMode::ARfd, StepMode::ClippedARfd];

/// Two rational quadratics: β = 1 is where its formulas are simplest.
const FAMILIES: [Family; 5] = [
    Family::SquaredExponential,
    Family::RationalQuadratic { beta: 1.0 },
    Family::RationalQuadratic { beta: 0.3 },
    Family::Matern32,
    Family::Matern52,
];

fn tensor(dtype: DType, grad: DType, len: usize, group: usize) -> Tensor {
    Tensor { dtype, grad, len, group, counts_in_norm: true, offset: 0, size: 1.0, row: None }
}

fn matrix(dtype: DType, grad: DType, len: usize, group: usize, row: usize) -> Tensor {
    Tensor { row: Some(row), ..tensor(dtype, grad, len, group) }
}

/// Formats and sizes of all kinds, among them no element and one, and a last row that is shorter.
fn mixed() -> Vec<Tensor> {
    use DType::{BF16, F16, F32, F64};
    vec![
        matrix(F32, F32, 33, 0, 8),
        tensor(F64, F64, 7, 1),
        matrix(BF16, F32, 40, 0, 5),
        tensor(F16, BF16, 1, 1),
        tensor(F32, F16, 0, 0),
        matrix(F32, F64, 5, 1, 1),
    ]
}

fn fitted(family: Family, mode: StepMode, inv_batch_size: f64, momentum: [f64; 2]) -> Kind {
    Kind::Fitted { family, mode, conservatism: 0.0, inv_batch_size, momentum: momentum.to_vec() }
}

fn plain(momentum: f64) -> Kind {
    fitted(Family::SquaredExponential, StepMode::Rfd, 0.0, [momentum; 2])
}

fn adaptive(averaging: f64, loss_bound: Option<f64>) -> Kind {
    Kind::Adaptive { averaging, loss_bound }
}

fn run(name: String, kind: Kind, tensors: Vec<Tensor>) -> Run {
    let seed = name.bytes().fold(17_u64, |seed, byte| seed.wrapping_mul(131).wrapping_add(u64::from(byte)));
    Run {
        setup: Setup {
            kind,
            moments: moments(tensors.iter().map(|t| t.len).sum()),
            groups: vec![GroupSetup::default(); 2],
            multiplier: 1.0,
            max_step_size: None,
            stochastic_rounding: None,
            master_weights: false,
        },
        name,
        seed: seed >> 16,
        tensors,
        steps: 8,
        size: 0.25,
        coupling: 0.5,
        split: false,
        events: Vec::new(),
    }
}

/// The methods, each with all of its settings.
fn methods() -> Vec<Run> {
    let mut runs = Vec::new();
    for family in FAMILIES {
        for mode in MODES {
            for inv_batch_size in [0.0, 1.0 / 128.0] {
                for momentum in [[0.0; 2], [0.9; 2], [0.5, 0.0]] {
                    let [first, second] = momentum;
                    let name = format!("fitted/{family}/{mode}/b{inv_batch_size}/m{first},{second}");
                    runs.push(run(name, fitted(family, mode, inv_batch_size, momentum), mixed()));
                }
            }
        }
    }
    for averaging in [0.9, 0.0, 0.5, 0.99] {
        for loss_bound in [None, Some(0.0), Some(-1.0), Some(1.6)] {
            let name = match loss_bound {
                None => format!("adaptive/a{averaging}"),
                Some(bound) => format!("adaptive/a{averaging}/l{bound}"),
            };
            // Windows of 16 steps decide from the second on.
            runs.push(Run { steps: 50, ..run(name, adaptive(averaging, loss_bound), mixed()) });
        }
    }
    // Trust in the model falls to its smallest value and comes back; losses that count as less; no bound.
    type Losses = fn(usize) -> f64;
    let losses: [(&str, Losses); 7] = [
        ("rising", |step| 2.0 + step as f64 / 64.0),
        ("flat", |step| 2.0 + (step % 3) as f64 / 16.0),
        ("back", |step| if step < 80 { 2.0 + step as f64 / 32.0 } else { 8.0 - step as f64 / 32.0 }),
        ("jumping", |step| if step / 16 % 3 == 1 { 7.0 } else { 3.0 - step as f64 / 128.0 }),
        ("spikes", |step| if step % 29 == 5 { 1e5 } else { 3.0 - step as f64 / 128.0 }),
        ("below-0", |step| 1.0 - step as f64 / 32.0),
        ("below-0-spikes", |step| if step % 41 == 40 { 1e5 } else { (step % 7) as f64 / 8.0 - 0.5 }),
    ];
    for (name, loss) in losses {
        for averaging in [0.9, 0.0] {
            let name = format!("adaptive/{name}/a{averaging}");
            let mut run = Run { steps: 200, ..run(name, adaptive(averaging, None), mixed()) };
            run.events = (0..run.steps).map(|step| (step, Event::Loss(loss(step)))).collect();
            run.events.extend([(50, Event::Reload), (101, Event::Reload)]);
            runs.push(run);
        }
    }
    // Gradients of different sizes; the bound that the loss sets.
    for averaging in [0.9, 0.0] {
        for (name, loss) in [("uneven", 2.0), ("uneven-small", 1e-3)] {
            let name = format!("adaptive/{name}/a{averaging}");
            let mut run = Run { steps: 20, ..run(name, adaptive(averaging, None), mixed()) };
            let sizes = [1.0, 1e-3, 0.02, 5.0, 1.0, 0.3];
            run.tensors.iter_mut().zip(sizes).for_each(|(tensor, size)| tensor.size = size);
            run.events = (0..run.steps).map(|step| (step, Event::Loss(loss))).collect();
            runs.push(run);
        }
    }
    // Rows of all lengths.
    for row in [1, 2, 3, 16, 17, 64, 65, 128, 257, 600, 1024, 2049, 4096, 4099, 5000] {
        let tensors = [DType::F32, DType::BF16, DType::F64].map(|dtype| matrix(dtype, dtype, 9000, 0, row));
        runs.push(run(format!("adaptive/rows/{row}"), adaptive(0.9, None), tensors.to_vec()));
    }
    runs
}

/// Parameters of each format with gradients of each, the halves also with what only they have.
fn formats() -> Vec<Run> {
    let kinds = [
        ("plain", plain(0.0)),
        ("momentum", plain(0.9)),
        ("adaptive", adaptive(0.9, None)),
        ("single", adaptive(0.0, None)),
    ];
    let mut runs = Vec::new();
    for dtype in DTYPES {
        for grad in DTYPES {
            for (kind_name, kind) in &kinds {
                let tensors = vec![
                    tensor(dtype, grad, 1, 0),
                    matrix(dtype, grad, 4097, 0, 241),
                    tensor(dtype, grad, 300, 0),
                ];
                let name = format!("formats/{dtype}/{grad}/{kind_name}");
                let base = run(name.clone(), kind.clone(), tensors);
                if matches!(dtype, DType::F16 | DType::BF16) {
                    let mut masters = Run { name: format!("{name}/masters"), ..base.clone() };
                    masters.setup.master_weights = true;
                    let mut stochastic = Run { name: format!("{name}/stochastic"), ..base.clone() };
                    stochastic.setup.stochastic_rounding = Some(0x1234_5678_9abc_def0);
                    stochastic.tensors[1].offset = 12_345;
                    runs.extend([masters, stochastic]);
                }
                runs.push(base);
            }
        }
    }
    runs
}

/// Tensors that several threads share, of whose chunks some tell of columns, and one of more than a segment
/// of the sum.
fn large() -> Vec<Run> {
    let mut runs = Vec::new();
    for (kind_name, kind) in
        [("plain", plain(0.0)), ("momentum", plain(0.9)), ("adaptive", adaptive(0.9, None))]
    {
        for (dtype, grad, len) in [
            (DType::F32, DType::F32, 131_073),
            (DType::F64, DType::F64, 140_000),
            (DType::F16, DType::F32, 150_001),
            (DType::BF16, DType::BF16, 200_000),
            (DType::F32, DType::F16, 1_050_000),
        ] {
            let mut tensors = mixed();
            tensors.push(matrix(dtype, grad, len, 1, 500));
            let name = format!("large/{dtype}/{len}/{kind_name}");
            let mut run = Run { steps: 3, ..run(name, kind.clone(), tensors) };
            run.setup.groups[1] = GroupSetup { norm_lock: true, weight_decay: 0.1, ..GroupSetup::default() };
            run.setup.stochastic_rounding = Some(5);
            runs.push(run);
        }
    }
    runs
}

/// Each option and each kind of step by itself.
fn options() -> Vec<Run> {
    type Change = (&'static str, fn(&mut Run));
    let changes: [Change; 24] = [
        ("multipliers", |run| {
            run.setup.multiplier = 0.7;
            run.setup.groups[0].multiplier = 0.3;
            run.setup.groups[1].multiplier = 0.0;
        }),
        ("factors", |run| {
            run.setup.groups[0].length_scale_factor = 0.31;
            run.setup.groups[1].length_scale_factor = 2.7;
        }),
        ("decay", |run| {
            run.setup.groups[0].weight_decay = 0.1;
            run.setup.groups[1].weight_decay = 1e3;
        }),
        ("lock", |run| run.setup.groups[0].norm_lock = true),
        ("lock-masters", |run| {
            run.setup.groups.iter_mut().for_each(|group| group.norm_lock = true);
            run.setup.master_weights = true;
        }),
        ("masters", |run| run.setup.master_weights = true),
        ("stochastic", |run| run.setup.stochastic_rounding = Some(3)),
        ("cap", |run| run.setup.max_step_size = Some(0.01)),
        ("grad-scale", |run| {
            let scales = [1.0, 1024.0, 1e-3, 3.0];
            run.events = (0..8).map(|step| (step, Event::GradScale(scales[step % 4]))).collect();
        }),
        ("found-inf", |run| run.events = vec![(0, Event::FoundInf), (3, Event::FoundInf)]),
        ("loss", |run| {
            let losses = [f64::NAN, f64::INFINITY, -1.0, 1e300, 2.5, 0.0];
            run.events = losses.iter().enumerate().map(|(i, &loss)| (i + 1, Event::Loss(loss))).collect();
        }),
        ("zero-gradient", |run| run.events = vec![(2, Event::ZeroGradient), (3, Event::ZeroGradient)]),
        ("poisoned", |run| run.events = (0..6).map(|k| (k + 1, Event::Poisoned(k))).collect()),
        ("missing", |run| {
            run.events = (0..6).map(|k| (k, Event::Missing(k))).collect();
            run.events.extend((0..6).map(|k| (6, Event::Missing(k))));
        }),
        ("not-counted", |run| {
            run.tensors[0].counts_in_norm = false;
            run.tensors[3].counts_in_norm = false;
            run.events = vec![(3, Event::Poisoned(0)), (4, Event::Missing(0))];
        }),
        ("reload", |run| run.events = (0..8).map(|step| (step, Event::Reload)).collect()),
        ("changes", |run| {
            let mut setup = run.setup.clone();
            setup.multiplier = 0.5;
            setup.groups[0] = GroupSetup { length_scale_factor: 1.5, multiplier: 0.8, ..setup.groups[0] };
            setup.groups[1] = GroupSetup { norm_lock: true, weight_decay: 0.01, ..setup.groups[1] };
            let mut later = setup.clone();
            if let Kind::Fitted { inv_batch_size, momentum, .. } = &mut setup.kind {
                *inv_batch_size = 0.1;
                *momentum = vec![0.0, 0.8];
            }
            if let Kind::Fitted { momentum, .. } = &mut later.kind {
                *momentum = vec![0.25, 0.95];
            }
            run.events = vec![
                (2, Event::Change(setup)),
                (4, Event::Reload),
                (5, Event::Change(later)),
                (7, Event::Reload),
            ];
        }),
        ("split", |run| {
            run.split = true;
            run.tensors[1].counts_in_norm = false;
            run.setup.groups[1].length_scale_factor = 0.6;
            run.events = vec![(2, Event::FoundInf), (3, Event::Poisoned(1)), (4, Event::GradScale(64.0))];
        }),
        ("tiny", |run| run.size = 2f64.powi(-40)),
        ("huge", |run| run.size = 2f64.powi(40)),
        ("huge-f32", |run| run.size = 2f64.powi(120)),
        ("tiny-f64", |run| {
            run.size = 2f64.powi(-600);
            run.coupling = 0.0;
        }),
        ("huge-f64", |run| {
            run.size = 2f64.powi(600);
            run.tensors.iter_mut().for_each(|t| t.grad = DType::F64);
        }),
        ("everything", |run| {
            run.setup.multiplier = 0.9;
            run.setup.max_step_size = Some(0.05);
            run.setup.stochastic_rounding = Some(u64::MAX);
            run.setup.groups = vec![
                GroupSetup { length_scale_factor: 0.8, multiplier: 1.1, weight_decay: 0.01, norm_lock: true },
                GroupSetup { length_scale_factor: 1.7, multiplier: 0.6, weight_decay: 0.2, norm_lock: false },
            ];
            run.events = vec![(3, Event::GradScale(128.0)), (5, Event::Missing(2)), (6, Event::Reload)];
        }),
    ];
    let mut runs = Vec::new();
    for (kind_name, kind) in [
        ("plain", plain(0.0)),
        ("momentum", fitted(Family::Matern52, StepMode::Rfd, 0.01, [0.9; 2])),
        ("adaptive", adaptive(0.9, None)),
        ("single", adaptive(0.0, None)),
    ] {
        for (change_name, change) in &changes {
            if *change_name == "split" && matches!(kind, Kind::Adaptive { .. }) {
                continue;
            }
            let mut run = run(format!("options/{change_name}/{kind_name}"), kind.clone(), mixed());
            change(&mut run);
            runs.push(run);
        }
    }
    runs.push(run("options/no-tensors/plain".into(), plain(0.0), Vec::new()));
    runs.push(run("options/no-tensors/adaptive".into(), adaptive(0.9, None), Vec::new()));
    runs
}

/// Draws from a seed.
struct Draws(Vec<f64>);

impl Draws {
    fn unit(&mut self) -> f64 {
        (self.0.pop().unwrap() + 1.0) / 2.0
    }

    fn below(&mut self, count: usize) -> usize {
        (self.unit() * count as f64) as usize
    }

    fn chance(&mut self, share: f64) -> bool {
        self.unit() < share
    }

    fn of<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())].clone()
    }

    fn groups(&mut self, count: usize, lock: bool) -> Vec<GroupSetup> {
        (0..count)
            .map(|_| GroupSetup {
                length_scale_factor: self.of(&[1.0, 1.0, 0.4, 3.0]),
                multiplier: self.of(&[1.0, 1.0, 0.5]),
                weight_decay: self.of(&[0.0, 0.0, 0.05]),
                norm_lock: lock && self.chance(0.3),
            })
            .collect()
    }
}

/// Everything together, drawn.
fn drawn(index: u64) -> Run {
    let mut draws = Draws(uniform(9_000 + index, 400));
    let groups = 1 + draws.below(3);
    let kind = if draws.chance(0.6) {
        Kind::Fitted {
            family: draws.of(&FAMILIES),
            mode: draws.of(&MODES),
            conservatism: 0.0,
            inv_batch_size: draws.of(&[0.0, 1.0, 1.0 / 60.0]),
            momentum: (0..groups).map(|_| draws.of(&[0.0, 0.9, 0.3])).collect(),
        }
    } else {
        let averaging = draws.of(&[0.9, 0.0, 0.7]);
        adaptive(averaging, draws.of(&[None, None, Some(0.0), Some(-3.0), Some(2.2)]))
    };
    let tensors: Vec<Tensor> = (0..1 + draws.below(6))
        .map(|k| Tensor {
            dtype: draws.of(&DTYPES),
            grad: draws.of(&DTYPES),
            len: draws.of(&[0, 1, 2, 17, 256, 1023, 4096, 9000]),
            group: draws.below(groups),
            counts_in_norm: draws.chance(0.85),
            offset: if draws.chance(0.2) { draws.below(1 << 40) as u64 } else { 0 },
            size: 1.0,
            row: [None, Some(1), Some(9), Some(300)][(k + index as usize) % 4],
        })
        // No row is longer than its tensor.
        .map(|t| Tensor { row: t.row.map(|row| row.min(t.len.max(1))), ..t })
        .collect();
    let mut run = run(format!("drawn/{index}"), kind, tensors);
    run.steps = 8 + draws.below(5);
    run.size = draws.of(&[0.25, 0.25, 1.0, 1e-3, 20.0]);
    run.split = matches!(run.setup.kind, Kind::Fitted { .. }) && draws.chance(0.3);
    run.setup.groups = draws.groups(groups, !run.split);
    run.setup.multiplier = draws.of(&[1.0, 0.3]);
    run.setup.max_step_size = draws.of(&[None, None, Some(0.1), Some(1e-4)]);
    run.setup.stochastic_rounding = draws.of(&[None, Some(1), Some(index << 32)]);
    run.setup.master_weights = draws.chance(0.4);
    let mut setup = run.setup.clone();
    for step in 0..run.steps {
        if !draws.chance(0.4) {
            continue;
        }
        let event = match draws.below(9) {
            0 => Event::FoundInf,
            1 => Event::Loss(draws.of(&[f64::NAN, 2.5, 0.1, f64::NEG_INFINITY])),
            2 => Event::ZeroGradient,
            3 => Event::Poisoned(draws.below(run.tensors.len())),
            4 => Event::Missing(draws.below(run.tensors.len())),
            5 => Event::Reload,
            6 => Event::GradScale(draws.of(&[2.0, 1e-2, 65_536.0])),
            _ => {
                setup.multiplier = draws.of(&[1.0, 0.9]);
                setup.groups = draws.groups(groups, !run.split);
                if let Kind::Fitted { inv_batch_size, momentum, .. } = &mut setup.kind {
                    *inv_batch_size = draws.of(&[0.0, 0.02]);
                    *momentum = (0..groups).map(|_| draws.of(&[0.0, 0.9, 0.5])).collect();
                }
                Event::Change(setup.clone())
            }
        };
        run.events.push((step, event));
    }
    run
}

fn runs() -> Vec<Run> {
    let mut runs = [methods(), formats(), large(), options()].concat();
    runs.extend((0..120).map(drawn));
    runs
}

/// Step sizes of models on a grid, those without conservatism.
fn step_sizes() -> Vec<String> {
    let mut lines = Vec::new();
    for family in FAMILIES.into_iter().chain([1e-3, 50.0].map(|beta| Family::RationalQuadratic { beta })) {
        for (scale, dims) in [(1.0, 1_000), (1e-6, 10_000_000)] {
            let moments = rfdescent::Moments { variance: 0.01 * scale, ..moments(dims) };
            let model = Model::new(family, moments).unwrap();
            for mode in MODES {
                let rule = StepRule::new(mode, 0.0).unwrap();
                let mut hash = Hash::default();
                let mut last = 0.0;
                for inv_batch_size in [0.0, 0.01, 1.0] {
                    for below in [-1.0, 0.0, 1e-9, 1e-3, 0.1, 0.7, 2.5, 1e4] {
                        for grad_norm in [1e-12, 1e-4, 0.03, 1.0, 17.0, 1e5, 1e200] {
                            let observation =
                                Observation { loss: moments.mean - below, grad_norm, inv_batch_size };
                            let step = model.step(&observation, &rule).unwrap();
                            hash.number(step.step_size);
                            hash.number(step.theta);
                            last = step.step_size;
                        }
                    }
                }
                for limit in [-1.0, 0.0, 2.0] {
                    hash.number(model.asymptotic_learning_rate(limit, 0.01).unwrap());
                }
                let (length, plateau) = (model.length_scale(), model.plateau_step_size());
                lines.push(format!(
                    "step-sizes/{family}/{dims}/{mode} hash={} length_scale={length:?} plateau={plateau:?} \
                     last={last:?}",
                    hash.text()
                ));
            }
        }
    }
    lines
}

/// Fits to samples whose losses and squared norms spread as the moments say, but uniformly.
fn fits() -> Vec<String> {
    let mut lines = Vec::new();
    let sets: [(f64, f64, f64, f64, &[u64]); 4] = [
        (0.01, 0.9, 5.0, 300.0, &[20, 50, 225, 1000, 4000]),
        (0.3, 0.1, 1e3, 1.0, &[1, 2, 3, 500]),
        (1e-7, 1e-4, 1e-3, 0.4, &[32, 4096]),
        (4e9, 3e11, 2e20, 7e22, &[10, 25, 60, 200, 900, 5000, 20_000]),
    ];
    for (index, (variance, noise, grad, grad_noise, sizes)) in sets.into_iter().enumerate() {
        let mut statistics = SampleStatistics::new();
        let shares = [("a", 0.1), ("b", 0.6), ("c", 0.3)];
        for &batch_size in sizes {
            let inverse = 1.0 / batch_size as f64;
            let draws = uniform(500 + index as u64 + (batch_size << 8), 120);
            for pair in draws.as_chunks::<4>().0 {
                // Uniform in [−√3, √3) has variance 1.
                let loss = 3.0 + (3.0 * (variance + noise * inverse)).sqrt() * pair[0];
                let squares: Vec<f64> = (shares.iter().enumerate())
                    .map(|(k, (_, share))| share * (grad + grad_noise * inverse) * (1.0 + 0.1 * pair[k + 1]))
                    .collect();
                let sample = Sample { loss, sq_grad_norm: squares.iter().sum(), batch_size };
                let names = shares.iter().map(|(name, _)| *name);
                statistics.push_tensors(&sample, names.zip(squares)).unwrap();
            }
        }
        match fit(&statistics) {
            Ok(fit) => {
                let numbers = [
                    fit.mean,
                    fit.variance,
                    fit.noise_variance,
                    fit.grad_variance,
                    fit.noise_grad_variance,
                    fit.relative_std,
                ];
                let mut line = format!("fits/{index} bits=");
                for number in numbers {
                    write!(line, "{:016x},", number.to_bits()).unwrap();
                }
                let (loss, grad) = (fit.iterations_loss, fit.iterations_grad);
                write!(line, " numbers={numbers:?} iterations={loss},{grad}").unwrap();
                lines.push(line.replace(", ", ","));
            }
            Err(error) => lines.push(format!("fits/{index} {error}")),
        }
        let tensors = [("a", 50), ("b", 1000), ("c", 7)]
            .map(|(name, dims)| TensorDims { name: name.into(), dims })
            .to_vec();
        let fitted = fit_tensors(&statistics, &tensors).unwrap();
        let mut line = format!(
            "fits/{index}/tensors all={:016x},{:016x}",
            fitted.grad_variance.to_bits(),
            fitted.noise_grad_variance.to_bits()
        );
        for tensor in &fitted.tensors {
            let factor = tensor.length_scale_factor;
            write!(line, " {}={:016x} ({factor:?}, {})", tensor.name, factor.to_bits(), tensor.raised)
                .unwrap();
        }
        lines.push(line);
    }
    lines
}

/// Conservative steps, as numbers.
fn conservative() -> Vec<(String, Vec<f64>)> {
    let mut lines = Vec::new();
    for family in FAMILIES {
        let model = Model::new(family, moments(1_000)).unwrap();
        for conservatism in [0.1, 0.5, 0.95] {
            let rule = StepRule::new(StepMode::Rfd, conservatism).unwrap();
            let grid =
                [(2.6, 1.0, 0.0), (2.5, 1.0, 0.01), (2.4, 0.5, 0.01), (2.0, 20.0, 0.0), (1.0, 3.0, 0.1)];
            let steps = grid.map(|(loss, grad_norm, inv_batch_size)| {
                model.step(&Observation { loss, grad_norm, inv_batch_size }, &rule).unwrap().step_size
            });
            lines.push((format!("conservative/{family}/{conservatism}"), steps.to_vec()));
        }
        // f64 alone, and gradients that do not depend on the steps before: no rounding makes more of a
        // difference.
        let tensors = [5, 300].map(|len| tensor(DType::F64, DType::F64, len, 0)).to_vec();
        let kind = Kind::Fitted {
            family,
            mode: StepMode::Rfd,
            conservatism: 0.5,
            inv_batch_size: 0.01,
            momentum: vec![0.5; 2],
        };
        let run = Run { coupling: 0.0, ..run(format!("conservative/{family}/run"), kind, tensors) };
        let record = run.play();
        let mut numbers: Vec<f64> = record.reports.iter().map(|report| report.step_size).collect();
        numbers.extend(record.reports.iter().map(|report| report.theta));
        lines.push((run.name, numbers));
    }
    lines
}

fn file() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/recorded_bits.txt"))
}

const HEADER: &str = "# Written by tests/recorded_bits.rs, which says when it may be written anew.\n";

#[test]
fn bits_are_those_recorded() {
    let runs = runs();
    let mut lines: Vec<String> = runs.iter().map(|run| run.play().line(&run.name)).collect();
    lines.extend(step_sizes());
    lines.extend(fits());
    let numbers = conservative();
    if std::env::var_os("RFDESCENT_RECORD").is_some() {
        lines.extend(numbers.iter().map(|(name, numbers)| format!("{name} {numbers:?}").replace(", ", ",")));
        std::fs::write(file(), HEADER.to_string() + &lines.join("\n") + "\n").unwrap();
        return;
    }
    let text = std::fs::read_to_string(file()).unwrap();
    let name = |line: &str| line.split(' ').next().unwrap().to_string();
    let recorded: BTreeMap<String, &str> =
        text.lines().filter(|line| !line.starts_with('#')).map(|line| (name(line), line)).collect();
    assert_eq!(recorded.len(), lines.len() + numbers.len(), "runs and recorded lines are not the same");
    let mut different = String::new();
    let mut count = 0;
    for line in &lines {
        let Some(&before) = recorded.get(&name(line)) else {
            panic!("nothing is recorded of {}", name(line));
        };
        if before != line {
            count += 1;
            if count <= 10 {
                write!(different, "\nrecorded {before}\nnow      {line}").unwrap();
            }
        }
    }
    for (name, numbers) in &numbers {
        let before = recorded.get(name).and_then(|line| line.split_once(' ')).expect(name).1;
        let before: Vec<f64> =
            before.trim_matches(['[', ']']).split(',').map(|x| x.parse().expect(name)).collect();
        let near = |a: f64, b: f64| a == b || ((a - b) / b).abs() <= CONSERVATIVE;
        if before.len() != numbers.len() || !numbers.iter().zip(&before).all(|(&a, &b)| near(a, b)) {
            count += 1;
            write!(different, "\nrecorded {name} {before:?}\nnow      {name} {numbers:?}").unwrap();
        }
    }
    assert!(count == 0, "{count} of {} lines differ, the first of them:{different}", recorded.len());
}

/// That the runs reach what they are there for: else their bits say little.
#[test]
fn runs_reach_every_outcome() {
    use rfdescent::optimizer::{Outcome, SkipReason};
    let mut applied = 0;
    let mut reasons: Vec<SkipReason> = Vec::new();
    let (mut stuck, mut beyond) = (Vec::new(), Vec::new());
    for run in runs() {
        let record = run.play();
        applied += record.optimizer.applied_steps();
        if record.optimizer.applied_steps() == 0 {
            stuck.push(run.name.clone());
        }
        for report in record.reports {
            if let Outcome::Skipped(reason) = report.outcome
                && !reasons.contains(&reason)
            {
                reasons.push(reason);
            }
        }
        if !record.values.iter().all(|tensor| tensor.to_f64().iter().all(|x| x.is_finite())) {
            beyond.push(run.name);
        }
    }
    println!("{applied} steps; no step in {stuck:?}; parameters out of range in {beyond:?}");
    // No option is outside its domain: those are refused when they are set.
    assert_eq!(reasons.len(), 6, "{reasons:?}");
    assert!(stuck.len() < 20, "{stuck:?}");
    assert!(beyond.len() < 20, "{beyond:?}");
}
