//! Numbers in tables and messages, which may be of any size, and whole numbers on the command line.

use std::ops::RangeInclusive;

use clap::builder::{StringValueParser, TypedValueParser};
use rfdescent::tables::whole_number;

/// No text of a number in a message is longer than this: the sign and 19 digits.
const LONGEST: usize = 20;

/// All digits, with an exponent where there would be too many of them.
pub fn short(value: f64) -> String {
    let text = value.to_string();
    if text.len() > LONGEST { format!("{value:e}") } else { text }
}

/// The same for a number that is text already; any other text as it is.
pub fn shortened(text: String) -> String {
    match text.parse() {
        Ok(value) if text.len() > LONGEST => short(value),
        _ => text,
    }
}

/// A number of things: `one` is the name of one, and others have an s.
pub fn count(number: usize, one: &str) -> String {
    format!("{number} {one}{}", if number == 1 { "" } else { "s" })
}

/// With a fixed number of decimals, and with an exponent where that would be no table any more.
pub fn fixed(value: f64, decimals: usize) -> String {
    if value.abs() >= 1e9 { format!("{value:.decimals$e}") } else { format!("{value:.decimals$}") }
}

/// Reads an option's whole number, written as tools write them (`1e4`, `16.0`), within a range.
pub fn whole<T>(range: RangeInclusive<u64>) -> impl TypedValueParser<Value = T>
where
    T: TryFrom<u64> + Clone + Send + Sync + 'static,
{
    StringValueParser::new().try_map(move |text| {
        let number = whole_number(&text).map_err(|problem| format!("it {problem}"))?;
        let outside = || format!("{text} is not in {}..={}", range.start(), range.end());
        if range.contains(&number) { T::try_from(number).map_err(|_| outside()) } else { Err(outside()) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_no_plural() {
        assert_eq!([0, 1, 2].map(|number| count(number, "epoch")), ["0 epochs", "1 epoch", "2 epochs"]);
    }

    #[test]
    fn no_number_fills_a_line() {
        assert_eq!(short(f64::MAX), "1.7976931348623157e308");
        assert_eq!(short(-1e-300), "-1e-300");
        assert_eq!(
            (short(-1.0), short(0.25), short(f64::INFINITY)),
            ("-1".into(), "0.25".into(), "inf".into())
        );
        assert_eq!(shortened(1e300.to_string()), "1e300");
        assert_eq!(
            shortened("a name that is longer than a number".into()),
            "a name that is longer than a number"
        );
        assert_eq!(
            (fixed(2.5, 2), fixed(1e300, 2), fixed(f64::NAN, 2)),
            ("2.50".into(), "1.00e300".into(), "NaN".into())
        );
    }
}
