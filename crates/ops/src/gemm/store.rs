//! The plain epilogue: sums go to a matrix.

use super::kernel::Tile;
use super::{Epilogue, Place};
use crate::linear::Write;
use crate::parallel::Lent;
use crate::simd::{Float, Level};

/// Writes sums to row-major matrices of one buffer, or adds them.
pub(crate) struct Store<'a, T> {
    pub(crate) to: Lent<'a, T>,
    /// Elements before each group's matrix.
    pub(crate) offsets: &'a [usize],
    /// Columns of all of them.
    pub(crate) stride: usize,
    pub(crate) write: Write,
}

impl<T: Float> Epilogue for Store<'_, T> {
    #[inline(always)]
    fn tile<S: Level>(&self, at: Place, tiles: &[Tile]) {
        let (column, columns) = at.columns;
        for row in 0..at.rows.1 {
            let start = self.offsets[at.group] + (at.rows.0 + row) * self.stride + column;
            // SAFETY: tiles do not overlap and neither do the matrices, so this part of a row is this call's alone.
            let to = unsafe { self.to.range(start..start + columns) };
            let sums = tiles[0].row(row);
            match self.write {
                Write::Replace => to.iter_mut().zip(sums).for_each(|(to, &sum)| *to = T::store(sum)),
                Write::Add => to.iter_mut().zip(sums).for_each(|(to, &sum)| *to = T::store(to.load() + sum)),
            }
        }
    }
}
