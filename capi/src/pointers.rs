//! Checks of what C passes: null, alignment, text, and structs whose size says from which release's header
//! they are.

use std::ffi::{CStr, c_char};
use std::marker::PhantomData;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, TryLockError};

use super::status::{
    Failure, RFD_ERROR_BUSY, RFD_ERROR_NULL, RFD_ERROR_PANIC, RFD_ERROR_STRUCT_SIZE, Result,
};

pub(super) fn check<T>(pointer: *const T, name: &str) -> Result<()> {
    if pointer.is_null() {
        return Err(Failure::new(RFD_ERROR_NULL, format!("{name} is null")));
    }
    if !pointer.is_aligned() {
        let expected = format!("must be aligned to {} bytes", align_of::<T>());
        return Err(Failure::invalid(name, format!("{pointer:p}"), &expected));
    }
    Ok(())
}

/// What a handle or an input points to.
///
/// # Safety
/// `pointer` is null, misaligned, or valid for reads for `'a`, and nothing writes there meanwhile.
pub(super) unsafe fn shared<'a, T>(pointer: *const T, name: &str) -> Result<&'a T> {
    check(pointer, name)?;
    // SAFETY: not null and aligned, checked above; the caller vouches for the rest.
    Ok(unsafe { &*pointer })
}

/// A list of `count` values; null is fine for none.
///
/// # Safety
/// As [`shared`], for `count` values.
pub(super) unsafe fn slice<'a, T>(pointer: *const T, count: usize, name: &str) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    check(pointer, name)?;
    if count > isize::MAX as usize / size_of::<T>() {
        return Err(Failure::invalid(&format!("length of {name}"), count, "is larger than any memory"));
    }
    // SAFETY: not null, aligned and not longer than memory can be, checked above; the caller vouches for the
    // rest.
    Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
}

/// UTF-8 text that ends with 0.
///
/// # Safety
/// As [`shared`], for all bytes up to the first 0.
pub(super) unsafe fn text<'a>(pointer: *const c_char, name: &str) -> Result<&'a str> {
    check(pointer, name)?;
    // SAFETY: not null, checked above; the caller vouches for the rest.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map_err(|_| Failure::invalid(name, text.to_string_lossy(), "must be UTF-8"))
}

/// A path: any bytes on Unix, UTF-8 elsewhere.
///
/// # Safety
/// As [`text`].
pub(super) unsafe fn path<'a>(pointer: *const c_char, name: &str) -> Result<&'a Path> {
    check(pointer, name)?;
    #[cfg(unix)]
    {
        use std::os::unix::ffi::OsStrExt;
        // SAFETY: not null, checked above; the caller vouches for the rest.
        let bytes = unsafe { CStr::from_ptr(pointer) }.to_bytes();
        Ok(Path::new(std::ffi::OsStr::from_bytes(bytes)))
    }
    #[cfg(not(unix))]
    {
        // SAFETY: the caller vouches for all bytes up to the first 0.
        unsafe { text(pointer, name) }.map(Path::new)
    }
}

/// Where a result goes, checked before the work begins, written when it is done.
pub(super) struct Out<T>(NonNull<T>);

impl<T> Out<T> {
    /// # Safety
    /// `pointer` is null, misaligned, or valid for writes as long as this exists.
    pub unsafe fn new(pointer: *mut T, name: &str) -> Result<Self> {
        check(pointer, name)?;
        NonNull::new(pointer).map(Self).ok_or_else(|| Failure::new(RFD_ERROR_NULL, name))
    }

    /// As [`Out::new`], but `None` for null.
    ///
    /// # Safety
    /// As [`Out::new`].
    pub unsafe fn optional(pointer: *mut T, name: &str) -> Result<Option<Self>> {
        // SAFETY: misaligned or valid for writes, says the caller.
        if pointer.is_null() { Ok(None) } else { unsafe { Self::new(pointer, name) }.map(Some) }
    }

    pub fn set(self, value: T) {
        // SAFETY: valid for writes, as `new` was promised. What was there is no value of ours and not
        // dropped.
        unsafe { self.0.write(value) }
    }
}

impl<T> Out<*mut T> {
    /// Hands a new handle to the caller.
    pub fn set_handle(self, value: T) {
        self.set(Box::into_raw(Box::new(value)));
    }
}

/// Frees a handle; nothing for null.
///
/// # Safety
/// `pointer` is null or came from [`Out::set_handle`] and has not been freed; no one uses it now or later.
pub(super) unsafe fn destroy<T>(pointer: *mut T) {
    let _ = super::status::guard(|| {
        if !pointer.is_null() {
            // SAFETY: made by `Box::into_raw`, and the caller vouches that this is its only use.
            drop(unsafe { Box::from_raw(pointer) });
        }
        Ok(())
    });
}

/// What a handle holds, for one thread at a time.
pub(super) fn lock<'a, T>(mutex: &'a Mutex<T>, name: &str) -> Result<MutexGuard<'a, T>> {
    mutex.try_lock().map_err(|error| match error {
        TryLockError::WouldBlock => Failure::new(
            RFD_ERROR_BUSY,
            format!("{name} is in use by another thread; give each thread its own, or take turns"),
        ),
        TryLockError::Poisoned(_) => {
            Failure::new(RFD_ERROR_PANIC, format!("{name} is unusable since an earlier panic; destroy it"))
        }
    })
}

/// A struct that C passes, whose first field is its size as the header said that the caller was compiled
/// with.
///
/// # Safety
/// `repr(C)`; the first field is a `usize`; every bit pattern is a valid value.
pub(super) unsafe trait Versioned: Copy {
    /// Its name in C.
    const NAME: &'static str;
    /// Its size in each release that changed it, in increasing order: fields are only ever added behind the
    /// end, never in padding there, which older callers leave undefined.
    const SIZES: &'static [usize];
    /// What fields are that the caller's header does not have yet.
    const DEFAULT: Self;
}

/// Makes a struct [`Versioned`]: all fields are 0 or null by default but those given. Behind them stands the
/// first field that each later release has added, if any.
macro_rules! versioned {
    ($name:ident { $($field:ident: $value:expr),* } $(then $added:ident)*) => {
        // SAFETY: repr(C), a usize first, numbers and raw pointers only: see the struct, which cbindgen shows
        // to C.
        unsafe impl Versioned for $name {
            const NAME: &'static str = stringify!($name);
            const SIZES: &'static [usize] = &[$(std::mem::offset_of!(Self, $added),)* size_of::<Self>()];
            const DEFAULT: Self = {
                // SAFETY: every bit pattern is a valid value, as said above.
                let zeroed: Self = unsafe { std::mem::zeroed() };
                Self { size: size_of::<Self>(), $($field: $value,)* ..zeroed }
            };
        }
    };
}
pub(crate) use versioned;

fn check_size<T: Versioned>(size: usize) -> Result<()> {
    const { assert!(T::SIZES[T::SIZES.len() - 1] == size_of::<T>()) };
    if T::SIZES.contains(&size) {
        return Ok(());
    }
    let (name, own) = (T::NAME, size_of::<T>());
    let remedy = if size > own {
        "the program was compiled with a newer header: install the library that belongs to it"
    } else {
        "set it to sizeof before the call"
    };
    Err(Failure::new(
        RFD_ERROR_STRUCT_SIZE,
        format!("{name}.size = {size}: this library knows {:?}; {remedy}", T::SIZES),
    ))
}

/// Reads a struct; what an older header does not have is the default.
///
/// # Safety
/// `pointer` is null, misaligned, or valid for reads of a `usize` and of as many bytes as that says.
pub(super) unsafe fn read<T: Versioned>(pointer: *const T) -> Result<T> {
    check(pointer, T::NAME)?;
    // SAFETY: not null and aligned; the caller vouches for the first field.
    let size = unsafe { pointer.cast::<usize>().read() };
    check_size::<T>(size)?;
    let mut value = T::DEFAULT;
    // SAFETY: `size` is at most the size of `value`, checked above; the caller vouches that so many bytes can
    // be read. Every bit pattern is valid, says the trait.
    unsafe { std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), (&raw mut value).cast(), size) };
    Ok(value)
}

/// The same for a struct that may be null, for its defaults.
///
/// # Safety
/// As [`read`].
pub(super) unsafe fn read_or_default<T: Versioned>(pointer: *const T) -> Result<T> {
    // SAFETY: misaligned, or valid for reads of as many bytes as its first field says, says the caller.
    if pointer.is_null() { Ok(T::DEFAULT) } else { unsafe { read(pointer) } }
}

/// Writes the default to a struct of the given size.
///
/// # Safety
/// `pointer` is null, misaligned, or valid for writes of `size` bytes.
pub(super) unsafe fn initialise<T: Versioned>(pointer: *mut T, size: usize) -> Result<()> {
    check(pointer, T::NAME)?;
    check_size::<T>(size)?;
    // SAFETY: checked above.
    unsafe { write_prefix(pointer, &T::DEFAULT, size) };
    Ok(())
}

/// # Safety
/// `pointer` is valid for writes of `size` bytes, at most the size of `T`.
unsafe fn write_prefix<T: Versioned>(pointer: *mut T, value: &T, size: usize) {
    // SAFETY: the caller vouches for the sizes; the first field is a usize, says the trait.
    unsafe {
        std::ptr::copy_nonoverlapping(std::ptr::from_ref(value).cast::<u8>(), pointer.cast(), size);
        pointer.cast::<usize>().write(size);
    }
}

/// Where a struct goes; as much of it as the caller's header has.
pub(super) struct OutStruct<T> {
    pointer: *mut T,
    size: usize,
}

impl<T: Versioned> OutStruct<T> {
    /// # Safety
    /// `pointer` is null, misaligned, or valid for reads of a `usize`, and for writes of as many
    /// bytes as that says as long as this exists.
    pub unsafe fn new(pointer: *mut T) -> Result<Self> {
        check(pointer, T::NAME)?;
        // SAFETY: not null and aligned; the caller vouches for the first field.
        let size = unsafe { pointer.cast::<usize>().read() };
        check_size::<T>(size)?;
        Ok(Self { pointer, size })
    }

    pub fn set(self, value: &T) {
        // SAFETY: the size was checked and the memory vouched for in `new`.
        unsafe { write_prefix(self.pointer, value, self.size) };
    }
}

/// A list of structs, all of one release's size.
#[derive(Clone, Copy)]
pub(super) struct Array<'a, T> {
    pointer: *const u8,
    stride: usize,
    count: usize,
    of: PhantomData<&'a T>,
}

impl<T: Versioned> Array<'_, T> {
    /// # Safety
    /// `pointer` is null, misaligned, or points to `count` structs, each valid for reads of as many
    /// bytes as its first field says, as long as this exists. It may be null when `count` is 0.
    pub unsafe fn new(pointer: *const T, count: usize, name: &str) -> Result<Self> {
        let mut stride = size_of::<T>();
        if count > 0 {
            check(pointer, name)?;
            // SAFETY: not null and aligned; the caller vouches for the first field.
            stride = unsafe { pointer.cast::<usize>().read() };
            check_size::<T>(stride)?;
            if count > isize::MAX as usize / stride {
                return Err(Failure::invalid(
                    &format!("length of {name}"),
                    count,
                    "is larger than any memory",
                ));
            }
        }
        Ok(Self { pointer: pointer.cast(), stride, count, of: PhantomData })
    }

    pub fn len(&self) -> usize {
        self.count
    }

    /// All of them; an error for one whose size differs from the first's.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Result<T>> {
        (0..self.count).map(|index| {
            // SAFETY: `index` is below the count, for which `new` was promised; the offset fits, as `new`
            // checked.
            let pointer = unsafe { self.pointer.add(index * self.stride) }.cast::<T>();
            // SAFETY: sizes of structs are multiples of their alignment, and the first one is aligned.
            let size = unsafe { pointer.cast::<usize>().read() };
            if size != self.stride {
                let message = format!(
                    "{}.size = {size} at index {index}, but {} at index 0; set each to sizeof",
                    T::NAME,
                    self.stride
                );
                return Err(Failure::new(RFD_ERROR_STRUCT_SIZE, message));
            }
            if size == size_of::<T>() {
                // SAFETY: aligned, as the first one is and sizes are multiples of the alignment; `new` was
                // promised so many bytes, and every bit pattern is valid.
                return Ok(unsafe { pointer.read() });
            }
            // SAFETY: `new` was promised as many bytes as the first field says.
            unsafe { read(pointer) }
        })
    }
}

/// An address as a number.
pub(super) fn address<T>(pointer: *const T) -> u64 {
    pointer.expose_provenance() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A struct that got a field in its second release.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Grown {
        size: usize,
        first: f64,
        second: f64,
    }

    // SAFETY: repr(C), a usize first, numbers only.
    unsafe impl Versioned for Grown {
        const NAME: &'static str = "grown";
        const SIZES: &'static [usize] = &[16, 24];
        const DEFAULT: Self = Self { size: size_of::<Self>(), first: 1.0, second: 2.0 };
    }

    #[test]
    fn a_struct_of_an_older_header_gets_defaults_and_keeps_its_neighbour() {
        let mut memory = Grown { size: 16, first: 5.0, second: 7.0 };
        // SAFETY: the struct is larger than its size says.
        unsafe {
            let value = read(&raw const memory).ok().unwrap();
            assert_eq!((value.first, value.second), (5.0, 2.0));
            OutStruct::new(&raw mut memory).ok().unwrap().set(&Grown { size: 24, first: 8.0, second: 9.0 });
            assert_eq!(memory, Grown { size: 16, first: 8.0, second: 7.0 });
            initialise(&raw mut memory, 16).ok().unwrap();
            assert_eq!(memory, Grown { size: 16, first: 1.0, second: 7.0 });
            initialise(&raw mut memory, 24).ok().unwrap();
            assert_eq!(memory, Grown::DEFAULT);
        }
    }

    #[test]
    fn lists_of_an_older_header_have_its_stride() {
        let memory = [16_usize, 3.0_f64.to_bits() as usize, 16, 4.0_f64.to_bits() as usize];
        // SAFETY: two structs of 16 bytes.
        let list = unsafe { Array::<Grown>::new(memory.as_ptr().cast(), 2, "list") }.ok().unwrap();
        let firsts: Vec<f64> = list.iter().map(|item| item.ok().unwrap().first).collect();
        assert_eq!(firsts, [3.0, 4.0]);
    }

    #[test]
    fn sizes_that_no_release_had_are_refused() {
        for size in [0, 8, 15, 17, 25, usize::MAX] {
            let memory = Grown { size, first: 0.0, second: 0.0 };
            // SAFETY: nothing is read beyond the first field, which is there.
            assert!(unsafe { read(&raw const memory) }.is_err(), "{size}");
        }
    }
}
