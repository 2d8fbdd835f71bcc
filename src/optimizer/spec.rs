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
    /// In sharded training, the tensor that this is a part of, on every rank, also on one that happens to
    /// hold all of it or nothing; `None` for one that is not cut. The adaptive method needs it.
    pub whole: Option<Whole>,
}

/// A tensor of which ranks hold parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Whole {
    /// Its shape, of as many dimensions as the part's.
    pub shape: Vec<usize>,
    /// In each dimension, the place of the part's first element.
    pub start: Vec<usize>,
    /// Whether ranks hold pieces of its rows, as where a matrix is cut along its second dimension; the same
    /// on all of them.
    pub splits_rows: bool,
}

impl Whole {
    /// A tensor of the given shape that is cut along its first dimension, of which a part starts at the given
    /// place.
    pub fn new(shape: &[usize], start: &[usize]) -> Self {
        Self { shape: shape.to_vec(), start: start.to_vec(), splits_rows: false }
    }

    /// The same, cut along other dimensions too.
    pub fn with_split_rows(self) -> Self {
        Self { splits_rows: true, ..self }
    }
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
            whole: None,
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

    /// The same tensor as a part of a whole one.
    pub fn part_of(self, whole: Whole) -> Self {
        Self { whole: Some(whole), ..self }
    }

    /// An error unless it is a part of what it is said to be a part of.
    pub(crate) fn check_whole(&self) -> Result<()> {
        let Some(Whole { shape, start, .. }) = &self.whole else { return Ok(()) };
        let dims = self.shape.len();
        let inside =
            |dim: usize| start[dim].checked_add(self.shape[dim]).is_some_and(|end| end <= shape[dim]);
        if shape.len() != dims || start.len() != dims || !(0..dims).all(inside) {
            let problem = format!(
                "has shape {:?}, which at {start:?} is no part of a tensor of shape {shape:?}; give shape and start of as \
                 many dimensions, with the part inside",
                self.shape
            );
            return Err(Error::tensor(&self.name, problem));
        }
        TensorSpec { shape: shape.clone(), ..self.clone() }.len().map(drop)
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
