//! Which tensors an optimizer works on.

use crate::DType;
use crate::error::{Error, Result};
use crate::rows::Rows;

/// Describes one parameter tensor. The order of the list given to [`Optimizer::new`](super::Optimizer::new)
/// is the order in which every step expects parameters and gradients.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSpec {
    /// Unique name; it appears in errors and in saved states.
    pub name: String,
    /// Shape; with the adaptive method rows follow it, else only the product matters for a step. The whole of
    /// it is compared when a state is loaded.
    pub shape: Vec<usize>,
    /// Format of the parameter. Gradients may have any format.
    pub dtype: DType,
    /// Index into [`Options::groups`](super::Options::groups).
    pub group: usize,
    /// Whether the gradient counts in the global norm. In sharded training a tensor that several ranks hold
    /// counts on one of them.
    pub counts_in_norm: bool,
    /// Index of the first element in the whole tensor, when this is a shard of it; stochastic rounding then
    /// draws the same bits as without sharding.
    pub offset: u64,
    /// Elements of a row, where the adaptive method should not take what lies behind the first dimension:
    /// rows are neighbouring elements that share a variance. At least 1, and no more than the tensor has.
    pub row: Option<usize>,
}

impl TensorSpec {
    /// A whole tensor in group 0.
    pub fn new(name: impl Into<String>, shape: &[usize], dtype: DType) -> Self {
        Self {
            name: name.into(),
            shape: shape.to_vec(),
            dtype,
            group: 0,
            counts_in_norm: true,
            offset: 0,
            row: None,
        }
    }

    /// The same tensor in another group.
    pub fn in_group(self, group: usize) -> Self {
        Self { group, ..self }
    }

    /// The same tensor with rows of so many elements.
    pub fn with_row(self, row: usize) -> Self {
        Self { row: Some(row), ..self }
    }

    /// Whether it has two dimensions or more, or is given rows as if it had.
    pub(crate) fn is_matrix(&self) -> bool {
        self.row.is_some() || self.shape.len() > 1
    }

    /// Its rows.
    pub(crate) fn rows(&self) -> Rows {
        self.row.map_or_else(|| Rows::of_shape(&self.shape), Rows::of_matrix)
    }

    /// Number of elements.
    ///
    /// # Errors
    /// [`Error::Tensor`] when the product of the shape does not fit in a `usize`.
    pub fn len(&self) -> Result<usize> {
        // A zero anywhere makes the tensor empty, however large the other sizes are.
        if self.shape.contains(&0) {
            return Ok(0);
        }
        self.shape.iter().try_fold(1_usize, |product, &size| product.checked_mul(size)).ok_or_else(|| {
            Error::tensor(
                &self.name,
                format!("the product of its shape {:?} is too large for this machine", self.shape),
            )
        })
    }

    /// Whether the tensor has no elements.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }
}
