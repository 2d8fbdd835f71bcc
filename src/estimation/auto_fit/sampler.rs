//! What auto-fit asks its user for: a cost at random initialisations.

use crate::covariance::check_sizes;
use crate::estimation::TensorDims;
use crate::{Error, Result};

/// What a mini-batch at a random initialisation gave.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchSample {
    /// The mean loss over the mini-batch.
    pub loss: f64,
    /// The squared norm of the gradient of that mean.
    pub sq_grad_norm: f64,
}

/// A mini-batch to evaluate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchRequest {
    /// The number of examples.
    pub batch_size: u64,
    /// What all its randomness should come from.
    pub seed: u64,
}

/// What a [`Sampler`] may fail with.
pub type SamplerError = Box<dyn std::error::Error + Send + Sync>;

/// Evaluates the cost to be optimised; the only thing auto-fit needs from its user.
///
/// A pair of d and a closure is a sampler as well; so is a pair of the tensors and a closure that returns the
/// squared gradient norm of each.
pub trait Sampler {
    /// d, the number of parameters.
    fn dims(&self) -> u64;

    /// Initialises the parameters at random, draws `batch_size` examples at random and evaluates loss and
    /// gradient.
    ///
    /// All randomness should come from `seed`: then the same samples come back after an interruption.
    ///
    /// # Errors
    /// Whatever prevents that; it ends the run, samples drawn before stay in the cache.
    fn sample(&mut self, batch_size: u64, seed: u64) -> std::result::Result<BatchSample, SamplerError>;

    /// How many mini-batches [`sample_many`](Self::sample_many) takes at once, at least 1. More than 1 is for
    /// devices, whose results are costly to wait for one by one; an interruption loses that many at most.
    fn most_at_once(&self) -> usize {
        1
    }

    /// Evaluates mini-batches and adds their results to `drawn`, in this order.
    ///
    /// # Errors
    /// As [`sample`](Self::sample). The results added before count.
    fn sample_many(
        &mut self,
        requests: &[BatchRequest],
        drawn: &mut Vec<BatchSample>,
    ) -> std::result::Result<(), SamplerError> {
        for request in requests {
            drawn.push(self.sample(request.batch_size, request.seed)?);
        }
        Ok(())
    }

    /// The tensors of parameters whose gradient norms [`sample_tensors`](Self::sample_tensors) gives; d is
    /// the sum of their sizes. None by default.
    fn tensors(&self) -> &[TensorDims] {
        &[]
    }

    /// As [`sample`](Self::sample), and adds the squared norm ‖g_k‖² of each tensor's part of the gradient to
    /// `sq_grad_norms`, in the order of [`tensors`](Self::tensors). Where there are tensors, it is called in
    /// place of the others, unless a cache without columns for them is gone on with.
    ///
    /// # Errors
    /// As [`sample`](Self::sample).
    fn sample_tensors(
        &mut self,
        batch_size: u64,
        seed: u64,
        sq_grad_norms: &mut Vec<f64>,
    ) -> std::result::Result<BatchSample, SamplerError> {
        let _ = sq_grad_norms;
        self.sample(batch_size, seed)
    }
}

/// The closure returns the mean loss and ‖g_k‖² of each tensor, whose sum ‖g‖² is.
impl<F> Sampler for (Vec<TensorDims>, F)
where
    F: FnMut(u64, u64) -> std::result::Result<(f64, Vec<f64>), SamplerError>,
{
    fn dims(&self) -> u64 {
        self.0.iter().fold(0, |sum, tensor| sum.saturating_add(tensor.dims))
    }

    fn sample(&mut self, batch_size: u64, seed: u64) -> std::result::Result<BatchSample, SamplerError> {
        self.sample_tensors(batch_size, seed, &mut Vec::new())
    }

    fn tensors(&self) -> &[TensorDims] {
        &self.0
    }

    fn sample_tensors(
        &mut self,
        batch_size: u64,
        seed: u64,
        sq_grad_norms: &mut Vec<f64>,
    ) -> std::result::Result<BatchSample, SamplerError> {
        let (loss, squares) = self.1(batch_size, seed)?;
        let sq_grad_norm = squares.iter().sum();
        sq_grad_norms.extend(squares);
        Ok(BatchSample { loss, sq_grad_norm })
    }
}

impl<F> Sampler for (u64, F)
where
    F: FnMut(u64, u64) -> std::result::Result<BatchSample, SamplerError>,
{
    fn dims(&self) -> u64 {
        self.0
    }

    fn sample(&mut self, batch_size: u64, seed: u64) -> std::result::Result<BatchSample, SamplerError> {
        self.1(batch_size, seed)
    }
}

/// An error for names that would not come back from a file, and for sizes that do not add up to d.
pub(super) fn check_tensors(tensors: &[TensorDims], dims: u64) -> Result<()> {
    for TensorDims { name, .. } in tensors {
        if name.is_empty() || name.trim() != name || name.contains(['\n', '\r']) {
            let problem = "is no name for a column: give one that is not empty, without line breaks and without white \
                           space at its ends";
            return Err(Error::tensor(name, problem));
        }
    }
    check_sizes(tensors.iter().map(|tensor| (tensor.name.as_str(), tensor.dims)), dims)
}
