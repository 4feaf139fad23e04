//! All ranks' versions of the same numbers, fetched to be reduced here in the order of ranks.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::group::{Group, Process};
use crate::few::with_few;
use crate::number::{NumberKind, Reduce};
use crate::under_way::locked;

/// Memory in whole cache lines. Libraries and systems copy with `rep movsb`, which takes up to twenty times as long on some processors
/// (Zen 3) where what is written lies 16 bytes further in its page than what is read. Of two blocks as an allocator gives them that
/// may be so; of a line's beginning and an allocator's usual 16 bytes behind one it is not.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line([u8; 64]);

/// Versions in memory that is used again and again, one after another: aligned for every number.
pub(crate) struct Versions<W> {
    lines: W,
    bytes: usize,
    num_ranks: usize,
}

impl<W: DerefMut<Target = Vec<Line>>> Versions<W> {
    /// Room in `lines` for `bytes` bytes from each rank, with what was there before.
    pub(crate) fn new(mut lines: W, bytes: usize, num_ranks: usize) -> Self {
        let len = (bytes * num_ranks).div_ceil(size_of::<Line>());
        if lines.len() < len {
            lines.resize(len, Line([0; 64]));
        }
        Self { lines, bytes, num_ranks }
    }

    pub(crate) fn start(&mut self) -> *mut u8 {
        self.lines.as_mut_ptr().cast()
    }

    /// # Safety
    /// `target` is valid for writing the bytes of one version, and aligned for the number.
    pub(crate) unsafe fn reduce(&self, (number, reduce): (NumberKind, Reduce), target: *mut u8) {
        let start = self.lines.as_ptr().cast::<u8>();
        let source = |rank: usize| start.wrapping_add(rank * self.bytes);
        // SAFETY: the versions lie one after another, each a whole number of numbers.
        with_few(self.num_ranks, source, |sources| unsafe { number.reduce(reduce, sources, &[target], self.bytes) });
    }
}

/// The spare memory of a process, taken for an operation that ends later.
pub(crate) struct Taken {
    lines: Vec<Line>,
    process: Arc<Process>,
}

impl Taken {
    pub(crate) fn from(group: &Group) -> Self {
        let process = Arc::clone(&group.process);
        let lines = std::mem::take(&mut *locked(&process.spare));
        Self { lines, process }
    }
}

impl Deref for Taken {
    type Target = Vec<Line>;

    fn deref(&self) -> &Vec<Line> {
        &self.lines
    }
}

impl DerefMut for Taken {
    fn deref_mut(&mut self) -> &mut Vec<Line> {
        &mut self.lines
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let mut spare = locked(&self.process.spare);
        if spare.len() < self.lines.len() {
            std::mem::swap(&mut *spare, &mut self.lines);
        }
    }
}
