//! How steps follow from losses and gradients.
//!
//! A method is one type on the host, here, and one header on the device (`kernels/methods/`). [`Descent`] is
//! what it has to say: which sums it needs, how it decides, what it remembers. Nobody else asks which method
//! it is.

mod adaptive;
mod fitted;
mod history;
mod trust;

pub use adaptive::Adaptive;
pub use fitted::Fitted;
pub(crate) use history::{History, Names};

use super::core::Core;
use super::decision::{Decision, Norms};
use super::part::Part;
use super::report::{SkipReason, StepInput};
use super::spec::TensorSpec;
use crate::backend::abi::{RfdSettings, RfdStep};
use crate::backend::cpu::{ColumnVariance, RowVariance};
use crate::backend::executor::InstanceKind;
use crate::covariance::Model;
use crate::error::{Error, Result};

/// How an optimizer chooses its steps. Later releases may add methods.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Method {
    /// Random Function Descent as published: steps from a covariance model fitted to samples.
    Fitted(Fitted),
    /// Steps from what training itself shows, without a fit.
    Adaptive(Adaptive),
}

impl From<Model> for Method {
    fn from(model: Model) -> Self {
        Fitted::new(model).into()
    }
}

impl From<Fitted> for Method {
    fn from(fitted: Fitted) -> Self {
        Method::Fitted(fitted)
    }
}

impl From<Adaptive> for Method {
    fn from(adaptive: Adaptive) -> Self {
        Method::Adaptive(adaptive)
    }
}

impl Method {
    /// Its name, as in saved states: `fitted` or `adaptive`.
    pub fn name(&self) -> &'static str {
        self.descent().name()
    }

    /// The fitted covariance model; `None` with a method that has none.
    pub fn model(&self) -> Option<&Model> {
        match self {
            Method::Fitted(fitted) => Some(&fitted.model),
            _ => None,
        }
    }

    pub(crate) fn descent(&self) -> &dyn Descent {
        match self {
            Method::Fitted(fitted) => fitted,
            Method::Adaptive(adaptive) => adaptive,
        }
    }

    /// What an optimizer remembers before its first step.
    pub(crate) fn fresh_history(&self, tensors: usize) -> History {
        self.descent().names().fresh(tensors)
    }
}

/// What a method has to say.
pub(crate) trait Descent {
    /// As in saved states and errors.
    fn name(&self) -> &'static str;

    /// An error for a setting outside its domain; there are so many groups.
    fn check(&self, groups: usize) -> Result<()>;

    /// An error unless it can work on these tensors.
    fn check_tensors(&self, _specs: &[TensorSpec]) -> Result<()> {
        Ok(())
    }

    /// An error unless an optimizer can go on with `new` in its place.
    fn check_change(&self, new: &Method) -> Result<()>;

    /// What the velocities of a group are multiplied with in each step; 0 when it has none.
    fn velocity_decay(&self, group: usize) -> f64;

    /// Which instances of the kernels are for it.
    fn kind(&self) -> InstanceKind;

    /// Whether it keeps a variance for each row of a tensor, by which it scales the row's steps.
    fn has_rows(&self) -> bool {
        false
    }

    /// How the variances of a tensor's rows change in the next step that the tensor takes part in, and what
    /// they weigh; it has so many elements, on all ranks. Only for a method that has rows.
    fn row_variance(&self, _history: &History, _tensor: usize, _elements: f64) -> RowVariance {
        RowVariance::default()
    }

    /// Those of all tensors: one call for all, where each would be looked up.
    fn row_variances(&self, history: &History, parts: &[Part], found: &mut Vec<RowVariance>) {
        found.clear();
        for (tensor, part) in parts.iter().enumerate() {
            found.push(self.row_variance(history, tensor, part.elements as f64));
        }
    }

    /// What the columns of a tensor weigh now, as [`Descent::row_variance`] says it of rows.
    fn column_variance(&self, _history: &History, _tensor: usize) -> ColumnVariance {
        ColumnVariance::default()
    }

    /// Which of the two lists that a device keeps of a tensor's variances is that of now.
    fn turn(&self, _history: &History, _tensor: usize) -> usize {
        0
    }

    /// Whether [`Descent::measure`] has to be called before the next step.
    fn lacks_measures(&self, _history: &History) -> bool {
        false
    }

    /// Takes from the parameters what it remembers of them; `mean_squares` are those of their elements, by
    /// tensor, 0 for an empty one.
    fn measure(&self, _history: &mut History, _specs: &[TensorSpec], _mean_squares: &[f64]) {}

    /// The step, or why there is none; writes what goes with it.
    fn decide(
        &self,
        seen: &Seen<'_>,
        history: &History,
        next: &mut Next,
    ) -> std::result::Result<Decision, SkipReason>;

    /// What the numbers are called that it remembers, and what they are before the first step.
    fn names(&self) -> Names {
        Names::NONE
    }

    /// An error unless numbers can be what steps have left, and steps can go on from them: they come from
    /// files, too.
    fn check_history(&self, _history: &History) -> Result<()> {
        Ok(())
    }

    /// Settings that a saved state must share with the optimizer that loads it.
    fn lasting_settings(&self) -> Vec<(&'static str, f64)> {
        Vec::new()
    }

    /// Writes what the kernels need of it into the launch's parameters; its history lies at the address
    /// given.
    fn place(&self, step: &mut RfdStep, history: u64) -> Result<()>;

    /// Writes those of its settings that may change between replays of a captured step.
    fn place_settings(&self, _settings: &mut RfdSettings) {}
}

/// What a step knows when it is decided.
pub(crate) struct Seen<'a> {
    pub core: &'a Core,
    pub input: &'a StepInput,
    /// Those of the gradients.
    pub norms: Norms,
    pub applied_steps: u64,
    /// By tensor, `None` for one that takes no part in the step. Empty for a method without rows.
    pub tensors: &'a [Option<TensorSums>],
}

/// Squared norms of one tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorSums {
    /// ‖g_k‖², gradient scale removed.
    pub squares: f64,
    /// Σ w_i u_j v_ij² over the new velocity, or the gradient where there is none, with the weights of rows
    /// and columns. 0 for a method without rows.
    pub direction: f64,
    /// The mean square of the elements that tell of columns, gradient scale removed; 0 without columns.
    pub sampled: f64,
    /// Whether the tensor counts in the norms.
    pub counts: bool,
}

/// What a step that is decided leaves beside the decision, in memory that is used again.
#[derive(Clone, Debug, Default)]
pub(crate) struct Next {
    /// By tensor: multiplies what all tensors' updates share. Empty where that is 1 for all.
    pub scales: Vec<f64>,
    /// By tensor, what it adds to the square of the norm that the step refers to.
    pub squares: Vec<f64>,
    /// What is remembered once the step is done.
    pub history: History,
}

impl Next {
    pub(crate) fn scale(&self, tensor: usize) -> f64 {
        self.scales.get(tensor).copied().unwrap_or(1.0)
    }
}

/// The error of [`Descent::check_change`] for what can't change.
fn fixed(name: &str, value: impl ToString) -> Error {
    Error::invalid(name, value, "can't change while the optimizer lives; make a new one and load its state")
}

/// The error of [`Descent::check_change`] for another method.
fn another_method(own: &'static str, given: &'static str) -> Error {
    Error::invalid(
        "method",
        given,
        format!("the optimizer was made with the {own} method; give one of that kind"),
    )
}
