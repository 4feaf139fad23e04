//! `A B` of few rows: rows of weights, times the elements of A, are added up in a strip of the result.
//!
//! A strip is some columns wide, so that it stays in the first-level cache while the rows of weights pass by, some at a
//! time. Within the strip columns stand in the order in which weights come out of their blocks.

use super::rows::{Weight, partial_block};
use crate::gemm::kernel::prefetch_far;
use crate::simd::{Level, kernel};

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
    /// `[rows, a_stride]`: the factors of each row of the result, at least `depth`.
    pub(super) a: &'a [f32],
    pub(super) a_stride: usize,
}

kernel! {
    /// `to [rows, to_stride]` becomes the sums. `to_stride` is at least the columns, filled up to whole blocks.
    pub(super) fn run<S: Level, T: Weight>(strip: Strip<'_, T>, to: &mut [f32], to_stride: usize) {
        let Strip { weights, stride, depth, columns, a, a_stride } = strip;
        to.fill(0.0);
        if depth == 0 || columns == 0 || to_stride == 0 {
            return;
        }
        let num_rows = to.len() / to_stride;
        assert!(to_stride >= columns.next_multiple_of(2 * S::WIDTH), "a strip is whole blocks");
        assert!(weights.len() >= (depth - 1) * stride + columns, "weights of a strip");
        assert!(a_stride >= depth && a.len() >= num_rows * a_stride, "factors of a strip");
        let rows = Rows { weights: weights.as_ptr(), stride, columns, a: a.as_ptr(), a_stride };
        let mut k = 0;
        // SAFETY: rows `k..k + N` of weights and factors exist, and the result's rows are as long as asserted.
        unsafe {
            if S::WIDTH >= 16 {
                while k + 8 <= depth {
                    rows.add::<S, 8>(k, (to.as_mut_ptr(), to_stride, num_rows));
                    k += 8;
                }
            } else {
                while k + 4 <= depth {
                    rows.add::<S, 4>(k, (to.as_mut_ptr(), to_stride, num_rows));
                    k += 4;
                }
            }
            for k in k..depth {
                rows.add::<S, 1>(k, (to.as_mut_ptr(), to_stride, num_rows));
            }
        }
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
    /// Adds `N` rows of weights from row `k` on, times their factors, to the rows of the result.
    ///
    /// # Safety
    /// The rows, their factors and whole blocks of the result's rows must exist.
    #[inline(always)]
    pub(crate) unsafe fn add<S: Level, const N: usize>(
        &self,
        k: usize,
        (to, to_stride, num_rows): (*mut f32, usize, usize),
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
                        let factor = S::splat(*self.a.add(row * self.a_stride + k + n));
                        for (sum, &vector) in sums.iter_mut().zip(vectors) {
                            *sum = S::vector_mul_add(factor, vector, *sum);
                        }
                    }
                    S::store(to, sums[0]);
                    S::store(to.add(S::WIDTH), sums[1]);
                }
            }
        }
    }
}
