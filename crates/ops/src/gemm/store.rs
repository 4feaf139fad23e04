//! The plain epilogue, which stores sums to a matrix, and helpers that move rows between tiles and matrices.
//!
//! Arithmetic in an epilogue runs over all elements of a tile as one array, including those beyond the last row or
//! column, because the compiler turns a loop of known length into straight vector code. On levels whose vectors fill
//! little of a tile it runs row by row over the filled part. Only copies from and to matrices use the tile's true
//! size.

use std::ops::Range;

use moeworks_tensor::DType;

use super::kernel::{MAX_ROWS, TILE_STRIDE, Tile, tile_lanes};
use super::{Epilogue, Place, Span};
use crate::linear::Write;
use crate::parallel::Lent;
use crate::simd::{Float, Level, store_all};

/// Tiles that an epilogue may use as scratch. They keep whatever was left in them.
pub(crate) struct Scratch {
    pub(crate) tiles: [Tile; 3],
    /// A tile of elements in their stored type.
    pub(crate) stored: Tile,
}

impl Scratch {
    #[inline(always)]
    pub(crate) fn new() -> Self {
        let zero = || Tile([0.0; MAX_ROWS * TILE_STRIDE]);
        Self { tiles: [zero(), zero(), zero()], stored: zero() }
    }
}

/// Calls `work` with the ranges of tile elements that may be filled in the first `rows` rows: one range, or one per
/// row.
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

/// Writes the rows of a tile to `to(row)`, converted to `T`.
#[inline(always)]
pub(crate) fn write_rows<'a, S: Level, T: Float>(
    tile: &Tile,
    stored: &mut Tile,
    rows: usize,
    columns: usize,
    to: impl Fn(usize) -> &'a mut [T],
) {
    let values = stored_rows::<S, T>(tile, stored, rows);
    for row in 0..rows {
        copy::<S, T>(&values[row * TILE_STRIDE..][..columns], to(row));
    }
}

/// Returns the rows of a tile in their stored type, [`TILE_STRIDE`] elements apart. Converted rows are in `stored`.
#[inline(always)]
fn stored_rows<'a, S: Level, T: Float>(tile: &'a Tile, stored: &'a mut Tile, rows: usize) -> &'a [T] {
    if T::DTYPE == DType::F32 {
        return bytemuck::cast_slice(&tile.0);
    }
    round_rows::<S, T>(tile, stored, rows);
    bytemuck::cast_slice(&stored.0)
}

/// Converts the rows of a tile to `T` in `stored`, unless `T` is f32.
#[inline(always)]
pub(crate) fn round_rows<S: Level, T: Float>(tile: &Tile, stored: &mut Tile, rows: usize) {
    if T::DTYPE != DType::F32 {
        let values: &mut [T] = bytemuck::cast_slice_mut(&mut stored.0);
        filled::<S>(rows, |part| store_all::<S, T>(&tile.0[part.clone()], &mut values[part]));
    }
}

/// Reads the rows `from(row)` into a tile.
#[inline(always)]
pub(crate) fn read_rows<'a, S: Level, T: Float>(
    tile: &mut Tile,
    stored: &mut Tile,
    rows: usize,
    columns: usize,
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

/// Loads a tile from the stored elements.
#[inline(always)]
pub(crate) fn load_stored<S: Level, T: Float>(tile: &mut Tile, stored: &Tile, rows: usize) {
    let stored: &[T] = bytemuck::cast_slice(&stored.0);
    filled::<S>(rows, |part| {
        tile.0[part.clone()].iter_mut().zip(&stored[part]).for_each(|(x, stored)| *x = stored.load());
    });
}

/// Copies a row of a tile: up to three vectors, or as many bytes. A copy of a length unknown to the compiler would be
/// a call.
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

/// Stores sums to row-major matrices in one buffer, or adds them.
pub(crate) struct Store<'a, T> {
    pub(crate) to: Lent<'a, T>,
    /// Elements before each group's matrix.
    pub(crate) offsets: &'a [usize],
    /// Columns of each matrix.
    pub(crate) stride: usize,
    pub(crate) write: Write,
}

impl<T: Float> Epilogue for Store<'_, T> {
    #[inline(always)]
    fn prefetch(&self, at: Place) {
        for row in 0..at.rows.len {
            let start = self.offsets[at.group] + (at.rows.first + row) * self.stride + at.columns.first;
            self.to.prefetch(start, at.columns.len);
        }
    }

    #[inline(always)]
    fn tile<S: Level>(&self, at: Place, tile: &mut Tile, _second: Option<&mut Tile>, scratch: &mut Scratch) {
        let Span { first: column, len: columns } = at.columns;
        let row_of = |row: usize| {
            let start = self.offsets[at.group] + (at.rows.first + row) * self.stride + column;
            // SAFETY: tiles do not overlap and neither do the matrices, so this part of a row is this call's alone.
            unsafe { self.to.range(start..start + columns) }
        };
        let num_rows = at.rows.len;
        if self.write == Write::Add {
            let old = &mut scratch.tiles[0];
            read_rows::<S, T>(old, &mut scratch.stored, num_rows, columns, |row| &*row_of(row));
            filled::<S>(num_rows, |part| {
                tile.0[part.clone()].iter_mut().zip(&old.0[part]).for_each(|(sum, old)| *sum += old);
            });
        }
        write_rows::<S, T>(tile, &mut scratch.stored, num_rows, columns, row_of);
    }
}

/// Stores sums to row-major matrices in one buffer, bypassing the caches, for results larger than these. A store
/// through the caches first fetches the line that it overwrites. Partial vectors at the ends of a tile's rows are
/// still stored that way.
pub(crate) struct Stream<'a, T> {
    pub(crate) to: Lent<'a, T>,
    /// Elements before each group's matrix.
    pub(crate) offsets: &'a [usize],
    /// Columns of each matrix.
    pub(crate) stride: usize,
}

impl<T: Float> Stream<'_, T> {
    /// Returns the first element of a row of a tile.
    #[inline(always)]
    fn start(&self, at: Place, row: usize) -> usize {
        self.offsets[at.group] + (at.rows.first + row) * self.stride + at.columns.first
    }
}

impl<T: Float> Epilogue for Stream<'_, T> {
    #[inline(always)]
    fn prefetch(&self, at: Place) {
        for row in 0..at.rows.len {
            let start = self.start(at, row);
            for place in [start, start + at.columns.len] {
                if !self.to.is_line(place) {
                    self.to.prefetch(place, 1);
                }
            }
        }
    }

    #[inline(always)]
    fn tile<S: Level>(&self, at: Place, tile: &mut Tile, _second: Option<&mut Tile>, scratch: &mut Scratch) {
        let columns = at.columns.len;
        let of_vector = 4 * S::WIDTH / size_of::<T>();
        let sums = stored_rows::<S, T>(tile, &mut scratch.stored, at.rows.len);
        for (row, sums) in sums.chunks_exact(TILE_STRIDE).enumerate().take(at.rows.len) {
            let (start, sums) = (self.start(at, row), &sums[..columns]);
            // SAFETY: tiles do not overlap and neither do the matrices, so this part of a row is this call's alone.
            let to = unsafe { self.to.range(start..start + columns) };
            let ahead = to.as_ptr().align_offset(4 * S::WIDTH).min(columns);
            let ((first, to), (first_sums, sums)) = (to.split_at_mut(ahead), sums.split_at(ahead));
            copy_part::<S, T>(first_sums, first);
            let whole = to.len() / of_vector * of_vector;
            let ((to, last), (sums, last_sums)) = (to.split_at_mut(whole), sums.split_at(whole));
            for (to, sums) in to.chunks_exact_mut(of_vector).zip(sums.chunks_exact(of_vector)) {
                // SAFETY: a vector is there on both sides, aligned where it is written; whoever runs a task ends it
                // with a fence.
                unsafe { S::stream(to.as_mut_ptr().cast(), S::load(sums.as_ptr().cast())) };
            }
            copy_part::<S, T>(last_sums, last);
        }
    }
}

/// Copies less than a vector, most often nothing or half of one.
#[inline(always)]
fn copy_part<S: Level, T: Float>(from: &[T], to: &mut [T]) {
    if from.len() == 16 && S::WIDTH == 16 {
        to[..16].copy_from_slice(&from[..16]);
    } else if !from.is_empty() {
        to.copy_from_slice(from);
    }
}
