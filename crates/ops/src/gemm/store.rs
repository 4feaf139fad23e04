//! The plain epilogue, sums to a matrix, and how any epilogue moves rows between tiles and matrices.
//!
//! Arithmetic in an epilogue goes over all elements of a tile as one array, also those beyond its last row or column: a
//! loop of a length that the compiler knows becomes straight vector code. Only the copies from and to matrices know the
//! tile's true size.

use super::kernel::{MAX_ROWS, TILE_STRIDE, Tile};
use super::{Epilogue, Place};
use crate::linear::Write;
use crate::parallel::Lent;
use crate::simd::{Float, Level};

/// Elements of a tile.
pub(crate) const TILE_LEN: usize = MAX_ROWS * TILE_STRIDE;

/// Elements of a tile in another type.
pub(crate) type TileOf<T> = [T; TILE_LEN];

/// Copies the rows of a tile out: `to(row)` is where the row belongs.
#[inline(always)]
pub(crate) fn copy_out<'a, T: Float>(tile: &TileOf<T>, rows: usize, columns: usize, to: impl Fn(usize) -> &'a mut [T]) {
    for row in 0..rows {
        copy(&tile[row * TILE_STRIDE..][..columns], to(row));
    }
}

/// Copies rows into a tile: `from(row)` is where the row is found.
#[inline(always)]
pub(crate) fn copy_in<'a, T: Float>(
    tile: &mut TileOf<T>,
    rows: usize,
    columns: usize,
    from: impl Fn(usize) -> &'a [T],
) {
    for row in 0..rows {
        copy(from(row), &mut tile[row * TILE_STRIDE..][..columns]);
    }
}

/// Rounds a tile to another type.
#[inline(always)]
pub(crate) fn convert<T: Float>(tile: &TileOf<f32>) -> TileOf<T> {
    let mut to = [T::zeroed(); TILE_LEN];
    for (to, &x) in to.iter_mut().zip(tile) {
        *to = T::store(x);
    }
    to
}

#[inline(always)]
fn copy<T: Copy>(from: &[T], to: &mut [T]) {
    #[inline(always)]
    fn whole<T: Copy, const LEN: usize>(from: &[T], to: &mut [T]) -> bool {
        match (from.as_array::<LEN>(), to.as_mut_array::<LEN>()) {
            (Some(from), Some(to)) => {
                *to = *from;
                true
            }
            _ => false,
        }
    }
    // A copy of a length known to the compiler is a few moves; others are a call.
    if !(whole::<T, 48>(from, to) || whole::<T, 32>(from, to) || whole::<T, 16>(from, to)) {
        to.copy_from_slice(from);
    }
}

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
        let row_of = |row: usize| {
            let start = self.offsets[at.group] + (at.rows.0 + row) * self.stride + column;
            // SAFETY: tiles do not overlap and neither do the matrices, so this part of a row is this call's alone.
            unsafe { self.to.range(start..start + columns) }
        };
        match self.write {
            Write::Replace => copy_out(&convert::<T>(&tiles[0].0), at.rows.1, columns, row_of),
            Write::Add => {
                let mut old = [T::zeroed(); TILE_LEN];
                copy_in(&mut old, at.rows.1, columns, |row| &*row_of(row));
                for (old, &sum) in old.iter_mut().zip(&tiles[0].0) {
                    *old = T::store(old.load() + sum);
                }
                copy_out(&old, at.rows.1, columns, row_of);
            }
        }
    }
}
