//! Samples of loss and gradient norm at random initialisations of a network: what auto-fit asks for.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use rfdescent::estimation::{BatchSample, Sampler, SamplerError, TensorDims};

use crate::error;
use crate::host::host_loss;
use crate::seeded_vars::SeededVars;

/// The stream of a sample's generator, apart from those that a program draws other things from with the same
/// seed.
const STREAM: u64 = 3;

/// Builds a network anew for each sample and takes the loss and the squared gradient norm, in all and of each
/// variable, on a fresh batch.
///
/// Three functions say what is trained. `build` makes the network, asking for its variables as for training.
/// `batch` draws so many examples, all of its randomness from the generator, so that a run that was
/// interrupted goes on from its cache with the same samples. `loss` is the mean loss over a batch as in
/// training, still differentiable.
///
/// ```no_run
/// use std::ops::ControlFlow;
///
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Linear, Module, VarBuilder};
/// use rfdescent_candle::NetworkSampler;
/// use rfdescent_candle::rfdescent::covariance::{Family, Model};
/// use rfdescent_candle::rfdescent::estimation::AutoFit;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let build = |vb: VarBuilder| candle_nn::linear(784, 10, vb);
/// let batch = |size: usize, _rng: &mut _| -> candle_core::Result<(Tensor, Tensor)> {
///     todo!("{size} examples")
/// };
/// let loss = |network: &Linear, (images, labels): &(Tensor, Tensor)| {
///     candle_nn::loss::cross_entropy(&network.forward(images)?, labels)
/// };
/// let cache = Some("samples.csv".into());
/// let auto_fit = AutoFit { max_batch_size: Some(60_000), cache, ..AutoFit::default() };
/// let mut sampler = NetworkSampler::new(DType::F32, &Device::Cpu, build, batch, loss, &auto_fit)?;
/// let fitted = auto_fit.run(&mut sampler, &mut |_| ControlFlow::Continue(()))?;
/// Model::new(Family::SquaredExponential, fitted.moments())?.save("model.json".as_ref())?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct NetworkSampler<Build, Batch, Loss> {
    dtype: DType,
    device: Device,
    build: Build,
    batch: Batch,
    loss: Loss,
    /// The variables that have a gradient.
    tensors: Vec<TensorDims>,
}

impl<Network, Examples, Build, Batch, Loss> NetworkSampler<Build, Batch, Loss>
where
    Build: FnMut(VarBuilder<'static>) -> Result<Network>,
    Batch: FnMut(usize, &mut ChaCha8Rng) -> Result<Examples>,
    Loss: FnMut(&Network, &Examples) -> Result<Tensor>,
{
    /// Evaluates the network once, at the smallest batch size that `auto_fit` may ask for: the tensors are
    /// the variables that have a gradient, not running averages and the like.
    ///
    /// # Errors
    /// Those of the functions; a loss that is not one number; a network without any gradient.
    pub fn new(
        dtype: DType,
        device: &Device,
        build: Build,
        batch: Batch,
        loss: Loss,
        auto_fit: &rfdescent::estimation::AutoFit,
    ) -> Result<Self> {
        let mut sampler = Self { dtype, device: device.clone(), build, batch, loss, tensors: Vec::new() };
        let evaluated = sampler.evaluate(auto_fit.min_batch_size, auto_fit.seed)?;
        if evaluated.tensors.is_empty() {
            let remedy = "take all variables from the VarBuilder, and the loss from them without `detach`";
            return Err(error::invalid("number of variables with a gradient", 0, remedy));
        }
        sampler.tensors = evaluated.tensors;
        Ok(sampler)
    }

    fn evaluate(&mut self, batch_size: u64, seed: u64) -> Result<Evaluated> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(STREAM);
        let vars = SeededVars::new(rng);
        let network = (self.build)(vars.builder(self.dtype, &self.device))?;
        let examples = (self.batch)(batch_size as usize, &mut vars.rng())?;
        let loss = (self.loss)(&network, &examples)?;
        let grads = loss.backward()?;
        let (mut sq_grad_norm, mut sq_grad_norms, mut tensors) = (0.0, Vec::new(), Vec::new());
        for parameter in vars.parameters() {
            let Some(grad) = grads.get(&parameter.var) else { continue };
            let grad = grad.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
            if grad.is_empty() {
                continue;
            }
            tensors.push(TensorDims { name: parameter.name, dims: grad.len() as u64 });
            let mut of_tensor = 0.0;
            for square in grad.into_iter().map(|g| g * g) {
                sq_grad_norm += square;
                of_tensor += square;
            }
            sq_grad_norms.push(of_tensor);
        }
        let sample = BatchSample { loss: host_loss(&loss)?, sq_grad_norm };
        Ok(Evaluated { sample, sq_grad_norms, tensors })
    }
}

struct Evaluated {
    sample: BatchSample,
    /// Of each tensor.
    sq_grad_norms: Vec<f64>,
    tensors: Vec<TensorDims>,
}

impl<Network, Examples, Build, Batch, Loss> Sampler for NetworkSampler<Build, Batch, Loss>
where
    Build: FnMut(VarBuilder<'static>) -> Result<Network>,
    Batch: FnMut(usize, &mut ChaCha8Rng) -> Result<Examples>,
    Loss: FnMut(&Network, &Examples) -> Result<Tensor>,
{
    fn dims(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.dims).sum()
    }

    fn sample(&mut self, batch_size: u64, seed: u64) -> std::result::Result<BatchSample, SamplerError> {
        self.sample_tensors(batch_size, seed, &mut Vec::new())
    }

    fn tensors(&self) -> &[TensorDims] {
        &self.tensors
    }

    fn sample_tensors(
        &mut self,
        batch_size: u64,
        seed: u64,
        squares: &mut Vec<f64>,
    ) -> std::result::Result<BatchSample, SamplerError> {
        let Evaluated { sample, sq_grad_norms, tensors } = self.evaluate(batch_size, seed)?;
        if tensors != self.tensors {
            let dims = |tensors: &[TensorDims]| tensors.iter().map(|tensor| tensor.dims).sum::<u64>();
            return Err(format!(
                "{} numbers in {} variables have a gradient, where {} in {} had before, or their names differ; a sample \
                 must always evaluate the whole network",
                dims(&tensors),
                tensors.len(),
                self.dims(),
                self.tensors.len()
            )
            .into());
        }
        squares.extend(sq_grad_norms);
        Ok(sample)
    }
}
