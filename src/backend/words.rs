//! The structs of [`abi`](super::abi) as the bytes and words that a device sees.

use super::abi::*;

mod sealed {
    pub trait Sealed {}
}

/// A struct that is nothing but its bytes.
///
/// # Safety
/// Whole aligned words of 8 bytes, no padding, and every pattern of bits a value. Only [`plain`] implements
/// it, which has the compiler check that.
pub(crate) unsafe trait Plain: Copy + Default + sealed::Sealed {
    /// The names of its fields.
    const FIELDS: &'static [&'static str];

    /// Its words, in the order of its fields.
    fn words(&self) -> &[u64] {
        // SAFETY: an implementor is aligned like a word and consists of whole words, none of which has
        // padding.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>() / 8) }
    }

    /// Its words, to be written.
    fn words_mut(&mut self) -> &mut [u64] {
        // SAFETY: an implementor is aligned like a word and consists of whole words; whatever is written
        // there is a value.
        unsafe { std::slice::from_raw_parts_mut(std::ptr::from_mut(self).cast(), size_of::<Self>() / 8) }
    }

    /// The struct that consists of these words, which must be as many as it has.
    fn from_words(words: &[u64]) -> Self {
        let mut value = Self::default();
        value.words_mut().copy_from_slice(words);
        value
    }

    /// Its bytes.
    fn bytes(&self) -> &[u8] {
        bytes_of(std::slice::from_ref(self))
    }

    /// Its bytes, to be written.
    fn bytes_mut(&mut self) -> &mut [u8] {
        bytes_of_mut(std::slice::from_mut(self))
    }
}

/// The bytes of a list.
pub(crate) fn bytes_of<T: Plain>(list: &[T]) -> &[u8] {
    // SAFETY: a `Plain` has no padding, so all bytes of the list are initialised; bytes need no alignment.
    unsafe { std::slice::from_raw_parts(list.as_ptr().cast(), size_of_val(list)) }
}

/// The bytes of a list, to be written.
pub(crate) fn bytes_of_mut<T: Plain>(list: &mut [T]) -> &mut [u8] {
    // SAFETY: bytes need no alignment, those of a list of `Plain` are all initialised, and whatever is
    // written there is a value of one.
    unsafe { std::slice::from_raw_parts_mut(list.as_mut_ptr().cast(), size_of_val(list)) }
}

/// The structs that a list of numbers consists of.
pub(crate) fn structs_of<T: Plain>(numbers: &[f64]) -> &[T] {
    let count = count_of::<T>(numbers);
    // SAFETY: count_of has compared alignments and lengths; every pattern of bits is a value of a `Plain`.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), count) }
}

/// The same, to be written.
pub(crate) fn structs_of_mut<T: Plain>(numbers: &mut [f64]) -> &mut [T] {
    let count = count_of::<T>(numbers);
    // SAFETY: as above; and every pattern of bits that is written to a `Plain` is one of f64 too.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), count) }
}

/// How many structs a list of numbers consists of.
fn count_of<T: Plain>(numbers: &[f64]) -> usize {
    const { assert!(align_of::<T>() <= align_of::<f64>() && size_of::<T>() >= size_of::<f64>()) };
    let size = size_of::<T>() / size_of::<f64>();
    debug_assert!(numbers.len().is_multiple_of(size), "numbers of another kind");
    numbers.len() / size
}

/// Numbers, or structs of such, whose every pattern of bits is a value.
trait Number {}
impl Number for f64 {}
impl Number for u64 {}
impl Number for u32 {}
impl Number for u16 {}
impl Number for u8 {}

/// The size of a field that must be a number, or a struct of such.
const fn size_of_number<S, N: Number>(_: fn(&S) -> &N) -> usize {
    size_of::<N>()
}

/// Implements [`Plain`] for structs of which all fields are named, each a number.
macro_rules! plain {
    ($($name:ident { $($field:ident),* $(,)? })*) => {$(
        const _: () = {
            assert!(size_of::<$name>() % 8 == 0 && align_of::<$name>() == 8, "no whole words");
            assert!(size_of::<$name>() == 0 $(+ size_of_number(|s: &$name| &s.$field))*, "it has padding");
        };
        impl Number for $name {}
        impl sealed::Sealed for $name {}
        // SAFETY: the assertions above: whole words, and numbers without padding between them.
        unsafe impl Plain for $name {
            const FIELDS: &'static [&'static str] = &[$(stringify!($field)),*];
        }
    )*};
}

each_struct!(plain);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_bytes_are_the_fields_in_order() {
        let group =
            RfdGroup { length_scale_factor: 1.5, multiplier: -0.0, velocity_decay: 0.9, weight_decay: 1e-3 };
        assert_eq!(group.words(), [1.5, -0.0, 0.9, 1e-3].map(f64::to_bits));
        assert_eq!(group.bytes()[..8], 1.5_f64.to_ne_bytes());
        assert_eq!(RfdGroup::from_words(group.words()), group);
        let mut copy = [RfdGroup::default(); 2];
        bytes_of_mut(&mut copy)[32..].copy_from_slice(group.bytes());
        assert_eq!(copy, [RfdGroup::default(), group]);
        assert_eq!(bytes_of(&copy).len(), 64);
        let mut numbers = [1.5, -0.0, 0.9, 1e-3, 2.0];
        assert_eq!(structs_of::<RfdGroup>(&numbers), [group]);
        structs_of_mut::<RfdGroup>(&mut numbers)[0].multiplier = 7.0;
        assert_eq!(numbers, [1.5, 7.0, 0.9, 1e-3, 2.0]);
        let status = RfdStatus::from_words(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
        assert_eq!((status.sequence, status.loss.to_bits(), status.outcome), (1, 4, 12));
        let mut read = RfdStatus::default();
        read.bytes_mut().copy_from_slice(status.bytes());
        assert_eq!(read.words(), status.words());
    }

    #[test]
    #[should_panic(expected = "length")]
    fn too_few_words_are_refused() {
        RfdSquaredNorm::from_words(&[1]);
    }
}
