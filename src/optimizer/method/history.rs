//! What a method remembers between steps beside velocities: numbers with names, some of all tensors together
//! and some of each. Host, device and saved states hold the same numbers in the same order.

use crate::backend::words::Plain;

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

    /// Those of two structs of numbers, by their fields; `Nothing` is one without.
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
        tensors.iter().for_each(|tensor| history.push(tensor));
        history
    }

    /// The numbers of all tensors together.
    pub fn shared<S: Plain>(&self) -> S {
        from_numbers(&self.shared)
    }

    /// Takes the numbers of all tensors together, in the memory that is there.
    pub fn set_shared<S: Plain>(&mut self, shared: &S) {
        self.shared.clear();
        self.shared.extend(shared.words().iter().copied().map(f64::from_bits));
    }

    /// Takes the numbers of the next tensor.
    pub fn push<T: Plain>(&mut self, tensor: &T) {
        self.tensors.extend(tensor.words().iter().copied().map(f64::from_bits));
    }

    /// The numbers of one tensor.
    pub fn of_tensor<T: Plain>(&self, tensor: usize) -> T {
        let size = T::FIELDS.len();
        from_numbers(&self.tensors[tensor * size..][..size])
    }

    /// Whether something holds for the numbers of any tensor.
    pub fn any_tensor<T: Plain>(&self, holds: impl Fn(T) -> bool) -> bool {
        self.tensors.chunks_exact(T::FIELDS.len().max(1)).any(|numbers| holds(from_numbers(numbers)))
    }

    /// The opposite of [`History::new`].
    pub fn read<S: Plain, T: Plain>(&self) -> (S, Vec<T>) {
        let tensors = self.tensors.chunks_exact(T::FIELDS.len().max(1)).map(from_numbers).collect();
        (self.shared(), tensors)
    }
}

/// A struct whose fields are these numbers, which must be as many.
fn from_numbers<T: Plain>(numbers: &[f64]) -> T {
    let mut value = T::default();
    let words = value.words_mut();
    assert_eq!(words.len(), numbers.len(), "a history of another method");
    for (word, number) in words.iter_mut().zip(numbers) {
        *word = number.to_bits();
    }
    value
}
