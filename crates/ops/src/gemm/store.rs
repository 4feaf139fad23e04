//! The plain epilogue, sums to a matrix, and how any epilogue moves rows between tiles and matrices.
//!
//! Arithmetic in an epilogue goes over all elements of a tile as one array, also those beyond its last row or column: a
//! loop of a length that the compiler knows becomes straight vector code. Where the level's vectors leave most of a tile unused
//! it goes row by row over as many as they fill. Only the copies from and to matrices know the tile's true size.

use std::ops::Range;

use moeworks_tensor::DType;

use super::kernel::{MAX_ROWS, TILE_STRIDE, Tile, tile_lanes};
use super::{Epilogue, Place};
use crate::linear::Write;
use crate::parallel::Lent;
use crate::simd::{Float, Level, store_all};

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

/// Calls `work` with the places of all elements of a tile that may be filled in `rows` rows: at once, or row by row.
#[inline(always)]
pub(crate) fn filled<S: Level>(rows: usize, mut work: impl FnMut(Range<usize>)) {
    let lanes = tile_lanes::<S>();
    if lanes == TILE_STRIDE {
        return work(0..MAX_ROWS * TILE_STRIDE);
    }
    for row in 0..rows {
        work(row * TILE_STRIDE..row * TILE_STRIDE + lanes);
    }
}

/// Writes the rows of a tile out: `to(row)` is where the row belongs.
#[inline(always)]
pub(crate) fn write_rows<'a, S: Level, T: Float>(
    tile: &Tile,
    stored: &mut Tile,
    (rows, columns): (usize, usize),
    to: impl Fn(usize) -> &'a mut [T],
) {
    let values: &[T] = if T::DTYPE == DType::F32 {
        bytemuck::cast_slice(&tile.0)
    } else {
        round_rows::<S, T>(tile, stored, rows);
        bytemuck::cast_slice(&stored.0)
    };
    for row in 0..rows {
        copy::<S, T>(&values[row * TILE_STRIDE..][..columns], to(row));
    }
}

/// Rounds the rows of a tile to what they would be stored as, if that is not what they are.
#[inline(always)]
pub(crate) fn round_rows<S: Level, T: Float>(tile: &Tile, stored: &mut Tile, rows: usize) {
    if T::DTYPE != DType::F32 {
        let values: &mut [T] = bytemuck::cast_slice_mut(&mut stored.0);
        filled::<S>(rows, |part| store_all::<S, T>(&tile.0[part.clone()], &mut values[part]));
    }
}

/// Reads rows into a tile: `from(row)` is where the row is found.
#[inline(always)]
pub(crate) fn read_rows<'a, S: Level, T: Float>(
    tile: &mut Tile,
    stored: &mut Tile,
    (rows, columns): (usize, usize),
    from: impl Fn(usize) -> &'a [T],
) {
    let is_f32 = T::DTYPE == DType::F32;
    let values: &mut [T] = bytemuck::cast_slice_mut(if is_f32 { &mut tile.0 } else { &mut stored.0 });
    for row in 0..rows {
        copy::<S, T>(from(row), &mut values[row * TILE_STRIDE..][..columns]);
    }
    if !is_f32 {
        load_stored::<S, T>(tile, stored, rows);
    }
}

/// Makes the elements of a tile those that are stored.
#[inline(always)]
pub(crate) fn load_stored<S: Level, T: Float>(tile: &mut Tile, stored: &Tile, rows: usize) {
    let stored: &[T] = bytemuck::cast_slice(&stored.0);
    filled::<S>(rows, |part| {
        tile.0[part.clone()].iter_mut().zip(&stored[part]).for_each(|(x, stored)| *x = stored.load());
    });
}

/// Copies up to three vectors, or as many bytes as fit in them. Written out, since a copy of a length that the compiler does
/// not know is a call.
#[inline(always)]
fn copy<S: Level, T: Float>(from: &[T], to: &mut [T]) {
    assert_eq!(from.len(), to.len(), "a row's length");
    let lanes = size_of_val(from) / 4;
    let (source, target) = (from.as_ptr().cast::<f32>(), to.as_mut_ptr().cast::<f32>());
    let whole = lanes / S::WIDTH;
    if whole == 0 || whole > 3 || !size_of_val(from).is_multiple_of(4) {
        return to.copy_from_slice(from);
    }
    // SAFETY: `whole` vectors and the last one, which may overlap them, are inside both slices, which are as long.
    unsafe {
        let last = lanes - S::WIDTH;
        let (first, end) = (S::load(source), S::load(source.add(last)));
        if whole == 3 {
            let middle = S::load(source.add(S::WIDTH));
            let third = S::load(source.add(2 * S::WIDTH));
            S::store(target.add(S::WIDTH), middle);
            S::store(target.add(2 * S::WIDTH), third);
        } else if whole == 2 {
            let middle = S::load(source.add(S::WIDTH));
            S::store(target.add(S::WIDTH), middle);
        }
        S::store(target, first);
        S::store(target.add(last), end);
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
    fn tile<S: Level>(&self, at: Place, tile: &mut Tile, _second: Option<&mut Tile>, room: &mut Room) {
        let (column, columns) = at.columns;
        let row_of = |row: usize| {
            let start = self.offsets[at.group] + (at.rows.0 + row) * self.stride + column;
            // SAFETY: tiles do not overlap and neither do the matrices, so this part of a row is this call's alone.
            unsafe { self.to.range(start..start + columns) }
        };
        let size = (at.rows.1, columns);
        if self.write == Write::Add {
            let old = &mut room.tiles[0];
            read_rows::<S, T>(old, &mut room.stored, size, |row| &*row_of(row));
            filled::<S>(at.rows.1, |part| {
                tile.0[part.clone()].iter_mut().zip(&old.0[part]).for_each(|(sum, old)| *sum += old);
            });
        }
        write_rows::<S, T>(tile, &mut room.stored, size, row_of);
    }
}

/// Writes sums to row-major f32 matrices of one buffer, past the caches: for results that are larger than these. A store that goes
/// through them first fetches the line that it overwrites.
pub(crate) struct Stream<'a> {
    pub(crate) to: Lent<'a, f32>,
    /// Elements before each group's matrix.
    pub(crate) offsets: &'a [usize],
    /// Columns of all of them.
    pub(crate) stride: usize,
}

impl Epilogue for Stream<'_> {
    #[inline(always)]
    fn tile<S: Level>(&self, at: Place, tile: &mut Tile, _second: Option<&mut Tile>, _room: &mut Room) {
        let (column, columns) = at.columns;
        for (row, sums) in tile.0.chunks_exact(TILE_STRIDE).enumerate().take(at.rows.1) {
            let start = self.offsets[at.group] + (at.rows.0 + row) * self.stride + column;
            // SAFETY: tiles do not overlap and neither do the matrices, so this part of a row is this call's alone.
            let to = unsafe { self.to.range(start..start + columns) };
            let is_whole = columns.is_multiple_of(S::WIDTH) && to.as_ptr().addr().is_multiple_of(4 * S::WIDTH);
            if !is_whole {
                to.copy_from_slice(&sums[..columns]);
                continue;
            }
            for (to, sums) in to.chunks_exact_mut(S::WIDTH).zip(sums.chunks_exact(S::WIDTH)) {
                // SAFETY: a vector is there on both sides, aligned where it is written; whoever runs a task ends it with a fence.
                unsafe { S::stream(to.as_mut_ptr(), S::load(sums.as_ptr())) };
            }
        }
    }
}
