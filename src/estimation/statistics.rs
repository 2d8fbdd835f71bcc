//! Sufficient statistics of the samples: Welford accumulators per batch size.
//!
//! For fixed μ, β₀ and β₁ the weighted least squares of the paper's section "Variance estimation in detail"
//! see a sample only through its batch size and the sums over (L − μ)² and ‖g‖² of that batch size. Both
//! follow from counts, means and central sums, so memory grows with the number of distinct batch sizes only,
//! and statistics of several workers merge without loss.

use super::EstimationError;
use crate::Result;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One mini-batch at a random initialisation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// The mini-batch loss, the mean over the batch; finite, may be negative.
    pub loss: f64,
    /// ‖∇L_b‖², the squared norm of the mini-batch gradient; finite, ≥ 0.
    pub sq_grad_norm: f64,
    /// b, the number of examples in the mini-batch; ≥ 1.
    pub batch_size: u64,
}

/// Largest loss and largest norm: the sums of up to 1e60 fourth powers of these stay finite.
pub(super) const LARGEST_NORM: f64 = 1e60;

impl Sample {
    /// Checks the domain of each field.
    ///
    /// # Errors
    /// [`EstimationError::InvalidSample`] for a loss that is not finite or beyond ±1e60, a squared norm that
    /// is negative, not finite or beyond 1e120, and batch size 0.
    pub fn validate(&self) -> std::result::Result<(), EstimationError> {
        let invalid =
            |quantity, value, expected| Err(EstimationError::InvalidSample { quantity, value, expected });
        if !self.loss.is_finite() {
            return invalid("loss", self.loss, "must be finite; draw this sample again or leave it out");
        }
        if self.loss.abs() > LARGEST_NORM {
            return invalid("loss", self.loss, "must be within ±1e60; divide the loss by a constant");
        }
        if !(self.sq_grad_norm.is_finite() && self.sq_grad_norm >= 0.0) {
            return invalid("sq_grad_norm", self.sq_grad_norm, "must be finite and at least 0");
        }
        if self.sq_grad_norm > LARGEST_NORM.powi(2) {
            return invalid(
                "sq_grad_norm",
                self.sq_grad_norm,
                "must be at most 1e120; divide the loss by a constant",
            );
        }
        if self.batch_size == 0 {
            return invalid("batchsize", 0.0, "must be at least 1");
        }
        Ok(())
    }
}

/// Count, mean and the sums of the second to fourth powers of the deviations from the mean.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LossMoments {
    mean: f64,
    m2: f64,
    m3: f64,
    m4: f64,
}

/// Mean and sum of squared deviations of ‖g‖².
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SqGradNormMoments {
    mean: f64,
    m2: f64,
}

/// Statistics of all samples that share one batch size.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Group {
    count: u64,
    loss: LossMoments,
    sq_grad_norm: SqGradNormMoments,
    /// Mean of ‖g_k‖² by the tensor's name; the same names at each batch size.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    tensors: BTreeMap<String, f64>,
}

impl Group {
    fn of(sample: &Sample, tensors: BTreeMap<String, f64>) -> Self {
        Group {
            count: 1,
            loss: LossMoments { mean: sample.loss, ..Default::default() },
            sq_grad_norm: SqGradNormMoments { mean: sample.sq_grad_norm, m2: 0.0 },
            tensors,
        }
    }

    /// The pairwise update of Chan, Golub & LeVeque, with Pébay's formulas for the third and fourth power.
    fn merged(&self, other: &Self) -> Self {
        let (na, nb) = (self.count as f64, other.count as f64);
        let n = na + nb;
        let (a, b) = (&self.loss, &other.loss);
        let delta = b.mean - a.mean;
        let step = delta / n;
        let cross = delta * step * na * nb;
        let loss = LossMoments {
            mean: a.mean + step * nb,
            m2: a.m2 + b.m2 + cross,
            m3: a.m3 + b.m3 + cross * step * (na - nb) + 3.0 * step * (na * b.m2 - nb * a.m2),
            m4: a.m4
                + b.m4
                + cross * step * step * (na * na - na * nb + nb * nb)
                + 6.0 * step * step * (na * na * b.m2 + nb * nb * a.m2)
                + 4.0 * step * (na * b.m3 - nb * a.m3),
        };
        let (a, b) = (&self.sq_grad_norm, &other.sq_grad_norm);
        let delta = b.mean - a.mean;
        let sq_grad_norm = SqGradNormMoments {
            mean: a.mean + delta / n * nb,
            m2: a.m2 + b.m2 + delta * (delta / n) * na * nb,
        };
        let tensors = self
            .tensors
            .iter()
            .zip(other.tensors.values())
            .map(|((name, a), b)| (name.clone(), a + (b - a) / n * nb));
        let tensors = tensors.collect();
        Group { count: self.count.saturating_add(other.count), loss, sq_grad_norm, tensors }
    }

    fn is_finite(&self) -> bool {
        let Group { loss, sq_grad_norm, .. } = self;
        [loss.mean, loss.m2, loss.m3, loss.m4, sq_grad_norm.mean, sq_grad_norm.m2]
            .iter()
            .all(|x| x.is_finite())
    }

    pub(super) fn count(&self) -> f64 {
        self.count as f64
    }

    pub(super) fn mean_loss(&self) -> f64 {
        self.loss.mean
    }

    pub(super) fn mean_sq_grad_norm(&self) -> f64 {
        self.sq_grad_norm.mean
    }

    /// The loss, where all samples have the same.
    pub(super) fn constant_loss(&self) -> Option<f64> {
        (self.loss.m2 == 0.0).then_some(self.loss.mean)
    }

    /// ‖g‖², where all samples have the same.
    pub(super) fn constant_sq_grad_norm(&self) -> Option<f64> {
        (self.sq_grad_norm.m2 == 0.0).then_some(self.sq_grad_norm.mean)
    }

    pub(super) fn mean_of_tensor(&self, name: &str) -> Option<f64> {
        self.tensors.get(name).copied()
    }

    /// Σ (L − center)^k for k = 2, 3, 4.
    pub(super) fn loss_powers_about(&self, center: f64) -> [f64; 3] {
        let (n, d, m) = (self.count(), self.loss.mean - center, &self.loss);
        let second = m.m2 + n * d * d;
        let third = m.m3 + d * (3.0 * m.m2 + n * d * d);
        let fourth = m.m4 + d * (4.0 * m.m3 + d * (6.0 * m.m2 + n * d * d));
        [second, third, fourth]
    }

    /// Σ (‖g‖² − center)².
    pub(super) fn sq_grad_norm_squares_about(&self, center: f64) -> f64 {
        self.sq_grad_norm.m2 + self.count() * (self.sq_grad_norm.mean - center).powi(2)
    }
}

/// Everything a fit needs to know about the samples, in memory proportional to the number of distinct batch
/// sizes (times that of tensors, where samples have their norms).
///
/// Two statistics merge into that of all their samples; the order of pushes and merges matters to rounding
/// only.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Stored", into = "Stored")]
pub struct SampleStatistics {
    groups: BTreeMap<u64, Group>,
}

impl SampleStatistics {
    /// Statistics of no samples.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds one sample.
    ///
    /// # Errors
    /// Those of [`Sample::validate`]; the statistics are unchanged then.
    pub fn push(&mut self, sample: &Sample) -> Result<()> {
        self.push_tensors(sample, [])
    }

    /// Adds one sample with the squared gradient norm ‖g_k‖² of each tensor, by the tensor's name, in any
    /// order.
    ///
    /// # Errors
    /// Those of [`Sample::validate`]; [`EstimationError::InvalidTensor`] for a squared norm that is negative,
    /// not finite or beyond 1e120 and for a name that comes twice; [`EstimationError::OtherTensors`] where
    /// the samples so far have other tensors or none. The statistics are unchanged then.
    pub fn push_tensors<'a>(
        &mut self,
        sample: &Sample,
        sq_grad_norms: impl IntoIterator<Item = (&'a str, f64)>,
    ) -> Result<()> {
        sample.validate()?;
        let mut tensors = BTreeMap::new();
        for (name, value) in sq_grad_norms {
            let invalid = |expected| EstimationError::InvalidTensor { tensor: name.into(), value, expected };
            if !(0.0..=LARGEST_NORM.powi(2)).contains(&value) {
                return Err(invalid("must be finite, at least 0 and at most 1e120").into());
            }
            if tensors.insert(name.to_string(), value).is_some() {
                return Err(invalid("is given twice; give each tensor a name of its own").into());
            }
        }
        if let Some(tensor) =
            self.groups.values().next().and_then(|group| difference(&group.tensors, &tensors))
        {
            return Err(EstimationError::OtherTensors { tensor: tensor.into() }.into());
        }
        self.add(sample.batch_size, &Group::of(sample, tensors));
        Ok(())
    }

    /// Adds the samples of `other`, as if they had been pushed one by one.
    ///
    /// Norms of tensors are kept where both have those of the same tensors; otherwise they are dropped, and
    /// only the whole gradient can be fitted.
    pub fn merge(&mut self, other: &SampleStatistics) {
        let mut other = other.clone();
        if let (Some(a), Some(b)) = (self.groups.values().next(), other.groups.values().next())
            && difference(&a.tensors, &b.tensors).is_some()
        {
            self.groups.values_mut().chain(other.groups.values_mut()).for_each(|group| group.tensors.clear());
        }
        for (&batch_size, group) in &other.groups {
            self.add(batch_size, group);
        }
    }

    fn add(&mut self, batch_size: u64, group: &Group) {
        self.groups
            .entry(batch_size)
            .and_modify(|old| *old = old.merged(group))
            .or_insert_with(|| group.clone());
    }

    /// Names of the tensors whose squared gradient norms all samples have, in alphabetical order.
    pub fn tensors(&self) -> impl Iterator<Item = &str> {
        self.groups.values().next().into_iter().flat_map(|group| group.tensors.keys().map(String::as_str))
    }

    /// Number of mini-batches.
    pub fn batches(&self) -> u64 {
        self.groups.values().fold(0, |sum: u64, g| sum.saturating_add(g.count))
    }

    /// Number of examples used: the sum of the batch sizes.
    pub fn examples(&self) -> u64 {
        self.groups.iter().fold(0, |sum: u64, (b, g)| sum.saturating_add(b.saturating_mul(g.count)))
    }

    /// Number of mini-batches of each batch size, in increasing order of the batch size.
    pub fn counts(&self) -> BTreeMap<u64, u64> {
        self.groups.iter().map(|(&b, g)| (b, g.count)).collect()
    }

    /// Number of distinct batch sizes.
    pub fn distinct_batch_sizes(&self) -> usize {
        self.groups.len()
    }

    pub(super) fn groups(&self) -> impl Iterator<Item = (u64, &Group)> {
        self.groups.iter().map(|(&b, g)| (b, g))
    }

    /// The statistics as versioned JSON; [`from_json`](Self::from_json) restores them bit for bit.
    pub fn to_json(&self) -> String {
        // Finite numbers under string keys: serialising them into memory cannot fail.
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    /// Reads what [`to_json`](Self::to_json) wrote.
    ///
    /// # Errors
    /// [`EstimationError::Statistics`] when it is something else, of another version, or inconsistent.
    pub fn from_json(json: &str) -> Result<Self> {
        Ok(serde_json::from_str(json).map_err(|e| EstimationError::Statistics(e.to_string()))?)
    }
}

/// A tensor that only one of the two has.
fn difference<'a>(a: &'a BTreeMap<String, f64>, b: &'a BTreeMap<String, f64>) -> Option<&'a String> {
    a.keys().find(|name| !b.contains_key(*name)).or_else(|| b.keys().find(|name| !a.contains_key(*name)))
}

const FORMAT: &str = "rfdescent-sample-statistics";
const VERSION: u32 = 1;

/// The form on disk.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    format: String,
    version: u32,
    batch_sizes: BTreeMap<u64, Group>,
}

impl From<SampleStatistics> for Stored {
    fn from(statistics: SampleStatistics) -> Self {
        Stored { format: FORMAT.into(), version: VERSION, batch_sizes: statistics.groups }
    }
}

impl TryFrom<Stored> for SampleStatistics {
    type Error = String;

    fn try_from(stored: Stored) -> std::result::Result<Self, String> {
        if stored.format != FORMAT {
            return Err(format!("format `{}` instead of `{FORMAT}`", stored.format));
        }
        if stored.version != VERSION {
            return Err(format!(
                "version {} instead of {VERSION}: written by another release; compute them from the samples again",
                stored.version
            ));
        }
        for (batch_size, group) in &stored.batch_sizes {
            let sound = *batch_size >= 1
                && group.count >= 1
                && group.is_finite()
                && group.loss.m2 >= 0.0
                && group.loss.m4 >= 0.0
                && group.sq_grad_norm.mean >= 0.0
                && group.sq_grad_norm.m2 >= 0.0
                && group.tensors.values().all(|mean| *mean >= 0.0 && mean.is_finite());
            if !sound {
                return Err(format!(
                    "batch size {batch_size}: counts must be positive and sums of squares ≥ 0"
                ));
            }
        }
        let mut groups = stored.batch_sizes.values();
        if let Some(first) = groups.next()
            && let Some(tensor) = groups.find_map(|group| difference(&first.tensors, &group.tensors))
        {
            return Err(format!("tensor `{tensor}` has no mean at some batch sizes"));
        }
        Ok(SampleStatistics { groups: stored.batch_sizes })
    }
}
