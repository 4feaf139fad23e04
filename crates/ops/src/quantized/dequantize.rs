//! Blocks turned into the bf16 numbers nearest to what they stand for, for products of many rows.

use moeworks_tensor::{BLOCK_LEN, bf16};

use super::block_kernel;
use super::kernel::{Kernel, WeightBlock};
use crate::parallel::{PIECE, piece_range};
use crate::{Context, Isa};

/// Writes the numbers of `blocks` to `to`. Those too small for a normal bf16 may become zero.
pub(super) fn to_bf16<B: WeightBlock>(ctx: &Context, blocks: &[B], to: &mut [bf16]) {
    let is_fast = is_fast(ctx.isa());
    ctx.threads().run_pieces(to, PIECE, |task, to| {
        let blocks = &blocks[piece_range(task, PIECE / BLOCK_LEN, blocks.len())];
        #[cfg(target_arch = "x86_64")]
        if is_fast {
            // SAFETY: `is_fast` has found the instructions.
            return unsafe { vectors::run(blocks, to) };
        }
        block_kernel::<B, bf16>(ctx.isa(), blocks, to);
    });
}

/// Whether the machine has the byte kernels' instructions and rounds to bf16 by itself.
fn is_fast(isa: Isa) -> bool {
    #[cfg(target_arch = "x86_64")]
    return isa >= Isa::Avx512Bf16 && Kernel::available(isa).contains(&Kernel::Vnni);
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

#[cfg(target_arch = "x86_64")]
mod vectors {
    use core::arch::x86_64::{
        __m512i, _mm_cvtph_ps, _mm_cvtsi32_si128, _mm_movehdup_ps, _mm256_castsi256_si128, _mm256_extracti128_si256,
        _mm512_broadcastss_ps, _mm512_castsi512_si256, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps, _mm512_cvtne2ps_pbh,
        _mm512_extracti64x4_epi64, _mm512_mul_ps, _mm512_set1_epi8, _mm512_storeu_si512, _mm512_sub_epi8,
    };

    use super::{BLOCK_LEN, WeightBlock, bf16};

    /// # Safety
    /// The machine must have AVX-512 F, BW, DQ, VL, VNNI and BF16, AVX2, FMA and F16C.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c,bmi2")]
    pub(super) unsafe fn run<B: WeightBlock>(blocks: &[B], to: &mut [bf16]) {
        let (pairs, last) = blocks.as_chunks::<2>();
        let (to, to_last) = to.as_chunks_mut::<{ 2 * BLOCK_LEN }>();
        for ([first, second], to) in pairs.iter().zip(to) {
            // SAFETY: the caller's promise.
            unsafe { pair(first, second, to) };
        }
        if let [last] = last {
            let mut room = [bf16::ZERO; 2 * BLOCK_LEN];
            // SAFETY: the caller's promise.
            unsafe { pair(last, last, &mut room) };
            to_last.copy_from_slice(&room[..BLOCK_LEN]);
        }
    }

    /// # Safety
    /// As for [`run`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c,bmi2")]
    unsafe fn pair<B: WeightBlock>(first: &B, second: &B, to: &mut [bf16; 2 * BLOCK_LEN]) {
        // SAFETY: both blocks are there, and the machine has the instructions.
        let unsigned = unsafe { B::pair(first, second) };
        let bytes = _mm512_sub_epi8(unsigned, _mm512_set1_epi8(B::OFFSET));
        let bits = u32::from(first.scale_bits()) | (u32::from(second.scale_bits()) << 16);
        let scales = _mm_cvtph_ps(_mm_cvtsi32_si128(bits.cast_signed()));
        let halves = [
            (_mm512_castsi512_si256(bytes), _mm512_broadcastss_ps(scales)),
            (_mm512_extracti64x4_epi64::<1>(bytes), _mm512_broadcastss_ps(_mm_movehdup_ps(scales))),
        ];
        for ((bytes, scale), to) in halves.into_iter().zip(to.as_chunks_mut::<BLOCK_LEN>().0) {
            let [low, high] = [_mm256_castsi256_si128(bytes), _mm256_extracti128_si256::<1>(bytes)]
                .map(|bytes| _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), scale));
            // SAFETY: the transmute renames 512 bits, and a block of bf16 has as many.
            unsafe {
                let rounded: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
                _mm512_storeu_si512(to.as_mut_ptr().cast(), rounded);
            }
        }
    }
}
