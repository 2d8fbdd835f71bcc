//! Whether parameters have memory of their own.

use rfdescent::DType;

use crate::error::{Error, Result};
use crate::parameter::{Parameter, Place};

/// A stretch of memory of one parameter.
struct Range {
    start: usize,
    end: usize,
    index: usize,
    written: bool,
}

/// Checks that no parameter shares memory with another one or with a gradient.
pub(crate) fn check_apart(parameters: &[Parameter], places: &[Place]) -> Result<()> {
    let range = |first: usize, len: usize, dtype: DType, index, written| Range {
        start: first,
        end: first + len * dtype.size(),
        index,
        written,
    };
    let mut ranges: Vec<Range> = Vec::with_capacity(2 * places.len());
    for (index, (parameter, place)) in
        parameters.iter().zip(places).enumerate().filter(|(_, (_, p))| p.len > 0)
    {
        ranges.push(range(place.param.addr(), place.len, parameter.dtype(), index, true));
        ranges.extend(
            place.grad.as_ref().map(|grad| range(grad.first.addr(), place.len, grad.dtype, index, false)),
        );
    }
    ranges.sort_unstable_by_key(|range| range.start);
    // Of the ranges before, the one that reaches furthest, and the furthest that is written.
    let (mut any, mut written): (Option<&Range>, Option<&Range>) = (None, None);
    for range in &ranges {
        let before = if range.written { any } else { written };
        if let Some(other) = before.filter(|other| other.end > range.start) {
            let (range, other) = if range.written { (range, other) } else { (other, range) };
            let what = if other.written { "" } else { "the gradient of " };
            let problem = format!(
                "shares memory with {what}`{}`; a parameter needs memory of its own: add a copy, or add a shared \
                 parameter once",
                parameters[other.index].name
            );
            return Err(Error::tensor(&parameters[range.index].name, problem));
        }
        let further = |best: Option<&Range>| best.is_none_or(|best| range.end > best.end);
        if further(any) {
            any = Some(range);
        }
        if range.written && further(written) {
            written = Some(range);
        }
    }
    Ok(())
}
