//! `A B` of few rows: rows of weights, times the elements of A, are added up in a strip of the result.
//!
//! A strip is some columns wide, so that it stays in the first-level cache while the rows of weights pass by, some at a
//! time. Within the strip columns stand in the order in which weights come out of their blocks.

use std::ops::Range;

use moeworks_tensor::{DType, bf16};

use super::beside::Gradient;
use super::rows::{Weight, partial_block};
use crate::gemm::Group;
use crate::prefetch::prefetch_far;
use crate::simd::{Float, Level, kernel};

/// A strip of the product.
#[derive(Clone, Copy)]
pub(super) struct Strip<'a, T> {
    /// The weights from the strip's first column of row 0 on.
    pub(super) weights: &'a [T],
    /// Elements from one row of weights to the next.
    pub(super) stride: usize,
    /// Rows of weights.
    pub(super) depth: usize,
    /// Columns of the strip.
    pub(super) columns: usize,
    pub(super) a_stride: usize,
}

impl<'a, T> Strip<'a, T> {
    /// Some columns of a group's B, whose elements are `weights`, for factors that take `a_len` words in all.
    pub(super) fn of(group: &Group<'_>, weights: &'a [T], columns: Range<usize>, a_len: usize) -> Self {
        let weights = &weights[(group.b.offset + columns.start).min(weights.len())..];
        let (stride, depth, a_stride) = (group.b.stride, group.depth, a_len / group.rows);
        Self { weights, stride, depth, columns: columns.len(), a_stride }
    }
}

kernel! {
    bf16 if matches!(T::DTYPE, DType::BF16);
    /// `to [rows, to_stride]` becomes the sums. `to_stride` is at least the columns, filled up to whole blocks. `a [rows, a_stride]` are
    /// the factors of each row of the result, at least `depth`, with zeros beyond; they become pairs of bf16 where these are multiplied.
    pub(super) fn run<S: Level, T: Weight>(strip: Strip<'_, T>, a: &mut [f32], to: &mut [f32], to_stride: usize) {
        sum_up::<S, T>(strip, a, (to, to_stride), &mut ());
    }
}

kernel! {
    bf16 if matches!(T::DTYPE, DType::BF16);
    /// As [`run`], and writes the gradient of the strip's weights: that of some rows and a block of columns as soon as these have been
    /// read, because memory is read and written at a time quicker than one after the other.
    pub(super) fn run_beside<S: Level, T: Weight, G: Float>(
        strip: Strip<'_, T>,
        a: &mut [f32],
        to: &mut [f32],
        to_stride: usize,
        gradient: Gradient<'_, G>,
    ) {
        let mut writer = Writer { gradient, done: 0 };
        sum_up::<S, T>(strip, a, (to, to_stride), &mut writer);
        for column in (0..strip.columns).step_by(2 * S::WIDTH) {
            gradient.write_from::<S>(writer.done, column);
        }
    }
}

/// What is done with rows of weights after their products have been added. Not a function that is handed on: one without the features
/// of an instruction set would be called for each of its instructions.
pub(crate) trait Visit {
    /// Some rows, and a block of columns that begins with one. The blocks of the same rows come one after the other.
    fn block<S: Level>(&mut self, rows: Range<usize>, column: usize);
}

impl Visit for () {
    #[inline(always)]
    fn block<S: Level>(&mut self, _: Range<usize>, _: usize) {}
}

/// Writes a gradient.
struct Writer<'a, G> {
    gradient: Gradient<'a, G>,
    /// Rows that are written.
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

/// [`run`], and what is to be done beside it.
#[inline(always)]
fn sum_up<S: Level, T: Weight>(
    strip: Strip<'_, T>,
    a: &mut [f32],
    (to, to_stride): (&mut [f32], usize),
    visit: &mut impl Visit,
) {
    let Strip { weights, stride, depth, columns, a_stride } = strip;
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
    let to = (to.as_mut_ptr(), to_stride, num_rows);
    let mut k = 0;
    // SAFETY: rows `k..k + N` of weights and factors exist, and the result's rows are as long as asserted.
    unsafe {
        if T::is_dotted::<S>() {
            while k + 2 * PAIRS <= depth {
                rows.add_pairs::<S, PAIRS>((k, 2 * PAIRS), to, visit);
                k += 2 * PAIRS;
            }
            while k < depth {
                rows.add_pairs::<S, 1>((k, (depth - k).min(2)), to, visit);
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

/// Pairs of rows of bf16 weights that are taken at once.
const PAIRS: usize = 8;

/// Where column `i` of a block of pairs of rows is in the two vectors that they make, if they are multiplied as pairs.
#[inline(always)]
pub(super) fn place_in_pairs(i: usize, width: usize) -> usize {
    i / 8 * 4 + i % 4 + if i % 8 < 4 { 0 } else { width }
}

/// Rounds elements to bf16, into the first half of their memory.
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

/// Rows of weights, and the factors of each row of the result.
pub(crate) struct Rows<T> {
    pub(crate) weights: *const T,
    pub(crate) stride: usize,
    pub(crate) columns: usize,
    pub(crate) a: *const f32,
    pub(crate) a_stride: usize,
}

impl<T: Weight> Rows<T> {
    /// Adds `count` rows of bf16 weights from row `k` on, at most `N` pairs, times their factors, which are pairs, to the rows of the
    /// result, whose columns are where [`place_in_pairs`] says. `k` is even.
    ///
    /// # Safety
    /// As for [`add`](Self::add). The level must have the product of pairs.
    #[inline(always)]
    unsafe fn add_pairs<S: Level, const N: usize>(
        &self,
        (k, count): (usize, usize),
        (to, to_stride, num_rows): (*mut f32, usize, usize),
        visit: &mut impl Visit,
    ) {
        let block = 2 * S::WIDTH;
        // SAFETY: the caller's promise; the last block, which may be shorter, is read from a copy, and so is a row that is not there.
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

    /// Adds `N` rows of weights from row `k` on, times their factors, to the rows of the result.
    ///
    /// # Safety
    /// The rows, their factors and whole blocks of the result's rows must exist.
    #[inline(always)]
    pub(crate) unsafe fn add<S: Level, const N: usize>(
        &self,
        k: usize,
        (to, to_stride, num_rows): (*mut f32, usize, usize),
        visit: &mut impl Visit,
    ) {
        let block = 2 * S::WIDTH;
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
