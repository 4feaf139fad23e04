//! Conversion of rows of quantized weights to the nearest bf16, by NEON.

use core::arch::aarch64::{
    float32x4_t, int8x16_t, vcvtq_f32_s32, vdupq_n_f32, vget_high_s8, vget_high_s16, vget_low_s8, vget_low_s16,
    vmovl_s8, vmovl_s16, vmulq_n_f32, vsubq_f32,
};
use moeworks_tensor::bf16;

use super::layouts::{PART, Scale};
use super::neon_blocks::NeonBlocks;
use super::weights::{Layout, RowBytes};
use super::{blocks_of, with_ints};
use crate::simd::{Level, Neon};

/// Half of a part.
const HALF: usize = PART / 2;

/// Converts a row of whole blocks of integers, as many elements as `to` holds.
pub(super) fn write_row(row: RowBytes<'_>, layout: Layout, to: &mut [bf16]) {
    with_ints!(layout, B => write::<B>(blocks_of::<B>(row.numbers), row.scales, to));
}

fn write<B: NeonBlocks>(blocks: &[B], scales: &[u8], to: &mut [bf16]) {
    for (index, (block, to)) in blocks.iter().zip(to.chunks_mut(B::LEN)).enumerate() {
        let split_scale = &scales[index * B::SPLIT_BYTES..];
        for (part, to) in to.chunks_mut(PART).enumerate() {
            let mut written = [bf16::ZERO; PART];
            for (half, numbers) in block.numbers(part).into_iter().enumerate() {
                let scale = block.scale((PART * part + HALF * half) / B::SHARED, split_scale);
                // SAFETY: `written` has sixteen more numbers of two bytes.
                unsafe { Neon::store(written[HALF * half..].as_mut_ptr().cast(), rounded::<B>(numbers, scale)) };
            }
            match to.first_chunk_mut() {
                Some(to) => *to = written,
                None => to.copy_from_slice(&written[..to.len()]),
            }
        }
    }
}

/// Converts sixteen numbers to bf16. Products are rounded before the minimum is subtracted, as in
/// [`decode`](super::layouts::Values::decode).
#[inline(always)]
fn rounded<B: NeonBlocks>(numbers: int8x16_t, scale: Scale) -> [float32x4_t; 2] {
    let Scale { scale, min } = scale;
    // SAFETY: all machines of this kind have NEON.
    unsafe {
        let value = |whole| {
            let product = vmulq_n_f32(vcvtq_f32_s32(whole), scale);
            if B::HAS_MIN { vsubq_f32(product, vdupq_n_f32(min)) } else { product }
        };
        let eight = |words| [value(vmovl_s16(vget_low_s16(words))), value(vmovl_s16(vget_high_s16(words)))];
        Neon::round([eight(vmovl_s8(vget_low_s8(numbers))), eight(vmovl_s8(vget_high_s8(numbers)))])
    }
}
