//! How tensors lie in memory, and their number formats.

use rfdescent::DType;
use tch::{Device, Kind, Tensor};

/// The library's format for a kind of tch, if it has one.
pub(crate) fn dtype(kind: Kind) -> Option<DType> {
    match kind {
        Kind::Float => Some(DType::F32),
        Kind::Double => Some(DType::F64),
        Kind::Half => Some(DType::F16),
        Kind::BFloat16 => Some(DType::BF16),
        _ => None,
    }
}

/// Whether a tensor is an array in memory at all: not sparse, nor in oneDNN's format, nor on a device of
/// other kind. Only then tch's `data_ptr` and `stride` do not panic.
pub(crate) fn is_strided(tensor: &Tensor) -> bool {
    matches!(tensor.device(), Device::Cpu | Device::Cuda(_))
        && !tensor.is_sparse()
        && !tensor.is_mkldnn()
        // The compressed sparse formats have no test of their own in tch; they refuse any view.
        && tch::no_grad(|| tensor.f_as_strided([0], [1], None)).is_ok()
}

/// Whether the elements fill a stretch of memory, each place once: then their order does not matter to a
/// step, which treats all alike. Contiguous tensors do, and their permutations, such as channels-last ones.
pub(crate) fn is_dense(size: &[i64], stride: &[i64]) -> bool {
    if size.contains(&0) {
        return true;
    }
    let mut axes: Vec<(i64, i64)> =
        stride.iter().copied().zip(size.iter().copied()).filter(|&(_, size)| size > 1).collect();
    axes.sort_unstable();
    let mut expected = 1;
    axes.into_iter().all(|(stride, size)| {
        let matches = stride == expected;
        expected *= size;
        matches
    })
}

/// Whether two tensors of one size have their elements at the same places. Strides of axes of length 1 don't
/// matter.
pub(crate) fn same_places(size: &[i64], a: &[i64], b: &[i64]) -> bool {
    size.contains(&0) || size.iter().zip(a).zip(b).all(|((&size, a), b)| size == 1 || a == b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permutations_without_gaps_are_dense() {
        for (size, stride, dense) in [
            (&[][..], &[][..], true),
            (&[1], &[7], true),
            (&[5], &[1], true),
            (&[5], &[2], false),
            (&[5], &[0], false),
            (&[2, 3], &[3, 1], true),
            (&[2, 3], &[1, 2], true),
            (&[2, 3], &[4, 1], false),
            (&[2, 3], &[1, 1], false),
            (&[2, 1, 3], &[3, 100, 1], true),
            (&[2, 4, 3, 3], &[36, 1, 12, 4], true),
            (&[2, 0], &[9, 9], true),
        ] {
            assert_eq!(is_dense(size, stride), dense, "{size:?} {stride:?}");
        }
    }

    #[test]
    fn axes_of_length_one_have_no_place() {
        assert!(same_places(&[2, 1], &[1, 1], &[1, 2]));
        assert!(!same_places(&[2, 2], &[1, 2], &[2, 1]));
        assert!(same_places(&[0, 2], &[1, 2], &[2, 1]));
    }
}
