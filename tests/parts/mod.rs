//! Tensors of which ranks hold parts, for the suites of sharded training.
#![allow(dead_code)] // each suite uses a part

use std::ops::Range;

use rfdescent::DType;
use rfdescent::optimizer::{TensorSpec, Whole};

use crate::common::Owned;

/// What one rank holds of a tensor: a range of each dimension, and whether it counts here.
#[derive(Clone, Debug)]
pub struct Block {
    pub ranges: Vec<Range<usize>>,
    pub counts: bool,
}

/// A tensor, and what each rank holds of it.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub shape: Vec<usize>,
    pub dtype: DType,
    pub row: Option<usize>,
    pub blocks: Vec<Block>,
}

impl Block {
    pub fn shape(&self) -> Vec<usize> {
        self.ranges.iter().map(|range| range.len()).collect()
    }

    /// Its elements out of those of the whole tensor.
    pub fn of(&self, shape: &[usize], whole: &Owned) -> Owned {
        let values = whole.to_f64();
        let mut places = vec![0];
        for (range, size) in self.ranges.iter().zip(shape) {
            places = places.iter().flat_map(|outer| range.clone().map(move |i| outer * size + i)).collect();
        }
        Owned::from_f64(whole.dtype(), &places.into_iter().map(|i| values[i]).collect::<Vec<_>>())
    }
}

impl Tensor {
    /// A tensor of which each rank holds the given ranges of dimension `dim`.
    pub fn cut(shape: &[usize], dim: usize, ranges: &[Range<usize>]) -> Self {
        let blocks = ranges.iter().map(|range| {
            let mut block: Vec<_> = shape.iter().map(|&size| 0..size).collect();
            block[dim] = range.clone();
            Block { ranges: block, counts: true }
        });
        Self { shape: shape.to_vec(), dtype: DType::F64, row: None, blocks: blocks.collect() }
    }

    /// One that all ranks hold, and that counts on the last.
    pub fn replicated(shape: &[usize], ranks: usize) -> Self {
        let mut tensor = Self::cut(shape, 0, &vec![0..shape[0]; ranks]);
        tensor.blocks.iter_mut().rev().skip(1).for_each(|block| block.counts = false);
        tensor
    }

    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn spec(&self, k: usize) -> TensorSpec {
        let spec = TensorSpec::new(format!("t{k}"), &self.shape, self.dtype).in_group(k % 2);
        TensorSpec { row: self.row, ..spec }
    }

    pub fn spec_of(&self, k: usize, rank: usize) -> TensorSpec {
        let Block { ranges, counts } = &self.blocks[rank];
        let start: Vec<usize> = ranges.iter().map(|range| range.start).collect();
        let shape = self.blocks[rank].shape();
        let cut_behind = |block: &Block| block.shape()[1..] != self.shape[1..];
        let splits_rows = self.blocks.iter().any(cut_behind);
        let whole = Whole { splits_rows, ..Whole::new(&self.shape, &start) };
        TensorSpec { shape, counts_in_norm: *counts, ..self.spec(k) }.part_of(whole)
    }
}
