//! Rows of blocks turned into the bf16 numbers nearest to what they stand for, by AVX2.

use core::arch::x86_64::{
    __m128i, _mm_srli_si128, _mm256_castsi256_si128, _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps,
    _mm256_extracti128_si256, _mm256_mul_ps, _mm256_set1_epi8, _mm256_set1_ps, _mm256_storeu_ps, _mm256_sub_epi8,
    _mm256_sub_ps, _mm256_unpackhi_epi8, _mm256_unpacklo_epi8,
};

use moeworks_tensor::bf16;

use super::layouts::PART;
use super::octets::Octets;
use super::stream::{MAX_BLOCKS, unit_of_scales};
use super::weights::Layout;
use super::{blocks_of, with_ints};
use crate::simd::rounding::round_8;

/// Half of a part.
const HALF: usize = PART / 2;

/// Lanes of a vector.
const LANES: usize = 8;

/// Writes as many numbers of a row of whole blocks of whole numbers, or of its part, as there is room for.
///
/// # Safety
/// The machine must have AVX2, FMA, F16C and BMI2.
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
pub(super) unsafe fn write_row((numbers, scales): (&[u8], &[u8]), layout: Layout, to: &mut [bf16]) {
    // SAFETY: the caller's promise.
    with_ints!(layout, B => unsafe { write::<B>(blocks_of::<B>(numbers), scales, to) });
}

// What follows is inlined into that, and has its instructions.

/// # Safety
/// As for [`write_row`].
#[inline(always)]
unsafe fn write<B: Octets>(blocks: &[B], scales: &[u8], to: &mut [bf16]) {
    assert!(scales.len() >= blocks.len() * B::APART, "scales of a row");
    let units = blocks.chunks(B::BLOCKS);
    for (index, (unit, to)) in units.zip(to.chunks_mut(B::BLOCKS * B::LEN)).enumerate() {
        let scales = &scales[index * B::BLOCKS * B::APART..];
        if unit.len() == B::BLOCKS {
            // SAFETY: the caller's promise.
            unsafe { write_unit::<B>((unit.as_ptr(), scales.as_ptr()), to) };
            continue;
        }
        let mut whole = [B::zeroed(); MAX_BLOCKS];
        whole[..unit.len()].copy_from_slice(unit);
        // SAFETY: as above.
        unsafe { write_unit::<B>((whole.as_ptr(), unit_of_scales(scales).as_ptr()), to) };
    }
}

/// Writes as many numbers of a unit as there is room for.
///
/// # Safety
/// As for [`write_row`]; the unit and its scales must be readable.
#[inline(always)]
unsafe fn write_unit<B: Octets>((unit, scales): (*const B, *const u8), to: &mut [bf16]) {
    // Lanes of these are had from memory in fewer steps than from registers.
    let mut all = [0.0_f32; 4 * LANES];
    // SAFETY: the caller's promise; there is room for four vectors.
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
                let (scale, least) = lanes_of::<B>(place, part, half);
                let least = if B::HAS_LEAST { Some(all[least]) } else { None };
                // SAFETY: as above.
                unsafe { write_half(numbers[part][half], (all[scale], least), to) };
            }
        }
    }
}

/// Where scale and least value of half a part are among those that [`Octets::scales`] gives.
#[inline(always)]
fn lanes_of<B: Octets>(place: usize, part: usize, half: usize) -> (usize, usize) {
    let index = 2 * place + part;
    match (B::IS_LONG, B::SHARED == PART) {
        (false, _) => (LANES / 2 * part, LANES + LANES / 2 * part),
        (true, true) => (index, LANES + index),
        (true, false) => (2 * index + half, 2 * (LANES + index) + half),
    }
}

/// The numbers of a place of a unit without their offset: of both parts both halves.
///
/// # Safety
/// As for [`write_unit`].
#[inline(always)]
unsafe fn halves<B: Octets>(unit: *const B, place: usize) -> [[__m128i; 2]; 2] {
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
unsafe fn write_half(numbers: __m128i, (scale, least): (f32, Option<f32>), to: &mut [bf16; HALF]) {
    // No closures, which have not the instructions, so that they would stay calls.
    // SAFETY: the caller's promise; there is room for 256 bits.
    unsafe {
        let scale = _mm256_set1_ps(scale);
        let mut first = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(numbers)), scale);
        let mut second = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128::<8>(numbers))), scale);
        if let Some(least) = least {
            let least = _mm256_set1_ps(least);
            (first, second) = (_mm256_sub_ps(first, least), _mm256_sub_ps(second, least));
        }
        _mm256_storeu_ps(to.as_mut_ptr().cast(), round_8(first, second));
    }
}
