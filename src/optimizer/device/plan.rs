//! What the kernels need to know of the tensors: addresses, formats, and where each one's chunks and segments
//! begin.

use super::buffers::Buffers;
use crate::backend::abi::{
    RFD_CHUNKS_PER_SEGMENT, RFD_DTYPE_F64, RFD_TENSOR_COLUMNS, RFD_TENSOR_COUNTS, RFD_TENSOR_LOCK,
    RFD_TENSOR_MATRIX, RfdTensor,
};
use crate::backend::executor::{Instance, InstanceKind};
use crate::backend::kernels::{DTYPES, are_same};
use crate::error::{Error, Result};
use crate::optimizer::core::Core;
use crate::optimizer::raw::RawTensor;
use crate::rows::Rows;
use crate::tensor::DType;

// The formats of host and kernels have the same numbers.
const _: () = assert!(are_same(DType::NAMES, DTYPES), "src/tensor.rs and kernels/abi.h have other formats");

/// Counts over a list of tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Extent {
    pub chunks: u64,
    pub segments: u32,
}

impl Extent {
    /// Adds a tensor of `len` elements that has a gradient, cut into these rows.
    pub fn add(&mut self, len: u64, rows: Rows) -> Option<()> {
        let chunks = len.div_ceil(rows.chunk() as u64);
        let segments = chunks.div_ceil(u64::from(RFD_CHUNKS_PER_SEGMENT));
        self.chunks = self.chunks.checked_add(chunks)?;
        self.segments = self.segments.checked_add(u32::try_from(segments).ok()?)?;
        Some(())
    }

    /// That of all tensors, as if each had a gradient: no step has more.
    pub fn of_all(core: &Core) -> Result<Self> {
        let mut extent = Self::default();
        let has_rows = core.method().descent().has_rows();
        for ((spec, &len), part) in core.specs().iter().zip(core.lens()).zip(core.parts()) {
            let rows = part.rows;
            // The kernels count rows in 32 bits, and look at them where the method has any.
            let most = rows.count(len).max(part.row_averages);
            let countable = !has_rows || u32::try_from(most).is_ok();
            extent.add(len as u64, rows).filter(|()| countable).ok_or_else(|| {
                Error::tensor(
                    &spec.name,
                    "with it the list has 2^32 segments of 256 chunks, or it has 2^32 rows, or more",
                )
            })?;
        }
        Ok(extent)
    }

    /// A tensor behind those there are, cut into these rows, as the kernels see it.
    pub fn place(
        &mut self,
        core: &Core,
        index: usize,
        buffers: &Buffers,
        address: &RawTensor,
        rows: Rows,
    ) -> RfdTensor {
        let (spec, len) = (&core.specs()[index], core.lens()[index] as u64);
        let counts = if spec.counts_in_norm { RFD_TENSOR_COUNTS } else { 0 };
        let lock = if core.group_of(index).norm_lock && len > 1 { RFD_TENSOR_LOCK } else { 0 };
        let matrix = if spec.is_matrix() { RFD_TENSOR_MATRIX } else { 0 };
        let columns = if rows.columns > 0 { RFD_TENSOR_COLUMNS } else { 0 };
        let tensor = RfdTensor {
            param: address.param,
            grad: address.grad,
            velocity: if core.velocity_decay_of(index) > 0.0 { buffers.velocity } else { 0 },
            master: buffers.master,
            variances: buffers.variances,
            len,
            offset: spec.offset,
            first_chunk: self.chunks,
            first_segment: self.segments,
            group: spec.group as u16,
            formats: (spec.dtype.number() | address.grad_dtype.number() << 4) as u8,
            flags: (counts | lock | matrix | columns) as u8,
            row: rows.len as u32,
            // Checked when the extent of all tensors was formed, for a method that has rows.
            rows: rows.count(len as usize) as u32,
        };
        if address.grad != 0 {
            // Cannot overflow: the extent of all tensors was formed when the optimizer was made.
            let _ = self.add(len, rows);
        }
        tensor
    }
}

/// Which kernels a list takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Choice {
    /// Those of a lean instance.
    Lean(Instance),
    /// The generic ones, and why.
    Generic(Reason),
}

/// Why a list takes the generic kernels; tensors by their place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Reason {
    /// Nothing has a gradient.
    Empty,
    /// The tensor's group has norm lock.
    Lock(usize),
    /// The method has no others, as it is set.
    Method,
    /// The second tensor is of another format than the first, or only one of them has momentum or master
    /// weights.
    Differ(usize, usize),
    /// There are none for lists of this tensor's kind.
    Kind(usize),
}

impl Choice {
    pub fn instance(self) -> Instance {
        match self {
            Self::Lean(instance) => instance,
            Self::Generic(_) => Instance::Generic,
        }
    }

    /// The instance's name, and why it is the generic one.
    pub fn explain(self, core: &Core) -> String {
        let name = |k: usize| &core.specs()[k].name;
        let reason = match self {
            Self::Lean(instance) => return instance.name().into(),
            Self::Generic(Reason::Empty) => "no tensor has a gradient".into(),
            Self::Generic(Reason::Lock(k)) => format!("tensor `{}` has norm lock", name(k)),
            Self::Generic(Reason::Method) => {
                format!("there are no others for the {} method with these settings", core.method().name())
            }
            Self::Generic(Reason::Differ(k, other)) => format!(
                "tensors `{}` and `{}` differ in format, momentum or master weights",
                name(k),
                name(other)
            ),
            Self::Generic(Reason::Kind(k)) => format!(
                "there are no others for such lists as that of tensor `{}`: {} parameters, with its format of gradients, \
                 {} momentum and {} master weights",
                name(k),
                core.specs()[k].dtype,
                if core.velocity_decay_of(k) > 0.0 { "with" } else { "without" },
                if core.options().master_weights { "with" } else { "without" }
            ),
        };
        format!("{}, slower than the others: {reason}", Instance::Generic.name())
    }
}

/// A list of tensors as the kernels see it.
#[derive(Debug)]
pub(super) struct Plan {
    pub tensors: Vec<RfdTensor>,
    pub extent: Extent,
    pub choice: Choice,
    /// Whether squares of gradients may leave the range of f64.
    pub f64_grads: bool,
}

impl Plan {
    /// The plan for checked addresses.
    pub fn new(core: &Core, buffers: &[Buffers], addresses: &[RawTensor]) -> Self {
        let kind = core.method().descent().kind();
        let mut extent = Extent::default();
        let tensors: Vec<RfdTensor> = (buffers.iter().zip(addresses).enumerate())
            .map(|(k, (buffers, address))| extent.place(core, k, buffers, address, core.parts()[k].rows))
            .collect();
        let active = || tensors.iter().enumerate().filter(|(_, tensor)| tensor.grad != 0 && tensor.len > 0);
        let f64_grads = active().any(|(_, tensor)| grad_format(tensor) == RFD_DTYPE_F64);
        Self { choice: choice(kind, active()), f64_grads, extent, tensors }
    }

    pub fn instance(&self) -> Instance {
        self.choice.instance()
    }
}

/// The number of a parameter's format.
fn param_format(tensor: &RfdTensor) -> u32 {
    u32::from(tensor.formats & 15)
}

/// The number of a gradient's format.
fn grad_format(tensor: &RfdTensor) -> u32 {
    u32::from(tensor.formats >> 4)
}

/// The lean instance for tensors that are all alike, if there is one for their kind.
fn choice<'a>(kind: InstanceKind, tensors: impl Iterator<Item = (usize, &'a RfdTensor)> + Clone) -> Choice {
    let buffers = |t: &RfdTensor| (param_format(t), grad_format(t), t.master != 0, t.velocity != 0);
    let locked = |(_, tensor): &(usize, &RfdTensor)| u32::from(tensor.flags) & RFD_TENSOR_LOCK != 0;
    if let Some((k, _)) = tensors.clone().find(locked) {
        return Choice::Generic(Reason::Lock(k));
    }
    if kind == InstanceKind::Generic {
        return Choice::Generic(Reason::Method);
    }
    let mut rest = tensors;
    let Some((k, first)) = rest.next() else { return Choice::Generic(Reason::Empty) };
    let first = buffers(first);
    if let Some((other, _)) = rest.find(|(_, tensor)| buffers(tensor) != first) {
        return Choice::Generic(Reason::Differ(k, other));
    }
    let (param, grad, master, velocity) = first;
    match Instance::of(kind, param, grad, master, velocity) {
        Instance::Generic => Choice::Generic(Reason::Kind(k)),
        lean => Choice::Lean(lean),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Moments;
    use crate::covariance::{Family, Model, StepRule};
    use crate::optimizer::{Adaptive, Fitted, Group, Method, Options, TensorSpec};

    /// The methods that take different instances.
    #[derive(Clone, Copy, Debug)]
    enum Kind {
        Fitted,
        Conservative,
        Adaptive,
        Averaged,
    }

    fn model() -> Model {
        let moments = Moments {
            mean: 1.0,
            variance: 1.0,
            noise_variance: 0.0,
            grad_variance: 1.0,
            noise_grad_variance: 0.0,
            dims: 1,
        };
        Model::new(Family::SquaredExponential, moments).unwrap()
    }

    /// Tensors of the given lengths and formats in one group.
    fn core(method: impl Into<Method>, norm_lock: bool, tensors: &[(usize, DType)]) -> Core {
        let specs = tensors.iter().enumerate();
        let specs = specs.map(|(k, &(len, dtype))| TensorSpec::new(format!("t{k}"), &[len], dtype)).collect();
        let options = Options { groups: vec![Group { norm_lock, ..Group::default() }], ..Options::default() };
        Core::new(method, options, specs).unwrap()
    }

    fn addresses(core: &Core, grad: DType) -> Vec<RawTensor> {
        (1..=core.specs().len() as u64).map(|k| RawTensor::new(k << 40, k << 40 | 1 << 32, grad)).collect()
    }

    /// The plan for tensors without velocities and master weights.
    fn bare(core: &Core, addresses: &[RawTensor]) -> Plan {
        Plan::new(core, &vec![Buffers::default(); addresses.len()], addresses)
    }

    #[test]
    fn chunks_and_segments_follow_the_tensors() {
        let lens = [0, 1, 4096, 4097, 1 << 20, (1 << 20) + 1, 5];
        let core = core(model(), false, &lens.map(|len| (len, DType::F32)));
        let mut addresses = addresses(&core, DType::F32);
        addresses[2].grad = 0;
        let plan = bare(&core, &addresses);
        let first = |f: fn(&RfdTensor) -> u64| plan.tensors.iter().map(f).collect::<Vec<_>>();
        assert_eq!(first(|t| t.first_chunk), [0, 0, 1, 1, 3, 259, 516]);
        assert_eq!(first(|t| t.first_segment.into()), [0, 0, 1, 1, 2, 3, 5]);
        assert_eq!(plan.extent, Extent { chunks: 517, segments: 6 });
        // room for the missing one is kept
        assert_eq!(Extent::of_all(&core).unwrap(), Extent { chunks: 518, segments: 7 });
    }

    #[test]
    fn counts_beyond_32_bits() {
        let large = core(model(), false, &[(1 << 45, DType::F32), (7, DType::F32)]);
        let plan = bare(&large, &addresses(&large, DType::F32));
        assert_eq!(plan.tensors[1].first_chunk, 1 << 33);
        assert_eq!(plan.tensors[1].first_segment, 1 << 25);
        let huge = core(model(), false, &[(1 << 52, DType::F32), (1, DType::F32)]);
        assert!(Extent::of_all(&huge).unwrap_err().to_string().contains("`t0`"));
        // As many rows as chunks, which only a method with rows looks at.
        let tensors = [(1, DType::F32), (1 << 45, DType::F32)];
        Extent::of_all(&core(model(), false, &tensors)).unwrap();
        let rows = core(Adaptive::default(), false, &tensors);
        assert_eq!(rows.parts()[1].rows, Rows::CHUNKS);
        assert!(Extent::of_all(&rows).unwrap_err().to_string().contains("`t1`"));
        Extent::of_all(&core(Adaptive::default(), false, &[(1 << 43, DType::F32)])).unwrap();
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
            (Kind::Fitted, param, grad, master, momentum, expected)
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
            let method = |momentum: f64| -> Method {
                let fitted = Fitted::new(model()).with_momentum(momentum);
                match kind {
                    Kind::Fitted => fitted.into(),
                    Kind::Conservative => {
                        Fitted { rule: StepRule { conservatism: 0.1, ..StepRule::default() }, ..fitted }
                            .into()
                    }
                    Kind::Adaptive => Adaptive { averaging: 0.0, ..Adaptive::default() }.into(),
                    Kind::Averaged => Adaptive::default().into(),
                }
            };
            let plan = |norm_lock| {
                let list = [(10, param), (0, F64), (20, param), (30, F64)];
                let core = core(method(if momentum { 0.9 } else { 0.0 }), norm_lock, &list);
                let buffers = Buffers {
                    velocity: if momentum { 512 } else { 0 },
                    master: if master { 256 } else { 0 },
                    variances: 1024,
                    master_ready: true,
                };
                let mut addresses = addresses(&core, grad);
                // neither an empty tensor nor one without gradient decides
                addresses[3] = RawTensor::without_grad(addresses[3].param);
                Plan::new(&core, &[buffers; 4], &addresses)
            };
            let (free, locked) = (plan(false), plan(true));
            let case = format!("{kind:?} {param} {grad} {master} {momentum}");
            assert_eq!((free.instance(), free.f64_grads), (expected, grad == F64), "{case}");
            assert_eq!(locked.choice, Choice::Generic(Reason::Lock(0)), "{case}");
        }
        let mixed = core(model(), false, &[(10, F32), (10, BF16)]);
        assert_eq!(bare(&mixed, &addresses(&mixed, F32)).choice, Choice::Generic(Reason::Differ(0, 1)));
        let empty = core(model(), false, &[]);
        assert_eq!(bare(&empty, &[]).choice, Choice::Generic(Reason::Empty));
        // Reasons in words name tensors and settings.
        let told = |core: &Core| bare(core, &addresses(core, F32)).choice.explain(core);
        assert_eq!(told(&core(model(), false, &[(10, F32)])), "f32");
        assert!(told(&mixed).contains("tensors `t0` and `t1` differ"), "{}", told(&mixed));
        assert!(told(&core(model(), true, &[(10, F32)])).contains("`t0` has norm lock"));
        assert!(told(&core(model(), false, &[(10, F64)])).contains("f64 parameters"));
        let plain = Adaptive { averaging: 0.0, ..Adaptive::default() };
        assert!(told(&core(plain, false, &[(10, F32)])).contains("the adaptive method with these settings"));
    }
}
