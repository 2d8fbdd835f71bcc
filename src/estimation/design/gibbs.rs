//! The paper's Gibbs form of the batch-size distribution.

use super::{DesignProblem, c_optimal, objective, weight};
use crate::{Error, Result};
use argmin::core::{CostFunction, Executor, State};
use argmin::solver::neldermead::NelderMead;

/// e⁻⁴⁰ ≈ 4e-18 is nothing to a sum in f64, also where it is multiplied by a batch size.
const NEGLIGIBLE: f64 = 40.0;

/// Cells of the quadrature are this fraction of the batch size wide. Where the distribution's mass is,
/// λ₂·width is then about 1/16, and the three-point rule's relative error (λ₂·width)⁶/2e6 below rounding.
const CELL: f64 = 1.0 / 16.0;

/// Largest λ₁/(2β₀²). Where β₁/β₀ is far above the smallest batch size the objective keeps falling as λ₁ and
/// λ₂ grow together: the distribution degenerates to two peaks, of which the c-optimal design is the better
/// version, and no optimum exists. Up to this value the upper peak, near b = β₁/β₀, keeps a standard
/// deviation of √(8/1024) = 9 % of b, so that the form keeps the spread it is there for, and the quadrature
/// (cells of 6 %) resolves it.
const MAX_ATTRACTION: f64 = 1024.0;

/// A list of more batch sizes than this is of no use to anyone; 16 MB.
const MAX_POINTS: f64 = (1u64 << 20) as f64;

/// ν(b) ∝ exp(λ₁/σ_b² − λ₂b), b = min, min + 1, …
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Gibbs {
    noise_ratio: f64,
    min: f64,
    max: f64,
    /// λ₁/(2β₀²): the first term of the exponent as b → ∞, free of units.
    attraction: f64,
    /// λ₂
    cost: f64,
}

impl Gibbs {
    fn log_density(&self, b: f64) -> f64 {
        self.attraction * 2.0 * weight(self.noise_ratio, b) - self.cost * (b - self.min)
    }

    /// Where the tail has become negligible: relative to ν(min), ν(b) is at most exp(λ₁/(2β₀²) − λ₂(b −
    /// min)).
    fn last(&self) -> f64 {
        let last = self.min + (self.attraction + NEGLIGIBLE) / self.cost;
        last.ceil().min(self.max)
    }

    /// Probabilities at the batch sizes `nodes`, each standing for `weight` neighbours, up to a common
    /// factor.
    fn density(&self, nodes: impl Iterator<Item = (f64, f64)> + Clone) -> Vec<(f64, f64)> {
        let top = nodes.clone().map(|(b, _)| self.log_density(b)).fold(f64::NEG_INFINITY, f64::max);
        nodes.map(|(b, weight)| (b, weight * (self.log_density(b) - top).exp())).collect()
    }

    /// λ₁ and λ₂ in the paper's units.
    pub fn lambda(&self, problem: &DesignProblem) -> [f64; 2] {
        [self.attraction * 2.0 * problem.variance * problem.variance, self.cost]
    }

    /// The best λ₁, λ₂ ≥ 0 by Nelder–Mead from several starts, then once more from the best end, as a
    /// collapsed simplex may have stopped short.
    ///
    /// The search runs in (angle, log λ₂) with λ₁/(2β₀²) = 1024·sin²(angle): no value of these is out of
    /// bounds, and the search can settle where λ₁ is at either of its bounds. In units of the inverse mean
    /// batch size of the c-optimal design λ₂ is of order 1 whatever the problem.
    pub fn optimal(problem: &DesignProblem) -> Result<Gibbs> {
        let exact: Vec<(f64, f64)> =
            c_optimal::further_counts(problem, &[], 1.0).iter().map(|&(b, n)| (b as f64, n)).collect();
        let mean = 1.0 / exact.iter().map(|&(_, count)| count).sum::<f64>();
        let search = Search {
            noise_ratio: problem.noise_ratio(),
            min: problem.min_batch_size as f64,
            max: problem.max_batch(),
            mean,
            best_possible: objective(problem.noise_ratio(), &exact),
            nodes: nodes(problem.min_batch_size as f64, problem.max_batch()),
        };
        let starts = [[0.05, 0.0], [0.3, 1.0], [1.2, 3.0]];
        let ends = starts.iter().map(|start| search.run(*start, 0.2));
        let mut best =
            ends.fold((vec![0.0, 0.0], f64::INFINITY), |best, end| if end.1 < best.1 { end } else { best });
        let again = search.run([best.0[0], best.0[1]], 0.05);
        if again.1 < best.1 {
            best = again;
        }
        // An optimum at λ₁ = 0 is reached up to rounding: put it there.
        let at_zero = vec![0.0, best.0[1]];
        if search.value(&at_zero) <= best.1 * (1.0 + 1e-12) {
            best.0 = at_zero;
        }
        let gibbs = search.gibbs(&best.0);
        if gibbs.last() - gibbs.min >= MAX_POINTS {
            let expected = "needed: the best Gibbs design spreads over more than a million batch sizes";
            return Err(Error::invalid("max_batch_size", "none", expected));
        }
        Ok(gibbs)
    }

    /// How many mini-batches of which sizes to draw with `budget` examples after those already `drawn`, in
    /// proportion.
    pub fn further_counts(&self, drawn: &[(u64, f64)], budget: f64) -> Vec<(u64, f64)> {
        let support = (self.min as u64..=self.last() as u64).map(|b| (b as f64, 1.0));
        let density = self.density(support);
        // Examples, and examples per unit of density: their quotient makes densities counts.
        let examples = budget + drawn.iter().map(|&(b, count)| b as f64 * count).sum::<f64>();
        let scale = examples / density.iter().map(|&(b, p)| b * p).sum::<f64>();
        let mut counts: Vec<(u64, f64)> = density.iter().map(|&(b, p)| (b as u64, p * scale)).collect();
        for &(b, count) in drawn {
            if let Some(wanted) = b.checked_sub(self.min as u64).and_then(|i| counts.get_mut(i as usize)) {
                wanted.1 = (wanted.1 - count).max(0.0);
            }
        }
        counts.retain(|&(_, count)| count > 0.0);
        // There is always some left to draw, but astronomically many drawn ones may round it away.
        if counts.is_empty() { self.further_counts(&[], budget) } else { counts }
    }
}

/// The sum over all whole numbers b in [min, max] as one over far fewer nodes (b, weight).
///
/// A cell of n neighbours is replaced by three nodes, its middle and middle ± h, with h² = (3n² − 7)/20 and
/// weights n(n²−1)/(24h²) at the sides: the discrete Gauss rule, exact for polynomials of degree 5.
fn nodes(min: f64, max: f64) -> Vec<(f64, f64)> {
    // Beyond 2⁵² whole numbers are no longer told apart.
    let max = max.min(2f64.powi(52));
    let mut nodes = Vec::new();
    let mut first = min;
    while first <= max {
        let n = (first * CELL).floor().clamp(1.0, max - first + 1.0);
        let middle = first + 0.5 * (n - 1.0);
        if n == 1.0 {
            nodes.push((middle, 1.0));
        } else {
            let h2 = (3.0 * n * n - 7.0) / 20.0;
            let side = n * (n * n - 1.0) / (24.0 * h2);
            let h = h2.sqrt();
            nodes.extend([(middle - h, side), (middle, n - 2.0 * side), (middle + h, side)]);
        }
        first += n;
    }
    nodes
}

/// The objective over that of the c-optimal design, as a function of (angle, log(λ₂·mean)).
struct Search {
    noise_ratio: f64,
    min: f64,
    max: f64,
    mean: f64,
    best_possible: f64,
    nodes: Vec<(f64, f64)>,
}

impl Search {
    fn gibbs(&self, parameters: &[f64]) -> Gibbs {
        Gibbs {
            noise_ratio: self.noise_ratio,
            min: self.min,
            max: self.max,
            attraction: MAX_ATTRACTION * parameters[0].sin().powi(2),
            // Where a maximum bounds the batch sizes λ₂ may tend to 0; e⁻³⁰ is 0 then.
            cost: parameters[1].clamp(-30.0, 30.0).exp() / self.mean,
        }
    }

    fn value(&self, parameters: &[f64]) -> f64 {
        let gibbs = self.gibbs(parameters);
        let last = gibbs.last();
        let density = gibbs.density(self.nodes.iter().copied().take_while(|&(b, _)| b <= last));
        let value = objective(self.noise_ratio, &density) / self.best_possible;
        // A distribution on one batch size only has no finite variance.
        if value.is_finite() { value } else { f64::MAX }
    }

    /// Nelder–Mead from a simplex of the given size; the end and its value.
    fn run(&self, start: [f64; 2], size: f64) -> (Vec<f64>, f64) {
        let [x, y] = start;
        let simplex = vec![vec![x, y], vec![x + size, y], vec![x, y + size]];
        // The values are of order 1; far fewer digits of them are needed.
        let solver = NelderMead::new(simplex).with_sd_tolerance(1e-11);
        let run = solver
            .and_then(|solver| Executor::new(self, solver).configure(|state| state.max_iters(200)).run());
        match run {
            Ok(result) => {
                let state = result.state();
                let end = state.get_best_param().cloned().unwrap_or_else(|| start.to_vec());
                (end, state.get_best_cost())
            }
            // The objective never fails, so nor does the search; its start is a sound answer all the same.
            Err(_) => (start.to_vec(), self.value(&start)),
        }
    }
}

impl CostFunction for &Search {
    type Param = Vec<f64>;
    type Output = f64;

    fn cost(&self, parameters: &Vec<f64>) -> std::result::Result<f64, argmin::core::Error> {
        Ok(self.value(parameters))
    }
}
