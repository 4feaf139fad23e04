//! Blocks as vectors of 32 bytes with their scales, for AVX2.

use core::arch::x86_64::{
    __m128i, __m256, __m256i, _mm_and_si128, _mm_cvtph_ps, _mm_cvtsi32_si128, _mm_loadl_epi64, _mm_loadu_si128,
    _mm_or_si128, _mm_set_epi8, _mm_set_epi32, _mm_set1_epi8, _mm_set1_epi16, _mm_set1_epi32, _mm_shuffle_epi8,
    _mm_slli_epi32, _mm_srli_epi32, _mm_srli_si128, _mm_srlv_epi32, _mm_unpacklo_epi64, _mm256_add_ps,
    _mm256_and_si256, _mm256_broadcastss_ps, _mm256_castsi256_ps, _mm256_cmpeq_epi8, _mm256_cvtepi8_epi32,
    _mm256_cvtepi32_ps, _mm256_cvtepu8_epi32, _mm256_cvtph_ps, _mm256_loadu_si256, _mm256_max_epi32, _mm256_mul_ps,
    _mm256_or_si256, _mm256_permute2x128_si256, _mm256_set_epi64x, _mm256_set_m128i, _mm256_set1_epi8,
    _mm256_set1_epi32, _mm256_set1_epi64x, _mm256_set1_ps, _mm256_setzero_ps, _mm256_shuffle_epi8, _mm256_slli_epi32,
    _mm256_sllv_epi64, _mm256_srli_epi16, _mm256_srlv_epi64, _mm256_sub_epi32, _mm256_sub_ps,
};

use moeworks_tensor::{
    Iq4NlBlock, Mxfp4Block, Q2KBlock, Q3KBlock, Q4_1Block, Q4Block, Q4KBlock, Q5_0Block, Q5_1Block, Q5KBlock, Q6KBlock,
    Q8Block,
};

use super::layouts::{Block, FP4_LEVELS, Fp4Pairs, IQ4_LEVELS, PART};

/// A type of blocks as AVX2 vectors.
///
/// Numbers are taken 64 at a time, two parts of 32: half a quad, called a place. Two vectors hold them, the first 16
/// numbers of each part and the other 16 of each, so that four consecutive lanes of their products belong to one
/// part. A unit has the blocks that a vector of scales covers: two consecutive short blocks, or a long one, which has
/// four places.
///
/// # Safety of all functions
///
/// Units must be readable, and the machine must have AVX2 and F16C.
pub(super) trait Avx2Blocks: Block {
    /// Added to the integers to make them unsigned and below 64; 0 if they are so already or are signed.
    const OFFSET: u8 = 0;
    /// True if the numbers are signed bytes.
    const IS_SIGNED: bool = false;
    /// True if the first vector holds the even numbers of each part and the second the odd ones, instead of its
    /// halves.
    const IS_PAIRED: bool = false;

    /// True if a unit is one block.
    const IS_LONG: bool = Self::LEN > PART;
    /// Blocks of a unit.
    const BLOCKS: usize = if Self::IS_LONG { 1 } else { 2 };

    /// Returns scales and minima of a unit. For short blocks: scales, each four times, and minima, each four times.
    /// For a long one with eight of each: scales, and minima. For one with sixteen: the scales of its halves, and the
    /// minima of its halves. `split_scale` points at the unit's scales if they are in a tensor of their own.
    ///
    /// # Safety
    /// As the trait says, also for `split_scale`.
    unsafe fn scales(unit: *const Self, split_scale: *const u8) -> [__m256; 4];

    /// Returns the numbers of place `place` of a unit.
    ///
    /// # Safety
    /// As the trait says; `place` is below 4, and 0 for short blocks.
    unsafe fn numbers(unit: *const Self, place: usize) -> [__m256i; 2];
}

/// # Safety
/// As [`Avx2Blocks`] says.
#[inline(always)]
unsafe fn load_16<B>(block: *const B, at: usize) -> __m128i {
    // SAFETY: the caller's promise.
    unsafe { _mm_loadu_si128(block.cast::<u8>().add(at).cast()) }
}

/// Returns the 16 bytes from `at` on in both halves of a vector.
///
/// # Safety
/// As [`Avx2Blocks`] says.
#[inline(always)]
unsafe fn twice_16<B>(block: *const B, at: usize) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let bytes = load_16(block, at);
        _mm256_set_m128i(bytes, bytes)
    }
}

/// Returns the f16 at byte `AT` of each of two blocks, each four times.
///
/// # Safety
/// As [`Avx2Blocks`] says.
#[inline(always)]
unsafe fn half_of_each<B: Block, const AT: usize>(unit: *const B) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        let half = |index: usize| _mm_set1_epi16(unit.add(index).cast::<u8>().add(AT).cast::<i16>().read_unaligned());
        _mm256_cvtph_ps(_mm_unpacklo_epi64(half(0), half(1)))
    }
}

/// Returns the scale at the beginning of each of two blocks.
///
/// # Safety
/// As [`Avx2Blocks`] says.
#[inline(always)]
unsafe fn scale_alone<B: Block>(unit: *const B) -> [__m256; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let zero = _mm256_setzero_ps();
        [half_of_each::<B, 0>(unit), zero, zero, zero]
    }
}

/// Returns the scale at the beginning of each of two blocks, and as minimum the negative of the second f16, which the
/// type adds.
///
/// # Safety
/// As [`Avx2Blocks`] says.
#[inline(always)]
unsafe fn scale_and_sum<B: Block>(unit: *const B) -> [__m256; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let zero = _mm256_setzero_ps();
        [half_of_each::<B, 0>(unit), _mm256_sub_ps(zero, half_of_each::<B, 2>(unit)), zero, zero]
    }
}

/// Returns the low four bits of each byte, and the high ones.
///
/// # Safety
/// As [`Avx2Blocks`] says.
#[inline(always)]
unsafe fn halves_of_bytes(bytes: __m256i) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let mask = _mm256_set1_epi8(15);
        [_mm256_and_si256(bytes, mask), _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), mask)]
    }
}

/// Returns the four-bit numbers in the 16 bytes from byte `AT` on of each of two blocks.
///
/// # Safety
/// As [`Avx2Blocks`] says.
#[inline(always)]
unsafe fn nibbles<B: Block, const AT: usize>(unit: *const B) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    unsafe { halves_of_bytes(_mm256_set_m128i(load_16(unit.add(1), AT), load_16(unit, AT))) }
}

/// Returns the five-bit numbers of two blocks: four bits as in [`nibbles`], the fifth ones in four bytes from `FIFTH`
/// on.
///
/// # Safety
/// As [`Avx2Blocks`] says.
#[inline(always)]
unsafe fn five_bits<B: Block, const AT: usize, const FIFTH: usize>(unit: *const B) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let bits =
            |index: usize| _mm_set1_epi32(unit.add(index).cast::<u8>().add(FIFTH).cast::<i32>().read_unaligned());
        let bits = _mm256_set_m128i(bits(1), bits(0));
        // Each byte of bits comes eight times, each of which keeps one bit.
        let each = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
        let fifth = |from: i64| {
            let (low, high) = (from * 0x0101_0101_0101_0101, (from + 1) * 0x0101_0101_0101_0101);
            let spread = _mm256_shuffle_epi8(bits, _mm256_set_epi64x(high, low, high, low));
            let is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, each), each);
            _mm256_and_si256(is_set, _mm256_set1_epi8(16))
        };
        let [first, second] = nibbles::<B, AT>(unit);
        [_mm256_or_si256(first, fifth(0)), _mm256_or_si256(second, fifth(2))]
    }
}

/// Looks up the levels of four-bit numbers.
///
/// # Safety
/// As [`Avx2Blocks`] says.
#[inline(always)]
unsafe fn levels([first, second]: [__m256i; 2], levels: &[i8; 16]) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let levels = twice_16(levels, 0);
        [_mm256_shuffle_epi8(levels, first), _mm256_shuffle_epi8(levels, second)]
    }
}

/// Shifts the 16 bytes from `at` on for each of two parts, so that bit `first` (for the second part bit `first +
/// step`) becomes bit `to`, and masks each byte with `mask`. The second vector holds the next 16 bytes.
///
/// # Safety
/// As [`Avx2Blocks`] says.
#[inline(always)]
unsafe fn moved<B>(block: *const B, at: usize, first: i64, step: i64, to: i64, mask: i8) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let shifts = |sign: i64| {
            let by = |part: i64| (sign * (first + part * step - to)).max(0);
            _mm256_set_epi64x(by(1), by(1), by(0), by(0))
        };
        let (right, left) = (shifts(1), shifts(-1));
        // Bits that are shifted from one byte into the next are outside the mask.
        let moved = |at: usize| {
            let bytes = _mm256_sllv_epi64(_mm256_srlv_epi64(twice_16(block, at), right), left);
            _mm256_and_si256(bytes, _mm256_set1_epi8(mask))
        };
        [moved(at), moved(at + 16)]
    }
}

/// # Safety
/// As [`Avx2Blocks`] says.
#[inline(always)]
unsafe fn or(low: [__m256i; 2], high: [__m256i; 2]) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    unsafe { [_mm256_or_si256(low[0], high[0]), _mm256_or_si256(low[1], high[1])] }
}

/// Implements [`Avx2Blocks`] for types whose scales and numbers are one expression each.
macro_rules! avx2_blocks {
    ($($block:ty, $offset:literal, $is_signed:literal, |$unit:ident| $scales:expr, |$of:pat_param, $place:pat_param| $numbers:expr;)*) => {
        $(
            impl Avx2Blocks for $block {
                const OFFSET: u8 = $offset;
                const IS_SIGNED: bool = $is_signed;

                #[inline(always)]
                unsafe fn scales($unit: *const Self, _: *const u8) -> [__m256; 4] {
                    // SAFETY: the caller's promise.
                    unsafe { $scales }
                }

                #[inline(always)]
                unsafe fn numbers($of: *const Self, $place: usize) -> [__m256i; 2] {
                    // SAFETY: the caller's promise.
                    unsafe { $numbers }
                }
            }
        )*
    };
}

avx2_blocks! {
    Q8Block, 0, true, |unit| scale_alone(unit), |unit, _| bytes_of_blocks(unit);
    Q4Block, 8, false, |unit| scale_alone(unit), |unit, _| nibbles::<Self, 2>(unit);
    Q4_1Block, 0, false, |unit| scale_and_sum(unit), |unit, _| nibbles::<Self, 4>(unit);
    Q5_0Block, 16, false, |unit| scale_alone(unit), |unit, _| five_bits::<Self, 6, 2>(unit);
    Q5_1Block, 0, false, |unit| scale_and_sum(unit), |unit, _| five_bits::<Self, 8, 4>(unit);
    Q2KBlock, 0, false, |block| q2_scales(block), |block, place| {
        moved(block, 16 + 32 * (place / 2), 4 * (place % 2) as i64, 2, 0, 3)
    };
    Q3KBlock, 4, false, |block| q3_scales(block), |block, place| {
        let low = moved(block, 32 + 32 * (place / 2), 4 * (place % 2) as i64, 2, 0, 3);
        or(low, moved(block, 0, 2 * place as i64, 1, 2, 1 << 2))
    };
    Q4KBlock, 0, false, |block| six_bit_scales(block), |block, place| moved(block, 16 + 32 * place, 0, 4, 0, 15);
    Q5KBlock, 0, false, |block| six_bit_scales(block), |block, place| {
        or(moved(block, 48 + 32 * place, 0, 4, 0, 15), moved(block, 16, 2 * place as i64, 1, 4, 1 << 4))
    };
    Q6KBlock, 32, false, |block| q6_scales(block), |block, place| {
        or(q6_nibbles(block, place), moved(block, 128 + 32 * (place / 2), 4 * (place % 2) as i64, 2, 4, 3 << 4))
    };
    Iq4NlBlock, 0, true, |unit| scale_alone(unit), |unit, _| levels(nibbles::<Self, 2>(unit), &IQ4_LEVELS);
    Mxfp4Block, 0, true, |unit| powers([0, 1].map(|index| i32::from((*unit.add(index)).bytes()[0]))),
        |unit, _| levels(nibbles::<Self, 1>(unit), &FP4_LEVELS);
}

impl Avx2Blocks for Fp4Pairs {
    const IS_SIGNED: bool = true;
    const IS_PAIRED: bool = true;

    #[inline(always)]
    unsafe fn scales(_: *const Self, split_scale: *const u8) -> [__m256; 4] {
        // SAFETY: the caller's promise: a unit has two exponents.
        unsafe { powers([0, 1].map(|index| i32::from(*split_scale.add(index)))) }
    }

    #[inline(always)]
    unsafe fn numbers(unit: *const Self, _: usize) -> [__m256i; 2] {
        // SAFETY: the caller's promise: a unit has 32 bytes.
        unsafe { levels(halves_of_bytes(_mm256_loadu_si256(unit.cast())), &FP4_LEVELS) }
    }
}

/// # Safety
/// As [`Avx2Blocks`] says.
#[inline(always)]
unsafe fn bytes_of_blocks(unit: *const Q8Block) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let values = |index: usize| _mm256_loadu_si256((&raw const (*unit.add(index)).values).cast());
        let (low, high) = (values(0), values(1));
        [_mm256_permute2x128_si256::<0x20>(low, high), _mm256_permute2x128_si256::<0x31>(low, high)]
    }
}

/// Returns the lower bits of two parts: the low four bits of 64 bytes for the first two of four parts, the high ones
/// for the others.
///
/// # Safety
/// As [`Avx2Blocks`] says.
#[inline(always)]
unsafe fn q6_nibbles(block: *const Q6KBlock, place: usize) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let at = 64 * (place / 2);
        let both = |at: usize| {
            let bytes = _mm256_set_m128i(load_16(block, at + 32), load_16(block, at));
            halves_of_bytes(bytes)[place % 2]
        };
        [both(at), both(at + 16)]
    }
}

/// Returns half of two to the power of each exponent less 127, each four times.
///
/// # Safety
/// As [`Avx2Blocks`] says.
#[inline(always)]
unsafe fn powers(exponents: [i32; 2]) -> [__m256; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let exponents = _mm256_set_m128i(_mm_set1_epi32(exponents[1]), _mm_set1_epi32(exponents[0]));
        // Exponent 0 gives a subnormal float; all ones, which would be infinite, become NaN.
        let powers = _mm256_max_epi32(_mm256_slli_epi32::<23>(exponents), _mm256_set1_epi32(0x0040_0000));
        let powers = _mm256_castsi256_ps(powers);
        let nothing = _mm256_sub_ps(powers, powers);
        let zero = _mm256_setzero_ps();
        [_mm256_add_ps(_mm256_mul_ps(powers, _mm256_set1_ps(0.5)), nothing), zero, zero, zero]
    }
}

/// Returns the f16 at byte `at` in all lanes.
///
/// # Safety
/// As [`Avx2Blocks`] says.
#[inline(always)]
unsafe fn half<B>(block: *const B, at: usize) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = block.cast::<u8>().add(at).cast::<u16>().read_unaligned();
        _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))))
    }
}

/// Converts the first eight unsigned bytes and the other eight to f32.
///
/// # Safety
/// As [`Avx2Blocks`] says.
#[inline(always)]
unsafe fn floats(bytes: __m128i) -> [__m256; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let of = |bytes| _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
        [of(bytes), of(_mm_srli_si128::<8>(bytes))]
    }
}

/// # Safety
/// As [`Avx2Blocks`] says.
#[inline(always)]
unsafe fn q2_scales(block: *const Q2KBlock) -> [__m256; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let (scale, min) = (half(block, 80), half(block, 82));
        let (both, mask) = (load_16(block, 0), _mm_set1_epi8(15));
        let low = floats(_mm_and_si128(both, mask));
        let high = floats(_mm_and_si128(_mm_srli_epi32::<4>(both), mask));
        [
            _mm256_mul_ps(low[0], scale),
            _mm256_mul_ps(low[1], scale),
            _mm256_mul_ps(high[0], min),
            _mm256_mul_ps(high[1], min),
        ]
    }
}

/// # Safety
/// As [`Avx2Blocks`] says.
#[inline(always)]
unsafe fn q3_scales(block: *const Q3KBlock) -> [__m256; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let bytes = block.cast::<u8>();
        let low = _mm_loadl_epi64(bytes.add(96).cast());
        let low = _mm_and_si128(_mm_unpacklo_epi64(low, _mm_srli_epi32::<4>(low)), _mm_set1_epi8(15));
        // Two bits of each of four bytes belong to each four scales.
        let high = _mm_set1_epi32(bytes.add(104).cast::<i32>().read_unaligned());
        let high = _mm_and_si128(_mm_srlv_epi32(high, _mm_set_epi32(6, 4, 2, 0)), _mm_set1_epi8(3));
        let all = _mm_or_si128(low, _mm_slli_epi32::<4>(high));
        let scale = half(block, 108);
        let of = |bytes| {
            let less = _mm256_sub_epi32(_mm256_cvtepu8_epi32(bytes), _mm256_set1_epi32(32));
            _mm256_mul_ps(_mm256_cvtepi32_ps(less), scale)
        };
        let (first, second) = (of(all), of(_mm_srli_si128::<8>(all)));
        [first, second, first, second]
    }
}

/// Returns eight scales and eight minima of six bits, from the twelve bytes after their factors.
///
/// # Safety
/// As [`Avx2Blocks`] says.
#[inline(always)]
unsafe fn six_bit_scales<B>(block: *const B) -> [__m256; 4] {
    // SAFETY: the caller's promise: a block has more than 20 bytes.
    unsafe {
        let [scales, min] = floats(six_bits(load_16(block, 4)));
        let zero = _mm256_setzero_ps();
        [_mm256_mul_ps(scales, half(block, 0)), _mm256_mul_ps(min, half(block, 2)), zero, zero]
    }
}

/// Returns the sixteen numbers of six bits in twelve bytes. The first four scales and four minima are the low six
/// bits of a byte each. Of the later ones, the lower four bits are the low and the high halves of four bytes, and the
/// upper two are the highest bits of the first ones.
///
/// # Safety
/// As [`Avx2Blocks`] says.
#[inline(always)]
pub(super) unsafe fn six_bits(bytes: __m128i) -> __m128i {
    // SAFETY: the caller's promise.
    unsafe {
        let low = _mm_shuffle_epi8(bytes, _mm_set_epi8(11, 10, 9, 8, 7, 6, 5, 4, 11, 10, 9, 8, 3, 2, 1, 0));
        let low = _mm_srlv_epi32(low, _mm_set_epi32(4, 0, 0, 0));
        let low = _mm_and_si128(low, _mm_set_epi32(0x0f0f_0f0f, 0x3f3f_3f3f, 0x0f0f_0f0f, 0x3f3f_3f3f));
        let high = _mm_shuffle_epi8(bytes, _mm_set_epi8(7, 6, 5, 4, -1, -1, -1, -1, 3, 2, 1, 0, -1, -1, -1, -1));
        let high = _mm_and_si128(_mm_srli_epi32::<2>(high), _mm_set1_epi8(0x30));
        _mm_or_si128(low, high)
    }
}

/// # Safety
/// As [`Avx2Blocks`] says.
#[inline(always)]
unsafe fn q6_scales(block: *const Q6KBlock) -> [__m256; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let all = load_16(block, 192);
        let scale = half(block, 208);
        let of = |bytes| _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), scale);
        let (first, second) = (of(all), of(_mm_srli_si128::<8>(all)));
        [first, second, first, second]
    }
}
