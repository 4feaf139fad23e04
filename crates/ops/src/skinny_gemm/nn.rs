//! The skinny kernel for `A B`: weight rows, scaled by the elements of A, are summed into a strip of the result.
//!
//! A strip is narrow enough to stay in the L1 cache while weight rows stream past, several at a time. Columns inside
//! a strip keep the order in which vectors of weights are unpacked.

use std::ops::Range;

use moeworks_tensor::{DType, bf16};

use super::fused_dgrad_wgrad::Gradient;
use super::rows::{Weight, partial_block};
use crate::gemm::Group;
use crate::prefetch::prefetch_far;
use crate::simd::{Float, Level, kernel};

/// A strip of the product.
#[derive(Clone, Copy)]
pub(super) struct Strip<'a, T> {
    /// The weights, beginning at the strip's first column of row 0.
    pub(super) weights: &'a [T],
    /// Elements from one weight row to the next.
    pub(super) stride: usize,
    /// Number of weight rows, which is the length of each sum.
    pub(super) depth: usize,
    /// Columns of the strip.
    pub(super) columns: usize,
    /// Words from one row of A to the next.
    pub(super) a_stride: usize,
}

impl<'a, T> Strip<'a, T> {
    /// Selects `columns` of a group's B, whose elements are `weights`; all rows of A together take `a_len` words.
    pub(super) fn new(group: &Group<'_>, weights: &'a [T], columns: Range<usize>, a_len: usize) -> Self {
        let weights = &weights[(group.b.offset + columns.start).min(weights.len())..];
        let (stride, depth, a_stride) = (group.b.stride, group.depth, a_len / group.rows);
        Self { weights, stride, depth, columns: columns.len(), a_stride }
    }
}
/// The f32 sums of a strip, `[rows, stride]`. `stride` is at least the strip's columns rounded up to whole blocks.
pub(crate) struct StripSums<'a> {
    pub(super) to: &'a mut [f32],
    pub(super) stride: usize,
}

/// The rows of a result that products are added to: `[num_rows, stride]` from `to` on.
#[derive(Clone, Copy)]
pub(crate) struct SumRows {
    pub(crate) to: *mut f32,
    pub(crate) stride: usize,
    pub(crate) num_rows: usize,
}
kernel! {
    bf16 if matches!(T::DTYPE, DType::BF16);
    /// Computes the sums of a strip. `a [rows, a_stride]` holds the factors of each result row, zero beyond `depth`;
    /// it is converted to bf16 pairs in place where the level multiplies pairs.
    pub(super) fn run<S: Level, T: Weight>(strip: Strip<'_, T>, a: &mut [f32], sums: StripSums<'_>) {
        sum_up::<S, T>(strip, a, sums, &mut ());
    }
}

kernel! {
    bf16 if matches!(T::DTYPE, DType::BF16);
    /// Computes the sums of a strip like [`run`], and writes the gradient of its weights. Each block of the gradient
    /// is written right after the weights of the same rows and columns are read, because reads and writes of memory
    /// overlap.
    pub(super) fn run_with_gradient<S: Level, T: Weight, G: Float>(
        strip: Strip<'_, T>,
        a: &mut [f32],
        sums: StripSums<'_>,
        gradient: Gradient<'_, G>,
    ) {
        let mut writer = Writer { gradient, done: 0 };
        sum_up::<S, T>(strip, a, sums, &mut writer);
        for column in (0..strip.columns).step_by(2 * S::WIDTH) {
            gradient.write_from::<S>(writer.done, column);
        }
    }
}

/// A hook that runs after the products of some weight rows have been added. It is a trait and not a closure, because
/// a closure is compiled without the instruction set's features and could not be inlined.
pub(crate) trait Visit {
    /// Is called with the weight rows just added and the first column of the block. Blocks of the same rows come in
    /// order of columns.
    fn block<S: Level>(&mut self, rows: Range<usize>, column: usize);
}

impl Visit for () {
    #[inline(always)]
    fn block<S: Level>(&mut self, _: Range<usize>, _: usize) {}
}

/// Writes the gradient of a strip as its weights are read.
struct Writer<'a, G> {
    gradient: Gradient<'a, G>,
    /// Rows already written.
    done: usize,
}

impl<G: Float> Visit for Writer<'_, G> {
    #[inline(always)]
    fn block<S: Level>(&mut self, rows: Range<usize>, column: usize) {
        let end = rows.end;
        if self.gradient.write::<S>(rows, column) {
            self.done = end;
        }
    }
}

/// Computes the sums of a strip and calls `visit` after each block of weights.
#[inline(always)]
fn sum_up<S: Level, T: Weight>(strip: Strip<'_, T>, a: &mut [f32], sums: StripSums<'_>, visit: &mut impl Visit) {
    let Strip { weights, stride, depth, columns, a_stride } = strip;
    let StripSums { to, stride: to_stride } = sums;
    to.fill(0.0);
    if depth == 0 || columns == 0 || to_stride == 0 {
        return;
    }
    let num_rows = to.len() / to_stride;
    assert!(to_stride >= columns.next_multiple_of(2 * S::WIDTH), "a strip is whole blocks");
    assert!(weights.len() >= (depth - 1) * stride + columns, "weights of a strip");
    assert!(a_stride >= depth && a.len() >= num_rows * a_stride, "factors of a strip");
    if T::is_dotted::<S>() {
        assert!(a_stride >= depth.next_multiple_of(2), "factors of whole pairs");
        a.chunks_exact_mut(a_stride).take(num_rows).for_each(make_pairs::<S>);
    }
    let rows = Rows { weights: weights.as_ptr(), stride, columns, a: a.as_ptr(), a_stride };
    let to = SumRows { to: to.as_mut_ptr(), stride: to_stride, num_rows };
    let mut k = 0;
    // SAFETY: rows `k..k + N` of weights and factors exist, and the result's rows are as long as asserted.
    unsafe {
        if T::is_dotted::<S>() {
            while k + 2 * PAIRS <= depth {
                rows.add_pairs::<S, PAIRS>(k, 2 * PAIRS, to, visit);
                k += 2 * PAIRS;
            }
            while k < depth {
                rows.add_pairs::<S, 1>(k, (depth - k).min(2), to, visit);
                k += 2;
            }
            return;
        }
        if S::WIDTH >= 16 {
            while k + 8 <= depth {
                rows.add::<S, 8>(k, to, visit);
                k += 8;
            }
        } else {
            while k + 4 <= depth {
                rows.add::<S, 4>(k, to, visit);
                k += 4;
            }
        }
        for k in k..depth {
            rows.add::<S, 1>(k, to, visit);
        }
    }
}

/// Pairs of bf16 weight rows multiplied at once.
const PAIRS: usize = 8;

/// Returns the place of column `i` within the two vectors that [`Level::pairs_of_rows`] makes of a block.
#[inline(always)]
pub(super) fn place_in_pairs(i: usize, width: usize) -> usize {
    i / 8 * 4 + i % 4 + if i % 8 < 4 { 0 } else { width }
}

/// Rounds a row to bf16 in place: the result fills the first half of its memory.
#[inline(always)]
fn make_pairs<S: Level>(row: &mut [f32]) {
    const LEN: usize = 32;
    for at in (0..row.len()).step_by(LEN) {
        let (mut from, mut to) = ([0.0; LEN], [bf16::ZERO; LEN]);
        let len = LEN.min(row.len() - at);
        from[..len].copy_from_slice(&row[at..at + len]);
        S::round_all(&from, &mut to);
        let words: [f32; LEN / 2] = bytemuck::cast(to);
        row[at / 2..][..len.div_ceil(2)].copy_from_slice(&words[..len.div_ceil(2)]);
    }
}

/// A matrix of weights with the factors of each result row.
pub(crate) struct Rows<T> {
    pub(crate) weights: *const T,
    pub(crate) stride: usize,
    pub(crate) columns: usize,
    pub(crate) a: *const f32,
    pub(crate) a_stride: usize,
}

impl<T: Weight> Rows<T> {
    /// Adds `count` bf16 weight rows from the even row `k` on, at most `N` pairs, times their factors, which are bf16
    /// pairs. Columns of the result are in the order of [`place_in_pairs`].
    ///
    /// # Safety
    /// As for [`add`](Self::add). The level must multiply bf16 pairs, and `k + count` rows of weights must exist.
    #[inline(always)]
    unsafe fn add_pairs<S: Level, const N: usize>(
        &self,
        k: usize,
        count: usize,
        sums: SumRows,
        visit: &mut impl Visit,
    ) {
        let (block, SumRows { to, stride: to_stride, num_rows }) = (2 * S::WIDTH, sums);
        // SAFETY: the caller's promise; the last block, which may be shorter, is read from a copy, and so is a row
        // that is not there.
        unsafe {
            let ahead = 2 * N * self.stride * size_of::<T>();
            for column in (0..self.columns).step_by(block) {
                let rest = self.columns - column;
                let mut vectors = [[S::splat(0.0); 2]; N];
                for (n, vectors) in vectors.iter_mut().enumerate() {
                    let from = self.weights.add((k + 2 * n) * self.stride + column);
                    let later = from.cast::<u8>().wrapping_add(ahead);
                    prefetch_far(later);
                    prefetch_far(later.wrapping_add(self.stride * size_of::<T>()));
                    *vectors = if rest >= block && 2 * n + 1 < count {
                        S::pairs_of_rows(from.cast(), from.add(self.stride).cast())
                    } else {
                        let row = |r: usize| match 2 * n + r < count {
                            true => partial_block(std::slice::from_raw_parts(
                                from.wrapping_add(r * self.stride),
                                rest.min(block),
                            )),
                            false => partial_block(&[]),
                        };
                        S::pairs_of_rows(row(0).as_ptr().cast(), row(1).as_ptr().cast())
                    };
                }
                for row in 0..num_rows {
                    let (a, to) = (self.a.add(row * self.a_stride + k / 2), to.add(row * to_stride + column));
                    let mut sums = [S::load(to), S::load(to.add(S::WIDTH))];
                    for (n, vectors) in vectors.iter().enumerate() {
                        let factors = S::splat_at(a, n);
                        for (sum, &vector) in sums.iter_mut().zip(vectors) {
                            *sum = S::dot_pairs(factors, vector, *sum);
                        }
                    }
                    S::store(to, sums[0]);
                    S::store(to.add(S::WIDTH), sums[1]);
                }
                visit.block::<S>(k..k + count, column);
            }
        }
    }

    /// Adds `N` weight rows from row `k` on, times their factors, to the result rows.
    ///
    /// # Safety
    /// The weight rows, their factors and whole blocks of the result rows must exist.
    #[inline(always)]
    pub(crate) unsafe fn add<S: Level, const N: usize>(&self, k: usize, sums: SumRows, visit: &mut impl Visit) {
        let (block, SumRows { to, stride: to_stride, num_rows }) = (2 * S::WIDTH, sums);
        // SAFETY: the caller's promise; the last block, which may be shorter, is read from a copy.
        unsafe {
            let ahead = N * self.stride * size_of::<T>();
            for column in (0..self.columns).step_by(block) {
                let mut vectors = [[S::splat(0.0); 2]; N];
                let rest = self.columns - column;
                for (n, vectors) in vectors.iter_mut().enumerate() {
                    let from = self.weights.add((k + n) * self.stride + column);
                    for line in (0..block * size_of::<T>()).step_by(64) {
                        prefetch_far(from.cast::<u8>().wrapping_add(ahead + line));
                    }
                    *vectors = if rest >= block {
                        T::fetch::<S>(from)
                    } else {
                        T::fetch::<S>(partial_block(std::slice::from_raw_parts(from, rest)).as_ptr())
                    };
                }
                for row in 0..num_rows {
                    let to = to.add(row * to_stride + column);
                    let mut sums = [S::load(to), S::load(to.add(S::WIDTH))];
                    for (n, vectors) in vectors.iter().enumerate() {
                        let factor = S::splat_at(self.a, row * self.a_stride + k + n);
                        for (sum, &vector) in sums.iter_mut().zip(vectors) {
                            *sum = S::vector_mul_add(factor, vector, *sum);
                        }
                    }
                    S::store(to, sums[0]);
                    S::store(to.add(S::WIDTH), sums[1]);
                }
                visit.block::<S>(k..k + N, column);
            }
        }
    }
}
