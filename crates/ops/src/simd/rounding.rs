//! Rounding by the instruction of AVX-512 BF16.

use core::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm512_castsi512_ps, _mm512_cvtne2ps_pbh, _mm512_loadu_ps, _mm512_loadu_si512,
    _mm512_permutexvar_epi16, _mm512_storeu_si512,
};

use moeworks_tensor::bf16;

use super::Float;

/// Rounds elements one for one. A function with its own features: where this is reached through a closure, which has none, each
/// instruction would become a call.
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

/// The lanes of both as bf16: those of `low` and then those of `high`, and one of each in turn.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) fn round_and_pair(low: __m512, high: __m512) -> [__m512; 2] {
    /// An element of the lower half and one of the upper half in turn.
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
