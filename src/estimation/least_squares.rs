//! Weighted least squares of a line in x = 1/b, and its iterated reweighting.

/// β₀ + β₁·x.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Line {
    pub intercept: f64,
    pub slope: f64,
}

impl Line {
    /// The paper's start of the iteration.
    pub const START: Line = Line { intercept: 0.0, slope: 1.0 };

    /// Both coefficients are variances, so the best admissible guess for the next weights has none below 0.
    /// That keeps every weight positive on the way, has no constant to choose, and moves no fixed point:
    /// where both coefficients are positive it is the identity.
    pub fn admissible(self) -> Line {
        Line { intercept: self.intercept.max(0.0), slope: self.slope.max(0.0) }
    }

    pub fn at(&self, x: f64) -> f64 {
        self.intercept + self.slope * x
    }
}

/// Where there are observations: `count` of them at `x`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Abscissa {
    pub x: f64,
    pub count: f64,
}

/// Neumaier's compensated sum: the error does not grow with the number of terms.
#[derive(Clone, Copy, Default)]
pub(super) struct Sum {
    total: f64,
    lost: f64,
}

impl Sum {
    pub fn value(self) -> f64 {
        self.total + self.lost
    }
}

impl std::ops::AddAssign<f64> for Sum {
    fn add_assign(&mut self, term: f64) {
        let total = self.total + term;
        let (large, small) =
            if self.total.abs() >= term.abs() { (self.total, term) } else { (term, self.total) };
        self.lost += (large - total) + small;
        self.total = total;
    }
}

impl FromIterator<f64> for Sum {
    fn from_iter<I: IntoIterator<Item = f64>>(terms: I) -> Self {
        let mut sum = Sum::default();
        terms.into_iter().for_each(|term| sum += term);
        sum
    }
}

/// Weighted design of a regression on x: everything but the observed values.
///
/// Weights are relative to the largest one, so that neither tiny nor huge variances over- or underflow.
pub(super) struct WeightedDesign<'a> {
    abscissae: &'a [Abscissa],
    weights: Vec<f64>,
    total: f64,
    /// Weighted mean of x.
    center: f64,
    /// Σ w (x − center)².
    spread: f64,
    /// The smallest v; the weight of an observation at x is (reference/v)².
    reference: f64,
}

impl<'a> WeightedDesign<'a> {
    /// For observations whose standard deviation is proportional to v = `line` (admissible and not 0).
    pub fn new(line: Line, abscissae: &'a [Abscissa]) -> Self {
        let reference = abscissae.iter().map(|a| line.at(a.x)).fold(f64::INFINITY, f64::min);
        let weights: Vec<f64> =
            abscissae.iter().map(|a| a.count * (reference / line.at(a.x)).powi(2)).collect();
        let weighted = |f: &dyn Fn(f64) -> f64| {
            abscissae.iter().zip(&weights).map(|(a, w)| w * f(a.x)).collect::<Sum>().value()
        };
        let total = weighted(&|_| 1.0);
        let center = weighted(&|x| x) / total;
        let spread = weighted(&|x| (x - center).powi(2));
        WeightedDesign { abscissae, weights, total, center, spread, reference }
    }

    /// The least-squares line through the means of the observations at each abscissa.
    pub fn solve(&self, means: &[f64]) -> Line {
        let weighted = self.weights.iter().zip(means);
        let mean = weighted.clone().map(|(w, y)| w * y).collect::<Sum>().value() / self.total;
        let joint: Sum =
            weighted.zip(self.abscissae).map(|((w, y), a)| w * (a.x - self.center) * (y - mean)).collect();
        let slope = joint.value() / self.spread;
        Line { intercept: mean - slope * self.center, slope }
    }

    /// Standard deviation of the intercept when an observation has variance 2·v²: the square root of the
    /// paper's lemma "Variance of β̂₀", rearranged with S₀·S₂ − S₁² = S₀·Σw(x−x̄)² to Var = 2·(1/S₀ +
    /// x̄²/Σw(x−x̄)²).
    pub fn intercept_std(&self) -> f64 {
        self.reference * (2.0 * (1.0 / self.total + self.center * self.center / self.spread)).sqrt()
    }

    /// Changes of the two coefficients that rounding alone can cause: 64 units of roundoff of the fitted
    /// value at the centre, carried to the slope by the spread of x and from there to the intercept. Only
    /// matters when a true coefficient is (close to) 0, so that no relative criterion can be met.
    fn rounding(&self, fitted: Line) -> (f64, f64) {
        let value = 64.0 * f64::EPSILON * fitted.at(self.center).abs();
        let slope = value * (self.total / self.spread).sqrt();
        (value + slope * self.center, slope)
    }
}

/// How an iteration ended.
pub(super) struct Converged {
    pub line: Line,
    pub iterations: u32,
}

/// Why it did not.
#[derive(Debug)]
pub(super) enum Failure {
    /// Both coefficients vanish or are negative: there are no weights to go on with.
    Vanished(Line),
    NotConverged {
        iterations: u32,
        change: f64,
    },
}

/// Enough even where a step shrinks the change only to 0.997 of the last one; each step costs microseconds.
const MAX_ITERATIONS: u32 = 10_000;

/// Largest relative change of a coefficient at which the iteration has converged.
const TOLERANCE: f64 = 1e-12;

/// Iterated reweighting: fit with the weights of the last line until the line no longer changes.
///
/// `means` gives the means of the observations at each abscissa for the line that the weights come from; they
/// depend on it where the mean of the losses has to be estimated too.
pub(super) fn iterate<M: AsRef<[f64]>>(
    abscissae: &[Abscissa],
    means: impl Fn(Line) -> M,
) -> Result<Converged, Failure> {
    let mut line = Line::START;
    let mut change = f64::INFINITY;
    for iterations in 1..=MAX_ITERATIONS {
        let guess = line.admissible();
        let design = WeightedDesign::new(guess, abscissae);
        let next = design.solve(means(guess).as_ref());
        if !(next.intercept > 0.0 || next.slope > 0.0) {
            return Err(Failure::Vanished(next));
        }
        let rounding = design.rounding(next);
        let relative = |old: f64, new: f64, rounding: f64| {
            if (new - old).abs() <= rounding { 0.0 } else { ((new - old) / new).abs() }
        };
        change = relative(line.intercept, next.intercept, rounding.0)
            .max(relative(line.slope, next.slope, rounding.1));
        line = next;
        if change <= TOLERANCE {
            return Ok(Converged { line, iterations });
        }
    }
    Err(Failure::NotConverged { iterations: MAX_ITERATIONS, change })
}
