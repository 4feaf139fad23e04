//! All ranks' versions of the same numbers, fetched to be reduced here in the order of ranks.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::group::{Group, Process};
use crate::few::with_few;
use crate::number::{NumberKind, Reduce};
use crate::under_way::locked;

/// Versions in memory that is used again and again, one after another: in words of eight bytes, so that they are aligned for every
/// number.
pub(crate) struct Versions<W> {
    words: W,
    bytes: usize,
    num_ranks: usize,
}

impl<W: DerefMut<Target = Vec<u64>>> Versions<W> {
    /// Room in `words` for `bytes` bytes from each rank, with what was there before.
    pub(crate) fn new(mut words: W, bytes: usize, num_ranks: usize) -> Self {
        let len = (bytes * num_ranks).div_ceil(8);
        if words.len() < len {
            words.resize(len, 0);
        }
        Self { words, bytes, num_ranks }
    }

    pub(crate) fn start(&mut self) -> *mut u8 {
        self.words.as_mut_ptr().cast()
    }

    /// # Safety
    /// `target` is valid for writing the bytes of one version, and aligned for the number.
    pub(crate) unsafe fn reduce(&self, (number, reduce): (NumberKind, Reduce), target: *mut u8) {
        let start = self.words.as_ptr().cast::<u8>();
        let source = |rank: usize| start.wrapping_add(rank * self.bytes);
        // SAFETY: the versions lie one after another, each a whole number of numbers.
        with_few(self.num_ranks, source, |sources| unsafe { number.reduce(reduce, sources, &[target], self.bytes) });
    }
}

/// The spare memory of a process, taken for an operation that ends later.
pub(crate) struct Taken {
    words: Vec<u64>,
    process: Arc<Process>,
}

impl Taken {
    pub(crate) fn from(group: &Group) -> Self {
        let process = Arc::clone(&group.process);
        let words = std::mem::take(&mut *locked(&process.spare));
        Self { words, process }
    }
}

impl Deref for Taken {
    type Target = Vec<u64>;

    fn deref(&self) -> &Vec<u64> {
        &self.words
    }
}

impl DerefMut for Taken {
    fn deref_mut(&mut self) -> &mut Vec<u64> {
        &mut self.words
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let mut spare = locked(&self.process.spare);
        if spare.len() < self.words.len() {
            std::mem::swap(&mut *spare, &mut self.words);
        }
    }
}
