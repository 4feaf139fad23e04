//! The sums of a vector's lanes, in one order for every instruction set.

/// Returns the sum of eight lanes, adding halves first.
///
/// # Safety
/// The machine must have AVX2.
#[inline(always)]
pub(super) unsafe fn total_of_8(lanes: core::arch::x86_64::__m256) -> f32 {
    use core::arch::x86_64::{
        _mm_add_ps, _mm_add_ss, _mm_cvtss_f32, _mm_movehl_ps, _mm_shuffle_ps, _mm256_castps256_ps128,
        _mm256_extractf128_ps,
    };
    // SAFETY: the caller's machine has the instructions.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps::<1>(lanes));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
}

/// Returns the sum of sixteen lanes, adding halves first.
///
/// # Safety
/// The machine must have AVX-512 F and DQ.
#[inline(always)]
pub(super) unsafe fn total_of_16(lanes: core::arch::x86_64::__m512) -> f32 {
    use core::arch::x86_64::{_mm256_add_ps, _mm512_castps512_ps256, _mm512_extractf32x8_ps};
    // SAFETY: the caller's machine has the instructions.
    unsafe { total_of_8(_mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps::<1>(lanes))) }
}

/// Returns the [`total_of_16`] of each of four vectors.
///
/// # Safety
/// The machine must have AVX-512 F and DQ.
#[inline(always)]
pub(super) unsafe fn totals_of_16([a, b, c, d]: [core::arch::x86_64::__m512; 4]) -> [f32; 4] {
    use core::arch::x86_64::{
        _mm_cvtss_f32, _mm512_add_ps, _mm512_castps512_ps128, _mm512_extractf32x4_ps, _mm512_permute_ps,
        _mm512_shuffle_f32x4,
    };
    // SAFETY: the caller's machine has the instructions.
    unsafe {
        let ab = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
        let cd = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
        // Each quarter now holds the partial sums of one vector.
        let four = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xdd>(ab, cd));
        let two = _mm512_add_ps(four, _mm512_permute_ps::<0x4e>(four));
        let one = _mm512_add_ps(two, _mm512_permute_ps::<0xb1>(two));
        [
            _mm_cvtss_f32(_mm512_castps512_ps128(one)),
            _mm_cvtss_f32(_mm512_extractf32x4_ps::<1>(one)),
            _mm_cvtss_f32(_mm512_extractf32x4_ps::<2>(one)),
            _mm_cvtss_f32(_mm512_extractf32x4_ps::<3>(one)),
        ]
    }
}
