//! The plain epilogue, sums to a matrix, and how any epilogue moves rows between tiles and matrices.
//!
//! Arithmetic in an epilogue goes over all elements of a tile as one array, also those beyond its last row or column: a
//! loop of a length that the compiler knows becomes straight vector code. Only the copies from and to matrices know the
//! tile's true size.

use moeworks_tensor::DType;

use super::kernel::{MAX_ROWS, TILE_STRIDE, Tile};
use super::{Epilogue, Place};
use crate::linear::Write;
use crate::parallel::Lent;
use crate::simd::{Float, Level};

/// Tiles that an epilogue may use as it likes; they keep whatever was left in them.
pub(crate) struct Room {
    pub(crate) tiles: [Tile; 3],
    /// For elements in the type that they are stored in.
    pub(crate) stored: Tile,
}

impl Room {
    #[inline(always)]
    pub(crate) fn new() -> Self {
        let zero = || Tile([0.0; MAX_ROWS * TILE_STRIDE]);
        Self { tiles: [zero(), zero(), zero()], stored: zero() }
    }
}

/// Writes the rows of a tile out: `to(row)` is where the row belongs.
#[inline(always)]
pub(crate) fn write_rows<'a, T: Float>(
    tile: &Tile,
    stored: &mut Tile,
    (rows, columns): (usize, usize),
    to: impl Fn(usize) -> &'a mut [T],
) {
    let values: &[T] = if T::DTYPE == DType::F32 {
        bytemuck::cast_slice(&tile.0)
    } else {
        let values: &mut [T] = bytemuck::cast_slice_mut(&mut stored.0);
        values.iter_mut().zip(&tile.0).for_each(|(to, &x)| *to = T::store(x));
        values
    };
    for row in 0..rows {
        copy(&values[row * TILE_STRIDE..][..columns], to(row));
    }
}

/// Reads rows into a tile: `from(row)` is where the row is found.
#[inline(always)]
pub(crate) fn read_rows<'a, T: Float>(
    tile: &mut Tile,
    stored: &mut Tile,
    (rows, columns): (usize, usize),
    from: impl Fn(usize) -> &'a [T],
) {
    let is_f32 = T::DTYPE == DType::F32;
    let values: &mut [T] = bytemuck::cast_slice_mut(if is_f32 { &mut tile.0 } else { &mut stored.0 });
    for row in 0..rows {
        copy(from(row), &mut values[row * TILE_STRIDE..][..columns]);
    }
    if !is_f32 {
        let values: &[T] = bytemuck::cast_slice(&stored.0);
        tile.0.iter_mut().zip(values).for_each(|(to, x)| *to = x.load());
    }
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
    fn prefetch(&self, at: Place) {
        for row in 0..at.rows.1 {
            let start = self.offsets[at.group] + (at.rows.0 + row) * self.stride + at.columns.0;
            self.to.prefetch(start, at.columns.1);
        }
    }

    #[inline(always)]
    fn tile<S: Level>(&self, at: Place, tiles: &mut [Tile], room: &mut Room) {
        let (column, columns) = at.columns;
        let row_of = |row: usize| {
            let start = self.offsets[at.group] + (at.rows.0 + row) * self.stride + column;
            // SAFETY: tiles do not overlap and neither do the matrices, so this part of a row is this call's alone.
            unsafe { self.to.range(start..start + columns) }
        };
        let size = (at.rows.1, columns);
        if self.write == Write::Add {
            let old = &mut room.tiles[0];
            read_rows(old, &mut room.stored, size, |row| &*row_of(row));
            tiles[0].0.iter_mut().zip(&old.0).for_each(|(sum, old)| *sum += old);
        }
        write_rows(&tiles[0], &mut room.stored, size, row_of);
    }
}
