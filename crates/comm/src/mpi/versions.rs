//! Versions of the same numbers from all ranks, fetched to be reduced here in the order of ranks.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::group::{Group, Process};
use crate::in_flight::locked;
use crate::number::Reduction;
use crate::short_list::with_short_list;

/// Memory in whole cache lines.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line([u8; 64]);

const LINE: usize = size_of::<Line>();

/// The distance, within a 4 KiB page, from this rank's own memory to the start of the versions. Any distance but 16
/// bytes would do. Libraries and systems copy with `rep movsb`, which takes up to twenty times as long on some CPUs
/// (Zen 3) if the target lies exactly 16 bytes further in its page than the source, as may happen with two blocks of
/// an allocator. Ranks mostly lay out their memory alike, so that the distance to the other ranks' memory is similar.
const TARGET_DISTANCE: usize = 1024;
const PAGE: usize = 4096;

/// Consecutive versions in memory that is reused, aligned for every number.
pub(crate) struct Versions<W> {
    lines: W,
    /// The number of lines before the first version.
    skipped: usize,
    bytes: usize,
    num_ranks: usize,
}

impl<W: DerefMut<Target = Vec<Line>>> Versions<W> {
    /// Makes space in `lines` for `bytes` bytes from each rank, which are copied from `source` and the like. Old
    /// contents remain.
    pub(crate) fn new(mut lines: W, bytes: usize, num_ranks: usize, source: *const u8) -> Self {
        let len = (bytes * num_ranks).div_ceil(LINE) + PAGE / LINE;
        if lines.len() < len {
            lines.resize(len, Line([0; LINE]));
        }
        let skipped = lines_to_skip(lines.as_ptr().addr(), source.addr());
        Self { lines, skipped, bytes, num_ranks }
    }

    pub(crate) fn start(&mut self) -> *mut u8 {
        self.lines[self.skipped..].as_mut_ptr().cast()
    }

    /// # Safety
    /// `target` is valid for writing the bytes of one version, and aligned for the number.
    pub(crate) unsafe fn reduce(&self, reduction: Reduction, target: *mut u8) {
        let Reduction { number, reduce } = reduction;
        let start = self.lines[self.skipped..].as_ptr().cast::<u8>();
        let source = |rank: usize| start.wrapping_add(rank * self.bytes);
        // SAFETY: the versions lie one after another, each a whole number of numbers.
        with_short_list(self.num_ranks, source, |sources| unsafe {
            number.reduce(reduce, sources, &[target], self.bytes);
        });
    }
}

/// Returns the number of lines after which memory from `start` on lies [`TARGET_DISTANCE`], or up to a line more,
/// further in its page than `source`.
fn lines_to_skip(start: usize, source: usize) -> usize {
    (source.wrapping_add(TARGET_DISTANCE).wrapping_sub(start) % PAGE).div_ceil(LINE)
}

/// The spare memory of a process, on loan to an operation that ends later.
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn versions_lie_far_from_16_bytes_further_in_their_page_than_what_they_are_copied_from(
            source in any::<usize>(), line in 0..usize::MAX / LINE - PAGE,
        ) {
            let start = line * LINE;
            let skipped = lines_to_skip(start, source);
            let further = (start + skipped * LINE).wrapping_sub(source) % PAGE;
            prop_assert!(skipped <= PAGE / LINE && (TARGET_DISTANCE..TARGET_DISTANCE + LINE).contains(&further), "{further}");
        }
    }
}
