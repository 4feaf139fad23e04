//! Products of quantized activations with blocks by the byte products of AVX2, which add two consecutive products in
//! 16 bits.

use core::arch::x86_64::{
    __m256, __m256i, _mm256_abs_epi8, _mm256_add_epi16, _mm256_add_epi32, _mm256_add_ps, _mm256_castps_si256,
    _mm256_cvtepi32_ps, _mm256_fmadd_ps, _mm256_fnmadd_ps, _mm256_load_ps, _mm256_load_si256, _mm256_loadu_si256,
    _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_mul_ps, _mm256_permutevar8x32_ps, _mm256_set1_epi16,
    _mm256_setzero_ps, _mm256_sign_epi8,
};

use super::avx2_blocks::Avx2Blocks;
use super::kernel::{Panel, with_rows};
use super::layouts::PART;
use super::rows::{ActivationFormat, Quad};
use super::stream::{self, MAX_BLOCKS, Row, Unit, prefetch_bytes, streamed, unit_of_scales};
use crate::gemm::kernel::{MAX_ROWS, TILE_STRIDE, Tile};
use crate::simd::{Avx2, Level};

/// Returns the format of activations for a type of weights.
pub(super) const fn activation_format<B: Avx2Blocks>() -> ActivationFormat {
    stream::activation_format::<B>(B::OFFSET, B::IS_PAIRED)
}

streamed!("avx2,fma,f16c,bmi2", Avx2Blocks);

/// Sums of products, and sums of the corrections: separate, so that additions do not wait for each other.
#[derive(Clone, Copy)]
struct Sums([__m256; 2]);

/// Bytes of activations in half a quad, and the number of floats that go with them.
const BYTES: usize = 32;
const LANES: usize = 8;

/// The lane of eight scales that each lane of products takes, for types with a scale for each half of a part: those
/// of the first halves, for the lower and the upper four parts. Second halves take the next lane.
const HALF_LANES: [[i32; LANES]; 2] = [[0, 0, 0, 0, 2, 2, 2, 2], [4, 4, 4, 4, 6, 6, 6, 6]];
const OTHER_HALF_LANES: [[i32; LANES]; 2] = [[1, 1, 1, 1, 3, 3, 3, 3], [5, 5, 5, 5, 7, 7, 7, 7]];

/// The lane of eight scales of parts that each lane of products takes, by place.
const PART_LANES: [[i32; LANES]; 4] =
    [[0, 0, 0, 0, 1, 1, 1, 1], [2, 2, 2, 2, 3, 3, 3, 3], [4, 4, 4, 4, 5, 5, 5, 5], [6, 6, 6, 6, 7, 7, 7, 7]];

/// Adds the products of unit `at` of a row of weights with `R` rows of activations.
///
/// # Safety
/// As for [`run`]; the unit and its scales must be readable, and the rows must have its quads.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
unsafe fn add_unit<B: Avx2Blocks, const R: usize>(unit: Unit<B>, a: [&[Quad]; R], at: usize, sums: &mut [Sums; R]) {
    let Unit { blocks: unit, scales } = unit;
    // SAFETY: the caller's promise.
    unsafe {
        let scales = B::scales(unit, scales);
        if !B::IS_LONG {
            let numbers = B::numbers(unit, 0);
            for (sums, a) in sums.iter_mut().zip(a) {
                sums.add_short::<B>(numbers, scales, a.get_unchecked(at / 2), at % 2);
            }
            return;
        }
        let mut factors = [[_mm256_setzero_ps(); 2]; R];
        for ((sums, a), factors) in sums.iter_mut().zip(a).zip(&mut factors) {
            *factors = sums.begin_long::<B>(scales, a.get_unchecked(2 * at));
        }
        for place in 0..4 {
            let numbers = B::numbers(unit, place);
            for ((sums, a), factors) in sums.iter_mut().zip(a).zip(&factors) {
                sums.add_place::<B>(numbers, place, *factors, a.get_unchecked(2 * at + place / 2));
            }
        }
    }
}

impl Sums {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,bmi2")]
    fn zero() -> Self {
        Self([_mm256_setzero_ps(); 2])
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,bmi2")]
    fn total<B: Avx2Blocks>(self) -> f32 {
        let Self([products, others]) = self;
        Avx2::total(_mm256_add_ps(products, others))
    }

    /// Adds the products of two short blocks with half `half` of a quad of activations.
    ///
    /// # Safety
    /// As for [`run`].
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,bmi2")]
    unsafe fn add_short<B: Avx2Blocks>(&mut self, numbers: [__m256i; 2], scales: [__m256; 4], a: &Quad, half: usize) {
        let Self([products, others]) = self;
        // SAFETY: the arrays of a quad are aligned to a cache line and of 64 bytes each.
        unsafe {
            let corrections = _mm256_load_ps(a.corrections[1].as_ptr().add(LANES * half));
            let mut totals = dots::<B>(numbers, a, half);
            if B::OFFSET > 0 {
                totals = _mm256_add_epi32(totals, _mm256_castps_si256(corrections));
            }
            let factors = _mm256_mul_ps(scales[0], _mm256_load_ps(a.corrections[0].as_ptr().add(LANES * half)));
            *products = _mm256_fmadd_ps(_mm256_cvtepi32_ps(totals), factors, *products);
            if B::HAS_MIN {
                *others = _mm256_fnmadd_ps(scales[1], corrections, *others);
            }
        }
    }

    /// Adds the corrections for minima and offsets of a long block, and returns the factors of its products: all of
    /// them in the first vector, or those of each half of the block, alternating between the halves of parts.
    ///
    /// # Safety
    /// As for [`run`].
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,bmi2")]
    unsafe fn begin_long<B: Avx2Blocks>(&mut self, scales: [__m256; 4], a: &Quad) -> [__m256; 2] {
        let Self([_, others]) = self;
        // SAFETY: the arrays of a quad are aligned to a cache line and of 64 bytes each.
        unsafe {
            let corrections =
                |which: usize, half: usize| _mm256_load_ps(a.corrections[which].as_ptr().add(LANES * half));
            if B::SHARED == PART {
                *others = _mm256_fmadd_ps(scales[1], corrections(0, 1), *others);
                return [_mm256_mul_ps(scales[0], corrections(0, 0)); 2];
            }
            *others = _mm256_fnmadd_ps(scales[2], corrections(1, 0), *others);
            *others = _mm256_fnmadd_ps(scales[3], corrections(1, 1), *others);
            [_mm256_mul_ps(scales[0], corrections(0, 0)), _mm256_mul_ps(scales[1], corrections(0, 1))]
        }
    }

    /// Adds the products of one place of a long block.
    ///
    /// # Safety
    /// As for [`run`].
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,bmi2")]
    unsafe fn add_place<B: Avx2Blocks>(&mut self, numbers: [__m256i; 2], place: usize, factors: [__m256; 2], a: &Quad) {
        let Self([products, others]) = self;
        let (quad, half) = (place / 2, place % 2);
        // SAFETY: lanes are eight words.
        let of_lanes = |factors: __m256, lanes: &[i32; LANES]| unsafe {
            _mm256_permutevar8x32_ps(factors, _mm256_loadu_si256(lanes.as_ptr().cast()))
        };
        // SAFETY: the caller's promise.
        unsafe {
            if B::SHARED == PART {
                let totals = _mm256_cvtepi32_ps(dots::<B>(numbers, a, half));
                *products = _mm256_fmadd_ps(totals, of_lanes(factors[0], &PART_LANES[place]), *products);
                return;
            }
            let of_half = |which: usize| {
                let pairs = pairs_of::<B>(numbers[which], bytes_of(a, which, half));
                _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
            };
            *products = _mm256_fmadd_ps(of_half(0), of_lanes(factors[quad], &HALF_LANES[half]), *products);
            *others = _mm256_fmadd_ps(of_half(1), of_lanes(factors[quad], &OTHER_HALF_LANES[half]), *others);
        }
    }
}

/// Loads the activations of half `half` of a quad: the first halves of blocks, or the other ones.
///
/// # Safety
/// As for [`run`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
unsafe fn bytes_of(a: &Quad, which: usize, half: usize) -> __m256i {
    // SAFETY: the arrays of a quad are aligned to a cache line and of 64 bytes each.
    unsafe { _mm256_load_si256(a.halves[which].as_ptr().add(BYTES * half).cast()) }
}

/// Returns sums of two consecutive products each, in 16 bits. They cannot overflow: an activation is at most 127, a
/// signed weight at most 128, an unsigned one below 64.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
fn pairs_of<B: Avx2Blocks>(weights: __m256i, x: __m256i) -> __m256i {
    if B::IS_SIGNED {
        return _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights));
    }
    _mm256_maddubs_epi16(weights, x)
}

/// Returns sums of eight products each: four consecutive ones of the first halves of blocks, and four of the others.
///
/// # Safety
/// As for [`run`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
unsafe fn dots<B: Avx2Blocks>(numbers: [__m256i; 2], a: &Quad, half: usize) -> __m256i {
    // SAFETY: the caller's promise.
    let x = unsafe { [bytes_of(a, 0, half), bytes_of(a, 1, half)] };
    let ones = _mm256_set1_epi16(1);
    let (first, second) = (pairs_of::<B>(numbers[0], x[0]), pairs_of::<B>(numbers[1], x[1]));
    if B::IS_SIGNED {
        // Two such sums do not fit 16 bits.
        return _mm256_add_epi32(_mm256_madd_epi16(first, ones), _mm256_madd_epi16(second, ones));
    }
    _mm256_madd_epi16(_mm256_add_epi16(first, second), ones)
}
