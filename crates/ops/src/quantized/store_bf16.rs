//! Stores of dequantized numbers, rounded to bf16, for products of many rows.

use core::arch::x86_64::{
    __m512, __m512i, _mm512_and_si512, _mm512_loadu_si512, _mm512_permutex2var_epi16, _mm512_permutex2var_epi32,
    _mm512_set1_epi32, _mm512_storeu_si512,
};

use moeworks_tensor::bf16;

use super::layouts::PART;
use crate::simd::rounding::nearest_of_16;
use crate::simd::{Avx512, Avx512Bf16, Level};

/// The lanes of a vector; two of them are a part.
const HALF: usize = PART / 2;

/// A way to store numbers.
///
/// # Safety of all functions
///
/// The machine must have AVX2, FMA, F16C, BMI2 and AVX-512 F, BW, DQ and VL. Functions are inlined into callers
/// compiled with these.
pub(super) trait StoreNumbers {
    /// The type of a number in memory.
    type Number;

    /// Stores the lanes of the first vector and then those of the second.
    ///
    /// # Safety
    /// As the trait says, and what the implementation adds.
    unsafe fn store(lanes: [__m512; 2], to: &mut [Self::Number; PART]);

    /// Stores the lanes of both vectors interleaved.
    ///
    /// # Safety
    /// As the trait says, and what the implementation adds.
    unsafe fn store_interleaved(lanes: [__m512; 2], to: &mut [Self::Number; PART]);
}

/// For each number of an interleaved store the index of its lane in both vectors.
const IN_TURN: [u32; PART] = {
    let mut places = [0; PART];
    let mut i = 0;
    while i < PART {
        places[i] = (i / 2 + i % 2 * HALF) as u32;
        i += 1;
    }
    places
};

/// For each number of an interleaved store the index of the upper word of its lane.
const UPPER_IN_TURN: [u16; PART] = {
    let mut words = [0; PART];
    let mut i = 0;
    while i < PART {
        words[i] = (2 * IN_TURN[i] + 1) as u16;
        i += 1;
    }
    words
};

/// Stores bf16 with the instructions of AVX-512 BF16, which the machine must have. Subnormal numbers become zero.
pub(super) struct ByInstruction;

impl StoreNumbers for ByInstruction {
    type Number = bf16;

    #[inline(always)]
    unsafe fn store(lanes: [__m512; 2], to: &mut [bf16; PART]) {
        // SAFETY: the caller's promise; 32 bf16 have the bits of a vector.
        unsafe { Avx512Bf16::store(to.as_mut_ptr().cast(), Avx512Bf16::round(lanes)) };
    }

    #[inline(always)]
    unsafe fn store_interleaved([first, second]: [__m512; 2], to: &mut [bf16; PART]) {
        // SAFETY: as above.
        unsafe { Avx512Bf16::store(to.as_mut_ptr().cast(), Avx512Bf16::pair(first, second)) };
    }
}

/// Stores bf16 with integer operations.
pub(super) struct ByWords;

impl StoreNumbers for ByWords {
    type Number = bf16;

    #[inline(always)]
    unsafe fn store(lanes: [__m512; 2], to: &mut [bf16; PART]) {
        // SAFETY: the caller's promise; 32 bf16 have the bits of a vector.
        unsafe { Avx512::store(to.as_mut_ptr().cast(), Avx512::round(lanes)) };
    }

    #[inline(always)]
    unsafe fn store_interleaved([first, second]: [__m512; 2], to: &mut [bf16; PART]) {
        // SAFETY: the caller's promise; the words are 512 bits, and `to` has as many.
        unsafe {
            let words = _mm512_loadu_si512(const { &UPPER_IN_TURN }.as_ptr().cast());
            let rounded = _mm512_permutex2var_epi16(nearest_of_16(first), words, nearest_of_16(second));
            _mm512_storeu_si512(to.as_mut_ptr().cast(), rounded);
        }
    }
}

/// Stores f32 rounded to bf16.
pub(super) struct Widened;

impl StoreNumbers for Widened {
    type Number = u32;

    #[inline(always)]
    unsafe fn store(lanes: [__m512; 2], to: &mut [u32; PART]) {
        for (lanes, to) in lanes.into_iter().zip(to.chunks_exact_mut(HALF)) {
            // SAFETY: the caller's promise; `to` has 16 numbers.
            unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), upper_words(lanes)) };
        }
    }

    #[inline(always)]
    unsafe fn store_interleaved([first, second]: [__m512; 2], to: &mut [u32; PART]) {
        // SAFETY: the caller's promise; `to` has 32 numbers, and so do the indices.
        unsafe {
            let (first, second) = (upper_words(first), upper_words(second));
            for (places, to) in const { &IN_TURN }.chunks_exact(HALF).zip(to.chunks_exact_mut(HALF)) {
                let places = _mm512_loadu_si512(places.as_ptr().cast());
                _mm512_storeu_si512(to.as_mut_ptr().cast(), _mm512_permutex2var_epi32(first, places, second));
            }
        }
    }
}

/// # Safety
/// As [`StoreNumbers`] says.
#[inline(always)]
unsafe fn upper_words(lanes: __m512) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe { _mm512_and_si512(nearest_of_16(lanes), _mm512_set1_epi32(0xffff_0000_u32.cast_signed())) }
}
