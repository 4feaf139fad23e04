//! `A B^T` of few rows: each row of weights is streamed once along its length and meets all rows of A.
//!
//! The sums of some rows of weights with some rows of A fill the registers. More rows of A than fit are taken in several
//! passes over the same rows of weights, which the caches then hold.

use super::rows::{MAX_BLOCK, Weight, partial_block};
use crate::gemm::kernel::{MAX_ROWS, TILE_STRIDE, Tile, prefetch_far};
use crate::simd::{Level, kernel};

/// Rows of A in one pass.
const MAX_PASS: usize = 6;

/// The product of rows of A with a panel of rows of weights.
#[derive(Clone, Copy)]
pub(super) struct Panel<'a, T> {
    /// The rows of weights, one after the other.
    pub(super) weights: &'a [T],
    /// Elements of a row of weights.
    pub(super) depth: usize,
    /// Rows of A as [`spread`](super::rows::spread) lays them out.
    pub(super) a: &'a [f32],
    /// Rows of A.
    pub(super) num_rows: usize,
    /// Every how many tiles the sums of the next [`MAX_ROWS`] rows go.
    pub(super) tile_step: usize,
    /// What will be read after this panel, to be asked for at its end.
    pub(super) next: *const u8,
}

kernel! {
    bf16
    /// Writes sum `[r][c]` to row `r % MAX_ROWS` of tile `r / MAX_ROWS * tile_step`, column c.
    pub(super) fn run<S: Level, T: Weight>(panel: Panel<'_, T>, tiles: &mut [Tile]) {
        let Panel { depth, num_rows, .. } = panel;
        let columns = panel.weights.len().checked_div(depth).unwrap_or(0);
        let num_blocks = depth.div_ceil(2 * S::WIDTH);
        assert!(panel.a.len() >= num_blocks * T::block_words::<S>() * num_rows, "rows of A are filled up to whole blocks");
        assert!(columns <= TILE_STRIDE && tiles.len() > (num_rows - 1) / MAX_ROWS * panel.tile_step);
        let num_passes = num_rows.div_ceil(MAX_PASS);
        let pass = num_rows.div_ceil(num_passes);
        // As many sums as registers hold beside the weights and A.
        let wanted = match (S::WIDTH >= 16, num_rows) {
            (true, ..=3) | (false, 1) => 8,
            (true, _) | (false, ..=3) => 4,
            (false, _) => 2,
        };
        let mut column = 0;
        while column < columns {
            let count = if column + wanted <= columns { wanted } else { 1 };
            for first in (0..num_rows).step_by(pass) {
                let row_bytes = depth * size_of::<T>();
                // The rows of weights that come next: they are asked for line by line while these are summed up, in as many
                // streams as there are rows.
                let ahead = if column + 2 * count <= columns {
                    panel.weights.as_ptr().cast::<u8>().wrapping_add((column + count) * row_bytes)
                } else {
                    panel.next
                };
                let part = Part { panel, column, first, ahead, tiles: &mut *tiles };
                // SAFETY: `count` rows of weights from `column` on and `pass` rows of A from `first` on, or as many as
                // there are, exist.
                unsafe { part.run::<S>(count, pass.min(num_rows - first)) };
            }
            column += count;
        }
    }
}

/// Some rows of weights with some rows of A.
struct Part<'a, T> {
    panel: Panel<'a, T>,
    column: usize,
    first: usize,
    ahead: *const u8,
    tiles: &'a mut [Tile],
}

impl<T: Weight> Part<'_, T> {
    /// # Safety
    /// `count` rows of weights and `rows` rows of A must exist.
    #[inline(always)]
    unsafe fn run<S: Level>(self, count: usize, rows: usize) {
        // SAFETY: the caller's promise is handed on.
        unsafe {
            match (count, rows) {
                (8, 1) => self.sums::<S, 8, 1>(),
                (8, 2) => self.sums::<S, 8, 2>(),
                (8, 3) => self.sums::<S, 8, 3>(),
                (4, 2) => self.sums::<S, 4, 2>(),
                (4, 3) => self.sums::<S, 4, 3>(),
                (4, 4) => self.sums::<S, 4, 4>(),
                (4, 5) => self.sums::<S, 4, 5>(),
                (4, 6) => self.sums::<S, 4, 6>(),
                (2, 2) => self.sums::<S, 2, 2>(),
                (2, 3) => self.sums::<S, 2, 3>(),
                (2, 4) => self.sums::<S, 2, 4>(),
                (2, 5) => self.sums::<S, 2, 5>(),
                (2, 6) => self.sums::<S, 2, 6>(),
                (1, 1) => self.sums::<S, 1, 1>(),
                (1, 2) => self.sums::<S, 1, 2>(),
                (1, 3) => self.sums::<S, 1, 3>(),
                (1, 4) => self.sums::<S, 1, 4>(),
                (1, 5) => self.sums::<S, 1, 5>(),
                (1, 6) => self.sums::<S, 1, 6>(),
                _ => unreachable!("passes are of at most {MAX_PASS} rows, equal but for the last"),
            }
        }
    }

    /// # Safety
    /// `N` rows of weights and `R` rows of A must exist.
    #[inline(always)]
    unsafe fn sums<S: Level, const N: usize, const R: usize>(self) {
        let Self { panel, column, first, ahead, tiles } = self;
        let Panel { weights, depth, a, num_rows, tile_step, .. } = panel;
        let (block, words) = (2 * S::WIDTH, T::block_words::<S>());
        let mut sums = [[S::splat(0.0); R]; N];
        // SAFETY: blocks of the rows are inside the slices by the caller's promise; the last, which may be shorter, is
        // read from a copy.
        unsafe {
            let weights = weights.as_ptr().add(column * depth);
            let mut a = a.as_ptr().add(first * words);
            let is_first = first == 0;
            for at in (0..depth / block * block).step_by(block) {
                for (n, sums) in sums.iter_mut().enumerate() {
                    let from = weights.add(n * depth + at);
                    // Later passes find their weights in a cache.
                    for line in (0..if is_first { block * size_of::<T>() } else { 0 }).step_by(64) {
                        prefetch_far(ahead.wrapping_add((n * depth + at) * size_of::<T>() + line));
                    }
                    step::<S, T, R>(sums, from, a);
                }
                a = a.add(num_rows * words);
            }
            let rest = depth % block;
            if rest > 0 {
                for (n, sums) in sums.iter_mut().enumerate() {
                    let from = weights.add(n * depth + depth - rest);
                    let last: [T; MAX_BLOCK] = partial_block(std::slice::from_raw_parts(from, rest));
                    step::<S, T, R>(sums, last.as_ptr(), a);
                }
            }
        }
        for (n, sums) in sums.iter().enumerate() {
            for (r, &sum) in sums.iter().enumerate() {
                let row = first + r;
                tiles[row / MAX_ROWS * tile_step].0[row % MAX_ROWS * TILE_STRIDE + column + n] = S::total(sum);
            }
        }
    }
}

/// Adds a block's products to the sums of one row of weights.
///
/// # Safety
/// A block must be readable at `weights` and `R` blocks at `a`.
#[inline(always)]
unsafe fn step<S: Level, T: Weight, const R: usize>(sums: &mut [S::Vector; R], weights: *const T, a: *const f32) {
    // SAFETY: the caller's promise; a block of pairs is one vector.
    unsafe {
        if T::is_dotted::<S>() {
            let pairs = S::load(weights.cast());
            for (r, sum) in sums.iter_mut().enumerate() {
                *sum = S::dot_pairs(pairs, S::load(a.add(r * S::WIDTH)), *sum);
            }
            return;
        }
        let [low, high] = T::fetch::<S>(weights);
        for (r, sum) in sums.iter_mut().enumerate() {
            *sum = S::vector_mul_add(low, S::load(a.add(2 * r * S::WIDTH)), *sum);
            *sum = S::vector_mul_add(high, S::load(a.add((2 * r + 1) * S::WIDTH)), *sum);
        }
    }
}
