//! Inputs and results of operations that may be on a GPU or still be computed there: lists, and deferred values.
//!
//! A host that reads a result of a GPU waits for all work queued before it, and copying a large list takes longer
//! than using it. So operations that only pass a list on take it where it is, and values that are read later or never
//! are deferred.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, LazyLock};

use moeworks_tensor::{Element, Tensor};

/// A list that an operation reads: a slice on the host, or a tensor, which may be on a GPU. It derefs to a slice; a
/// tensor that is only on a GPU is copied to the host for that.
#[derive(Clone, Copy)]
pub enum List<'a, E> {
    /// On the host.
    Host(&'a [E]),
    /// Wherever the tensor is.
    Tensor(&'a Tensor),
}

impl<E: Element> List<'_, E> {
    /// Returns the number of elements, without a copy.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Host(list) => list.len(),
            Self::Tensor(tensor) => tensor.len(),
        }
    }

    /// Returns whether the list is empty.
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

/// A value that a GPU may still be computing; reading it waits. Clones share it.
#[derive(Clone)]
pub struct Deferred<T>(Arc<LazyLock<T, Wait<T>>>);

impl<T: Send + 'static> Deferred<T> {
    /// Defers a value that `wait` returns; it is called when the value is first read.
    #[must_use]
    pub fn new(wait: impl FnOnce() -> T + Send + 'static) -> Self {
        Self(Arc::new(LazyLock::new(Box::new(wait))))
    }

    /// Wraps a value that is ready.
    #[must_use]
    pub fn now(value: T) -> Self {
        Self::new(|| value)
    }
}

impl<T> Deref for Deferred<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: fmt::Debug> fmt::Debug for Deferred<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use super::Deferred;

    #[test]
    fn a_deferred_value_is_computed_once_and_not_before_it_is_read() {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        let deferred = Deferred::new(move || count.fetch_add(1, Relaxed) + 7);
        let other = deferred.clone();
        assert_eq!(asked.load(Relaxed), 0);
        assert_eq!((*deferred, *other, asked.load(Relaxed)), (7, 7, 1));
    }
}
