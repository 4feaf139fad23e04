//! Conversion of rows of quantized weights to the nearest bf16, by AVX2.

use core::arch::x86_64::{
    __m128i, _mm_srli_si128, _mm256_castsi256_si128, _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps,
    _mm256_extracti128_si256, _mm256_mul_ps, _mm256_set1_epi8, _mm256_set1_ps, _mm256_storeu_ps, _mm256_sub_epi8,
    _mm256_sub_ps, _mm256_unpackhi_epi8, _mm256_unpacklo_epi8,
};

use moeworks_tensor::bf16;

use super::avx2_blocks::Avx2Blocks;
use super::layouts::PART;
use super::stream::{MAX_BLOCKS, Unit, unit_of_scales};
use super::weights::{Layout, RowBytes};
use super::{blocks_of, with_ints};
use crate::simd::rounding::round_8;

/// Half of a part.
const HALF: usize = PART / 2;

/// Avx512Blocks of a vector.
const LANES: usize = 8;

/// Converts a row of whole blocks of integers, as many elements as `to` holds.
///
/// # Safety
/// The machine must have AVX2, FMA, F16C and BMI2.
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
pub(super) unsafe fn write_row(row: RowBytes<'_>, layout: Layout, to: &mut [bf16]) {
    let RowBytes { numbers, scales } = row;
    // SAFETY: the caller's promise.
    with_ints!(layout, B => unsafe { write::<B>(blocks_of::<B>(numbers), scales, to) });
}

// The functions below are inlined into that one and so compiled with its CPU features.

/// # Safety
/// As for [`write_row`].
#[inline(always)]
unsafe fn write<B: Avx2Blocks>(blocks: &[B], scales: &[u8], to: &mut [bf16]) {
    assert!(scales.len() >= blocks.len() * B::SPLIT_BYTES, "scales of a row");
    let units = blocks.chunks(B::BLOCKS);
    for (index, (unit, to)) in units.zip(to.chunks_mut(B::BLOCKS * B::LEN)).enumerate() {
        let scales = &scales[index * B::BLOCKS * B::SPLIT_BYTES..];
        if unit.len() == B::BLOCKS {
            // SAFETY: the caller's promise.
            unsafe { write_unit::<B>(Unit { blocks: unit.as_ptr(), scales: scales.as_ptr() }, to) };
            continue;
        }
        let mut whole = [B::zeroed(); MAX_BLOCKS];
        whole[..unit.len()].copy_from_slice(unit);
        // SAFETY: as above.
        unsafe {
            let scales = unit_of_scales(scales);
            write_unit::<B>(Unit { blocks: whole.as_ptr(), scales: scales.as_ptr() }, to);
        }
    }
}

/// Converts the elements of a unit, as many as `to` holds.
///
/// # Safety
/// As for [`write_row`]; the unit and its scales must be readable.
#[inline(always)]
unsafe fn write_unit<B: Avx2Blocks>(unit: Unit<B>, to: &mut [bf16]) {
    let Unit { blocks: unit, scales } = unit;
    // Single scales are read from memory in fewer steps than from registers.
    let mut all = [0.0_f32; 4 * LANES];
    // SAFETY: the caller's promise; `all` has space for four vectors.
    unsafe {
        for (scales, to) in B::scales(unit, scales).into_iter().zip(all.chunks_exact_mut(LANES)) {
            _mm256_storeu_ps(to.as_mut_ptr(), scales);
        }
    }
    for (place, to) in to.chunks_mut(2 * PART).enumerate() {
        // SAFETY: as above.
        let numbers = unsafe { halves::<B>(unit, place) };
        for (part, to) in to.as_chunks_mut::<PART>().0.iter_mut().enumerate() {
            for (half, to) in to.as_chunks_mut::<HALF>().0.iter_mut().enumerate() {
                let (scale, min) = lanes_of::<B>(place, part, half);
                let min = if B::HAS_MIN { Some(all[min]) } else { None };
                // SAFETY: as above.
                unsafe { write_half(numbers[part][half], all[scale], min, to) };
            }
        }
    }
}

/// Returns the indices of scale and minimum of half a part among those that [`Avx2Blocks::scales`] returns.
#[inline(always)]
fn lanes_of<B: Avx2Blocks>(place: usize, part: usize, half: usize) -> (usize, usize) {
    let index = 2 * place + part;
    match (B::IS_LONG, B::SHARED == PART) {
        (false, _) => (LANES / 2 * part, LANES + LANES / 2 * part),
        (true, true) => (index, LANES + index),
        (true, false) => (2 * index + half, 2 * (LANES + index) + half),
    }
}

/// Returns the numbers of a place of a unit without their offset: both halves of both parts.
///
/// # Safety
/// As for [`write_unit`].
#[inline(always)]
unsafe fn halves<B: Avx2Blocks>(unit: *const B, place: usize) -> [[__m128i; 2]; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let [mut first, mut second] = B::numbers(unit, place);
        if B::IS_PAIRED {
            (first, second) = (_mm256_unpacklo_epi8(first, second), _mm256_unpackhi_epi8(first, second));
        }
        let offset = _mm256_set1_epi8(B::OFFSET.cast_signed());
        let (first, second) = (_mm256_sub_epi8(first, offset), _mm256_sub_epi8(second, offset));
        [
            [_mm256_castsi256_si128(first), _mm256_castsi256_si128(second)],
            [_mm256_extracti128_si256::<1>(first), _mm256_extracti128_si256::<1>(second)],
        ]
    }
}

/// # Safety
/// As for [`write_row`].
#[inline(always)]
unsafe fn write_half(numbers: __m128i, scale: f32, min: Option<f32>, to: &mut [bf16; HALF]) {
    // No closures: they are compiled without the CPU features, so they would stay calls.
    // SAFETY: the caller's promise; `to` has 256 bits.
    unsafe {
        let scale = _mm256_set1_ps(scale);
        let mut first = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(numbers)), scale);
        let mut second = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128::<8>(numbers))), scale);
        if let Some(min) = min {
            let min = _mm256_set1_ps(min);
            (first, second) = (_mm256_sub_ps(first, min), _mm256_sub_ps(second, min));
        }
        _mm256_storeu_ps(to.as_mut_ptr().cast(), round_8(first, second));
    }
}
