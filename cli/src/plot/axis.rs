//! Axes: what they span, where their ticks lie and what those say.

use std::ops::Range;

use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};

/// Ticks that an axis has at least, where the numbers allow it.
const TICKS: f64 = 5.0;

/// One axis of a panel. Positions along it are values or, on a logarithmic one, their decimal logarithms.
pub struct Axis {
    label: String,
    logarithmic: bool,
    /// Of positions, a little wider than the values.
    range: Range<f64>,
    /// Values.
    ticks: Vec<f64>,
    /// Decimals of the ticks on a linear axis.
    decimals: usize,
}

impl Axis {
    /// A linear axis over finite values.
    pub fn linear(label: impl Into<String>, values: impl Iterator<Item = f64>) -> Self {
        let range = widened(values);
        let (step, exponent) = nice_step((range.end - range.start) / TICKS);
        let first = (range.start / step).ceil();
        // The range is a few steps wide; a count ends the ticks where steps are lost in rounding.
        let ticks = (0..20).map(|i| (first + f64::from(i)) * step).take_while(|&t| t <= range.end).collect();
        Axis {
            label: label.into(),
            logarithmic: false,
            range,
            ticks,
            decimals: usize::try_from(-exponent).unwrap_or(0),
        }
    }

    /// A logarithmic axis over positive values.
    pub fn logarithmic(label: impl Into<String>, values: impl Iterator<Item = f64>) -> Self {
        let range = widened(values.map(f64::log10));
        let decades = || range.start.floor() as i32..=range.end.ceil() as i32;
        // Few decades need ticks between their ends; many can't have one each.
        let every = (((range.end - range.start) / (2.0 * TICKS)).ceil() as usize).max(1);
        let multiples: &[f64] = match range.end - range.start {
            width if width < 1.5 => &[1.0, 2.0, 3.0, 5.0],
            width if width < 3.0 => &[1.0, 3.0],
            _ => &[1.0],
        };
        let ticks = decades().step_by(every).flat_map(|e| multiples.iter().map(move |m| m * 10f64.powi(e)));
        let ticks = ticks.filter(|tick| range.contains(&tick.log10())).collect();
        Axis { label: label.into(), logarithmic: true, range, ticks, decimals: 0 }
    }

    /// What is written along it.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// Of positions.
    pub fn range(&self) -> Range<f64> {
        self.range.clone()
    }

    /// The axis for plotters.
    pub fn positions(&self) -> Positions {
        let ticks = self.ticks.iter().map(|&tick| self.position(tick)).collect();
        Positions { range: self.range(), ticks }
    }

    /// Where a value lies.
    pub fn position(&self, value: f64) -> f64 {
        if self.logarithmic { value.log10() } else { value }
    }

    /// What the tick at a position says.
    pub fn tick_text(&self, position: f64) -> String {
        if !self.logarithmic {
            let decimals = self.decimals;
            let text = format!("{position:.decimals$}");
            // Rounding may leave the sign of what is 0.
            let text =
                if text.trim_matches(['-', '0', '.']).is_empty() { text.replace('-', "") } else { text };
            return if text.len() > 8 { format!("{position:.3e}") } else { text };
        }
        let value = 10f64.powf(position);
        // Ticks have one digit.
        let text = format!("{value:.0e}");
        if (-3..5).contains(&(position.floor() as i32)) {
            return text.parse().map_or(text, |value: f64| value.to_string());
        }
        text
    }
}

/// The range of an axis' positions, with ticks of our choice.
pub struct Positions {
    range: Range<f64>,
    ticks: Vec<f64>,
}

impl Ranged for Positions {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (start, end): (i32, i32)) -> i32 {
        let share = (value - self.range.start) / (self.range.end - self.range.start);
        start + (share * f64::from(end - start)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.ticks.clone()
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

/// From the smallest to the largest value with a margin, never empty.
fn widened(values: impl Iterator<Item = f64>) -> Range<f64> {
    let (low, high) = values
        .filter(|value| value.is_finite())
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
    if low > high {
        return 0.0..1.0;
    }
    let least = 1e-9 * low.abs().max(high.abs()).max(1e-300);
    let margin = (0.05 * (high - low)).max(least);
    low - margin..high + margin
}

/// 1, 2 or 5 times a power of ten, at most `width`, and that power.
fn nice_step(width: f64) -> (f64, i32) {
    let exponent = width.log10().floor() as i32;
    let power = 10f64.powi(exponent);
    let multiple = [5.0, 2.0].into_iter().find(|multiple| multiple * power <= width).unwrap_or(1.0);
    (multiple * power, exponent)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(axis: &Axis) -> Vec<String> {
        axis.positions().ticks.iter().map(|&tick| axis.tick_text(tick)).collect()
    }

    #[test]
    fn ticks_are_round_numbers_within_the_range() {
        let axis = Axis::linear("", [-0.21, 0.43].into_iter());
        assert_eq!(texts(&axis), ["-0.2", "-0.1", "0.0", "0.1", "0.2", "0.3", "0.4"]);
        let axis = Axis::logarithmic("", [20.0, 4000.0].into_iter());
        assert_eq!(texts(&axis), ["30", "100", "300", "1000", "3000"]);
        let axis = Axis::logarithmic("", [3e-9, 2e7].into_iter());
        assert_eq!(texts(&axis), ["1e-8", "1e-6", "1e-4", "0.01", "1", "100", "10000", "1e6", "1e8"]);
    }

    #[test]
    fn any_finite_values_give_a_range_and_few_ticks() {
        for values in [
            vec![],
            vec![0.0],
            vec![2.0, 2.0],
            vec![1e20, 1e20 + 1e5],
            vec![-1e60, 1e60],
            vec![1e-300, 2e-300],
            vec![f64::NAN, 1.0, f64::INFINITY],
        ] {
            let axis = Axis::linear("", values.iter().copied());
            let range = axis.range();
            assert!(range.start < range.end, "{values:?}: {range:?}");
            assert!(axis.ticks.len() <= 20 && axis.ticks.iter().all(|&t| t.is_finite()), "{values:?}");
            let axis = Axis::logarithmic("", values.iter().map(|value| value.abs()));
            let range = axis.range();
            assert!(range.start < range.end && range.start.is_finite(), "{values:?}: {range:?}");
            assert!(axis.ticks.len() <= 20, "{values:?}");
        }
    }
}
