//! Blocks as vectors of unsigned bytes with their scales, for AVX-512.

use core::arch::x86_64::{
    __m128, __m128i, __m512, __m512i, _mm_castsi128_ps, _mm_cvtph_ps, _mm_cvtsi32_si128, _mm_fmadd_ps, _mm_loadu_si128,
    _mm_max_epi32, _mm_movehdup_ps, _mm_permute_ps, _mm_set_epi32, _mm_set_epi64x, _mm_set1_epi32, _mm_set1_ps,
    _mm_slli_epi32, _mm_sub_ps, _mm256_broadcastsi128_si256, _mm256_loadu_si256, _mm512_and_si512,
    _mm512_broadcast_i32x4, _mm512_broadcast_i64x4, _mm512_broadcastss_ps, _mm512_castps128_ps512,
    _mm512_castsi128_si512, _mm512_castsi256_si512, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps, _mm512_cvtepu8_epi32,
    _mm512_inserti64x4, _mm512_loadu_si512, _mm512_mask_broadcast_i32x4, _mm512_maskz_set1_epi8, _mm512_mul_ps,
    _mm512_or_si512, _mm512_set_epi64, _mm512_set1_epi8, _mm512_set1_epi32, _mm512_setzero_ps, _mm512_shuffle_epi8,
    _mm512_shuffle_f32x4, _mm512_slli_epi16, _mm512_srli_epi16, _mm512_srlv_epi64, _mm512_sub_epi32, _mm512_xor_si512,
};

use moeworks_tensor::{
    Iq4NlBlock, Mxfp4Block, Q2KBlock, Q3KBlock, Q4_1Block, Q4Block, Q4KBlock, Q5_0Block, Q5_1Block, Q5KBlock, Q6KBlock,
    Q8Block,
};

use super::layouts::{Block, FP4_LEVELS, IQ4_LEVELS};

/// Elements of a vector of bytes.
pub(super) const PAIR: usize = 64;

/// A type of blocks as vectors. A unit is two neighbouring short blocks, or a long one twice.
///
/// All functions ask for readable blocks, and for a machine with AVX-512 F, BW, DQ and VL, AVX2 and F16C.
pub(super) trait Lanes: Block {
    /// What is added to the whole numbers to make them unsigned.
    const OFFSET: i8;

    /// Blocks of a unit, and its vectors of bytes.
    const BLOCKS: usize = PAIR.div_ceil(Self::DTYPE.block_len());
    /// See [`BLOCKS`](Self::BLOCKS).
    const PAIRS: usize = Self::DTYPE.block_len().div_ceil(PAIR);

    /// Of types whose blocks are 32 numbers of four bits: how they lie.
    const NIBBLES: Option<Nibbles> = None;

    /// For each of a unit's vectors, whose scale four neighbours each take.
    const SCALE_LANES: [[i32; 16]; 4] = scale_lanes(Self::SHARED);

    /// Scales and least values of a unit, in the order of its elements.
    ///
    /// # Safety
    /// As the trait says.
    unsafe fn scales(unit: [*const Self; 2]) -> [__m512; 2];

    /// 64 elements of a unit from `64 * pair` on.
    ///
    /// # Safety
    /// As the trait says; `pair` is below [`PAIRS`](Self::PAIRS).
    unsafe fn bytes(unit: [*const Self; 2], pair: usize) -> __m512i;
}

/// 32 numbers of four bits: the low halves of 16 bytes, then the high ones.
#[derive(Clone, Copy)]
pub(super) struct Nibbles {
    /// The first of the bytes.
    at: usize,
    /// What the numbers stand for, as unsigned bytes larger by the type's offset; none where that is themselves.
    levels: Option<&'static [i8; 16]>,
}

const fn raised(levels: &[i8; 16], by: i8) -> [i8; 16] {
    let mut raised = *levels;
    let mut i = 0;
    while i < 16 {
        raised[i] = raised[i].wrapping_add(by);
        i += 1;
    }
    raised
}

impl Nibbles {
    /// What four-bit numbers stand for.
    ///
    /// # Safety
    /// As [`Lanes`] says.
    #[inline(always)]
    unsafe fn levels(self, numbers: __m512i) -> __m512i {
        let Some(levels) = self.levels else { return numbers };
        // SAFETY: the caller's promise.
        unsafe { _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(levels.as_ptr().cast())), numbers) }
    }

    /// The first 16 numbers of each of four blocks, then the others.
    ///
    /// # Safety
    /// As [`Lanes`] says.
    #[inline(always)]
    pub(super) unsafe fn of_four<B>(self, blocks: [*const B; 4]) -> [__m512i; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let [first, second, third, fourth] = blocks.map(|block| block.cast::<u8>().wrapping_add(self.at).cast());
            let all = _mm512_castsi128_si512(_mm_loadu_si128(first));
            let all = _mm512_mask_broadcast_i32x4(all, 0x00f0, _mm_loadu_si128(second));
            let all = _mm512_mask_broadcast_i32x4(all, 0x0f00, _mm_loadu_si128(third));
            let all = _mm512_mask_broadcast_i32x4(all, 0xf000, _mm_loadu_si128(fourth));
            let mask = _mm512_set1_epi8(15);
            let low = _mm512_and_si512(all, mask);
            let high = _mm512_and_si512(_mm512_srli_epi16::<4>(all), mask);
            [self.levels(low), self.levels(high)]
        }
    }
}

const fn scale_lanes(shared: usize) -> [[i32; 16]; 4] {
    let mut lanes = [[0; 16]; 4];
    let mut i = 0;
    while i < 64 {
        lanes[i / 16][i % 16] = (4 * i / shared) as i32;
        i += 1;
    }
    lanes
}

/// Bytes `at` to `at + 2` of two blocks as the f16 that they are: in lanes 0 and 1.
///
/// # Safety
/// As [`Lanes`] says.
#[inline(always)]
unsafe fn halves_of_both<B: Block>([first, second]: [*const B; 2], at: usize) -> [__m512; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = |block: *const B| u32::from(block.cast::<u8>().add(at).cast::<u16>().read_unaligned());
        let halves = _mm_cvtph_ps(_mm_cvtsi32_si128((bits(first) | bits(second) << 16).cast_signed()));
        [_mm512_castps128_ps512(halves), _mm512_setzero_ps()]
    }
}

/// Scale and least value of two blocks that begin with an f16 for each, the latter to be added.
///
/// # Safety
/// As [`Lanes`] says.
#[inline(always)]
unsafe fn scale_and_sum_of_both<B: Block>([first, second]: [*const B; 2]) -> [__m512; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = |block: *const B| block.cast::<u64>().read_unaligned() & 0xffff_ffff;
        let both = bits(first) | bits(second) << 32;
        let all: __m128 = _mm_cvtph_ps(_mm_set_epi64x(0, both.cast_signed()));
        let least = _mm512_mul_ps(
            _mm512_castps128_ps512(_mm_permute_ps::<0b1101>(all)),
            core::arch::x86_64::_mm512_set1_ps(-1.0),
        );
        [_mm512_castps128_ps512(_mm_permute_ps::<0b1000>(all)), least]
    }
}

/// The f16 at `at` and the one behind it, each in all lanes.
///
/// # Safety
/// As [`Lanes`] says.
#[inline(always)]
unsafe fn two_halves<B>(block: *const B, at: usize) -> [__m512; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let both = _mm_cvtph_ps(_mm_cvtsi32_si128(block.cast::<u8>().add(at).cast::<i32>().read_unaligned()));
        [_mm512_broadcastss_ps(both), _mm512_broadcastss_ps(_mm_movehdup_ps(both))]
    }
}

/// The f16 at `at` in all lanes.
///
/// # Safety
/// As [`Lanes`] says.
#[inline(always)]
unsafe fn half<B>(block: *const B, at: usize) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = block.cast::<u8>().add(at).cast::<u16>().read_unaligned();
        _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))))
    }
}

/// Sixteen unsigned bytes as floats.
///
/// # Safety
/// As [`Lanes`] says.
#[inline(always)]
unsafe fn floats(bytes: __m128i) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)) }
}

/// The 64 four-bit numbers that begin at byte `at` of two short blocks.
///
/// # Safety
/// As [`Lanes`] says.
#[inline(always)]
unsafe fn nibbles<B: Block>([first, second]: [*const B; 2], at: usize) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let twice = |block: *const B| _mm256_broadcastsi128_si256(_mm_loadu_si128(block.cast::<u8>().add(at).cast()));
        let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(twice(first)), twice(second));
        // The low halves of the bytes are the first 16 weights of a block, the high ones the others.
        let halves = _mm512_srlv_epi64(both, _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0));
        _mm512_and_si512(halves, _mm512_set1_epi8(15))
    }
}

/// 16 where one of the 64 bits is set that begin at byte `at` of two short blocks.
///
/// # Safety
/// As [`Lanes`] says.
#[inline(always)]
unsafe fn fifth_bits<B: Block>([first, second]: [*const B; 2], at: usize) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = |block: *const B| u64::from(block.cast::<u8>().add(at).cast::<u32>().read_unaligned());
        _mm512_maskz_set1_epi8(bits(first) | bits(second) << 32, 16)
    }
}

/// 32 bytes from `at` on, twice: the first time shifted to the right by `low`, the second by `high` bits, and of each the bits
/// of `mask`.
///
/// # Safety
/// As [`Lanes`] says.
#[inline(always)]
unsafe fn shifted<B>(block: *const B, at: usize, (low, high): (usize, usize), mask: i8) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let twice = _mm512_broadcast_i64x4(_mm256_loadu_si256(block.cast::<u8>().add(at).cast()));
        let (low, high) = (low as i64, high as i64);
        let shifted = _mm512_srlv_epi64(twice, _mm512_set_epi64(high, high, high, high, low, low, low, low));
        _mm512_and_si512(shifted, _mm512_set1_epi8(mask))
    }
}

impl Lanes for Q8Block {
    const OFFSET: i8 = i8::MIN; // 128 as an unsigned byte

    #[inline(always)]
    unsafe fn scales(unit: [*const Self; 2]) -> [__m512; 2] {
        // SAFETY: the caller's promise.
        unsafe { halves_of_both(unit, 0) }
    }

    #[inline(always)]
    unsafe fn bytes([first, second]: [*const Self; 2], _: usize) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe {
            let first = _mm256_loadu_si256((&raw const (*first).values).cast());
            let second = _mm256_loadu_si256((&raw const (*second).values).cast());
            let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(first), second);
            _mm512_xor_si512(both, _mm512_set1_epi8(Self::OFFSET))
        }
    }
}

/// Types of which scales and bytes are an expression each.
macro_rules! lanes {
    ($($block:ty, $offset:expr, |$unit:ident| $scales:expr, |$of:pat_param, $pair:pat_param| $bytes:expr;)*) => {
        $(
            impl Lanes for $block {
                const OFFSET: i8 = $offset;

                #[inline(always)]
                unsafe fn scales($unit: [*const Self; 2]) -> [__m512; 2] {
                    // SAFETY: the caller's promise.
                    unsafe { $scales }
                }

                #[inline(always)]
                unsafe fn bytes($of: [*const Self; 2], $pair: usize) -> __m512i {
                    // SAFETY: the caller's promise.
                    unsafe { $bytes }
                }
            }
        )*
    };
}

lanes! {
    Q4_1Block, 0, |unit| scale_and_sum_of_both(unit), |unit, _| nibbles(unit, 4);
    Q5_0Block, 16, |unit| halves_of_both(unit, 0), |unit, _| _mm512_or_si512(nibbles(unit, 6), fifth_bits(unit, 2));
    Q5_1Block, 0, |unit| scale_and_sum_of_both(unit), |unit, _| _mm512_or_si512(nibbles(unit, 8), fifth_bits(unit, 4));
    Q2KBlock, 0, |unit| q2_scales(unit[0]),
        |[block, _], pair| shifted(block, 16 + pair / 2 * 32, (pair % 2 * 4, pair % 2 * 4 + 2), 3);
    Q3KBlock, 4, |unit| q3_scales(unit[0]), |[block, _], pair| {
        let low = shifted(block, 32 + pair / 2 * 32, (pair % 2 * 4, pair % 2 * 4 + 2), 3);
        _mm512_or_si512(low, _mm512_slli_epi16::<2>(shifted(block, 0, (2 * pair, 2 * pair + 1), 1)))
    };
    Q4KBlock, 0, |unit| six_bit_scales(unit[0]), |[block, _], pair| shifted(block, 16 + 32 * pair, (0, 4), 15);
    Q5KBlock, 0, |unit| six_bit_scales(unit[0]), |[block, _], pair| {
        let fifth = shifted(block, 16, (2 * pair, 2 * pair + 1), 1);
        _mm512_or_si512(shifted(block, 48 + 32 * pair, (0, 4), 15), _mm512_slli_epi16::<4>(fifth))
    };
    Q6KBlock, 32, |unit| q6_scales(unit[0]), |[block, _], pair| {
        let both = _mm512_loadu_si512(block.cast::<u8>().add(pair / 2 * 64).cast());
        let half = if pair.is_multiple_of(2) { both } else { _mm512_srli_epi16::<4>(both) };
        let high = shifted(block, 128 + pair / 2 * 32, (pair % 2 * 4, pair % 2 * 4 + 2), 3);
        _mm512_or_si512(_mm512_and_si512(half, _mm512_set1_epi8(15)), _mm512_slli_epi16::<4>(high))
    };
}

/// Types of four-bit numbers that nothing but a scale comes with.
macro_rules! nibble_lanes {
    ($($block:ty, $offset:expr, $at:expr, $levels:expr, |$unit:ident| $scales:expr;)*) => {
        $(
            impl Lanes for $block {
                const OFFSET: i8 = $offset;
                const NIBBLES: Option<Nibbles> = Some(Nibbles { at: $at, levels: $levels });

                #[inline(always)]
                unsafe fn scales($unit: [*const Self; 2]) -> [__m512; 2] {
                    // SAFETY: the caller's promise.
                    unsafe { $scales }
                }

                #[inline(always)]
                unsafe fn bytes(unit: [*const Self; 2], _: usize) -> __m512i {
                    // SAFETY: the caller's promise.
                    unsafe { Nibbles { at: $at, levels: $levels }.levels(nibbles(unit, $at)) }
                }
            }
        )*
    };
}

nibble_lanes! {
    Q4Block, 8, 2, None, |unit| halves_of_both(unit, 0);
    Iq4NlBlock, i8::MIN, 2, Some(const { &raised(&IQ4_LEVELS, i8::MIN) }), |unit| halves_of_both(unit, 0);
    Mxfp4Block, 12, 1, Some(const { &raised(&FP4_LEVELS, 12) }), |unit| powers(unit);
}

/// # Safety
/// As [`Lanes`] says.
#[inline(always)]
unsafe fn powers(unit: [*const Mxfp4Block; 2]) -> [__m512; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let [first, second] = unit.map(|block| i32::from((*block).bytes()[0]));
        // Exponent 0 is too small for a float's own exponent; all ones, which would be infinite, become NaN.
        let powers = _mm_slli_epi32::<23>(_mm_set_epi32(0, 0, second, first));
        let powers = _mm_castsi128_ps(_mm_max_epi32(powers, _mm_set1_epi32(0x0040_0000)));
        let halves = _mm_fmadd_ps(powers, _mm_set1_ps(0.5), _mm_sub_ps(powers, powers));
        [_mm512_castps128_ps512(halves), _mm512_setzero_ps()]
    }
}

/// # Safety
/// As [`Lanes`] says.
#[inline(always)]
unsafe fn q2_scales(block: *const Q2KBlock) -> [__m512; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let [scale, least] = two_halves(block, 80);
        let both = _mm512_cvtepu8_epi32(_mm_loadu_si128(block.cast()));
        let low = _mm512_and_si512(both, _mm512_set1_epi32(15));
        let high = core::arch::x86_64::_mm512_srli_epi32::<4>(both);
        [_mm512_mul_ps(_mm512_cvtepi32_ps(low), scale), _mm512_mul_ps(_mm512_cvtepi32_ps(high), least)]
    }
}

/// # Safety
/// As [`Lanes`] says.
#[inline(always)]
unsafe fn q3_scales(block: *const Q3KBlock) -> [__m512; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let bytes = block.cast::<u8>();
        let low = bytes.add(96).cast::<u64>().read_unaligned();
        let high = u64::from(bytes.add(104).cast::<u32>().read_unaligned());
        // Two bits of each of four bytes for each four scales.
        let high = |at: u32| (high >> (2 * at) & 0x0303_0303) << 4;
        let low = |at: u32| low >> (4 * at) & 0x0f0f_0f0f_0f0f_0f0f;
        let [first, second] = [(low(0), 0), (low(1), 2)].map(|(low, at)| low | high(at) | high(at + 1) << 32);
        let all = _mm512_cvtepu8_epi32(_mm_set_epi64x(second.cast_signed(), first.cast_signed()));
        let all = _mm512_cvtepi32_ps(_mm512_sub_epi32(all, _mm512_set1_epi32(32)));
        [_mm512_mul_ps(all, half(block, 108)), _mm512_setzero_ps()]
    }
}

/// Eight scales and eight least values of six bits in the twelve bytes behind their factors.
///
/// # Safety
/// As [`Lanes`] says.
#[inline(always)]
unsafe fn six_bit_scales<B>(block: *const B) -> [__m512; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let word = |index: usize| block.cast::<u32>().add(1 + index).read_unaligned();
        let (six, four, two) = (0x3f3f_3f3f, 0x0f0f_0f0f, 0x0303_0303);
        let (first, second, third) = (word(0), word(1), word(2));
        let late = |low: u32, high: u32| (low & four | (high >> 6 & two) << 4).cast_signed();
        let early = |word: u32| (word & six).cast_signed();
        let all = floats(_mm_set_epi32(late(third >> 4, second), early(second), late(third, first), early(first)));
        let [scale, least] = two_halves(block, 0);
        [_mm512_mul_ps(all, scale), _mm512_mul_ps(_mm512_shuffle_f32x4::<0b01_00_11_10>(all, all), least)]
    }
}

/// # Safety
/// As [`Lanes`] says.
#[inline(always)]
unsafe fn q6_scales(block: *const Q6KBlock) -> [__m512; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let all = _mm512_cvtepi8_epi32(_mm_loadu_si128(block.cast::<u8>().add(192).cast()));
        [_mm512_mul_ps(_mm512_cvtepi32_ps(all), half(block, 208)), _mm512_setzero_ps()]
    }
}
