//! What a method remembers between steps beside velocities: numbers with names, some of all tensors together
//! and some of each. Host, device and saved states hold the same numbers in the same order.

use crate::backend::words::{Plain, structs_of, structs_of_mut};

/// The numbers, f64 each.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct History {
    /// Of all tensors together, in the order of [`Names::shared`].
    pub shared: Vec<f64>,
    /// Those of each tensor, in the order of [`Names::tensor`], tensor after tensor.
    pub tensors: Vec<f64>,
}

/// What the numbers are called, and what they are before the first step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Names {
    pub shared: &'static [&'static str],
    pub tensor: &'static [&'static str],
    fresh: fn(tensors: usize) -> History,
}

impl Names {
    /// Of a method that remembers nothing.
    pub const NONE: Self = Self { shared: &[], tensor: &[], fresh: |_| History::default() };

    /// Those of two structs of numbers, by their fields.
    pub fn of<S: Plain, T: Plain>(fresh: fn(tensors: usize) -> History) -> Self {
        Self { shared: S::FIELDS, tensor: T::FIELDS, fresh }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.shared.is_empty() && self.tensor.is_empty()
    }

    /// The numbers before the first step.
    pub fn fresh(&self, tensors: usize) -> History {
        (self.fresh)(tensors)
    }
}

impl History {
    /// The numbers of two kinds of structs, whose fields all are f64.
    pub fn new<S: Plain, T: Plain>(shared: &S, tensors: &[T]) -> Self {
        let mut history = Self::default();
        history.set_shared(shared);
        history.each_tensor_mut(tensors.len()).copy_from_slice(tensors);
        history
    }

    /// The numbers of all tensors together.
    pub fn shared<S: Plain>(&self) -> S {
        assert_eq!(self.shared.len(), S::FIELDS.len(), "a history of another method");
        structs_of(&self.shared)[0]
    }

    /// Takes the numbers of all tensors together, in the memory that is there.
    pub fn set_shared<S: Plain>(&mut self, shared: &S) {
        self.shared.resize(S::FIELDS.len(), 0.0);
        structs_of_mut(&mut self.shared)[0] = *shared;
    }

    /// The numbers of one tensor.
    pub fn of_tensor<T: Plain>(&self, tensor: usize) -> &T {
        &self.each_tensor()[tensor]
    }

    /// Whether something holds for the numbers of any tensor.
    pub fn any_tensor<T: Plain>(&self, holds: impl Fn(&T) -> bool) -> bool {
        self.each_tensor().iter().any(holds)
    }

    /// The numbers of each tensor.
    pub fn each_tensor<T: Plain>(&self) -> &[T] {
        structs_of(&self.tensors)
    }

    /// The numbers of each of so many tensors, to be written.
    pub fn each_tensor_mut<T: Plain>(&mut self, count: usize) -> &mut [T] {
        self.tensors.resize(count * T::FIELDS.len(), 0.0);
        structs_of_mut(&mut self.tensors)
    }

    /// The opposite of [`History::new`].
    pub fn read<S: Plain, T: Plain>(&self) -> (S, Vec<T>) {
        (self.shared(), self.each_tensor().to_vec())
    }
}
