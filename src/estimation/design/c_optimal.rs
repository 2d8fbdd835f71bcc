//! The exact design: two batch sizes at most.
//!
//! Let M be the information (2×2) of old and new mini-batches, one of size b adding w·(1, x)(1, x)ᵀ with x =
//! 1/b, w = 1/σ_b². Since Var(β̂₀) = (M⁻¹)₀₀ = max over u of 2u₀ − uᵀMu, exchanging minimum and maximum and
//! maximising over the length of u = s·(1, −r) leaves a convex problem in one number, the batch size r at
//! which the line u vanishes:
//!
//! 1/Var = min over r of (1, −r) M_old (1, −r)ᵀ + budget · max over b of φ(b; r)²,
//! φ(b; r) = (b − r)/(√2·√b·(b + ρ)), ρ = β₁/β₀ (in units of β₀).
//!
//! New mini-batches go where φ² is largest. Left of r that is the smallest batch size; right of r, φ rises to
//! one maximum and falls, at the positive root of b² − (ρ + 3r)b − ρr = 0. So there are two candidates, and
//! the best r is either where both are equal (new mini-batches of both sizes) or to one side of it (all of
//! one size).

use super::{DesignProblem, weight};

/// Halvings that bring any bracket of positive numbers of a similar size down to neighbouring floats.
const HALVINGS: usize = 200;

struct Candidates {
    noise_ratio: f64,
    min: f64,
    max: f64,
}

impl Candidates {
    /// φ(b; r), without the factor 1/√2.
    fn phi(&self, b: f64, r: f64) -> f64 {
        (b - r) / (b.sqrt() * (b + self.noise_ratio))
    }

    /// The whole number b in range with the largest φ(b; r).
    fn right(&self, r: f64) -> f64 {
        let half = 0.5 * (self.noise_ratio + 3.0 * r);
        let peak = half + (half * half + self.noise_ratio * r).sqrt();
        let [low, high] = [peak.floor(), peak.ceil()].map(|b| b.clamp(self.min, self.max));
        if self.phi(low, r) >= self.phi(high, r) { low } else { high }
    }

    /// The r at which both candidates are equally good: φ at the right one falls with r, −φ at the left one
    /// grows.
    fn balance(&self) -> f64 {
        let right_wins = |r: f64| self.phi(self.right(r), r) > -self.phi(self.min, r);
        let mut high = 2.0 * self.min + self.noise_ratio;
        while right_wins(high) {
            high *= 2.0;
        }
        bisect(self.min, high, right_wins)
    }
}

/// The place between `low` and `high` where `holds` turns from true to false.
fn bisect(mut low: f64, mut high: f64, holds: impl Fn(f64) -> bool) -> f64 {
    for _ in 0..HALVINGS {
        let middle = 0.5 * (low + high);
        if holds(middle) { low = middle } else { high = middle }
    }
    0.5 * (low + high)
}

/// How many mini-batches of which sizes to draw with `budget` examples after those already `drawn`.
pub(super) fn further_counts(problem: &DesignProblem, drawn: &[(u64, f64)], budget: f64) -> Vec<(u64, f64)> {
    let noise_ratio = problem.noise_ratio();
    let candidates = Candidates { noise_ratio, min: problem.min_batch_size as f64, max: problem.max_batch() };
    let (balance, left) = (candidates.balance(), candidates.min);
    let right = candidates.right(balance);

    // What a mini-batch adds to Σ w·x·(1 − r·x), the derivative of the first term by r (up to −2): 0 at the
    // best r.
    let pull = |b: f64, r: f64| weight(noise_ratio, b) / b * (1.0 - r / b);
    let drawn_pull = |r: f64| drawn.iter().map(|&(b, count)| count * pull(b as f64, r)).sum::<f64>();
    let new_pull = |b: f64, r: f64| budget / b * pull(b, r);

    let (at_left, at_right, old) = (new_pull(left, balance), new_pull(right, balance), drawn_pull(balance));
    let share = (-old - at_left) / (at_right - at_left);
    if share <= 0.0 {
        vec![(left as u64, budget / left)]
    } else if share < 1.0 {
        vec![(left as u64, budget * (1.0 - share) / left), (right as u64, budget * share / right)]
    } else {
        // Even with all of the budget on the right the balance is not reached: the best r is smaller.
        let r = bisect(0.0, balance, |r| drawn_pull(r) + new_pull(candidates.right(r), r) > 0.0);
        let only = candidates.right(r);
        vec![(only as u64, budget / only)]
    }
}
