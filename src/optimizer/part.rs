//! Rows and columns of a tensor, and where they lie in the whole one when it is a part of it.

use super::TensorSpec;
use crate::backend::abi::RfdPart;
use crate::error::{Error, Result};
use crate::rows::Rows;

/// A tensor of this rank in the whole one; most are whole.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    /// Those of the part.
    pub rows: Rows,
    /// Elements of the whole tensor.
    pub elements: usize,
    /// Columns of the whole tensor.
    pub whole_columns: usize,
    /// The place of each of the part's columns in the whole tensor; `None` where they are the same.
    columns: Option<Vec<usize>>,
    /// Which share of the elements, and of what a column holds, is here.
    pub share: f64,
    pub height_share: f64,
    /// Rows of which several ranks hold a piece each; `None` where rows are whole on each rank.
    pub shared: Option<SharedRows>,
    /// Number of averages of rows that are kept.
    pub row_averages: usize,
}

/// Rows that are kept by every rank, for each holds pieces of them only.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedRows {
    /// How many the whole tensor has.
    pub count: usize,
    /// Elements of a whole one.
    pub elements: usize,
    /// The one that the part begins in.
    first: usize,
    /// Rows of the part, in the sense of its `rows`, that are pieces of one of these.
    pieces: usize,
}

impl SharedRows {
    /// The one that a row of the part is a piece of.
    pub fn of(&self, row: usize) -> usize {
        self.first + row / self.pieces
    }
}

impl Part {
    /// Of a tensor with so many elements, for a method without rows.
    pub fn without_rows(len: usize) -> Self {
        Self::whole(Rows::CHUNKS, len)
    }

    fn whole(rows: Rows, len: usize) -> Self {
        Self {
            rows,
            elements: len,
            whole_columns: rows.columns,
            columns: None,
            share: 1.0,
            height_share: 1.0,
            shared: None,
            row_averages: rows.count(len),
        }
    }

    /// Of a tensor with so many elements, whose description has been checked.
    ///
    /// # Errors
    /// [`Error::Tensor`] for a part whose rows can't be told from others'.
    pub fn of(spec: &TensorSpec, len: usize) -> Result<Self> {
        let own = Self::whole(spec.rows(), len);
        let Some(place) = &spec.whole else {
            return Ok(own);
        };
        let whole = TensorSpec { shape: place.shape.clone(), ..spec.clone() };
        let elements = whole.len()?;
        let share = if elements > 0 { len as f64 / elements as f64 } else { 1.0 };
        let whole_columns = whole.rows().columns;
        let part = Self { elements, whole_columns, share, height_share: share, ..own };
        // Only a tensor without elements, of which some size is 0, has rows beyond all numbers.
        let behind = |shape: &[usize]| {
            shape.iter().skip(1).try_fold(1_usize, |product, &size| product.checked_mul(size)).unwrap_or(0)
        };
        let (inner, whole_inner) = (behind(&spec.shape), behind(&place.shape));
        let is_cut_behind = spec.shape.get(1..) != place.shape.get(1..);
        if is_cut_behind && !place.splits_rows && spec.row.is_none() {
            let problem =
                "is cut along another dimension than the first; say on every rank that its rows are split";
            return Err(Error::tensor(&spec.name, problem));
        }
        if let Some(row) = spec.row {
            let first = place.start.first().map_or(0, |start| start * whole_inner);
            let ends = len.is_multiple_of(row) || first + len == elements;
            if len > 0 && (is_cut_behind || !first.is_multiple_of(row) || !ends) {
                let problem = format!("begins or ends inside a row of {row} elements; cut it between rows");
                return Err(Error::tensor(&spec.name, problem));
            }
            return Ok(part);
        }
        if spec.shape.len() == 1 {
            // A vector is one row, however many ranks hold it.
            let shared = SharedRows { count: 1, elements, first: 0, pieces: usize::MAX };
            return Ok(Self { shared: Some(shared), row_averages: 1, ..part });
        }
        if spec.shape.is_empty() || !place.splits_rows {
            return Ok(part);
        }
        let mut rows = Rows::of_matrix(inner);
        if !inner.is_multiple_of(rows.len) {
            let problem = format!(
                "is a part with rows of {inner} elements, which are too many to be summed and have no equal pieces; cut \
                 the tensor along its first dimension"
            );
            return Err(Error::tensor(&spec.name, problem));
        }
        let pieces = (inner / rows.len).max(1);
        let count = if elements > 0 { place.shape[0] } else { 0 };
        let shared = SharedRows { count, elements: whole_inner, first: place.start[0], pieces };
        if whole_columns == 0 {
            rows.columns = 0;
        }
        Ok(Self {
            rows,
            columns: Some(if rows.columns > 0 {
                places(spec, &place.shape, &place.start)
            } else {
                Vec::new()
            }),
            height_share: if count > 0 { spec.shape[0] as f64 / count as f64 } else { 1.0 },
            shared: Some(shared),
            row_averages: count,
            ..part
        })
    }

    /// How many averages are kept, of columns and rows.
    pub fn averages(&self) -> usize {
        self.rows.columns + self.row_averages
    }

    /// Elements of a row, and number of columns, as states have them.
    pub fn described(&self) -> [usize; 2] {
        [self.shared.map_or(self.rows.len, |shared| shared.elements), self.rows.columns]
    }

    /// The place of a column of the part in the whole tensor.
    pub fn column(&self, own: usize) -> usize {
        self.columns.as_ref().map_or(own, |columns| columns[own])
    }

    /// The places of its columns in the whole tensor, where they are others.
    pub fn places(&self) -> Option<&[usize]> {
        self.columns.as_deref()
    }

    /// As kernels are told of it, but for what else lies in a device's memory.
    pub fn for_kernels(&self) -> RfdPart {
        let part = RfdPart {
            elements: self.elements as f64,
            share: self.share,
            height_share: self.height_share,
            whole_columns: self.whole_columns as u32,
            ..RfdPart::default()
        };
        match self.shared {
            None => part,
            Some(shared) => RfdPart {
                row: shared.elements as f64,
                shared_rows: shared.count as u32,
                first_row: shared.first as u32,
                // Of a vector, which is one row, so many as there are.
                pieces: u32::try_from(shared.pieces).unwrap_or(u32::MAX),
                ..part
            },
        }
    }

    /// Averages of the part's own rows out of those that are kept.
    pub fn own_rows(&self, len: usize, averages: &[f64]) -> Vec<f64> {
        match self.shared {
            None => averages.to_vec(),
            Some(shared) => (0..self.rows.count(len)).map(|row| averages[shared.of(row)]).collect(),
        }
    }
}

/// Where the columns of a part lie among those of a whole tensor of the given shape, in which it starts at
/// the given place.
fn places(spec: &TensorSpec, whole: &[usize], start: &[usize]) -> Vec<usize> {
    let mut places = vec![0];
    for dim in 1..whole.len() {
        let along = start[dim]..start[dim] + spec.shape[dim];
        places =
            (places.iter()).flat_map(|&outer| along.clone().map(move |i| outer * whole[dim] + i)).collect();
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::optimizer::Whole;

    fn place(shape: &[usize], whole: &[usize], start: &[usize]) -> Whole {
        let place = Whole::new(whole, start);
        if shape[1..] == whole[1..] { place } else { place.with_split_rows() }
    }

    fn part(shape: &[usize], whole: &[usize], start: &[usize]) -> Part {
        let spec = TensorSpec::new("w", shape, DType::F32).part_of(place(shape, whole, start));
        Part::of(&spec, spec.len().unwrap()).unwrap()
    }

    #[test]
    fn rows_of_a_cut_along_the_first_dimension_are_whole() {
        let found = part(&[3, 5, 2], &[8, 5, 2], &[4, 0, 0]);
        assert_eq!((found.rows, found.elements, found.row_averages), (Rows { len: 10, columns: 10 }, 80, 3));
        assert!(found.shared.is_none() && found.column(7) == 7 && found.share == 30.0 / 80.0);
        // Rows that are cut stay so.
        let found = part(&[2, 9000], &[8, 9000], &[0, 0]);
        assert_eq!((found.rows, found.row_averages), (Rows { len: 3000, columns: 0 }, 6));
    }

    #[test]
    fn rows_that_are_cut_are_kept_as_those_of_the_whole() {
        let found = part(&[4, 2, 3], &[8, 5, 3], &[4, 1, 0]);
        let shared = found.shared.unwrap();
        assert_eq!((shared.count, shared.elements, shared.of(0), shared.of(3)), (8, 15, 4, 7));
        let columns: Vec<usize> = (0..6).map(|own| found.column(own)).collect();
        assert_eq!((columns, found.whole_columns), (vec![3, 4, 5, 6, 7, 8], 15));
        assert_eq!((found.height_share, found.described()), (0.5, [15, 6]));
        assert_eq!(found.own_rows(24, &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]), [4.0, 5.0, 6.0, 7.0]);
        // Longer than a chunk: pieces of the part, and no columns, as in the whole.
        let found = part(&[2, 6000], &[2, 12_000], &[0, 6000]);
        assert_eq!((found.rows, found.row_averages), (Rows { len: 3000, columns: 0 }, 2));
        assert_eq!(found.own_rows(12_000, &[1.0, 2.0]), [1.0, 1.0, 2.0, 2.0]);
        // A vector is one row, of any length.
        let found = part(&[5000], &[9000], &[4000]);
        assert_eq!((found.rows.count(5000), found.own_rows(5000, &[3.0])), (2, vec![3.0; 2]));
        // Ranks that hold nothing keep it too, and one that holds all shares it.
        let all = TensorSpec::new("w", &[6, 1], DType::F32);
        let all = all.part_of(Whole::new(&[6, 1], &[0, 0]).with_split_rows());
        assert!(Part::of(&all, 6).unwrap().shared.is_some() && part(&[1], &[1], &[0]).shared.is_some());
        assert_eq!(part(&[0], &[9], &[9]).averages(), 1);
        assert_eq!(part(&[6, 0], &[6, 9], &[0, 9]).averages(), 6);
        // Without elements, of any size.
        assert_eq!(part(&[0, 1 << 40, 1 << 40], &[0, 1 << 40, 1 << 40], &[0, 0, 0]).averages(), 0);
        let none = TensorSpec::new("w", &[0, 0], DType::F32);
        let none = none.part_of(Whole::new(&[1 << 60, 0], &[0, 0]).with_split_rows());
        assert_eq!(Part::of(&none, 0).unwrap().averages(), 0);
    }

    #[test]
    fn parts_that_tear_rows_apart_are_refused() {
        let flat = |len: usize, start: usize| {
            let spec = TensorSpec::new("flat", &[len], DType::F32).part_of(Whole::new(&[30], &[start]));
            Part::of(&spec.with_row(4), len)
        };
        assert!(flat(8, 4).is_ok() && flat(14, 16).is_ok() && flat(0, 7).is_ok());
        for (len, start) in [(8, 2), (7, 4)] {
            let message = flat(len, start).unwrap_err().to_string();
            assert!(message.contains("`flat`") && message.contains("cut it between rows"), "{message}");
        }
        // A prime; and one that is cut in a way that others can't know.
        let spec = TensorSpec::new("w", &[2, 4099], DType::F32);
        for (place, remedy) in [
            (Whole::new(&[2, 9000], &[0, 0]).with_split_rows(), "along its first dimension"),
            (Whole::new(&[2, 9000], &[0, 0]), "say on every rank"),
        ] {
            let message = Part::of(&spec.clone().part_of(place), 2 * 4099).unwrap_err().to_string();
            assert!(message.contains("`w`") && message.contains(remedy), "{message}");
        }
    }
}
