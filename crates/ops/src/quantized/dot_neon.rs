//! Products of quantized activations with blocks by the byte dot product of aarch64 (`sdot`, Armv8.2), whose operands
//! are both signed.

use core::arch::aarch64::{
    float32x4_t, int8x16_t, int32x4_t, vaddvq_f32, vcvtq_f32_s32, vdupq_n_f32, vdupq_n_s8, vdupq_n_s32, vfmaq_n_f32,
    vfmsq_n_f32, vld1q_s8,
};

use super::blocks_of;
use super::kernel::{MAX_FEW, Panel, with_rows, write_column};
use super::layouts::{PART, Scale};
use super::neon_blocks::NeonBlocks;
use super::rows::Quad;
use crate::gemm::kernel::Tile;

/// Numbers in a vector, and in half of a [`PART`].
const HALF: usize = PART / 2;

/// Computes the sums of a panel as [`run`](super::kernel::run) does.
///
/// # Safety
/// The machine must have the instruction, and rows must be as long as for [`run`](super::kernel::run).
#[target_feature(enable = "dotprod")]
pub(super) unsafe fn run<B: NeonBlocks>(panel: Panel<'_>, tiles: &mut [Tile]) {
    let Panel { weights, columns, a, tile_step, .. } = panel;
    for column in 0..columns {
        let blocks = blocks_of::<B>(weights.numbers.row(column));
        let scales = weights.scales.row(column);
        let mut sums = [0.0; MAX_FEW];
        for (rows, sums) in a.chunks(panel.pass()).zip(sums.chunks_mut(panel.pass())) {
            with_rows!(rows, rows => sums[..rows.len()].copy_from_slice(&products(blocks, scales, rows)));
        }
        write_column(&sums[..a.len()], column, tile_step, tiles);
    }
}

/// Returns the products of a row of weights with `R` rows of activations.
#[inline]
#[target_feature(enable = "dotprod")]
fn products<B: NeonBlocks, const R: usize>(blocks: &[B], split_scale: &[u8], a: [&[Quad]; R]) -> [f32; R] {
    let mut sums = [vdupq_n_f32(0.0); R];
    for (index, block) in blocks.iter().enumerate() {
        let split_scale = &split_scale[index * B::SPLIT_BYTES..];
        for part in 0..B::LEN / PART {
            let at = index * (B::LEN / PART) + part;
            let numbers = block.numbers(part);
            // Two, because halves may have scales of their own.
            let scales = [0, 1].map(|half| block.scale((PART * part + HALF * half) / B::SHARED, split_scale));
            for (sum, a) in sums.iter_mut().zip(a) {
                *sum = add_part::<B>(*sum, numbers, scales, &a[at / 4], at % 4);
            }
        }
    }
    sums.map(|sum| vaddvq_f32(sum))
}

/// Adds the products of 32 weights with block `at` of a quad of activations.
#[inline]
#[target_feature(enable = "dotprod")]
fn add_part<B: NeonBlocks>(
    mut sum: float32x4_t,
    numbers: [int8x16_t; 2],
    scales: [Scale; 2],
    quad: &Quad,
    at: usize,
) -> float32x4_t {
    let (none, ones) = (vdupq_n_s32(0), vdupq_n_s8(1));
    let x = quad.halves.each_ref().map(|half| load(&half.as_chunks::<HALF>().0[at]));
    let x_scale = quad.corrections[0][at * 4];
    if B::SHARED == PART {
        let Scale { scale, min } = scales[0];
        let dots = |with: [int8x16_t; 2]| vcvtq_f32_s32(dot(dot(none, with[0], x[0]), with[1], x[1]));
        sum = vfmaq_n_f32(sum, dots(numbers), scale * x_scale);
        return if B::HAS_MIN { vfmsq_n_f32(sum, dots([ones; 2]), min * x_scale) } else { sum };
    }
    for half in 0..2 {
        let Scale { scale, min } = scales[half];
        sum = vfmaq_n_f32(sum, vcvtq_f32_s32(dot(none, numbers[half], x[half])), scale * x_scale);
        if B::HAS_MIN {
            sum = vfmsq_n_f32(sum, vcvtq_f32_s32(dot(none, ones, x[half])), min * x_scale);
        }
    }
    sum
}

#[inline]
#[target_feature(enable = "dotprod")]
fn load(numbers: &[i8; HALF]) -> int8x16_t {
    // SAFETY: the array is as long as a vector.
    unsafe { vld1q_s8(numbers.as_ptr()) }
}

/// Adds to each lane of `sum` the four products of the bytes of `a` and `b` in that lane.
#[inline]
#[target_feature(enable = "dotprod")]
fn dot(mut sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // The intrinsic (`vdotq_s32`) is not stable yet.
    // SAFETY: the machine has the instruction, which reads and writes these registers alone.
    unsafe {
        core::arch::asm!(
            "sdot {0:v}.4s, {1:v}.16b, {2:v}.16b",
            inout(vreg) sum, in(vreg) a, in(vreg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}
