//! Rounding to what products in eight-bit floats take: E4M3 (four bits of exponent, three of mantissa, at most 448; "FP8 Formats for
//! Deep Learning", 2209.05433) times a scale that 128 neighbours along the depth of a product share, or the 128 x 128 of a block of
//! weights (DeepSeek-V3, 2412.19437, section 3.3.2).
//!
//! Scales are powers of two, as those of the microscaling formats are: such a number is a bf16 as it is, so that products of what is
//! rounded here, in bf16, are products in eight-bit floats to the bit, on machines that have none.

use moeworks_tensor::{DType, Tensor, bf16};

use crate::cuda::{self, On};
use crate::parallel::{Lent, PIECE};
use crate::simd::{Float, kernel, with_float};
use crate::{Context, Isa};

/// Elements that share a scale, and rows and columns of a block that does.
pub const BLOCK: usize = 128;

/// The least exponent of a scale: so small numbers become zero or are less exact, and none is beyond bf16's range.
const MIN_SCALE_EXPONENT: i32 = -110;

/// The power of two by which numbers of at most `largest` are divided, so that they are at most 448 and this is more than 224.
#[must_use]
pub fn scale_for(largest: f32) -> f32 {
    let bits = largest.to_bits();
    let exponent = (bits >> 23) as i32 - 127 - 8 + i32::from(bits & 0x7f_ffff > 0x60_0000);
    f32::from_bits(((exponent.max(MIN_SCALE_EXPONENT) + 127) as u32) << 23)
}

/// The float of E4M3 nearest to `x`, of at most 448, ties to even; what is not finite is NaN.
#[inline(always)]
fn nearest(x: f32) -> f32 {
    let size = x.abs();
    // To three bits of mantissa, and below 2^-6 to multiples of 2^-9: of which there are none between floats of this size.
    const SHIFT: f32 = 16384.0;
    let bits = size.to_bits();
    let normal = f32::from_bits((bits.wrapping_add(0x7_ffff + (bits >> 20 & 1))) & 0xfff0_0000);
    let rounded = if size < 0.015_625 { (size + SHIFT) - SHIFT } else { normal };
    let rounded = if size < f32::INFINITY { rounded } else { f32::NAN };
    rounded.copysign(x)
}

/// `x` `[.., N]` (f32 or bf16) as bf16, rounded in blocks of [`BLOCK`] along each row.
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

/// `weights` `[.., N]` (f32 or bf16), matrices of `rows` rows each, as bf16, rounded in blocks of [`BLOCK`] rows and columns of each.
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
            // SAFETY: strips are of rows of their own.
            round_strip::<T>(ctx.isa(), &from[range.clone()], columns, unsafe { to.range(range) });
        });
    });
    rounded
}

/// Rows of which [`BLOCK`] columns each share a scale.
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

/// The larger of two sizes; NaN is larger than all.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    // As whole numbers positive floats and NaN are in order.
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
