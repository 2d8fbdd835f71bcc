//! Samples for auto-fit, from a network as tch programs write it.

use std::fmt;

use rfdescent::estimation::{self, BatchSample, SamplerError};
use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};

/// Draws losses and gradient norms of a network at random initialisations, for
/// [`AutoFit::run`](rfdescent::estimation::AutoFit::run).
///
/// Each sample seeds libtorch's generators, makes the network anew in a store of its own, draws a batch and
/// goes backward. The network in training is not touched; libtorch's generators are. They are shared by all
/// threads: samples come back only where no other thread draws random numbers meanwhile.
///
/// ```
/// use std::ops::ControlFlow;
/// use rfdescent::covariance::{Family, Model};
/// use rfdescent::estimation::AutoFit;
/// use rfdescent_tch::NetworkSampler;
/// use tch::nn::Module;
/// use tch::{Device, Kind, Tensor, nn};
///
/// # fn main() -> rfdescent_tch::Result<()> {
/// let build = |root: nn::Path<'_>| nn::linear(root / "layer", 8, 1, Default::default());
/// let batch = |size: i64| {
///     let inputs = Tensor::randn([size, 8], (Kind::Float, Device::Cpu));
///     let targets = inputs.sum_dim_intlist([1_i64].as_slice(), true, Kind::Float);
///     Ok((inputs, targets))
/// };
/// let loss = |net: &nn::Linear, (inputs, targets): (Tensor, Tensor)| {
///     Ok((net.forward(&inputs) - targets).square().mean(Kind::Float))
/// };
/// let mut sampler = NetworkSampler::new(Device::Cpu, build, batch, loss)?;
/// let fitted = AutoFit::default().run(&mut sampler, &mut |_| ControlFlow::Continue(()))?;
/// let model = Model::new(Family::SquaredExponential, fitted.moments())?;
/// # Ok(())
/// # }
/// ```
pub struct NetworkSampler<N, B, L> {
    device: Device,
    dims: u64,
    build: N,
    batch: B,
    loss: L,
}

impl<N, B, L> fmt::Debug for NetworkSampler<N, B, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Closures have no text.
        f.debug_struct("NetworkSampler")
            .field("device", &self.device)
            .field("dims", &self.dims)
            .finish_non_exhaustive()
    }
}

impl<N, M, B, D, L> NetworkSampler<N, B, L>
where
    N: FnMut(nn::Path<'_>) -> M,
    B: FnMut(i64) -> std::result::Result<D, SamplerError>,
    L: FnMut(&M, D) -> std::result::Result<Tensor, SamplerError>,
{
    /// A sampler of the networks that `build` makes on the device.
    ///
    /// `batch` draws so many examples at random; `loss` is their mean loss, of which one goes backward. All
    /// randomness should be libtorch's, which is seeded before: then the same samples come back after an
    /// interruption.
    ///
    /// # Errors
    /// [`Error::Rfd`] when the network has no trainable variables.
    pub fn new(device: Device, mut build: N, batch: B, loss: L) -> Result<Self> {
        let store = VarStore::new(device);
        build(store.root());
        let dims = store.trainable_variables().iter().map(|variable| variable.numel() as u64).sum();
        if dims == 0 {
            let expected =
                "the network has no trainable variables; make its layers under the path that is passed";
            return Err(Error::invalid("build", "an empty store", expected));
        }
        Ok(Self { device, dims, build, batch, loss })
    }

    fn evaluate(&mut self, batch_size: u64, seed: u64) -> std::result::Result<(f64, f64), SamplerError> {
        // Any bits will do for a seed.
        tch::manual_seed(seed.cast_signed());
        let store = VarStore::new(self.device);
        let network = (self.build)(store.root());
        let batch = (self.batch)(i64::try_from(batch_size)?)?;
        let loss = (self.loss)(&network, batch)?;
        loss.f_backward()?;
        let mut squares = Vec::new();
        for variable in store.trainable_variables() {
            let gradient = variable.f_grad()?;
            if gradient.defined() {
                // f64 before it is squared, so that no format overflows.
                squares.push(gradient.f_to_kind(Kind::Double)?.f_square()?.f_sum(Kind::Double)?);
            }
        }
        // One wait for the device, and the loss's.
        let sq_grad_norm = match squares.is_empty() {
            true => 0.0,
            false => Tensor::f_stack(&squares, 0)?.f_sum(Kind::Double)?.f_double_value(&[])?,
        };
        Ok((loss.f_double_value(&[])?, sq_grad_norm))
    }
}

impl<N, M, B, D, L> estimation::Sampler for NetworkSampler<N, B, L>
where
    N: FnMut(nn::Path<'_>) -> M,
    B: FnMut(i64) -> std::result::Result<D, SamplerError>,
    L: FnMut(&M, D) -> std::result::Result<Tensor, SamplerError>,
{
    fn dims(&self) -> u64 {
        self.dims
    }

    fn sample(&mut self, batch_size: u64, seed: u64) -> std::result::Result<BatchSample, SamplerError> {
        let (loss, sq_grad_norm) = self.evaluate(batch_size, seed)?;
        Ok(BatchSample { loss, sq_grad_norm })
    }
}
