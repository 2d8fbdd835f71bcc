//! What the optimizers on host and device have in common: method, options and tensors, with their checks and
//! changes.

use std::collections::HashSet;

use super::part::Part;
use super::{Group, Method, Options, TensorSpec};
use crate::covariance::Model;
use crate::error::{Error, Result};
use crate::tensor::DType;

/// What each step asks of a tensor: close together in memory, where descriptions are not.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Brief {
    pub dtype: DType,
    pub group: usize,
    pub counts_in_norm: bool,
}

/// What an optimizer was made of and works with; every optimizer derefs to it.
#[derive(Clone, Debug)]
pub struct Core {
    method: Method,
    options: Options,
    specs: Vec<TensorSpec>,
    /// By tensor.
    briefs: Vec<Brief>,
    lens: Vec<usize>,
    /// Of all tensors.
    elements: usize,
    /// By tensor.
    parts: Vec<Part>,
    /// A tensor that is a part of a whole one, where that matters to the method.
    first_part: Option<usize>,
}

impl Core {
    /// Checks all parts, each and together.
    pub(crate) fn new(method: impl Into<Method>, options: Options, specs: Vec<TensorSpec>) -> Result<Self> {
        let method = method.into();
        options.validate()?;
        method.descent().check(options.groups.len())?;
        method.descent().check_tensors(&specs)?;
        let lens = check_specs(&options, &specs)?;
        let has_rows = method.descent().has_rows();
        let part = |(spec, &len)| if has_rows { Part::of(spec, len) } else { Ok(Part::without_rows(len)) };
        let parts = specs.iter().zip(&lens).map(part).collect::<Result<_>>()?;
        // No more than a part of the lists can lie in memory at a time.
        let elements = lens.iter().fold(0_usize, |sum, &len| sum.saturating_add(len));
        let briefs = specs.iter().map(|&TensorSpec { dtype, group, counts_in_norm, .. }| Brief {
            dtype,
            group,
            counts_in_norm,
        });
        let briefs = briefs.collect();
        let first_part = specs.iter().position(|spec| has_rows && spec.whole.is_some());
        Ok(Self { method, options, specs, briefs, lens, elements, parts, first_part })
    }

    /// How steps are chosen.
    pub fn method(&self) -> &Method {
        &self.method
    }

    /// The fitted covariance model; `None` with a method that has none.
    pub fn model(&self) -> Option<&Model> {
        self.method.model()
    }

    /// The options in force.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The tensors, in the order in which steps expect them.
    pub fn specs(&self) -> &[TensorSpec] {
        &self.specs
    }

    /// The tensors again, in brief.
    pub(crate) fn briefs(&self) -> &[Brief] {
        &self.briefs
    }

    /// Number of elements, by tensor.
    pub(crate) fn lens(&self) -> &[usize] {
        &self.lens
    }

    /// Of all tensors.
    pub(crate) fn elements(&self) -> usize {
        self.elements
    }

    /// The rows that each tensor is cut into, chunks for a method without rows, and its place in a whole one.
    pub(crate) fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The group of a tensor.
    pub(crate) fn group_of(&self, tensor: usize) -> &Group {
        &self.options.groups[self.briefs[tensor].group]
    }

    /// What the velocity of a tensor is multiplied with in each step; 0 when it has none.
    pub(crate) fn velocity_decay_of(&self, tensor: usize) -> f64 {
        self.method.descent().velocity_decay(self.briefs[tensor].group)
    }

    /// Replaces options that are checked; on an error all stays as it was.
    pub(crate) fn change_options(&mut self, change: impl FnOnce(&mut Options)) -> Result<()> {
        let mut options = self.options.clone();
        change(&mut options);
        options.validate()?;
        self.options = options;
        Ok(())
    }

    /// Replaces the options of one group; returns those it had.
    pub(crate) fn set_group(&mut self, index: usize, group: Group) -> Result<Group> {
        let count = self.options.groups.len();
        let Some(old) = self.options.groups.get_mut(index) else {
            return Err(Error::invalid("group", index, format!("there are {count} groups, counted from 0")));
        };
        group.validate(index)?;
        Ok(std::mem::replace(old, group))
    }

    /// An error unless [`Core::set_method`] would take the settings.
    pub(crate) fn check_method(&self, method: &Method) -> Result<()> {
        method.descent().check(self.options.groups.len())?;
        self.method.descent().check_change(method)
    }

    /// Replaces the settings of the method; returns those it had.
    pub(crate) fn set_method(&mut self, method: Method) -> Result<Method> {
        self.check_method(&method)?;
        Ok(std::mem::replace(&mut self.method, method))
    }

    /// An error unless the two halves of a step in sharded training can do what method and options ask for.
    pub(crate) fn check_sharded(&self) -> Result<()> {
        if self.options.groups.iter().any(|group| group.norm_lock) {
            let expected =
                "a shard does not know the norm of the whole tensor; use `step`, or switch norm lock off";
            return Err(Error::invalid("norm_lock", true, expected));
        }
        Ok(())
    }

    /// An error unless a step can be taken without other ranks.
    pub(crate) fn check_alone(&self) -> Result<()> {
        match self.first_part() {
            None => Ok(()),
            Some(spec) => Err(Error::tensor(
                &spec.name,
                "is a part of a whole tensor, of which the method needs to know all: take the step in two halves",
            )),
        }
    }

    /// A tensor that is a part of a whole one, where that matters to the method.
    pub(crate) fn first_part(&self) -> Option<&TensorSpec> {
        self.first_part.map(|tensor| &self.specs[tensor])
    }

    /// An error unless a list has something for each tensor.
    pub(crate) fn check_count(&self, what: &str, count: usize) -> Result<()> {
        if count == self.specs.len() {
            return Ok(());
        }
        let expected = format!("the optimizer was made for {} tensors; give one for each", self.specs.len());
        Err(Error::invalid(&format!("number of {what}"), count, expected))
    }
}

/// Checks tensors before an optimizer is made of them; their lengths.
fn check_specs(options: &Options, specs: &[TensorSpec]) -> Result<Vec<usize>> {
    let mut names = HashSet::new();
    specs
        .iter()
        .map(|spec| {
            if !names.insert(&spec.name) {
                return Err(Error::tensor(
                    &spec.name,
                    "is listed twice; give each tensor once, by a name of its own",
                ));
            }
            options.group_of(spec)?;
            let len = spec.len()?;
            spec.check_whole()?;
            if spec.row == Some(0) {
                return Err(Error::tensor(&spec.name, "has rows of 0 elements; give at least 1"));
            }
            if let Some(row) = spec.row.filter(|&row| row > len && len > 0) {
                return Err(Error::tensor(
                    &spec.name,
                    format!("has rows of {row} elements, but {len} elements in all; give at most that"),
                ));
            }
            if spec.offset.checked_add(len as u64).is_none() {
                return Err(Error::tensor(
                    &spec.name,
                    format!("ends beyond 2^64 elements, at offset {}", spec.offset),
                ));
            }
            Ok(len)
        })
        .collect()
}
