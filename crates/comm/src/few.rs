//! Lists that are mostly short: these need no memory of the heap, which would take a part of a short call's time.

use std::ops::Deref;

/// The longest list without.
pub(crate) const FEW: usize = 16;

/// A list that does not grow.
pub(crate) enum Few<T> {
    OnStack { items: [T; FEW], len: usize },
    OnHeap(Vec<T>),
}

impl<T: Copy> Few<T> {
    /// `len` items: `item(0)`, `item(1)` and so on.
    #[inline(always)] // Made where it stays: to move it would take as long as the rest of a short call.
    pub(crate) fn of(len: usize, mut item: impl FnMut(usize) -> T) -> Self {
        if len == 0 || len > FEW {
            return Self::OnHeap((0..len).map(item).collect());
        }
        let mut items = [item(0); FEW];
        for (index, place) in items[..len].iter_mut().enumerate().skip(1) {
            *place = item(index);
        }
        Self::OnStack { items, len }
    }
}

impl<T> Deref for Few<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        match self {
            Self::OnStack { items, len } => &items[..*len],
            Self::OnHeap(items) => items,
        }
    }
}
