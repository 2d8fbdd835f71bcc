//! Memory that callers name by address: whether it can be what they say, and slices of it.

use crate::tensor::{DType, GradRef, ParamMut, each_dtype};

/// The bytes of a tensor; empty where there are none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Range {
    pub start: u64,
    pub end: u64,
}

impl Range {
    /// That of `len` elements from an address on, or what is wrong with it.
    pub fn new(address: u64, len: u64, dtype: DType) -> Result<Self, String> {
        let size = dtype.size() as u64;
        if !address.is_multiple_of(size) {
            return Err(format!(
                "at {address:#x} is not aligned to {size} bytes, the size of an {dtype}; pass the address of its first \
                 element and the right format"
            ));
        }
        let end = len
            .checked_mul(size)
            .filter(|&bytes| bytes <= isize::MAX as u64)
            .and_then(|bytes| address.checked_add(bytes));
        match end {
            Some(end) => Ok(Self { start: address, end }),
            None => Err(format!(
                "of {len} {dtype} elements at {address:#x} goes beyond the address space; it is larger than any memory"
            )),
        }
    }

    fn is_empty(&self) -> bool {
        self.start == self.end
    }
}

/// Two of a list of ranges that share bytes although one of them is written: the later and the earlier one by
/// its place in the list. `None` when there are no such. Ranges that are only read may overlap one another.
pub(crate) fn overlap(ranges: &[Range], written: impl Fn(usize) -> bool) -> Option<(usize, usize)> {
    let mut order: Vec<usize> = (0..ranges.len()).filter(|&k| !ranges[k].is_empty()).collect();
    order.sort_unstable_by_key(|&k| (ranges[k].start, k));
    // Of those before, the one that reaches furthest, of what is read and of what is written.
    let mut furthest: [Option<usize>; 2] = [None, None];
    for k in order {
        let own = usize::from(written(k));
        let rivals = if own == 1 { &furthest[..] } else { &furthest[1..] };
        if let Some(&rival) = rivals.iter().flatten().find(|&&rival| ranges[rival].end > ranges[k].start) {
            return Some((k.max(rival), k.min(rival)));
        }
        if furthest[own].is_none_or(|best| ranges[best].end < ranges[k].end) {
            furthest[own] = Some(k);
        }
    }
    None
}

/// Elements to update; an empty slice for none, wherever they are said to be.
///
/// # Safety
/// [`Range::new`] has accepted address, length and format; the memory is this process's, initialised, and
/// used by no one else for `'a`.
pub(crate) unsafe fn param_mut<'a>(address: u64, len: usize, dtype: DType) -> ParamMut<'a> {
    /// # Safety
    /// As the function around, for the format `T`.
    unsafe fn slice<'a, T>(address: u64, len: usize) -> &'a mut [T] {
        if len == 0 {
            return &mut [];
        }
        let first = std::ptr::with_exposed_provenance_mut(address as usize);
        // SAFETY: aligned and no larger than memory can be, says `Range::new`; every bit pattern is a number;
        // the caller vouches for the rest.
        unsafe { std::slice::from_raw_parts_mut(first, len) }
    }
    // SAFETY: the caller's promise, for the format at hand.
    unsafe { each_dtype!(dtype, T => slice::<T>(address, len).into()) }
}

/// Elements of a gradient; an empty slice for none.
///
/// # Safety
/// As [`param_mut`], but others may read the memory, too.
pub(crate) unsafe fn grad_ref<'a>(address: u64, len: usize, dtype: DType) -> GradRef<'a> {
    /// # Safety
    /// As the function around, for the format `T`.
    unsafe fn slice<'a, T>(address: u64, len: usize) -> &'a [T] {
        if len == 0 {
            return &[];
        }
        let first = std::ptr::with_exposed_provenance(address as usize);
        // SAFETY: aligned and no larger than memory can be, says `Range::new`; every bit pattern is a number;
        // the caller vouches for the rest.
        unsafe { std::slice::from_raw_parts(first, len) }
    }
    // SAFETY: the caller's promise, for the format at hand.
    unsafe { each_dtype!(dtype, T => slice::<T>(address, len).into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlaps_are_found_whatever_the_order() {
        let range = |start, end| Range { start, end };
        let find = |ranges: &[Range]| overlap(ranges, |k| k % 2 == 0);
        assert_eq!(find(&[]), None);
        // beside each other; gradients may share
        assert_eq!(find(&[range(0, 8), range(16, 24), range(8, 16), range(16, 24)]), None);
        assert_eq!(find(&[range(8, 16), range(0, 9)]), Some((1, 0)));
        assert_eq!(find(&[range(0, 8), range(64, 72), range(4, 12), range(64, 72)]), Some((2, 0)));
        // a long one before several short ones
        assert_eq!(find(&[range(0, 100), range(200, 208), range(10, 12), range(300, 308)]), Some((2, 0)));
        assert_eq!(find(&[range(50, 60), range(0, 100)]), Some((1, 0)));
        // empty ones share nothing
        assert_eq!(find(&[range(4, 4), range(0, 8)]), None);
    }
}
