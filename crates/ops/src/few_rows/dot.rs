//! `A B^T` of few rows: each row of weights is streamed once along its length and meets all rows of A.
//!
//! The sums of some rows of weights with some rows of A fill the registers. More rows of A than fit are taken in several
//! passes over the same rows of weights, which the caches then hold.

use moeworks_tensor::DType;

use super::rows::{MAX_BLOCK, Weight, partial_block};
use crate::gemm::Panels;
use crate::gemm::kernel::{MAX_ROWS, TILE_STRIDE, Tile};
use crate::prefetch::prefetch_far;
use crate::simd::{Level, kernel};

/// Bytes of the rows of A that stay in the first-level cache while rows of weights pass by: most of 32 KiB.
const A_BYTES: usize = 24 << 10;

/// Rows of weights that are taken at once, at most.
const MAX_WEIGHTS: usize = 8;

/// Numbers of a tile.
const TILE_LEN: usize = size_of::<Tile>() / size_of::<f32>();

/// The most rows of A that meet rows of weights from as many parts of a stretch as there are [`STREAMS`]: as many as leave registers for
/// the sums with one row of each.
const MAX_STREAMED: usize = 6;

/// Streams in which memory is then read, far enough apart that the waits at the starts of pages (for a translation of the address, and
/// for the processor's own fetching to set in) of one are spent on the others.
const STREAMS: usize = 4;

/// Bytes by which such a stream is asked for ahead of its use, and of those of the next stretch at the end of one.
const STREAM_AHEAD: usize = 1 << 10;

/// Panels of columns whose rows of weights are read in the same streams, at most: short streams are as many starts.
pub(super) const MAX_PANELS: usize = 8;

/// The product of rows of A with the rows of weights of some panels of columns: one, or up to [`MAX_PANELS`] where [`is_streamed`] says so.
#[derive(Clone, Copy)]
pub(super) struct Stretch<'a, T> {
    /// The rows of weights, one after the other.
    pub(super) weights: &'a [T],
    /// What their group's columns are cut into, and the first of these.
    pub(super) panels: (Panels, usize),
    /// Elements of a row of weights.
    pub(super) depth: usize,
    /// Rows of A as [`spread`](super::rows::spread) lays them out.
    pub(super) a: &'a [f32],
    /// Rows of A.
    pub(super) num_rows: usize,
    /// Every how many tiles the sums of the next [`MAX_ROWS`] rows go.
    pub(super) tile_step: usize,
    /// What will be read after this, to be asked for at its end.
    pub(super) next: *const u8,
}

/// Vectors of sums that wait between parts of the depth, at most: 32-bit words for so many rows of A.
pub(super) fn waiting_words(num_rows: usize) -> usize {
    num_rows * TILE_STRIDE * MAX_LANES
}

/// Lanes of the widest vector.
const MAX_LANES: usize = 16;

/// How many rows of A are taken in a pass: at most so many, and all passes alike but the last.
#[inline(always)]
fn rows_of_pass<S: Level>(num_rows: usize) -> usize {
    let most = match S::WIDTH {
        16.. => 8,
        8.. => 6,
        _ => 4,
    };
    num_rows.div_ceil(num_rows.div_ceil(most))
}

/// As many rows of weights as there are registers for their sums, beside the weights and A.
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
    /// Writes sum `[r][c]` to row `r % MAX_ROWS` of tile `r / MAX_ROWS * tile_step` of those of the column's panel, which come one panel's
    /// after the other's, at the column's place in the panel. `waiting` has [`waiting_words`] if sums wait.
    pub(super) fn run<S: Level, T: Weight>(stretch: Stretch<'_, T>, waiting: &mut [f32], tiles: &mut [Tile]) {
        let Stretch { depth, num_rows, .. } = stretch;
        let columns = stretch.weights.len().checked_div(depth).unwrap_or(0);
        let (block, words) = (2 * S::WIDTH, T::block_words::<S>());
        let num_blocks = depth.div_ceil(block);
        assert!(stretch.a.len() >= num_blocks * words * num_rows, "rows of A are filled up to whole blocks");
        let pass = rows_of_pass::<S>(num_rows);
        let is_stream = are_streams::<S>(num_rows);
        let num_parts = num_parts::<S, T>(num_rows, depth);
        assert!(num_parts == 1 || waiting.len() >= num_rows * columns * S::WIDTH, "room for the sums that wait");
        let wanted = weights_of_pass::<S>(pass);
        // Rows of weights of a stream.
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
                        0 => stretch.ahead((column, count), columns, (start, end)),
                        _ => stretch.row(column).wrapping_add(STREAM_AHEAD),
                    };
                    let part = Part { stretch, column, apart, places, first, depth: (start, end), pass, ahead };
                    // SAFETY: `count` rows of weights from `column` on, so far apart, and `pass` rows of A from `first` on, or as
                    // many as there are, exist.
                    unsafe { part.run::<S>((count, pass.min(num_rows - first)), waiting, tiles) };
                }
            }
        }
        if len > 0 {
            // While the sums are put to use.
            for stream in 0..STREAMS {
                let first = stretch.next.wrapping_add(stream * len * depth * size_of::<T>());
                (0..STREAM_AHEAD).step_by(64).for_each(|line| prefetch_far(first.wrapping_add(line)));
            }
        }
    }
}

/// Where the sums of the columns at hand of [`STREAMS`] streams go, and how many columns are left there with each.
#[derive(Default)]
struct Streams([(usize, usize); STREAMS]);

impl Streams {
    /// The places of the columns `len` apart from `column` on, one further than those of the call before.
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

/// Whether so few rows meet rows of weights from several parts of a stretch at once.
#[inline(always)]
fn are_streams<S: Level>(num_rows: usize) -> bool {
    num_rows <= MAX_STREAMED && S::WIDTH >= 16
}

/// With more rows of A than fit near the registers they are taken in parts of their depth.
#[inline(always)]
fn num_parts<S: Level, T: Weight>(num_rows: usize, depth: usize) -> usize {
    let (pass, num_blocks) = (rows_of_pass::<S>(num_rows), depth.div_ceil(2 * S::WIDTH));
    if pass <= 3 { 1 } else { (4 * num_blocks * T::block_words::<S>() * pass).div_ceil(A_BYTES).max(1) }
}

kernel! {
    bf16 if matches!(T::DTYPE, DType::BF16);
    /// Whether rows of weights of several panels may be taken as one stretch: they are read in streams, and no sums wait.
    pub(super) fn is_streamed<S: Level, T: Weight>(num_rows: usize, depth: usize) -> bool {
        are_streams::<S>(num_rows) && num_parts::<S, T>(num_rows, depth) == 1
    }
}

/// Which rows of weights are taken at once: the first, how many, and how far apart. If streams have a length, there are as many of
/// them, and what is left is taken one by one.
#[inline(always)]
fn turns(columns: usize, len: usize, wanted: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    let whole = if len > 0 { 0 } else { columns / wanted };
    let left = STREAMS * len + whole * wanted..columns;
    let of_streams = (0..len).map(move |column| (column, STREAMS, len));
    of_streams.chain((0..whole).map(move |i| (i * wanted, wanted, 1))).chain(left.map(|column| (column, 1, 1)))
}

impl<T: Weight> Stretch<'_, T> {
    /// Where the sum of a column and the first row of A goes, counted in numbers of tiles, and how many columns are left there with it.
    #[inline(always)]
    fn place<S: Level>(&self, column: usize) -> (usize, usize) {
        let (panels, first) = self.panels;
        let (panel, column) = panels.place(panels.panel(first).0 + column, S::WIDTH);
        let tiles = (panel - first) * self.num_rows.div_ceil(MAX_ROWS) * self.tile_step;
        (tiles * TILE_LEN + column, panels.width(panel) - column)
    }

    /// Where a row of weights lies.
    #[inline(always)]
    fn row(&self, column: usize) -> *const u8 {
        self.weights.as_ptr().cast::<u8>().wrapping_add(column * self.depth * size_of::<T>())
    }

    /// Where element 0 lies of the rows of weights that come after some: they are asked for line by line while those are summed
    /// up, in as many streams as there are rows.
    #[inline(always)]
    fn ahead(&self, (column, count): (usize, usize), columns: usize, (start, end): (usize, usize)) -> *const u8 {
        if column + 2 * count <= columns {
            self.row(column + count)
        } else if end < self.depth {
            self.row(0).wrapping_add((end - start) * size_of::<T>())
        } else {
            self.next.wrapping_sub(start * size_of::<T>())
        }
    }
}

/// Some rows of weights with some rows of A, over a part of the depth.
struct Part<'a, T> {
    stretch: Stretch<'a, T>,
    column: usize,
    /// From one row of weights to the next.
    apart: usize,
    /// Where their sums with the first row of A go.
    places: [usize; MAX_WEIGHTS],
    first: usize,
    depth: (usize, usize),
    /// Rows of A in a pass.
    pass: usize,
    ahead: *const u8,
}

/// Calls `sums` with the numbers of rows as constants.
macro_rules! by_size {
    ($part:ident, $size:expr, $waiting:ident, $tiles:ident, $($n:literal: $($r:literal)*),*) => {
        match $size {
            $($(($n, $r) => $part.sums::<S, $n, $r>($waiting, $tiles),)*)*
            _ => unreachable!("passes are as `rows_of_pass` and `weights_of_pass` say"),
        }
    };
}

impl<T: Weight> Part<'_, T> {
    /// # Safety
    /// As many rows of weights and of A as `size` says must exist.
    #[inline(always)]
    unsafe fn run<S: Level>(self, size: (usize, usize), waiting: &mut [f32], tiles: &mut [Tile]) {
        // SAFETY: the caller's promise is handed on.
        unsafe {
            if S::WIDTH >= 16 {
                by_size!(self, size, waiting, tiles, 8: 1 2 3, 4: 1 2 3 4 5 6, 3: 6 7 8, 1: 1 2 3 4 5 6 7 8);
            } else if S::WIDTH >= 8 {
                by_size!(self, size, waiting, tiles, 8: 1, 4: 2 3, 2: 1 2 3 4 5 6, 1: 1 2 3 4 5 6);
            } else {
                by_size!(self, size, waiting, tiles, 4: 1, 2: 1 2 3 4, 1: 1 2 3 4);
            }
        }
    }

    /// # Safety
    /// `N` rows of weights and `R` rows of A must exist.
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
        // Each pass asks for its share of the lines.
        let num_turns = num_rows.div_ceil(pass);
        let mut wait = first / pass;
        // SAFETY: blocks of the rows are inside the slices by the caller's promise; the last, which may be shorter, is
        // read from a copy.
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

/// `put(n, r, sum)` with the sum of row n of weights and row r of A, each over the lanes: four at a time, of rows of A, or of rows of
/// weights where there are more of these.
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

/// `put(n, r, sum)` with the products of `N` rows of `depth` weights with `R` rows of A, which [`spread`](super::rows::spread) laid
/// out among `num_rows`.
///
/// # Safety
/// The rows of weights must be readable, and at `a` the blocks of the rows of A from the first of these on.
#[inline(always)]
pub(crate) unsafe fn dots<S: Level, T: Weight, const N: usize, const R: usize>(
    weights: [*const T; N],
    depth: usize,
    (mut a, num_rows): (*const f32, usize),
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

/// Adds a block's products to the sums of some rows of weights. Weights stay in registers while each vector of A is loaded once.
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
