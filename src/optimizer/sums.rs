//! What ranks add up between the two halves of a step in sharded training.
//!
//! A method without rows needs two norms. One that has rows needs of each tensor seven numbers, then for each
//! column of the whole tensor what the ranks' parts say of its mean square, then for each row that ranks
//! share two sums (`docs/summation.md`, section 7).

use super::core::Core;
use super::decision::TotalSquares;
use super::part::Part;
use crate::backend::abi::RfdTensorNumbers;
use crate::backend::words::Plain;
use crate::error::{Error, Result};

/// The sums of one rank's part of all gradients: add those of all ranks up, number by number, then give the
/// result to [`Optimizer::step_with_sums`](super::Optimizer::step_with_sums) on each.
#[derive(Debug)]
pub struct LocalSums {
    pub(super) values: Vec<f64>,
    /// By tensor, the new averages of the rows that are whole on this rank.
    pub(super) rows: Vec<Vec<f64>>,
    pub(super) grad_scale: f64,
    /// Steps applied and skipped before.
    pub(super) steps: [u64; 2],
}

impl LocalSums {
    /// The numbers, [`Core::sums_len`] of them.
    pub fn values(&self) -> &[f64] {
        &self.values
    }

    /// The same, for those of all ranks to be put in their place.
    pub fn values_mut(&mut self) -> &mut [f64] {
        &mut self.values
    }
}

/// The sums of one tensor, of a part or of the whole.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct TensorNumbers {
    /// Those beside columns and rows, as kernels have them: the `elements` that have a gradient and count;
    /// `squares`, ‖g_k‖² with the gradient scale; `direction`, Σ w_i u_j d_ij² over the rows that are
    /// whole on a rank; `sampled`, the mean square of the elements that tell of columns, times the share of
    /// elements; `parameter`, Σ p² before the first step, 0 later; the ranks that hold elements with a
    /// gradient, `present`, and without, `missing`, whether they count or not.
    pub own: RfdTensorNumbers,
    /// The mean square in each column of the part, times the share of what the column holds.
    pub columns: Vec<f64>,
    /// Of each row that ranks share, Σ g² and Σ u_j d_ij².
    pub rows: Vec<[f64; 2]>,
}

/// Numbers of a tensor beside those of columns and rows.
const NUMBERS: usize = size_of::<RfdTensorNumbers>() / size_of::<f64>();

/// Numbers of a tensor.
pub(super) fn len(part: &Part) -> usize {
    NUMBERS + part.whole_columns + part.shared.map_or(0, |shared| 2 * shared.count)
}

impl Core {
    /// How many f64 ranks add up in a step in two halves; the same on all that have parts of the same list of
    /// tensors.
    pub fn sums_len(&self) -> usize {
        match self.method().descent().has_rows() {
            false => 2,
            true => self.parts().iter().map(len).sum(),
        }
    }

    /// An error unless there are as many numbers as ranks add up.
    pub(super) fn check_sums(&self, count: usize) -> Result<()> {
        let own = self.sums_len();
        if count == own {
            return Ok(());
        }
        Err(Error::invalid("number of sums", count, format!("ranks add up {own} numbers: give all of them")))
    }
}

impl TensorNumbers {
    /// Writes them where ranks add them up; zeros of a tensor that counts on another rank, but what is not
    /// finite makes all skip.
    pub fn write(&self, part: &Part, counts: bool, values: &mut Vec<f64>) {
        let first = values.len();
        values.resize(first + len(part), 0.0);
        let values = &mut values[first..];
        let RfdTensorNumbers { squares, present, missing, .. } = self.own;
        let elsewhere = RfdTensorNumbers {
            squares: if squares.is_finite() { 0.0 } else { squares },
            present,
            missing,
            ..RfdTensorNumbers::default()
        };
        let own = if counts { &self.own } else { &elsewhere };
        values.iter_mut().zip(own.words()).for_each(|(value, &word)| *value = f64::from_bits(word));
        if !counts {
            return;
        }
        let (columns, rows) = values[NUMBERS..].split_at_mut(part.whole_columns);
        for (own, mean) in self.columns.iter().enumerate() {
            columns[part.column(own)] = *mean;
        }
        if let Some(shared) = part.shared {
            // In the order of the part's rows.
            for (own, sums) in self.rows.iter().enumerate() {
                let row = &mut rows[2 * shared.of(own)..][..2];
                row.iter_mut().zip(sums).for_each(|(sum, term)| *sum += term);
            }
        }
    }

    /// Those of each tensor, with the columns that its part has and all rows that ranks share.
    pub fn read(core: &Core, mut values: &[f64]) -> Vec<Self> {
        (core.parts().iter())
            .map(|part| {
                let all;
                (all, values) = values.split_at(len(part));
                let (own, rest) = all.split_at(NUMBERS);
                let words: Vec<u64> = own.iter().map(|number| number.to_bits()).collect();
                let (columns, rows) = rest.split_at(part.whole_columns);
                Self {
                    own: RfdTensorNumbers::from_words(&words),
                    columns: (0..part.rows.columns).map(|own| columns[part.column(own)]).collect(),
                    rows: rows.as_chunks::<2>().0.to_vec(),
                }
            })
            .collect()
    }

    /// Whether the tensor takes part in the step; the same on all ranks, as is an error, but where one gives
    /// other gradients than in the first half: `here` says whether this one has elements of it with a
    /// gradient, or elements without.
    pub fn takes_part(&self, core: &Core, tensor: usize, here: Option<bool>) -> Result<bool> {
        let RfdTensorNumbers { elements, present, missing, .. } = self.own;
        let whole = core.parts()[tensor].elements;
        let problem = match here {
            _ if present > 0.0 && missing > 0.0 => format!(
                "has a gradient on {} of the ranks that hold it and none on {}; give it on all of them, or on none",
                present, missing
            ),
            _ if present > 0.0 && elements == 0.0 => {
                "has a gradient but counts in the norm of no rank; let it count on one".into()
            }
            _ if present > 0.0 && elements != whole as f64 => format!(
                "has {whole} elements, but the ranks' sums are of {}; add up those of all ranks, each part counting \
                 on one of them",
                elements
            ),
            Some(has) if has != (present > 0.0) => {
                "has another gradient than in the first half, or none; give both halves the same".into()
            }
            _ => return Ok(present > 0.0),
        };
        Err(Error::tensor(&core.specs()[tensor].name, problem))
    }
}

/// The two norms of a method without rows.
pub(super) fn total(values: &[f64]) -> TotalSquares {
    TotalSquares { euclidean: values[0], sigma: values[1], exponent: 0 }
}
