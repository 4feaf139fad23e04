//! Rounding to bf16: by the instruction of AVX-512 BF16, and by integer operations with the results of
//! [`Float::store`].

use core::arch::x86_64::{
    __m256, __m256i, __m512, __m512bh, __m512i, _CMP_ORD_Q, _CMP_UNORD_Q, _mm256_add_epi32, _mm256_and_si256,
    _mm256_blendv_epi8, _mm256_castps_si256, _mm256_castsi256_ps, _mm256_cmp_ps, _mm256_or_si256, _mm256_packus_epi32,
    _mm256_permute4x64_epi64, _mm256_set1_epi32, _mm256_srli_epi32, _mm512_add_epi32, _mm512_and_si512,
    _mm512_castps_si512, _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_cvtne2ps_pbh, _mm512_loadu_ps,
    _mm512_loadu_si512, _mm512_mask_or_epi32, _mm512_permutex2var_epi16, _mm512_permutexvar_epi16, _mm512_set1_epi32,
    _mm512_srli_epi32, _mm512_storeu_si512,
};

use moeworks_tensor::bf16;

use super::Float;

/// Rounds elements one by one. It is a function with its own CPU features, because a closure has none and each
/// instruction in it would become a call.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) fn round_by_instruction(from: &[f32], to: &mut [bf16]) {
    let ((from, rest), (to, to_rest)) = (from.as_chunks::<32>(), to.as_chunks_mut::<32>());
    for (from, to) in from.iter().zip(to) {
        // SAFETY: 32 elements are read and as many written, and the transmute renames 512 bits.
        unsafe {
            let (low, high) = (_mm512_loadu_ps(from.as_ptr()), _mm512_loadu_ps(from[16..].as_ptr()));
            let rounded: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
            _mm512_storeu_si512(to.as_mut_ptr().cast(), rounded);
        }
    }
    to_rest.iter_mut().zip(rest).for_each(|(to, &x)| *to = bf16::store(x));
}

/// Returns the lanes of both vectors as bf16: those of `low` and then those of `high`, and both interleaved.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) fn round_and_pair(low: __m512, high: __m512) -> [__m512; 2] {
    /// Indices that alternate between the lower and the upper half.
    const TURNS: [u16; 32] = {
        let mut turns = [0; 32];
        let mut i = 0;
        while i < 32 {
            turns[i] = i as u16 / 2 + if i % 2 == 0 { 0 } else { 16 };
            i += 1;
        }
        turns
    };
    // SAFETY: the transmute renames 512 bits, and there are as many at `TURNS`.
    unsafe {
        let rounded = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
        let turns = _mm512_loadu_si512(TURNS.as_ptr().cast());
        [rounded, _mm512_permutexvar_epi16(turns, rounded)].map(|x| _mm512_castsi512_ps(x))
    }
}

/// Half of the least step of bf16, less one, in the bits of f32.
const BELOW_HALF: i32 = 0x7fff;
/// The bit that makes a NaN quiet, so that its upper word is a NaN, too.
const QUIET: i32 = 0x0040_0000;

/// Returns lanes whose upper words are the nearest bf16, ties to even.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) fn nearest_of_16(lanes: __m512) -> __m512i {
    let bits = _mm512_castps_si512(lanes);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(BELOW_HALF)));
    // The addition could turn a NaN into a number.
    let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(lanes, lanes);
    _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(QUIET))
}

/// Returns the lanes of both vectors, one after the other, as bf16.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn round_16(low: __m512, high: __m512) -> __m512 {
    /// Indices of the upper words of both vectors.
    const UPPER: [u16; 32] = {
        let mut words = [0; 32];
        let mut i = 0;
        while i < 32 {
            words[i] = 2 * i as u16 + 1;
            i += 1;
        }
        words
    };
    // SAFETY: there are 512 bits at `UPPER`.
    let upper = unsafe { _mm512_loadu_si512(UPPER.as_ptr().cast()) };
    _mm512_castsi512_ps(_mm512_permutex2var_epi16(nearest_of_16(low), upper, nearest_of_16(high)))
}

/// Returns the nearest bf16, ties to even, in 32-bit lanes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
fn nearest_of_8(lanes: __m256) -> __m256i {
    let bits = _mm256_castps_si256(lanes);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(BELOW_HALF)));
    let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(QUIET));
    // The addition could turn a NaN into a number.
    let is_number = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_ORD_Q>(lanes, lanes));
    _mm256_srli_epi32::<16>(_mm256_blendv_epi8(quiet, rounded, is_number))
}

/// Returns the lanes of both vectors, one after the other, as bf16.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
pub(crate) fn round_8(low: __m256, high: __m256) -> __m256 {
    let words = _mm256_packus_epi32(nearest_of_8(low), nearest_of_8(high));
    // The instruction packs by halves of vectors.
    _mm256_castsi256_ps(_mm256_permute4x64_epi64::<0b11_01_10_00>(words))
}
