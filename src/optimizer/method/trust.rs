//! How far the model is trusted: a factor on steps, from means of the loss over windows of steps
//! (`docs/adaptive.md`).

use crate::backend::abi::RfdHistory;

/// Steps whose losses are compared with those of the steps before.
pub(super) const WINDOW: f64 = 16.0;
pub(super) const SMALLEST: f64 = 1e-3;
/// The part of the promised fall that has to come: steps overshoot the minimum along their line most of the
/// time, also in good runs.
pub(super) const SHARE: f64 = 0.1;
/// What the factor is multiplied with after less and after more than that.
pub(super) const AFTER_LESS: f64 = 0.5;
pub(super) const AFTER_MORE: f64 = 1.5;

/// After one more loss.
pub(super) fn observe(history: &RfdHistory, loss: f64) -> RfdHistory {
    let first = history.steps == 0.0 && history.windows == 0.0;
    let difference = if first { 0.0 } else { loss - history.last };
    let mut next = RfdHistory {
        last: loss,
        steps: history.steps + 1.0,
        sum: history.sum + loss,
        squares: history.squares + difference * difference,
        ..*history
    };
    if next.steps < WINDOW {
        return next;
    }
    if next.windows > 0.0 {
        next.factor = (next.factor * verdict(&next)).clamp(SMALLEST, 1.0);
    }
    RfdHistory {
        steps: 0.0,
        windows: next.windows + 1.0,
        sum: 0.0,
        squares: 0.0,
        promised: 0.0,
        sum_before: next.sum,
        squares_before: next.squares,
        promised_before: next.promised,
        ..next
    }
}

/// From two complete windows: less than was promised beyond doubt, more than was promised, or neither.
/// Between windows the sum of the losses should fall by their length times what the steps of one window
/// promised. Half a mean squared difference of successive losses is the variance of their noise, whatever the
/// trend; so the standard error of the fall is √((squares_before + squares)/2).
fn verdict(history: &RfdHistory) -> f64 {
    let fall = history.sum_before - history.sum;
    let promise = SHARE * (WINDOW * ((history.promised_before + history.promised) / 2.0));
    let noise = ((history.squares_before + history.squares) / 2.0).sqrt();
    if fall < promise - noise {
        AFTER_LESS
    } else if fall > promise {
        AFTER_MORE
    } else {
        1.0
    }
}
