//! Rounding of the operands of FP8 products: E4M3 (four bits of exponent, three of mantissa, at most 448; "FP8
//! Formats for Deep Learning", 2209.05433) times a scale for 128 consecutive elements along the depth, or for a block
//! of 128 x 128 weights (DeepSeek-V3, 2412.19437, section 3.3.2).
//!
//! Scales are powers of two, as in the microscaling formats. Such a number is exact as bf16, so bf16 products of
//! numbers rounded here are FP8 products to the bit, on machines without FP8.

use moeworks_tensor::{DType, Tensor, bf16};

use crate::cuda::{self, On};
use crate::parallel::{Lent, PIECE};
use crate::simd::{Float, kernel, with_float};
use crate::{Context, Isa};

/// Elements that share a scale, and rows and columns of a block of weights that does.
pub const BLOCK: usize = 128;

/// The least exponent of a scale. Smaller numbers become zero or less exact, and no product with a scale leaves the
/// range of bf16.
const MIN_SCALE_EXPONENT: i32 = -110;

/// Returns the power of two by which numbers of magnitude up to `largest` are divided, which maps `largest` to above
/// 224 and at most 448.
#[must_use]
pub fn scale_for(largest: f32) -> f32 {
    let bits = largest.to_bits();
    let exponent = (bits >> 23) as i32 - 127 - 8 + i32::from(bits & 0x7f_ffff > 0x60_0000);
    f32::from_bits(((exponent.max(MIN_SCALE_EXPONENT) + 127) as u32) << 23)
}

/// Returns the E4M3 number nearest to `x`, of magnitude at most 448, ties to even; what is not finite becomes NaN.
#[inline(always)]
fn nearest(x: f32) -> f32 {
    let size = x.abs();
    // Rounds to three bits of mantissa, and below 2^-6 to multiples of 2^-9 by adding a number whose floats are that
    // far apart.
    const SHIFT: f32 = 16384.0;
    let bits = size.to_bits();
    let normal = f32::from_bits((bits.wrapping_add(0x7_ffff + (bits >> 20 & 1))) & 0xfff0_0000);
    let rounded = if size < 0.015_625 { (size + SHIFT) - SHIFT } else { normal };
    let rounded = if size < f32::INFINITY { rounded } else { f32::NAN };
    rounded.copysign(x)
}

/// Rounds `x` `[.., N]` (f32 or bf16) to E4M3 in blocks of [`BLOCK`] along each row; returns bf16.
#[must_use]
pub fn round_rows(ctx: &Context, x: &Tensor) -> Tensor {
    if let Some(on) = On::of(ctx) {
        return cuda::e4m3::round_rows(on, x);
    }
    let mut y = ctx.empty(x.shape(), DType::BF16);
    let columns = x.cols();
    if x.is_empty() {
        return y;
    }
    let rows_per_piece = (PIECE / columns).max(1);
    with_float!(x.dtype(), T => {
        let x = x.slice::<T>();
        ctx.threads().run_pieces(y.slice_mut::<bf16>(), rows_per_piece * columns, |piece, y| {
            let x = &x[piece * rows_per_piece * columns..][..y.len()];
            for (x, y) in x.chunks_exact(columns).zip(y.chunks_exact_mut(columns)) {
                x.chunks(BLOCK).zip(y.chunks_mut(BLOCK)).for_each(|(x, y)| {
                    let scale = scale_for(largest::<T>(ctx.isa(), x));
                    round::<T>(ctx.isa(), x, scale, y);
                });
            }
        });
    });
    y
}

/// Rounds matrices of `rows` rows each, `weights` `[.., N]` (f32 or bf16), to E4M3 in blocks of [`BLOCK`] rows and
/// columns; returns bf16.
#[must_use]
pub fn round_matrices(ctx: &Context, weights: &Tensor, rows: usize) -> Tensor {
    let columns = weights.cols();
    assert!(weights.len().is_multiple_of((rows * columns).max(1)), "matrices of {rows} rows: {:?}", weights.shape());
    if let Some(on) = On::of(ctx) {
        return cuda::e4m3::round_matrices(on, weights, rows, None);
    }
    let mut rounded = ctx.empty(weights.shape(), DType::BF16);
    if weights.is_empty() {
        return rounded;
    }
    let (row_blocks, all_rows) = (rows.div_ceil(BLOCK), weights.len() / columns);
    let to = Lent::new(rounded.slice_mut::<bf16>());
    with_float!(weights.dtype(), T => {
        let from = weights.slice::<T>();
        ctx.threads().run(all_rows / rows * row_blocks, |strip| {
            let first = strip / row_blocks * rows + strip % row_blocks * BLOCK;
            let end = (first + BLOCK).min((strip / row_blocks + 1) * rows);
            let range = first * columns..end * columns;
            // SAFETY: each strip has rows of its own.
            round_strip::<T>(ctx.isa(), &from[range.clone()], columns, unsafe { to.range(range) });
        });
    });
    rounded
}

/// Rounds rows of which each [`BLOCK`] columns share a scale.
fn round_strip<T: Float>(isa: Isa, from: &[T], columns: usize, to: &mut [bf16]) {
    for first in (0..columns).step_by(BLOCK) {
        let range = first..(first + BLOCK).min(columns);
        let of_rows = from.chunks_exact(columns).map(|row| largest::<T>(isa, &row[range.clone()]));
        let scale = scale_for(of_rows.fold(0.0, larger));
        for (from, to) in from.chunks_exact(columns).zip(to.chunks_exact_mut(columns)) {
            round::<T>(isa, &from[range.clone()], scale, &mut to[range.clone()]);
        }
    }
}

/// Returns the larger of two magnitudes; NaN is larger than all.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    // Positive floats and NaN are ordered as integers are.
    f32::from_bits(a.to_bits().max(b.to_bits()))
}

kernel! {
    fn largest<S: Level, T: Float>(x: &[T]) -> f32 {
        x.iter().fold(0.0, |all, x| larger(all, x.load().abs()))
    }
}

kernel! {
    fn round<S: Level, T: Float>(x: &[T], scale: f32, y: &mut [bf16]) {
        let inverse = 1.0 / scale;
        for (x, y) in x.iter().zip(y) {
            // Exact: at most four bits of mantissa, and in range.
            *y = <bf16 as Float>::store(nearest(x.load() * inverse) * scale);
        }
    }
}

#[cfg(test)]
#[path = "e4m3_tests.rs"]
pub(crate) mod tests;
