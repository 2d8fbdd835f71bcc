//! What the kernels need to know of the tensors: addresses, formats, and where each one's chunks and segments begin.

use super::input::DeviceTensor;
use crate::backend::abi::{
    RFD_CHUNK, RFD_CHUNKS_PER_SEGMENT, RFD_DTYPE_BF16, RFD_DTYPE_F16, RFD_DTYPE_F32, RFD_DTYPE_F64,
    RFD_TENSOR_COUNTS, RFD_TENSOR_LOCK, RfdTensor,
};
use crate::backend::executor::Instance;
use crate::error::{Error, Result};
use crate::optimizer::{Group, Method, Options, TensorSpec};
use crate::tensor::DType;

/// A tensor of the optimizer and its buffers on the device.
#[derive(Debug)]
pub(super) struct TensorEntry {
    pub spec: TensorSpec,
    pub len: u64,
    /// Address of the velocity, 0 for none.
    pub momentum: u64,
    /// Address of the master weights, 0 for none.
    pub master: u64,
    /// Whether the master weights hold something.
    pub master_ready: bool,
}

/// The number of a format in the shared structs.
pub(super) fn dtype_code(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => RFD_DTYPE_F32,
        DType::F64 => RFD_DTYPE_F64,
        DType::F16 => RFD_DTYPE_F16,
        DType::BF16 => RFD_DTYPE_BF16,
    }
}

/// Bytes of an element.
pub(super) fn size_of(dtype: DType) -> u64 {
    match dtype {
        DType::F32 => 4,
        DType::F64 => 8,
        DType::F16 | DType::BF16 => 2,
    }
}

/// Counts over a list of tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Extent {
    pub chunks: u64,
    pub segments: u32,
}

impl Extent {
    /// Adds a tensor of `len` elements that has a gradient.
    pub fn add(&mut self, len: u64) -> Option<()> {
        let chunks = len.div_ceil(u64::from(RFD_CHUNK));
        let segments = chunks.div_ceil(u64::from(RFD_CHUNKS_PER_SEGMENT));
        self.chunks = self.chunks.checked_add(chunks)?;
        self.segments = self.segments.checked_add(u32::try_from(segments).ok()?)?;
        Some(())
    }

    /// That of all tensors, as if each had a gradient: no step has more.
    pub fn of_all(tensors: &[TensorEntry]) -> Result<Self> {
        let mut extent = Self::default();
        for tensor in tensors {
            extent.add(tensor.len).ok_or_else(|| {
                Error::tensor(
                    &tensor.spec.name,
                    "with it the list has 2^32 segments of 2^20 elements or more",
                )
            })?;
        }
        Ok(extent)
    }
}

/// What steps follow from, as far as sums and instances depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Published,
    /// RFD as published with conservatism.
    Conservative,
    /// The adaptive method along the gradient.
    Adaptive,
    /// The adaptive method along the averaged gradient.
    Averaged,
}

impl Kind {
    pub fn new(method: &Method, options: &Options) -> Self {
        match method {
            Method::Published(_) if options.rule.conservatism > 0.0 => Kind::Conservative,
            Method::Published(_) => Kind::Published,
            Method::Adaptive(adaptive) if adaptive.averaging > 0.0 => Kind::Averaged,
            Method::Adaptive(_) => Kind::Adaptive,
        }
    }

    /// Sums per chunk.
    pub fn sums(self, norm_lock: bool) -> u32 {
        match self {
            _ if norm_lock => 4,
            Kind::Averaged => 2,
            _ => 1,
        }
    }
}

/// A list of tensors as the kernels see it.
#[derive(Debug)]
pub(super) struct Plan {
    pub tensors: Vec<RfdTensor>,
    pub extent: Extent,
    pub instance: Instance,
    /// Sums per chunk.
    pub sums: u32,
    /// Whether squares of gradients may leave the range of f64.
    pub f64_grads: bool,
}

impl Plan {
    /// The plan for checked addresses.
    pub fn new(entries: &[TensorEntry], groups: &[Group], addresses: &[DeviceTensor], kind: Kind) -> Self {
        let mut extent = Extent::default();
        let tensors: Vec<RfdTensor> = entries
            .iter()
            .zip(addresses)
            .map(|(entry, address)| {
                let group = &groups[entry.spec.group];
                let counts = if entry.spec.counts_in_norm { RFD_TENSOR_COUNTS } else { 0 };
                let lock = if group.norm_lock && entry.len > 1 { RFD_TENSOR_LOCK } else { 0 };
                let tensor = RfdTensor {
                    param: address.param,
                    grad: address.grad,
                    momentum: if group.momentum > 0.0 { entry.momentum } else { 0 },
                    master: entry.master,
                    len: entry.len,
                    offset: entry.spec.offset,
                    first_chunk: extent.chunks,
                    first_segment: extent.segments,
                    group: entry.spec.group as u16,
                    formats: (dtype_code(entry.spec.dtype) + 4 * dtype_code(address.grad_dtype)) as u8,
                    flags: (counts | lock) as u8,
                };
                if address.grad != 0 {
                    // Cannot overflow: the extent of all tensors was formed when the optimizer was made.
                    let _ = extent.add(entry.len);
                }
                tensor
            })
            .collect();
        let active = || tensors.iter().filter(|tensor| tensor.grad != 0 && tensor.len > 0);
        let locked = active().any(|tensor| u32::from(tensor.flags) & RFD_TENSOR_LOCK != 0);
        let instance = if locked { Instance::Generic } else { instance_of(kind, active()) };
        let f64_grads = active().any(|tensor| u32::from(tensor.formats >> 2) == RFD_DTYPE_F64);
        Self { instance, sums: kind.sums(locked), f64_grads, extent, tensors }
    }
}

/// The lean instance for tensors that are all alike, if there is one for their kind.
fn instance_of<'a>(kind: Kind, mut tensors: impl Iterator<Item = &'a RfdTensor>) -> Instance {
    let buffers =
        |t: &RfdTensor| (u32::from(t.formats & 3), u32::from(t.formats >> 2), t.master != 0, t.momentum != 0);
    let Some(first) = tensors.next().map(buffers) else { return Instance::Generic };
    if !tensors.all(|tensor| buffers(tensor) == first) {
        return Instance::Generic;
    }
    const F32: (u32, u32) = (RFD_DTYPE_F32, RFD_DTYPE_F32);
    const BF16: (u32, u32) = (RFD_DTYPE_BF16, RFD_DTYPE_BF16);
    const F16: (u32, u32) = (RFD_DTYPE_F16, RFD_DTYPE_F16);
    let (param, grad, master, momentum) = first;
    match (kind, (param, grad), master, momentum) {
        (Kind::Published, F32, false, false) => Instance::F32,
        (Kind::Published, F32, false, true) => Instance::F32Momentum,
        (Kind::Published, BF16, true, false) => Instance::Bf16Master,
        (Kind::Published, BF16, true, true) => Instance::Bf16MasterMomentum,
        (Kind::Published, BF16, false, false) => Instance::Bf16,
        (Kind::Published, F16, true, false) => Instance::F16Master,
        (Kind::Averaged, F32, false, true) => Instance::F32Averaged,
        (Kind::Averaged, BF16, true, true) => Instance::Bf16MasterAveraged,
        _ => Instance::Generic,
    }
}

/// Checks each tensor's addresses: there, aligned, and within the address space.
pub(super) fn check_addresses(entries: &[TensorEntry], addresses: &[DeviceTensor]) -> Result<()> {
    for (entry, address) in entries.iter().zip(addresses) {
        if entry.len == 0 {
            continue;
        }
        let name = &entry.spec.name;
        if address.param == 0 {
            return Err(Error::tensor(name, "its address is null; pass the address of its first element"));
        }
        check_range(name, "parameter", address.param, entry.len, entry.spec.dtype)?;
        if address.grad != 0 {
            check_range(name, "gradient", address.grad, entry.len, address.grad_dtype)?;
        }
    }
    Ok(())
}

fn check_range(name: &str, what: &str, address: u64, len: u64, dtype: DType) -> Result<()> {
    let size = size_of(dtype);
    if !address.is_multiple_of(size) {
        let problem = format!(
            "the address {address:#x} of its {what} is no multiple of {size}, the size of an {dtype}; pass the address \
             of its first element and the right format"
        );
        return Err(Error::tensor(name, problem));
    }
    if len.checked_mul(size).and_then(|bytes| address.checked_add(bytes)).is_none() {
        let problem = format!(
            "its {what} of {len} {dtype} elements at {address:#x} goes beyond the address space; pass a device address"
        );
        return Err(Error::tensor(name, problem));
    }
    Ok(())
}

/// Checks that no two parameters share memory: both would be updated from what the other left.
pub(super) fn check_overlap(entries: &[TensorEntry], addresses: &[DeviceTensor]) -> Result<()> {
    let mut ranges: Vec<(u64, u64, usize)> = entries
        .iter()
        .zip(addresses)
        .enumerate()
        .filter(|(_, (entry, _))| entry.len > 0)
        .map(|(k, (entry, address))| {
            (address.param, address.param + entry.len * size_of(entry.spec.dtype), k)
        })
        .collect();
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        let ((first, end, a), (second, _, b)) = (pair[0], pair[1]);
        if second < end {
            let (earlier, later) = (&entries[a.min(b)].spec.name, &entries[a.max(b)].spec.name);
            let problem = if first == second {
                format!(
                    "is the same memory as `{earlier}`; list a shared parameter once, with the sum of its gradients"
                )
            } else {
                format!("shares memory with `{earlier}`; each parameter needs elements of its own")
            };
            return Err(Error::tensor(later, problem));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(lengths: &[(usize, DType)]) -> Vec<TensorEntry> {
        lengths
            .iter()
            .enumerate()
            .map(|(k, &(len, dtype))| TensorEntry {
                spec: TensorSpec::new(format!("t{k}"), &[len], dtype),
                len: len as u64,
                momentum: 0,
                master: 0,
                master_ready: false,
            })
            .collect()
    }

    fn addresses(entries: &[TensorEntry], grad: DType) -> Vec<DeviceTensor> {
        (1..=entries.len() as u64).map(|k| DeviceTensor::new(k << 40, k << 40 | 1 << 32, grad)).collect()
    }

    fn plan(entries: &[TensorEntry], addresses: &[DeviceTensor], group: Group) -> Plan {
        Plan::new(entries, &[group], addresses, Kind::Published)
    }

    #[test]
    fn chunks_and_segments_follow_the_tensors() {
        let entries = entries(&[0, 1, 4096, 4097, 1 << 20, (1 << 20) + 1, 5].map(|len| (len, DType::F32)));
        let mut addresses = addresses(&entries, DType::F32);
        addresses[2].grad = 0;
        let plan = plan(&entries, &addresses, Group::default());
        let first = |f: fn(&RfdTensor) -> u64| plan.tensors.iter().map(f).collect::<Vec<_>>();
        assert_eq!(first(|t| t.first_chunk), [0, 0, 1, 1, 3, 259, 516]);
        assert_eq!(first(|t| t.first_segment.into()), [0, 0, 1, 1, 2, 3, 5]);
        assert_eq!(plan.extent, Extent { chunks: 517, segments: 6 });
        // room for the missing one is kept
        assert_eq!(Extent::of_all(&entries).unwrap(), Extent { chunks: 518, segments: 7 });
    }

    #[test]
    fn counts_beyond_32_bits() {
        let large = entries(&[(1 << 45, DType::F32), (7, DType::F32)]);
        let plan = plan(&large, &addresses(&large, DType::F32), Group::default());
        assert_eq!(plan.tensors[1].first_chunk, 1 << 33);
        assert_eq!(plan.tensors[1].first_segment, 1 << 25);
        let huge = entries(&[(1 << 52, DType::F32), (1, DType::F32)]);
        assert!(Extent::of_all(&huge).unwrap_err().to_string().contains("`t0`"));
    }

    #[test]
    fn lists_of_one_kind_get_their_instance() {
        use DType::{BF16, F16, F32, F64};
        // parameter, gradient, master weights, momentum
        let cases = [
            (F32, F32, false, false, Instance::F32),
            (F32, F32, false, true, Instance::F32Momentum),
            (BF16, BF16, true, false, Instance::Bf16Master),
            (BF16, BF16, true, true, Instance::Bf16MasterMomentum),
            (BF16, BF16, false, false, Instance::Bf16),
            (BF16, BF16, false, true, Instance::Generic),
            (F16, F16, true, false, Instance::F16Master),
            (F16, F16, false, false, Instance::Generic),
            (F32, BF16, false, false, Instance::Generic),
            (F32, F64, false, false, Instance::Generic),
            (F64, F64, false, false, Instance::Generic),
        ]
        .map(|(param, grad, master, momentum, expected)| {
            (Kind::Published, param, grad, master, momentum, expected)
        });
        let others = [
            (Kind::Averaged, F32, F32, false, true, Instance::F32Averaged),
            (Kind::Averaged, F32, BF16, false, true, Instance::Generic),
            (Kind::Averaged, BF16, BF16, true, true, Instance::Bf16MasterAveraged),
            (Kind::Averaged, BF16, BF16, false, true, Instance::Generic),
            (Kind::Adaptive, F32, F32, false, false, Instance::Generic),
            (Kind::Conservative, F32, F32, false, false, Instance::Generic),
        ];
        for (kind, param, grad, master, momentum, expected) in cases.into_iter().chain(others) {
            let mut entries = entries(&[(10, param), (0, F64), (20, param), (30, F64)]);
            for entry in &mut entries {
                entry.master = if master { 256 } else { 0 };
                entry.momentum = if momentum { 512 } else { 0 };
            }
            let mut addresses = addresses(&entries, grad);
            // neither an empty tensor nor one without gradient decides
            addresses[3] = DeviceTensor::without_grad(addresses[3].param);
            let group = Group { momentum: if momentum { 0.9 } else { 0.0 }, ..Group::default() };
            let with = |group| Plan::new(&entries, &[group], &addresses, kind);
            let sums = if kind == Kind::Averaged { 2 } else { 1 };
            let plan = with(group);
            assert_eq!(
                (plan.instance, plan.sums),
                (expected, sums),
                "{kind:?} {param} {grad} {master} {momentum}"
            );
            assert_eq!(plan.f64_grads, grad == F64);
            let locked = with(Group { norm_lock: true, ..group });
            assert_eq!((locked.instance, locked.sums), (Instance::Generic, 4));
        }
        let mixed = entries(&[(10, F32), (10, BF16)]);
        assert_eq!(plan(&mixed, &addresses(&mixed, F32), Group::default()).instance, Instance::Generic);
        assert_eq!(plan(&[], &[], Group::default()).instance, Instance::Generic);
    }

    #[test]
    fn errors_name_the_tensor() {
        let entries = entries(&[(8, DType::F32), (8, DType::F64), (0, DType::F32), (8, DType::BF16)]);
        let good = addresses(&entries, DType::F16);
        check_addresses(&entries, &good).unwrap();
        check_overlap(&entries, &good).unwrap();
        let broken = |change: fn(&mut [DeviceTensor])| {
            let mut addresses = good.clone();
            change(&mut addresses);
            let checked =
                check_addresses(&entries, &addresses).and_then(|()| check_overlap(&entries, &addresses));
            checked.map_err(|error| error.to_string())
        };
        for (change, tensor, word) in [
            ((|a| a[1].param = 0) as fn(&mut [DeviceTensor]), "`t1`", "null"),
            (|a| a[0].param += 2, "`t0`", "multiple of 4"),
            (|a| a[1].param += 4, "`t1`", "multiple of 8"),
            (|a| a[3].grad += 1, "`t3`", "gradient"),
            (|a| a[0].param = u64::MAX - 15, "`t0`", "beyond"),
            (|a| a[3].grad = u64::MAX - 15, "`t3`", "beyond"),
            (|a| a[3].param = a[0].param, "`t3`", "same memory as `t0`"),
            (|a| a[1].param = a[0].param + 24, "`t1`", "shares memory with `t0`"),
            (|a| a[0].param = a[3].param + 12, "`t3`", "shares memory with `t0`"),
        ] {
            let message = broken(change).unwrap_err();
            assert!(message.contains(tensor) && message.contains(word), "{message}");
        }
        // neighbours, empty tensors anywhere, missing gradients
        broken(|a| a[1].param = a[0].param + 32).unwrap();
        broken(|a| a[2] = DeviceTensor::new(0, 3, DType::F32)).unwrap();
        broken(|a| a[3].grad = 0).unwrap();
    }
}
