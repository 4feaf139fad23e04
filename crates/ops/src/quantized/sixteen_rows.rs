//! Rows of blocks turned into the bf16 numbers nearest to what they stand for, by NEON.

use core::arch::aarch64::{
    float32x4_t, int8x16_t, vcvtq_f32_s32, vdupq_n_f32, vget_high_s8, vget_high_s16, vget_low_s8, vget_low_s16,
    vmovl_s8, vmovl_s16, vmulq_n_f32, vsubq_f32,
};
use moeworks_tensor::bf16;

use super::layouts::PART;
use super::sixteens::Sixteens;
use super::weights::Layout;
use super::{blocks_of, with_ints};
use crate::simd::{Level, Neon};

/// Half of a part.
const HALF: usize = PART / 2;

/// Writes as many numbers of a row of whole blocks of whole numbers, or of its part, as there is room for.
pub(super) fn write_row((numbers, scales): (&[u8], &[u8]), layout: Layout, to: &mut [bf16]) {
    with_ints!(layout, B => write::<B>(blocks_of::<B>(numbers), scales, to));
}

fn write<B: Sixteens>(blocks: &[B], scales: &[u8], to: &mut [bf16]) {
    for (index, (block, to)) in blocks.iter().zip(to.chunks_mut(B::LEN)).enumerate() {
        let apart = &scales[index * B::APART..];
        for (part, to) in to.chunks_mut(PART).enumerate() {
            let mut written = [bf16::ZERO; PART];
            for (half, numbers) in block.sixteens(part).into_iter().enumerate() {
                let scale = block.scale((PART * part + HALF * half) / B::SHARED, apart);
                // SAFETY: there is room for sixteen numbers of two bytes.
                unsafe { Neon::store(written[HALF * half..].as_mut_ptr().cast(), rounded::<B>(numbers, scale)) };
            }
            match to.first_chunk_mut() {
                Some(to) => *to = written,
                None => to.copy_from_slice(&written[..to.len()]),
            }
        }
    }
}

/// Sixteen numbers as bf16: the products are rounded before anything is taken away, as in [`decode`](super::layouts::Values::decode).
#[inline(always)]
fn rounded<B: Sixteens>(numbers: int8x16_t, (scale, least): (f32, f32)) -> [float32x4_t; 2] {
    // SAFETY: all machines of this kind have NEON.
    unsafe {
        let value = |whole| {
            let product = vmulq_n_f32(vcvtq_f32_s32(whole), scale);
            if B::HAS_LEAST { vsubq_f32(product, vdupq_n_f32(least)) } else { product }
        };
        let eight = |words| [value(vmovl_s16(vget_low_s16(words))), value(vmovl_s16(vget_high_s16(words)))];
        Neon::round([eight(vmovl_s8(vget_low_s8(numbers))), eight(vmovl_s8(vget_high_s8(numbers)))])
    }
}
