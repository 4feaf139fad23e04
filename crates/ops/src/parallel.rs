//! Slices lent to several tasks, each of which writes a part of its own.

use std::marker::PhantomData;
use std::ops::Range;

use moeworks_tensor::{DType, Tensor};

use crate::simd::LANES;
use crate::threads::SendPointer;

/// Elements of a task of a memory-bound operation: large against the cost of a fork, small enough to balance.
pub(crate) const PIECE: usize = 1 << 15;

/// The size from which a result is no longer in a cache when it is read again. A plain store fetches the line that it
/// overwrites, which moves twice the bytes for nothing.
const FAR_BYTES: usize = 32 << 20;

/// Returns whether a result of f32, in rows of whole groups of lanes, should be written past the caches.
pub(crate) fn is_far(result: &Tensor, width: usize) -> bool {
    result.dtype() == DType::F32 && result.num_bytes() >= FAR_BYTES && width.is_multiple_of(LANES)
}

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;

/// A mutable slice from which tasks take ranges that do not overlap.
pub(crate) struct Lent<'a, T> {
    start: SendPointer<T>,
    len: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

impl<T> Clone for Lent<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

/// Safety conditions on ranges hold across all copies.
impl<T> Copy for Lent<'_, T> {}

impl<'a, T: Send> Lent<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: SendPointer(slice.as_mut_ptr()), len: slice.len(), lifetime: PhantomData }
    }

    /// Lends the elements of `range`.
    ///
    /// # Safety
    /// While the result lives, no other range taken from this slice may overlap `range`.
    #[allow(clippy::mut_from_ref)] // the whole point; the caller answers for it
    pub(crate) unsafe fn range(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "a task's range is outside the slice");
        // SAFETY: the range is inside the slice, which is borrowed for 'a; nobody else has it: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.get().add(range.start), range.end - range.start) }
    }

    /// Returns the address of `range`, for a task that writes some of its elements, which are the task's own.
    pub(crate) fn start_of(&self, range: &Range<usize>) -> *mut T {
        assert!(range.start <= range.end && range.end <= self.len, "a task's range is outside the slice");
        self.start.get().wrapping_add(range.start)
    }

    /// Returns whether a cache line begins with the element.
    #[inline(always)]
    pub(crate) fn is_line(&self, place: usize) -> bool {
        self.start.get().wrapping_add(place).addr().is_multiple_of(LINE)
    }

    /// Prefetches the cache lines of elements that will be written soon.
    #[inline(always)]
    pub(crate) fn prefetch(&self, start: usize, len: usize) {
        prefetch_elements(self.start.get().wrapping_add(start), len);
    }

    /// Prefetches the cache lines of elements that will be written later, into the second-level cache.
    #[inline(always)]
    pub(crate) fn prefetch_far(&self, start: usize, len: usize) {
        prefetch_elements_far(self.start.get().wrapping_add(start), len);
    }
}

/// Prefetches the cache lines of elements.
#[inline(always)]
pub(crate) fn prefetch_elements<T>(first: *const T, len: usize) {
    lines(first, len).for_each(|line| crate::prefetch::prefetch(line.cast()));
}

/// Prefetches the cache lines of elements into the second-level cache.
#[inline(always)]
pub(crate) fn prefetch_elements_far<T>(first: *const T, len: usize) {
    lines(first, len).for_each(crate::prefetch::prefetch_far);
}

/// Returns an address in each cache line of elements.
#[inline(always)]
fn lines<T>(first: *const T, len: usize) -> impl Iterator<Item = *const u8> {
    (0..len * size_of::<T>()).step_by(LINE).map(move |byte| first.cast::<u8>().wrapping_add(byte))
}

/// Returns the range of piece `index` when `len` elements are cut into pieces of `piece`.
pub(crate) fn piece_range(index: usize, piece: usize, len: usize) -> Range<usize> {
    let start = (index * piece).min(len);
    start..(start + piece).min(len)
}
