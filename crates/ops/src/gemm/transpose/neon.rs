//! Transposition of 8 rows by 8 units with NEON registers.

use core::arch::aarch64::{
    float32x4_t, vld1q_f32, vreinterpretq_f32_f64, vreinterpretq_f64_f32, vreinterpretq_u16_f32, vtrn1q_f32,
    vtrn2q_f32, vuzp1q_u16, vuzp2q_u16, vzip1q_f64, vzip2q_f64,
};

use moeworks_tensor::DType;

use crate::gemm::source::Format;
use crate::simd::neon::{Neon, bf16_pairs, widened_halves};
use crate::simd::{Float, Level};

/// Writes unit u of row r to `to[u * width + r]`, as far as whole blocks go, and returns the number of units. Does
/// nothing if elements would have to be rounded.
///
/// # Safety
/// The machine must have NEON.
pub(in crate::gemm) unsafe fn units_of_8<T: Float>(
    rows: &[&[T]; 8],
    format: Format,
    width: usize,
    to: &mut [u32],
) -> usize {
    write_blocks!(8, rows, format, (width, to), transpose_8, widened::<T>, Neon::store)
}

/// Returns the first elements of 8 pairs of f16 or bf16, and the second ones.
///
/// # Safety
/// The machine must have NEON.
#[inline(always)]
unsafe fn widened<T: Float>(pairs: [float32x4_t; 2]) -> [[float32x4_t; 2]; 2] {
    // SAFETY: the caller's machine has the instructions.
    unsafe {
        if T::DTYPE == DType::F16 {
            let [low, high] = pairs.map(|pairs| vreinterpretq_u16_f32(pairs));
            return [vuzp1q_u16(low, high), vuzp2q_u16(low, high)].map(|halves| widened_halves(halves));
        }
        bf16_pairs(pairs)
    }
}

/// # Safety
/// The machine must have NEON, and 8 elements must be readable at each pointer.
#[inline(always)]
unsafe fn transpose_8(from: &[*const f32; 8]) -> [[float32x4_t; 2]; 8] {
    // SAFETY: the caller's machine has the instructions, and what is read is inside the 8 elements that it promises.
    unsafe {
        let mut columns = [Neon::splat(0.0); 8];
        for half in 0..2 {
            for quarter in 0..2 {
                let row = |r: usize| vld1q_f32(from[4 * half + r].add(4 * quarter));
                let [a, b, c, d] = [row(0), row(1), row(2), row(3)];
                let [ab, ba] = [vtrn1q_f32(a, b), vtrn2q_f32(a, b)].map(|x| vreinterpretq_f64_f32(x));
                let [cd, dc] = [vtrn1q_f32(c, d), vtrn2q_f32(c, d)].map(|x| vreinterpretq_f64_f32(x));
                let of_quarter = [vzip1q_f64(ab, cd), vzip1q_f64(ba, dc), vzip2q_f64(ab, cd), vzip2q_f64(ba, dc)];
                for (i, column) in of_quarter.into_iter().enumerate() {
                    columns[4 * quarter + i][half] = vreinterpretq_f32_f64(column);
                }
            }
        }
        columns
    }
}
