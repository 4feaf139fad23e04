//! The skinny kernel for `A B^T`: each weight row is streamed once along its length and meets all rows of A.
//!
//! The sums of several weight rows with several rows of A fill the registers. If more rows of A exist than fit,
//! several passes go over the same weight rows, which are in the caches by then.

use std::ops::Range;

use moeworks_tensor::DType;

use super::rows::{MAX_BLOCK, Weight, partial_block};
use crate::gemm::Panels;
use crate::gemm::kernel::{MAX_ROWS, TILE_STRIDE, Tile};
use crate::prefetch::prefetch_far;
use crate::simd::{Level, kernel};

/// Bytes of A that stay in the L1 cache while weight rows pass: most of 32 KiB.
const A_BYTES: usize = 24 << 10;

/// The most weight rows taken at once.
const MAX_WEIGHTS: usize = 8;

/// Elements of a tile.
const TILE_LEN: usize = size_of::<Tile>() / size_of::<f32>();

/// The most rows of A for which weights are read in [`STREAMS`] streams: with more, registers for the sums run out.
const MAX_STREAMED: usize = 6;

/// Streams in which weights are read. They are far apart in memory, so that a stream's wait at the start of a page
/// (address translation, start of the hardware prefetcher) overlaps with the other streams.
const STREAMS: usize = 4;

/// Bytes by which each stream is prefetched ahead of its use, and prefetched of the next stretch at the end of one.
const STREAM_AHEAD: usize = 1 << 10;

/// The most panels of columns read as one set of streams; short streams would start too often.
pub(super) const MAX_PANELS: usize = 8;

/// The product of rows of A with the weight rows of some panels: one panel, or up to [`MAX_PANELS`] if
/// [`is_streamed`].
#[derive(Clone, Copy)]
pub(super) struct Stretch<'a, T> {
    /// The consecutive weight rows of the panels.
    pub(super) weights: &'a [T],
    /// The panels of the group's columns, and the first panel of this stretch.
    pub(super) panels: (Panels, usize),
    /// Elements of a weight row.
    pub(super) depth: usize,
    /// Rows of A in the layout of [`spread`](super::rows::spread).
    pub(super) a: &'a [f32],
    /// Rows of A.
    pub(super) num_rows: usize,
    /// Tiles from the sums of [`MAX_ROWS`] rows to those of the next.
    pub(super) tile_step: usize,
    /// The weights read after this stretch, to be prefetched at its end.
    pub(super) next: *const u8,
}

/// Returns how many words the partial sums of `num_rows` rows of A take between parts of the depth, at most.
pub(super) fn waiting_words(num_rows: usize) -> usize {
    num_rows * TILE_STRIDE * MAX_LANES
}

/// Lanes of the widest vector.
const MAX_LANES: usize = 16;

/// Returns how many rows of A each pass takes, the last one excepted.
#[inline(always)]
fn rows_of_pass<S: Level>(num_rows: usize) -> usize {
    let most = match S::WIDTH {
        16.. => 8,
        8.. => 6,
        _ => 4,
    };
    num_rows.div_ceil(num_rows.div_ceil(most))
}

/// Returns how many weight rows are taken at once: as many as there are registers for their sums, besides weights and
/// A.
#[inline(always)]
fn weights_of_pass<S: Level>(rows: usize) -> usize {
    match (S::WIDTH, rows) {
        (16.., ..=3) | (8.., 1) => 8,
        (16.., 4..=6) | (8.., ..=3) | (_, 1) => 4,
        (16.., _) => 3,
        _ => 2,
    }
}

kernel! {
    bf16 if matches!(T::DTYPE, DType::BF16);
    /// Writes sum `[r][c]` to row `r % MAX_ROWS` of tile `r / MAX_ROWS * tile_step` of the column's panel, at the
    /// column's place in the panel. The tiles of the panels follow each other. `waiting` has [`waiting_words`] words
    /// if the depth is cut into parts.
    pub(super) fn run<S: Level, T: Weight>(stretch: Stretch<'_, T>, waiting: &mut [f32], tiles: &mut [Tile]) {
        let Stretch { depth, num_rows, .. } = stretch;
        let columns = stretch.weights.len().checked_div(depth).unwrap_or(0);
        let (block, words) = (2 * S::WIDTH, T::block_words::<S>());
        let num_blocks = depth.div_ceil(block);
        assert!(stretch.a.len() >= num_blocks * words * num_rows, "rows of A are filled up to whole blocks");
        let pass = rows_of_pass::<S>(num_rows);
        let is_stream = are_streams::<S>(num_rows);
        let num_parts = num_parts::<S, T>(num_rows, depth);
        assert!(num_parts == 1 || waiting.len() >= num_rows * columns * S::WIDTH, "space for the partial sums");
        let wanted = weights_of_pass::<S>(pass);
        // Weight rows of a stream.
        let len = if is_stream { columns / STREAMS } else { 0 };
        assert!(len > 0 || columns <= TILE_STRIDE, "only streams go through several panels");
        let part = num_blocks.div_ceil(num_parts) * block;
        for start in (0..depth).step_by(part.max(1)) {
            let end = (start + part).min(depth);
            let mut streams = Streams::default();
            for (column, count, apart) in turns(columns, len, wanted) {
                let places = match len {
                    0 => std::array::from_fn(|n| column + n),
                    _ if count == STREAMS => streams.next::<S, T>(&stretch, column, len),
                    _ => [stretch.place::<S>(column).0; MAX_WEIGHTS],
                };
                for first in (0..num_rows).step_by(pass) {
                    let ahead = match len {
                        0 => stretch.ahead(column, count, columns, start..end),
                        _ => stretch.row(column).wrapping_add(STREAM_AHEAD),
                    };
                    let part = Part { stretch, column, apart, places, first, depth: (start, end), pass, ahead };
                    // SAFETY: `count` rows of weights from `column` on, so far apart, and `pass` rows of A from
                    // `first` on, or as many as there are, exist.
                    unsafe { part.run::<S>(count, pass.min(num_rows - first), waiting, tiles) };
                }
            }
        }
        if len > 0 {
            // Prefetched while the epilogue uses the sums.
            for stream in 0..STREAMS {
                let first = stretch.next.wrapping_add(stream * len * depth * size_of::<T>());
                (0..STREAM_AHEAD).step_by(64).for_each(|line| prefetch_far(first.wrapping_add(line)));
            }
        }
    }
}

/// For each of [`STREAMS`] streams: the place of the current column's sums, and the columns left in its panel.
#[derive(Default)]
struct Streams([(usize, usize); STREAMS]);

impl Streams {
    /// Returns the places of the columns `column + i * len`, each one further than in the call before.
    #[inline(always)]
    fn next<S: Level, T: Weight>(
        &mut self,
        stretch: &Stretch<'_, T>,
        column: usize,
        len: usize,
    ) -> [usize; MAX_WEIGHTS] {
        let mut places = [0; MAX_WEIGHTS];
        for (stream, ((at, left), place)) in self.0.iter_mut().zip(&mut places).enumerate() {
            if *left == 0 {
                (*at, *left) = stretch.place::<S>(column + stream * len);
            }
            *place = *at;
            (*at, *left) = (*at + 1, *left - 1);
        }
        places
    }
}

/// Returns whether weights of so few rows of A are read in several streams.
#[inline(always)]
fn are_streams<S: Level>(num_rows: usize) -> bool {
    num_rows <= MAX_STREAMED && S::WIDTH >= 16
}

/// Returns into how many parts the depth is cut so that the rows of A of a pass fit the L1 cache.
#[inline(always)]
fn num_parts<S: Level, T: Weight>(num_rows: usize, depth: usize) -> usize {
    let (pass, num_blocks) = (rows_of_pass::<S>(num_rows), depth.div_ceil(2 * S::WIDTH));
    if pass <= 3 { 1 } else { (4 * num_blocks * T::block_words::<S>() * pass).div_ceil(A_BYTES).max(1) }
}

kernel! {
    bf16 if matches!(T::DTYPE, DType::BF16);
    /// Returns whether weight rows of several panels may be taken as one stretch: they are read in streams, and the
    /// depth is not cut.
    pub(super) fn is_streamed<S: Level, T: Weight>(num_rows: usize, depth: usize) -> bool {
        are_streams::<S>(num_rows) && num_parts::<S, T>(num_rows, depth) == 1
    }
}

/// Lists the weight rows taken at once: the first, their number, and the distance between them. Streams of length
/// `len` come first; the rows left over are taken one by one.
#[inline(always)]
fn turns(columns: usize, len: usize, wanted: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    let whole = if len > 0 { 0 } else { columns / wanted };
    let left = STREAMS * len + whole * wanted..columns;
    let of_streams = (0..len).map(move |column| (column, STREAMS, len));
    of_streams.chain((0..whole).map(move |i| (i * wanted, wanted, 1))).chain(left.map(|column| (column, 1, 1)))
}

impl<T: Weight> Stretch<'_, T> {
    /// Returns the place of the sum of a column and the first row of A, as an index into the tiles' elements, and the
    /// columns left in its panel.
    #[inline(always)]
    fn place<S: Level>(&self, column: usize) -> (usize, usize) {
        let (panels, first) = self.panels;
        let (panel, column) = panels.place(panels.panel(first).0 + column, S::WIDTH);
        let tiles = (panel - first) * self.num_rows.div_ceil(MAX_ROWS) * self.tile_step;
        (tiles * TILE_LEN + column, panels.width(panel) - column)
    }

    /// Returns the address of a weight row.
    #[inline(always)]
    fn row(&self, column: usize) -> *const u8 {
        self.weights.as_ptr().cast::<u8>().wrapping_add(column * self.depth * size_of::<T>())
    }

    /// Returns the address of element 0 of the weight rows to prefetch while `count` rows from `column` on are
    /// summed: one line at a time, in as many streams as there are rows.
    #[inline(always)]
    fn ahead(&self, column: usize, count: usize, columns: usize, depth: Range<usize>) -> *const u8 {
        let Range { start, end } = depth;
        if column + 2 * count <= columns {
            self.row(column + count)
        } else if end < self.depth {
            self.row(0).wrapping_add((end - start) * size_of::<T>())
        } else {
            self.next.wrapping_sub(start * size_of::<T>())
        }
    }
}

/// Some weight rows with some rows of A, over a part of the depth.
struct Part<'a, T> {
    stretch: Stretch<'a, T>,
    column: usize,
    /// Weight rows from one taken to the next.
    apart: usize,
    /// The places of their sums with the first row of A.
    places: [usize; MAX_WEIGHTS],
    /// The first row of A.
    first: usize,
    /// First element of the part and the one after its last.
    depth: (usize, usize),
    /// Rows of A in a pass.
    pass: usize,
    ahead: *const u8,
}

/// Calls `sums` with the numbers of rows as constants.
macro_rules! by_size {
    ($part:ident, $num_weights:ident, $num_rows:ident, $waiting:ident, $tiles:ident, $($n:literal: $($r:literal)*),*) => {
        match ($num_weights, $num_rows) {
            $($(($n, $r) => $part.sums::<S, $n, $r>($waiting, $tiles),)*)*
            _ => unreachable!("passes are as `rows_of_pass` and `weights_of_pass` say"),
        }
    };
}

impl<T: Weight> Part<'_, T> {
    /// Computes the sums of `num_weights` weight rows with `num_rows` rows of A.
    ///
    /// # Safety The rows must exist.
    #[inline(always)]
    unsafe fn run<S: Level>(self, num_weights: usize, num_rows: usize, waiting: &mut [f32], tiles: &mut [Tile]) {
        // SAFETY: the caller's promise is handed on.
        unsafe {
            if S::WIDTH >= 16 {
                by_size!(self, num_weights, num_rows, waiting, tiles, 8: 1 2 3, 4: 1 2 3 4 5 6, 3: 6 7 8, 1: 1 2 3 4 5 6 7 8);
            } else if S::WIDTH >= 8 {
                by_size!(self, num_weights, num_rows, waiting, tiles, 8: 1, 4: 2 3, 2: 1 2 3 4 5 6, 1: 1 2 3 4 5 6);
            } else {
                by_size!(self, num_weights, num_rows, waiting, tiles, 4: 1, 2: 1 2 3 4, 1: 1 2 3 4);
            }
        }
    }

    /// Computes the sums of `N` weight rows with `R` rows of A and stores them, or keeps them in `waiting` until the
    /// depth ends.
    ///
    /// # Safety The rows must exist.
    #[inline(always)]
    unsafe fn sums<S: Level, const N: usize, const R: usize>(self, waiting: &mut [f32], tiles: &mut [Tile]) {
        let Self { stretch, column, apart, places, first, depth: (start, end), .. } = self;
        let place = |n: usize, r: usize| ((column + n * apart) * stretch.num_rows + first + r) * S::WIDTH;
        let mut sums = [[S::splat(0.0); R]; N];
        // SAFETY: the caller's promise; `waiting` has a vector for each row of A and column.
        unsafe {
            if start > 0 {
                for (n, sums) in sums.iter_mut().enumerate() {
                    for (r, sum) in sums.iter_mut().enumerate() {
                        *sum = S::load(waiting.as_ptr().add(place(n, r)));
                    }
                }
            }
            self.add_blocks::<S, N, R>(&mut sums);
            if end < stretch.depth {
                for (n, sums) in sums.iter().enumerate() {
                    for (r, &sum) in sums.iter().enumerate() {
                        S::store(waiting.as_mut_ptr().add(place(n, r)), sum);
                    }
                }
                return;
            }
        }
        let rows: [usize; R] = std::array::from_fn(|r| {
            let row = first + r;
            row / MAX_ROWS * stretch.tile_step * TILE_LEN + row % MAX_ROWS * TILE_STRIDE
        });
        let last = places[..N].iter().max().zip(rows.last()).map_or(0, |(column, row)| column + row);
        assert!(last < tiles.len() * TILE_LEN, "tiles for all rows and columns");
        let to = tiles.as_mut_ptr().cast::<f32>();
        // SAFETY: tiles are numbers one after the other, and no place is behind the last, which is among them.
        totals::<S, N, R>(&sums, |n, r, sum| unsafe { *to.add(places[n] + rows[r]) = sum });
    }

    /// Adds the products of this part of the depth, block by block.
    ///
    /// # Safety
    /// As for [`sums`](Self::sums).
    #[inline(always)]
    unsafe fn add_blocks<S: Level, const N: usize, const R: usize>(&self, sums: &mut [[S::Vector; R]; N]) {
        let Self { stretch, column, apart, first, depth: (start, end), pass, ahead, .. } = *self;
        let Stretch { weights, depth, a, num_rows, .. } = stretch;
        let (block, words) = (2 * S::WIDTH, T::block_words::<S>());
        // The passes over the same weight rows share the prefetches.
        let num_turns = num_rows.div_ceil(pass);
        let mut wait = first / pass;
        // SAFETY: blocks of the rows are inside the slices by the caller's promise; the last, which may be shorter,
        // is read from a copy.
        unsafe {
            let weights = weights.as_ptr().add(column * depth);
            let apart = apart * depth;
            let mut a = a.as_ptr().add((start / block * num_rows + first) * words);
            for at in (start..end / block * block).step_by(block) {
                let from: [*const T; N] = std::array::from_fn(|n| weights.wrapping_add(n * apart + at));
                if wait == 0 {
                    for n in 0..N {
                        for line in (0..block * size_of::<T>()).step_by(64) {
                            prefetch_far(ahead.wrapping_add((n * apart + at) * size_of::<T>() + line));
                        }
                    }
                    wait = num_turns;
                }
                wait -= 1;
                step::<S, T, N, R>(sums, from, a);
                a = a.add(num_rows * words);
            }
            let rest = end % block;
            if rest > 0 {
                let mut last = [[T::store(0.0); MAX_BLOCK]; N];
                for (n, last) in last.iter_mut().enumerate() {
                    *last = partial_block(std::slice::from_raw_parts(weights.add(n * apart + depth - rest), rest));
                }
                step::<S, T, N, R>(sums, last.each_ref().map(|last| last.as_ptr()), a);
            }
        }
    }
}

/// Calls `put(n, r, sum)` with the sum over the lanes for each weight row n and row r of A. Four vectors are reduced
/// at once: of four rows of A, or of four weight rows if there are fewer than four rows of A.
#[inline(always)]
fn totals<S: Level, const N: usize, const R: usize>(
    sums: &[[S::Vector; R]; N],
    mut put: impl FnMut(usize, usize, f32),
) {
    let by_weights = R < 4 && N.is_multiple_of(4);
    let (outer, inner) = if by_weights { (R, N) } else { (N, R) };
    let place = |o: usize, i: usize| if by_weights { (i, o) } else { (o, i) };
    let sum_at = |(n, r): (usize, usize)| sums[n][r];
    for o in 0..outer {
        let whole = inner / 4 * 4;
        for i in (0..whole).step_by(4) {
            let four = S::totals(std::array::from_fn(|lane| sum_at(place(o, i + lane))));
            for (lane, sum) in four.into_iter().enumerate() {
                let (n, r) = place(o, i + lane);
                put(n, r, sum);
            }
        }
        for i in whole..inner {
            let (n, r) = place(o, i);
            put(n, r, S::total(sum_at((n, r))));
        }
    }
}

/// Calls `put(n, r, sum)` with the products of `N` weight rows of `depth` elements and `R` rows of A, which
/// [`spread`](super::rows::spread) laid out among `num_rows`.
///
/// # Safety
/// The weight rows must be readable, and so must the blocks of the rows of A at `a`.
#[inline(always)]
pub(crate) unsafe fn dots<S: Level, T: Weight, const N: usize, const R: usize>(
    weights: [*const T; N],
    depth: usize,
    mut a: *const f32,
    num_rows: usize,
    put: impl FnMut(usize, usize, f32),
) {
    let (block, words) = (2 * S::WIDTH, T::block_words::<S>());
    let mut sums = [[S::splat(0.0); R]; N];
    let whole = depth / block * block;
    // SAFETY: the caller's promise; the last block, which may be shorter, is read from a copy.
    unsafe {
        for at in (0..whole).step_by(block) {
            step::<S, T, N, R>(&mut sums, weights.map(|row| row.add(at)), a);
            a = a.add(num_rows * words);
        }
        if whole < depth {
            let last = weights.map(|row| partial_block(std::slice::from_raw_parts(row.add(whole), depth - whole)));
            step::<S, T, N, R>(&mut sums, last.each_ref().map(|last| last.as_ptr()), a);
        }
    }
    totals::<S, N, R>(&sums, put);
}

/// Adds a block's products to the sums of some weight rows. Weights stay in registers while each vector of A is
/// loaded once.
///
/// # Safety
/// A block must be readable at each of `weights` and `R` blocks at `a`.
#[inline(always)]
unsafe fn step<S: Level, T: Weight, const N: usize, const R: usize>(
    sums: &mut [[S::Vector; R]; N],
    weights: [*const T; N],
    a: *const f32,
) {
    // SAFETY: the caller's promise; a block of pairs is one vector.
    unsafe {
        if T::is_dotted::<S>() {
            let mut pairs = [S::splat(0.0); N];
            for (pairs, weights) in pairs.iter_mut().zip(weights) {
                *pairs = S::load(weights.cast());
            }
            for r in 0..R {
                let x = S::load(a.add(r * S::WIDTH));
                for (sums, &pairs) in sums.iter_mut().zip(&pairs) {
                    sums[r] = S::dot_pairs(pairs, x, sums[r]);
                }
            }
            return;
        }
        let mut vectors = [[S::splat(0.0); 2]; N];
        for (vectors, weights) in vectors.iter_mut().zip(weights) {
            *vectors = T::fetch::<S>(weights);
        }
        for half in 0..2 {
            for r in 0..R {
                let x = S::load(a.add((2 * r + half) * S::WIDTH));
                for (sums, vectors) in sums.iter_mut().zip(&vectors) {
                    sums[r] = S::vector_mul_add(vectors[half], x, sums[r]);
                }
            }
        }
    }
}
