//! candle's storages as what the library takes.

use std::ops::Range;

use candle_core::{CpuStorage, DType, Layout, Result, Storage, Tensor};
use rfdescent::{GradRef, ParamMut};

use crate::error;

/// The library's name of a number format, if it has one.
pub(crate) fn format(dtype: DType) -> Option<rfdescent::DType> {
    match dtype {
        DType::F32 => Some(rfdescent::DType::F32),
        DType::F64 => Some(rfdescent::DType::F64),
        DType::F16 => Some(rfdescent::DType::F16),
        DType::BF16 => Some(rfdescent::DType::BF16),
        _ => None,
    }
}

/// A number that tensors have in common when they share their memory, and only then.
pub(crate) fn storage_id(tensor: &Tensor) -> usize {
    let (storage, _) = tensor.storage_and_layout();
    std::ptr::from_ref::<Storage>(&storage).addr()
}

/// Where a contiguous tensor lies in its storage.
pub(crate) fn range(layout: &Layout) -> Option<Range<usize>> {
    layout.contiguous_offsets().map(|(start, end)| start..end)
}

/// A storage without elements.
pub(crate) fn empty_storage(dtype: DType) -> CpuStorage {
    match dtype {
        DType::F64 => CpuStorage::F64(Vec::new()),
        DType::F16 => CpuStorage::F16(Vec::new()),
        DType::BF16 => CpuStorage::BF16(Vec::new()),
        _ => CpuStorage::F32(Vec::new()),
    }
}

/// Elements to update; `None` for another number format, or where the storage does not have them.
pub(crate) fn param_mut(storage: &mut CpuStorage, range: Range<usize>) -> Option<ParamMut<'_>> {
    Some(match storage {
        CpuStorage::F32(values) => ParamMut::F32(values.get_mut(range)?),
        CpuStorage::F64(values) => ParamMut::F64(values.get_mut(range)?),
        CpuStorage::F16(values) => ParamMut::F16(values.get_mut(range)?),
        CpuStorage::BF16(values) => ParamMut::BF16(values.get_mut(range)?),
        _ => return None,
    })
}

/// Elements of a gradient; `None` as for [`param_mut`].
pub(crate) fn grad_ref(storage: &CpuStorage, range: Range<usize>) -> Option<GradRef<'_>> {
    Some(match storage {
        CpuStorage::F32(values) => GradRef::F32(values.get(range)?),
        CpuStorage::F64(values) => GradRef::F64(values.get(range)?),
        CpuStorage::F16(values) => GradRef::F16(values.get(range)?),
        CpuStorage::BF16(values) => GradRef::BF16(values.get(range)?),
        _ => return None,
    })
}

/// The loss in a storage on the CPU.
pub(crate) fn loss_value(storage: &CpuStorage, layout: &Layout) -> Result<f64> {
    check_loss(layout)?;
    let at = layout.start_offset();
    let value = match storage {
        CpuStorage::F32(values) => values.get(at).copied().map(f64::from),
        CpuStorage::F64(values) => values.get(at).copied(),
        CpuStorage::F16(values) => values.get(at).copied().map(f64::from),
        CpuStorage::BF16(values) => values.get(at).copied().map(f64::from),
        _ => None,
    };
    value.ok_or_else(|| error::invalid("loss", "no float", "give a tensor of f32, f64, f16 or bf16"))
}

/// An error unless there is one element.
pub(crate) fn check_loss(layout: &Layout) -> Result<()> {
    if layout.shape().elem_count() == 1 {
        return Ok(());
    }
    let shape = format!("{:?}", layout.dims());
    Err(error::invalid("shape of the loss", shape, "give one number, the mean over the batch (`mean_all`)"))
}
