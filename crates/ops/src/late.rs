//! What an operation reads and gives wherever it lies: lists, and numbers that may still be under way on a GPU.
//!
//! A host that looks at what a GPU computes waits for all that was asked of it before, and a large list takes longer to copy than to
//! use. So operations that only hand a list on take it as it is, and numbers that are looked at later, or never, come late.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, LazyLock};

use moeworks_tensor::{Element, Tensor};

/// A list that an operation reads: the host's, or a tensor's, which may be on a GPU. It reads like a slice, for which a tensor that is
/// on a GPU alone is copied to the host.
#[derive(Clone, Copy)]
pub enum List<'a, E> {
    /// In the host.
    Host(&'a [E]),
    /// Wherever the tensor is.
    Tensor(&'a Tensor),
}

impl<E: Element> List<'_, E> {
    /// The number of elements; nothing is copied.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Host(list) => list.len(),
            Self::Tensor(tensor) => tensor.len(),
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<E: Element> Deref for List<'_, E> {
    type Target = [E];

    fn deref(&self) -> &[E] {
        match self {
            Self::Host(list) => list,
            Self::Tensor(tensor) => tensor.slice(),
        }
    }
}

impl<'a, E> From<&'a [E]> for List<'a, E> {
    fn from(list: &'a [E]) -> Self {
        Self::Host(list)
    }
}

impl<'a, E> From<&'a Vec<E>> for List<'a, E> {
    fn from(list: &'a Vec<E>) -> Self {
        Self::Host(list)
    }
}

impl<'a, E, const N: usize> From<&'a [E; N]> for List<'a, E> {
    fn from(list: &'a [E; N]) -> Self {
        Self::Host(list)
    }
}

impl<'a, E> From<&'a Tensor> for List<'a, E> {
    fn from(tensor: &'a Tensor) -> Self {
        Self::Tensor(tensor)
    }
}

impl<E: Element + fmt::Debug> fmt::Debug for List<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

type Wait<T> = Box<dyn FnOnce() -> T + Send>;

/// A value that may still be under way on a GPU; who looks at it waits for it. Clones share it.
#[derive(Clone)]
pub struct Late<T>(Arc<LazyLock<T, Wait<T>>>);

impl<T: Send + 'static> Late<T> {
    /// What `wait` gives, which is called at the first look.
    #[must_use]
    pub fn new(wait: impl FnOnce() -> T + Send + 'static) -> Self {
        Self(Arc::new(LazyLock::new(Box::new(wait))))
    }

    /// A value that is there.
    #[must_use]
    pub fn now(value: T) -> Self {
        Self::new(|| value)
    }
}

impl<T> Deref for Late<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: fmt::Debug> fmt::Debug for Late<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use super::Late;

    #[test]
    fn a_late_value_is_asked_for_once_and_not_before_it_is_looked_at() {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        let late = Late::new(move || count.fetch_add(1, Relaxed) + 7);
        let other = late.clone();
        assert_eq!(asked.load(Relaxed), 0);
        assert_eq!((*late, *other, asked.load(Relaxed)), (7, 7, 1));
    }
}
