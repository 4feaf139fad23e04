//! Powers of two by AVX-512 instructions, which split a number into integer and fraction and apply exponents.

use core::arch::x86_64::{
    __m512, _CMP_NLT_UQ, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT, _mm512_cmp_ps_mask, _mm512_fmadd_ps,
    _mm512_maskz_scalef_ps, _mm512_roundscale_ps, _mm512_set1_ps, _mm512_sub_ps,
};

/// The coefficients of `2^r` from the first power of r on, with the least relative error for `|r| <= 1/2`. They are
/// those of [`vmath::exp2_falling`](crate::vmath::exp2_falling), for the same bits. With one power less the error,
/// 1.7e-7, shows in gradients through large scores.
pub(super) const FOR_F32: [f32; 6] =
    [std::f32::consts::LN_2, 0.240_226_46, 5.550_328_6e-2, 9.618_489e-3, 1.339_993_1e-3, 1.534_581_2e-4];
/// Coefficients with an error of 2.9e-6, of which next to nothing remains in bf16.
pub(super) const FOR_BF16: [f32; 4] = [0.693_124_2, 0.240_240_99, 5.590_643e-2, 9.582_855e-3];

/// Returns `2^x` for `x <= 0` as [`vmath::exp2_falling`](crate::vmath::exp2_falling) does, as precisely as
/// `polynomial` allows.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn exp2_falling<const N: usize>(x: __m512, polynomial: [f32; N]) -> __m512 {
    const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    let whole = _mm512_roundscale_ps::<NEAREST>(x);
    let rest = _mm512_sub_ps(x, whole);
    let mut sum = _mm512_set1_ps(polynomial[N - 1]);
    for &factor in polynomial[..N - 1].iter().rev() {
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(factor));
    }
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0));
    // Zero below the least power; a NaN is kept.
    let is_there = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(crate::vmath::LEAST_POWER));
    _mm512_maskz_scalef_ps(is_there, sum, whole)
}

/// Defines powers of two of sixteen numbers by one of these polynomials, for a level of as many lanes.
macro_rules! powers_of {
    ($x:ident, $polynomial:ident) => {{
        let mut powers = $x;
        // SAFETY: as in `splat`; the arrays are vectors of sixteen lanes.
        unsafe {
            let power = powers::exp2_falling(Self::load($x.as_ptr()), powers::$polynomial);
            Self::store(powers.as_mut_ptr(), power);
        }
        powers
    }};
}
pub(super) use powers_of;
