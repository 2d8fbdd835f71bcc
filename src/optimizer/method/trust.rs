//! How far the model is trusted: a factor on steps, from means of the loss over windows of steps
//! (`docs/adaptive.md`).

use crate::backend::abi::{RfdAdaptive, RfdHistory};

/// Steps whose losses are compared with those of the steps before.
pub(super) const WINDOW: f64 = 16.0;
/// The part of the promised fall that has to come: steps overshoot the minimum along their line most of the
/// time, also in good runs.
const SHARE: f64 = 0.05;
/// What the factor is multiplied with after less than that, and after more.
const AFTER_LESS: f64 = 0.5;
const AFTER_MORE: f64 = 1.5;
/// Its bounds.
pub(super) const SMALLEST: f64 = 1e-3;
pub(super) const LARGEST: f64 = 4.0;
/// So many losses in a row, each so many standard deviations above the mean of the last window, are no noise:
/// the factor falls before the window ends, but once in it. Where losses stay at a higher level, as after a
/// change of the data, it would else fall to nothing.
pub(super) const ALARM_LOSSES: f64 = 3.0;
const ALARM_DEVIATIONS: f64 = 3.0;

/// The numbers above, for the kernels.
pub(super) fn place(adaptive: &mut RfdAdaptive) {
    adaptive.window = WINDOW;
    adaptive.share = SHARE;
    adaptive.after_less = AFTER_LESS;
    adaptive.after_more = AFTER_MORE;
    adaptive.smallest_trust = SMALLEST;
    adaptive.largest_trust = LARGEST;
    adaptive.alarm_losses = ALARM_LOSSES;
    adaptive.alarm_deviations = ALARM_DEVIATIONS;
}

/// After one more loss.
pub(super) fn observe(history: &RfdHistory, loss: f64) -> RfdHistory {
    let first = history.steps == 0.0 && history.windows == 0.0;
    let difference = if first { 0.0 } else { loss - history.last };
    let alarmed = history.high >= ALARM_LOSSES;
    let mut next = RfdHistory {
        last: loss,
        high: match () {
            _ if alarmed => history.high,
            _ if is_high(history, loss) => history.high + 1.0,
            _ => 0.0,
        },
        steps: history.steps + 1.0,
        sum: history.sum + loss,
        squares: history.squares + difference * difference,
        ..*history
    };
    if next.high >= ALARM_LOSSES && !alarmed {
        next.trust = bounded(next.trust * AFTER_LESS);
    }
    if next.steps < WINDOW {
        return next;
    }
    if next.windows > 0.0 {
        next.trust = bounded(next.trust * verdict(&next));
    }
    RfdHistory {
        high: 0.0,
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

fn bounded(trust: f64) -> f64 {
    trust.clamp(SMALLEST, LARGEST)
}

/// The standard deviation of a single loss in the last complete window: half a mean squared difference of
/// successive losses is their variance, whatever the trend.
pub(super) fn deviation(history: &RfdHistory) -> f64 {
    (history.squares_before / (2.0 * WINDOW)).sqrt()
}

/// Whether a loss is further above the last complete window than noise explains.
fn is_high(history: &RfdHistory, loss: f64) -> bool {
    let mean = history.sum_before / WINDOW;
    history.windows > 0.0 && loss > mean + ALARM_DEVIATIONS * deviation(history)
}

/// From two complete windows: less than was promised beyond doubt, more than was promised, or neither.
/// Between windows the sum of the losses should fall by their length times what the steps of one window
/// promised; its standard error is √((squares_before + squares)/2).
fn verdict(history: &RfdHistory) -> f64 {
    let fall = history.sum_before - history.sum;
    let promise = SHARE * (WINDOW * ((history.promised_before + history.promised) / 2.0));
    let noise = ((history.squares_before + history.squares) / 2.0).sqrt();
    match () {
        // Of steps that promised nothing, as those with multipliers of 0, no fall is a verdict.
        _ if promise == 0.0 => 1.0,
        _ if fall < promise - noise => AFTER_LESS,
        _ if fall > promise => AFTER_MORE,
        _ => 1.0,
    }
}
