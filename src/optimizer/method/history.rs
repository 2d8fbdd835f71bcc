//! What a method remembers between steps beside velocities: numbers with names, some of all tensors together
//! and some of each. Host, device and saved states hold the same numbers in the same order.

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
    pub fn of<S: Numbers, T: Numbers>(fresh: fn(tensors: usize) -> History) -> Self {
        Self { shared: S::NAMES, tensor: T::NAMES, fresh }
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
    /// The numbers of two kinds of structs.
    pub fn new<S: Numbers, T: Numbers>(shared: &S, tensors: &[T]) -> Self {
        Self { shared: shared.numbers(), tensors: tensors.iter().flat_map(T::numbers).collect() }
    }

    /// The opposite of [`History::new`].
    pub fn read<S: Numbers, T: Numbers>(&self) -> (S, Vec<T>) {
        let tensors = self.tensors.chunks_exact(T::NAMES.len()).map(T::from_numbers).collect();
        (S::from_numbers(&self.shared), tensors)
    }
}

/// A struct of f64 alone, whose fields are taken one after the other.
pub(crate) trait Numbers {
    /// Of its fields.
    const NAMES: &'static [&'static str];
    fn numbers(&self) -> Vec<f64>;
    /// Of a list as long as the names.
    fn from_numbers(numbers: &[f64]) -> Self;
}

/// Implements [`Numbers`] for a struct that the kernels share. It does not compile unless the list names all
/// fields in their order.
macro_rules! numbers {
    ($of:ident { $($field:ident),* $(,)? }) => {
        impl Numbers for $of {
            const NAMES: &'static [&'static str] = &[$(stringify!($field)),*];

            fn numbers(&self) -> Vec<f64> {
                vec![$(self.$field),*]
            }

            fn from_numbers(numbers: &[f64]) -> Self {
                let mut numbers = numbers.iter().copied();
                let mut next = || numbers.next().expect("as many as there are names");
                Self { $($field: next()),* }
            }
        }
        const _: () = {
            let offsets = [$(std::mem::offset_of!($of, $field)),*];
            let mut field = 0;
            while field < offsets.len() {
                assert!(offsets[field] == field * size_of::<f64>());
                field += 1;
            }
            assert!(size_of::<$of>() == offsets.len() * size_of::<f64>());
        };
    };
}
pub(super) use numbers;
