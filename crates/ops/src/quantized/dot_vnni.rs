//! Products of quantized activations with blocks by the byte dot product of AVX-512 VNNI.

use core::arch::x86_64::{
    __m512, __m512i, _mm512_add_ps, _mm512_castps_si512, _mm512_cvtepi32_ps, _mm512_dpbusd_epi32, _mm512_fmadd_ps,
    _mm512_fnmadd_ps, _mm512_load_ps, _mm512_load_si512, _mm512_loadu_si512, _mm512_mask_add_ps, _mm512_mul_ps,
    _mm512_permutexvar_ps, _mm512_setzero_ps, _mm512_setzero_si512,
};

use super::avx512_blocks::Avx512Blocks;
use super::kernel::{Panel, with_rows};
use super::layouts::PART;
use super::rows::{ActivationFormat, Quad};
use super::stream::{self, MAX_BLOCKS, Row, Unit, prefetch_bytes, streamed, unit_of_scales};
use crate::gemm::kernel::{MAX_ROWS, TILE_STRIDE, Tile};
use crate::simd::{Avx512, Level};

/// Returns the format of activations for a type of weights.
pub(super) const fn activation_format<B: Avx512Blocks>() -> ActivationFormat {
    stream::activation_format::<B>(B::OFFSET.cast_unsigned(), B::IS_PAIRED)
}

streamed!("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2", Avx512Blocks);

/// Two vectors of sums, so that additions do not wait for each other.
#[derive(Clone, Copy)]
struct Sums([__m512; 2]);

/// Adds the products of unit `at` of a row of weights with `R` rows of activations.
///
/// # Safety
/// As for [`run`]; the unit and its scales must be readable, and the rows must have its quads.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn add_unit<B: Avx512Blocks, const R: usize>(unit: Unit<B>, a: [&[Quad]; R], at: usize, sums: &mut [Sums; R]) {
    let (at, Unit { blocks: unit, scales }) = (at * B::QUADS, unit);
    // SAFETY: the caller's promise.
    unsafe {
        let scales = B::scales(unit, scales);
        if !B::IS_LONG {
            let numbers = B::numbers(unit, 0);
            for (sums, a) in sums.iter_mut().zip(a) {
                sums.add_short::<B>(numbers, scales, a.get_unchecked(at));
            }
            return;
        }
        let numbers = [B::numbers(unit, 0), B::numbers(unit, 1)];
        for (sums, a) in sums.iter_mut().zip(a) {
            sums.add_long::<B>(numbers, scales, [a.get_unchecked(at), a.get_unchecked(at + 1)]);
        }
    }
}

impl Sums {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn zero() -> Self {
        Self([_mm512_setzero_ps(); 2])
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")]
    fn total<B: Avx512Blocks>(self) -> f32 {
        let Self([products, others]) = self;
        // If scales and minima share a vector, only the upper lanes of the corrections are sums.
        let lanes = if B::IS_LONG && B::SHARED == PART { 0xff00 } else { 0xffff };
        Avx512::total(_mm512_mask_add_ps(products, lanes, products, others))
    }

    /// Adds the products of four short blocks with a quad of activations.
    ///
    /// # Safety
    /// As for [`run`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
    unsafe fn add_short<B: Avx512Blocks>(&mut self, numbers: [__m512i; 2], scales: [__m512; 2], a: &Quad) {
        let Self([products, others]) = self;
        // SAFETY: the arrays of a quad are aligned to a cache line and of 64 bytes each.
        unsafe {
            let corrections = _mm512_load_ps(a.corrections[1].as_ptr());
            let start = if B::HAS_MIN { _mm512_setzero_si512() } else { _mm512_castps_si512(corrections) };
            let totals = _mm512_cvtepi32_ps(dots(dots(start, numbers[0], &a.halves[0]), numbers[1], &a.halves[1]));
            let factors = _mm512_mul_ps(scales[0], _mm512_load_ps(a.corrections[0].as_ptr()));
            *products = _mm512_fmadd_ps(totals, factors, *products);
            if B::HAS_MIN {
                *others = _mm512_fnmadd_ps(scales[1], corrections, *others);
            }
        }
    }

    /// Adds the products of a long block with two quads of activations.
    ///
    /// # Safety
    /// As for [`run`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
    unsafe fn add_long<B: Avx512Blocks>(
        &mut self,
        numbers: [[__m512i; 2]; 2],
        [scales, min]: [__m512; 2],
        a: [&Quad; 2],
    ) {
        let Self([products, others]) = self;
        // SAFETY: the arrays of a quad are aligned to a cache line and of 64 bytes each, as lanes are.
        unsafe {
            let factors = _mm512_mul_ps(scales, _mm512_load_ps(a[0].corrections[0].as_ptr()));
            let zero = _mm512_setzero_si512();
            if B::SHARED == PART {
                // The upper lanes already are products of minima and sums.
                *others = _mm512_add_ps(*others, factors);
            } else {
                let min = if B::HAS_MIN { min } else { scales };
                *others = _mm512_fnmadd_ps(min, _mm512_load_ps(a[0].corrections[1].as_ptr()), *others);
            }
            for quad in 0..2 {
                let lanes = [0, 1].map(|half| B::SCALE_LANES[quad][half].as_ptr().cast());
                let first = _mm512_permutexvar_ps(_mm512_loadu_si512(lanes[0]), factors);
                let totals = dots(zero, numbers[quad][0], &a[quad].halves[0]);
                if B::SHARED == PART {
                    let totals = dots(totals, numbers[quad][1], &a[quad].halves[1]);
                    *products = _mm512_fmadd_ps(_mm512_cvtepi32_ps(totals), first, *products);
                } else {
                    let second = _mm512_permutexvar_ps(_mm512_loadu_si512(lanes[1]), factors);
                    *products = _mm512_fmadd_ps(_mm512_cvtepi32_ps(totals), first, *products);
                    let totals = dots(zero, numbers[quad][1], &a[quad].halves[1]);
                    *others = _mm512_fmadd_ps(_mm512_cvtepi32_ps(totals), second, *others);
                }
            }
        }
    }
}

/// Returns sums of four products each of weights and activations, added to `start`.
///
/// # Safety
/// As for [`run`]; activations must be aligned to a cache line.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn dots(start: __m512i, weights: __m512i, a: &[i8; 64]) -> __m512i {
    // SAFETY: the caller's promise.
    _mm512_dpbusd_epi32(start, weights, unsafe { _mm512_load_si512(a.as_ptr().cast()) })
}
