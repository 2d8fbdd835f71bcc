//! The minimum of the conditional expectation, or of its upper confidence bound, where no closed form is
//! known.

use super::{Covariance, Profile};

/// Points of the grid per factor e: neighbouring ones differ by a tenth, less than any feature of a
/// covariance.
pub(crate) const POINTS_PER_E: f64 = 10.0;

/// The grid starts this far below the shortest length at which the objective can turn.
pub(crate) const MARGIN: f64 = 1e-3;

/// No step is looked for below; no length of a network's parameters gets there.
pub(crate) const SHORTEST: f64 = 1e-300;

/// Of [`root`]. A bracket of ratio e^0.1 takes some 50 bisections to shrink to rounding; interpolation needs
/// about 6 steps.
pub(crate) const ROOT_ITERATIONS: usize = 120;

/// The mini-batch noise relative to the cost's own spread.
#[derive(Clone, Copy, Debug)]
pub(super) struct Noise {
    /// C_ε(0)/(b·C(0)).
    pub loss: f64,
    /// C'_ε(0)/(b·C'(0)).
    pub gradient: f64,
}

impl Noise {
    /// The conditional variance divided by C(0), and its derivative, at distance u; `slope` is −ρ'(0).
    ///
    /// With the signal shares q = 1/(1 + loss) and p = 1/(1 + gradient) the variance is 1 − qρ² − pw, w =
    /// −ρ'(0)(uκ)². Both results are written so that nothing cancels, D + (1 − q)ρ² + (1 − p)w and q·D' + (q
    /// − p)·w'.
    pub fn variance(&self, profile: &Profile, u: f64, slope: f64) -> (f64, f64) {
        let (q, p) = (1.0 / (1.0 + self.loss), 1.0 / (1.0 + self.gradient));
        let ukappa = u * profile.kappa;
        let value = profile.unexplained
            + self.loss * q * (profile.rho * profile.rho)
            + self.gradient * p * (slope * ukappa * ukappa);
        let w_slope = 2.0 * slope * ukappa * profile.ukappa_slope;
        (value, q * profile.unexplained_slope + (self.gradient - self.loss) * q * p * w_slope)
    }

    /// What [`Self::variance`] at u is more than at 0.
    fn growth(&self, profile: &Profile, u: f64, slope: f64) -> f64 {
        let (q, p) = (1.0 / (1.0 + self.loss), 1.0 / (1.0 + self.gradient));
        let ukappa = u * profile.kappa;
        q * profile.unexplained + (self.gradient - self.loss) * q * p * (slope * ukappa * ukappa)
    }
}

/// F(u) = −b·ρ − a·u·κ + z·√v, with v the conditional variance divided by C(0); a > 0, b ≥ 0, z ≥ 0.
pub(super) struct Objective<'a, C: ?Sized> {
    pub covariance: &'a C,
    pub a: f64,
    pub b: f64,
    pub z: f64,
    pub noise: Noise,
}

impl<C: Covariance + ?Sized> Objective<'_, C> {
    /// F'(u) for u > 0.
    fn slope(&self, u: f64) -> f64 {
        let profile = self.covariance.profile(u);
        let slope = self.covariance.slope();
        let mean = self.b * slope * u * profile.kappa - self.a * profile.ukappa_slope;
        if self.z == 0.0 {
            return mean;
        }
        let (variance, variance_slope) = self.noise.variance(&profile, u, slope);
        if variance <= 0.0 {
            // Only a profile rounded to 0 gets here: the deviation is too small to matter.
            return mean;
        }
        mean + self.z * variance_slope / (2.0 * variance.sqrt())
    }

    /// F(u) − F(0), accurate also where it is tiny against F(0).
    fn change(&self, u: f64) -> f64 {
        let profile = self.covariance.profile(u);
        let mean = self.b * profile.drop - self.a * u * profile.kappa;
        if self.z == 0.0 {
            return mean;
        }
        let slope = self.covariance.slope();
        let (variance, _) = self.noise.variance(&profile, u, slope);
        let start = self.noise.loss / (1.0 + self.noise.loss);
        let deviations = variance.max(0.0).sqrt() + start.sqrt();
        if deviations == 0.0 {
            return mean;
        }
        mean + self.z * (self.noise.growth(&profile, u, slope) / deviations)
    }

    /// The global minimiser in [0, plateau].
    ///
    /// Beyond the plateau, where u·κ is largest, neither the mean nor the variance decreases any more if ρ
    /// and κ decrease with the distance, so nothing is lost by not looking there. Within, the sign changes of
    /// F' on a grid of equal ratios enclose the local minima.
    pub fn minimise(&self, plateau: f64) -> f64 {
        self.minimise_between(self.shortest_turn(plateau) * MARGIN, plateau)
    }

    /// The global minimiser in [0, `longest`] with all turning points of F beyond `shortest`.
    fn minimise_between(&self, shortest: f64, longest: f64) -> f64 {
        let shortest = shortest.max(SHORTEST).min(longest);
        let cells = ((longest / shortest).ln() * POINTS_PER_E).ceil().max(1.0);
        let point = |i: f64| {
            if i == cells { longest } else { shortest * (i / POINTS_PER_E).exp() }
        };
        let (mut left, mut left_slope) = (shortest, self.slope(shortest));
        // F rises from the start: then 0 is a local minimum.
        let mut best = if left_slope >= 0.0 { Some((0.0, 0.0)) } else { None };
        let mut consider = |u: f64| {
            let change = self.change(u);
            if best.is_none_or(|(_, least)| change < least) {
                best = Some((u, change));
            }
        };
        for i in 1..=cells as usize {
            let right = point(i as f64);
            let right_slope = self.slope(right);
            if left_slope < 0.0 && right_slope >= 0.0 {
                consider(root(|u| self.slope(u), (left, left_slope), (right, right_slope)));
            }
            (left, left_slope) = (right, right_slope);
        }
        if left_slope < 0.0 {
            consider(longest);
        }
        best.map_or(0.0, |(u, _)| u)
    }

    /// A lower bound, up to a factor, for the lengths at which F' can change its sign.
    ///
    /// Near 0, in units of the plateau, −a + b·λ·u is up against the growth of the deviation: √D grows like
    /// u^1.5 or faster, √(noise + u²·(…)) bends where the loss's and the gradient's noise are equally large,
    /// and where the loss is exact the gradient's noise alone can balance a at any length.
    fn shortest_turn(&self, plateau: f64) -> f64 {
        let slope = self.covariance.slope();
        let pull = self.a * plateau;
        let mean_bend = self.b * slope * plateau * plateau;
        let mut turns = vec![1.0, pull / mean_bend];
        if self.z > 0.0 {
            let (q, p) = (1.0 / (1.0 + self.noise.loss), 1.0 / (1.0 + self.noise.gradient));
            let start = (self.noise.loss * q).sqrt();
            let growth = (self.noise.gradient - self.noise.loss).abs() * q * p * (slope * plateau * plateau);
            let balance = (pull - self.z * growth.sqrt()).abs();
            for force in [pull, balance] {
                turns.extend([force / self.z, (force / self.z).powi(2), force / mean_bend]);
            }
            turns.extend([pull * start / (self.z * growth), start / growth.sqrt()]);
        }
        turns.into_iter().filter(|turn| *turn > 0.0).fold(1.0, f64::min) * plateau
    }
}

/// The maximiser of u·κ(u), the step at loss = μ; `None` if there is none within eight orders of magnitude.
pub(super) fn plateau<C: Covariance + ?Sized>(covariance: &C) -> Option<f64> {
    const RANGE: f64 = 1e8;
    let exact = Noise { loss: 0.0, gradient: 0.0 };
    let objective = Objective { covariance, a: 1.0, b: 0.0, z: 0.0, noise: exact };
    let unit = 1.0 / covariance.slope().sqrt();
    let u = objective.minimise_between(unit / RANGE, unit * RANGE);
    (u > 0.0 && u < unit * RANGE).then_some(u)
}

/// The root of a function between two points where its signs differ, by Chandrupatla's method: inverse
/// quadratic interpolation where it is safe, bisection otherwise. It keeps to the bracket and halves it at
/// least every other time.
fn root(f: impl Fn(f64) -> f64, (a, fa): (f64, f64), (b, fb): (f64, f64)) -> f64 {
    let (mut x1, mut f1, mut x2, mut f2) = (b, fb, a, fa);
    let mut position = 0.5;
    for _ in 0..ROOT_ITERATIONS {
        let x = x1 + position * (x2 - x1);
        let value = f(x);
        let (x3, f3);
        if (value >= 0.0) == (f1 >= 0.0) {
            (x3, f3) = (x1, f1);
        } else {
            (x3, f3) = (x2, f2);
            (x2, f2) = (x1, f1);
        }
        (x1, f1) = (x, value);
        let (best, least) = if f1.abs() < f2.abs() { (x1, f1) } else { (x2, f2) };
        let tolerance = f64::EPSILON * best.abs();
        let smallest = tolerance / (x2 - x1).abs();
        if least == 0.0 || smallest.is_nan() || smallest >= 0.5 {
            return best;
        }
        let xi = (x1 - x2) / (x3 - x2);
        let phi = (f1 - f2) / (f3 - f2);
        position = if phi * phi < xi && (1.0 - phi) * (1.0 - phi) < 1.0 - xi {
            f1 / (f2 - f1) * f3 / (f2 - f3) + (x3 - x1) / (x2 - x1) * f1 / (f3 - f1) * f2 / (f3 - f2)
        } else {
            0.5
        };
        position = position.clamp(smallest, 1.0 - smallest);
    }
    if f1.abs() < f2.abs() { x1 } else { x2 }
}

/// [`Covariance::profile`] from C, C' and C'' alone.
pub(super) fn generic_profile<C: Covariance + ?Sized>(covariance: &C, u: f64) -> Profile {
    let (c0, dc0) = (covariance.c(0.0), covariance.dc(0.0));
    let slope = -dc0 / c0;
    let at = |u: f64| {
        let h = u * u / 2.0;
        let kappa = covariance.dc(h) / dc0;
        // u²·C''(u²/2) tends to 0 with u for every C that is differentiable at 0.
        let bend = if h > 0.0 { u * u * (covariance.ddc(h) / dc0) } else { 0.0 };
        (covariance.c(h), kappa, kappa + bend)
    };
    let (c, kappa, ukappa_slope) = at(u);
    let rho = c / c0;
    // D' = 2·(−ρ'(0))·u·κ·(ρ − (uκ)').
    let unexplained_slope_at = |u: f64| {
        let (c, kappa, ukappa_slope) = at(u);
        2.0 * slope * u * kappa * (c / c0 - ukappa_slope)
    };
    let direct = 1.0 - rho * rho - slope * (u * kappa) * (u * kappa);
    Profile {
        rho,
        drop: (c0 - c) / c0,
        kappa,
        ukappa_slope,
        // At short distances, before C' has lost half of its height, the difference cancels; the integral of
        // D' keeps the digits of ρ − (uκ)', and is smooth enough there for one panel.
        unexplained: if kappa > 0.5 { integral(unexplained_slope_at, u) } else { direct }.max(0.0),
        unexplained_slope: unexplained_slope_at(u),
    }
}

/// ∫₀ᵘ f by Gauss–Legendre quadrature with 16 nodes, exact to degree 31.
fn integral(f: impl Fn(f64) -> f64, u: f64) -> f64 {
    const NODES: [(f64, f64); 8] = [
        (0.09501250983763744, 0.1894506104550685),
        (0.2816035507792589, 0.18260341504492358),
        (0.45801677765722737, 0.16915651939500254),
        (0.6178762444026438, 0.14959598881657674),
        (0.755404408355003, 0.12462897125553388),
        (0.8656312023878318, 0.09515851168249279),
        (0.9445750230732326, 0.062253523938647894),
        (0.9894009349916499, 0.027152459411754096),
    ];
    let half = u / 2.0;
    half * NODES.iter().map(|(x, weight)| weight * (f(half * (1.0 - x)) + f(half * (1.0 + x)))).sum::<f64>()
}
