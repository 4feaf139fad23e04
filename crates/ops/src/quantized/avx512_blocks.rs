//! Blocks as vectors of unsigned bytes with their scales, for AVX-512.

use core::arch::x86_64::{
    __m128i, __m512, __m512i, _mm_cvtepu8_epi32, _mm_cvtph_ps, _mm_cvtsi32_si128, _mm_loadu_si128, _mm_max_epi32,
    _mm_set_epi32, _mm_set_epi64x, _mm_set1_epi32, _mm_slli_epi32, _mm256_loadu_si256, _mm512_add_ps, _mm512_and_si512,
    _mm512_broadcast_i32x4, _mm512_broadcastss_ps, _mm512_castps128_ps512, _mm512_castsi128_si512,
    _mm512_castsi256_si512, _mm512_castsi512_si128, _mm512_castsi512_si256, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps,
    _mm512_cvtepu8_epi32, _mm512_cvtph_ps, _mm512_inserti64x4, _mm512_loadu_si512, _mm512_mask_broadcast_i32x4,
    _mm512_maskz_set1_epi8, _mm512_mul_ps, _mm512_or_si512, _mm512_permutex2var_epi16, _mm512_permutexvar_ps,
    _mm512_rorv_epi64, _mm512_set_epi32, _mm512_set_epi64, _mm512_set1_epi8, _mm512_set1_epi32, _mm512_setzero_ps,
    _mm512_shuffle_epi8, _mm512_shuffle_i64x2, _mm512_srli_epi16, _mm512_srli_epi32, _mm512_srlv_epi64,
    _mm512_sub_epi32, _mm512_sub_ps, _mm512_xor_si512,
};

use moeworks_tensor::{
    Iq4NlBlock, Mxfp4Block, Q2KBlock, Q3KBlock, Q4_1Block, Q4Block, Q4KBlock, Q5_0Block, Q5_1Block, Q5KBlock, Q6KBlock,
    Q8Block,
};

use super::avx2_blocks::six_bits;
use super::layouts::{Block, FP4_LEVELS, Fp4Pairs, IQ4_LEVELS, PART};

/// The parts of a quad.
pub(super) const PARTS: usize = 4;

/// A type of blocks as AVX-512 vectors.
///
/// Numbers are taken 128 at a time, four parts of 32: a quad. Two vectors hold them, the first 16 numbers of each
/// part and the other 16 of each, so that four consecutive lanes of their products belong to one part. A unit has the
/// blocks that a vector of scales covers: four consecutive short blocks, or a long one, which has two quads.
///
/// # Safety of all functions
///
/// Units must be readable, and the machine must have AVX-512 F, BW, DQ and VL, AVX2 and F16C.
pub(super) trait Avx512Blocks: Block {
    /// Added to the integers to make them unsigned.
    const OFFSET: i8;

    /// True if the first vector holds the even numbers of each part and the second the odd ones, instead of its
    /// halves.
    const IS_PAIRED: bool = false;

    /// True if a unit is one block.
    const IS_LONG: bool = Self::LEN > PART;
    /// Blocks of a unit.
    const BLOCKS: usize = if Self::IS_LONG { 1 } else { PARTS };
    /// Quads of a unit.
    const QUADS: usize = Self::LEN.div_ceil(PARTS * PART);

    /// The lane of [`scales`](Self::scales) that each lane of products takes, for each quad of a unit and either half
    /// of its parts.
    const SCALE_LANES: [[[i32; 16]; 2]; 2] = scale_lanes(Self::IS_LONG, Self::SHARED);

    /// The lane of the first minimum.
    const FIRST_MIN: i32 = if Self::IS_LONG && Self::SHARED == PART { 8 } else { 0 };

    /// Returns scales and minima of a unit. For short blocks each comes four times; for a long one they are in the
    /// order of its elements, and if there are eight of each, one vector holds both and is returned twice.
    /// `split_scale` points at the unit's scales if they are in a tensor of their own.
    ///
    /// # Safety
    /// As the trait says, also for `split_scale`.
    unsafe fn scales(unit: *const Self, split_scale: *const u8) -> [__m512; 2];

    /// Returns the numbers of quad `quad` of a unit.
    ///
    /// # Safety
    /// As the trait says; `quad` is below [`QUADS`](Self::QUADS).
    unsafe fn numbers(unit: *const Self, quad: usize) -> [__m512i; 2];
}

const fn scale_lanes(is_long: bool, shared: usize) -> [[[i32; 16]; 2]; 2] {
    let mut lanes = [[[0; 16]; 2]; 2];
    let mut i = 0;
    while i < 64 {
        let (quad, half, part) = (i / 32, i / 16 % 2, i % 16 / 4);
        lanes[quad][half][i % 16] = match (is_long, shared) {
            (false, _) => 4 * part,
            (true, PART) => 4 * quad + part,
            (true, _) => 8 * quad + 2 * part + half,
        } as i32;
        i += 1;
    }
    lanes
}

/// Indices of 16-bit words that gather a vector from four consecutive short blocks, of which two overlapping loads
/// are taken.
type Words = [u16; 32];

/// Returns where the second load begins, in words.
const fn second_load(block_bytes: usize) -> usize {
    if PARTS * block_bytes <= 128 { (PARTS * block_bytes - 64) / 2 } else { 20 }
}

/// Returns indices that give each block `words_each` consecutive lanes: the words from byte `at` on if `is_run`,
/// otherwise always that word.
const fn words_of_each(block_bytes: usize, at: usize, words_each: usize, is_run: bool) -> Words {
    let mut words = [0; 32];
    let mut i = 0;
    while i < PARTS * words_each {
        let word = i / words_each * block_bytes / 2 + at / 2 + if is_run { i % words_each } else { 0 };
        words[i] = if word < 32 { word } else { 32 + word - second_load(block_bytes) } as u16;
        i += 1;
    }
    words
}

/// # Safety
/// As [`Avx512Blocks`] says.
#[inline(always)]
unsafe fn chosen<B: Block>(unit: *const B, words: &Words) -> __m512i {
    // SAFETY: the caller's promise; both loads end within four blocks.
    unsafe {
        let first = _mm512_loadu_si512(unit.cast());
        let second = _mm512_loadu_si512(unit.cast::<u16>().add(second_load(size_of::<B>())).cast());
        _mm512_permutex2var_epi16(first, _mm512_loadu_si512(words.as_ptr().cast()), second)
    }
}

/// Returns the f16 at byte `AT` of each of four blocks, each four times.
///
/// # Safety
/// As [`Avx512Blocks`] says.
#[inline(always)]
unsafe fn half_of_each<B: Block, const AT: usize>(unit: *const B) -> __m512 {
    let words = const { &words_of_each(size_of::<B>(), AT, 4, false) };
    // SAFETY: the caller's promise.
    unsafe { _mm512_cvtph_ps(_mm512_castsi512_si256(chosen(unit, words))) }
}

/// Returns the scale at the beginning of each of four blocks, and as minimum the negative of the second f16, which
/// the type adds.
///
/// # Safety
/// As [`Avx512Blocks`] says.
#[inline(always)]
unsafe fn scale_and_sum<B: Block>(unit: *const B) -> [__m512; 2] {
    // SAFETY: the caller's promise.
    unsafe { [half_of_each::<B, 0>(unit), _mm512_sub_ps(_mm512_setzero_ps(), half_of_each::<B, 2>(unit))] }
}

/// # Safety
/// As [`Avx512Blocks`] says.
#[inline(always)]
unsafe fn scale_alone<B: Block>(unit: *const B) -> [__m512; 2] {
    // SAFETY: the caller's promise.
    unsafe { [half_of_each::<B, 0>(unit), _mm512_setzero_ps()] }
}

/// Returns the low four bits of each byte, and the high ones.
///
/// # Safety
/// As [`Avx512Blocks`] says.
#[inline(always)]
unsafe fn halves_of_bytes(bytes: __m512i) -> [__m512i; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let mask = _mm512_set1_epi8(15);
        [_mm512_and_si512(bytes, mask), _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), mask)]
    }
}

/// Returns the four-bit numbers in the 16 bytes from byte `AT` on of each of four blocks.
///
/// # Safety
/// As [`Avx512Blocks`] says.
#[inline(always)]
unsafe fn nibbles<B: Block, const AT: usize>(unit: *const B) -> [__m512i; 2] {
    let words = const { &words_of_each(size_of::<B>(), AT, PART / 4, true) };
    // SAFETY: the caller's promise.
    unsafe { halves_of_bytes(chosen(unit, words)) }
}

/// Returns the five-bit numbers of four blocks: four bits as in [`nibbles`], the fifth ones in four bytes from
/// `FIFTH` on.
///
/// # Safety
/// As [`Avx512Blocks`] says.
#[inline(always)]
unsafe fn five_bits<B: Block, const AT: usize, const FIFTH: usize>(unit: *const B) -> [__m512i; 2] {
    const fn of_both(block_bytes: usize, at: usize) -> Words {
        let (mut words, second) =
            (words_of_each(block_bytes, at, 1, false), words_of_each(block_bytes, at + 2, 1, false));
        let mut i = 0;
        while i < PARTS {
            words[PARTS + i] = second[i];
            i += 1;
        }
        words
    }
    let words = const { &of_both(size_of::<B>(), FIFTH) };
    // SAFETY: the caller's promise; 128 bits are two numbers of 64.
    unsafe {
        let bits: [u64; 2] = std::mem::transmute(_mm512_castsi512_si128(chosen(unit, words)));
        let [first, second] = nibbles::<B, AT>(unit);
        [
            _mm512_or_si512(first, _mm512_maskz_set1_epi8(bits[0], 16)),
            _mm512_or_si512(second, _mm512_maskz_set1_epi8(bits[1], 16)),
        ]
    }
}

/// Looks up the levels of four-bit numbers, which are raised by the type's offset to be unsigned.
///
/// # Safety
/// As [`Avx512Blocks`] says.
#[inline(always)]
unsafe fn levels([first, second]: [__m512i; 2], levels: &[i8; 16]) -> [__m512i; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let levels = _mm512_broadcast_i32x4(_mm_loadu_si128(levels.as_ptr().cast()));
        [_mm512_shuffle_epi8(levels, first), _mm512_shuffle_epi8(levels, second)]
    }
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

/// Rotates the 16 bytes from `at` on right by `first`, `first + step` and so on in the quarters of a vector (left if
/// negative), and masks each byte with `mask`. The second vector holds the next 16 bytes.
///
/// # Safety
/// As [`Avx512Blocks`] says.
#[inline(always)]
unsafe fn moved<B>(block: *const B, at: usize, first: i64, step: i64, mask: i8) -> [__m512i; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let by = |part: i64| first + part * step;
        // Bits that rotate from one byte into the next are outside the mask.
        let by = _mm512_set_epi64(by(3), by(3), by(2), by(2), by(1), by(1), by(0), by(0));
        let mask = _mm512_set1_epi8(mask);
        let bytes = block.cast::<u8>().add(at);
        let halves = [_mm_loadu_si128(bytes.cast()), _mm_loadu_si128(bytes.add(16).cast())];
        [
            _mm512_and_si512(_mm512_rorv_epi64(_mm512_broadcast_i32x4(halves[0]), by), mask),
            _mm512_and_si512(_mm512_rorv_epi64(_mm512_broadcast_i32x4(halves[1]), by), mask),
        ]
    }
}

/// Splits 64 bytes from `at` on into parts: the low four bits of 32 bytes are one part, the high ones the next.
///
/// # Safety
/// As [`Avx512Blocks`] says.
#[inline(always)]
unsafe fn nibbles_of_parts<B>(block: *const B, at: usize) -> [__m512i; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let bytes = _mm512_loadu_si512(block.cast::<u8>().add(at).cast());
        let by = _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0);
        let mask = _mm512_set1_epi8(15);
        let first = _mm512_shuffle_i64x2::<0b10_10_00_00>(bytes, bytes);
        let second = _mm512_shuffle_i64x2::<0b11_11_01_01>(bytes, bytes);
        [_mm512_and_si512(_mm512_srlv_epi64(first, by), mask), _mm512_and_si512(_mm512_srlv_epi64(second, by), mask)]
    }
}

/// Reorders two vectors of consecutive parts to a quad.
///
/// # Safety
/// As [`Avx512Blocks`] says.
#[inline(always)]
unsafe fn from_parts([low, high]: [__m512i; 2]) -> [__m512i; 2] {
    // SAFETY: the caller's promise.
    unsafe { [_mm512_shuffle_i64x2::<0b10_00_10_00>(low, high), _mm512_shuffle_i64x2::<0b11_01_11_01>(low, high)] }
}

/// # Safety
/// As [`Avx512Blocks`] says.
#[inline(always)]
unsafe fn or(low: [__m512i; 2], high: [__m512i; 2]) -> [__m512i; 2] {
    // SAFETY: the caller's promise.
    unsafe { [_mm512_or_si512(low[0], high[0]), _mm512_or_si512(low[1], high[1])] }
}

/// Implements [`Avx512Blocks`] for types whose scales and numbers are one expression each.
macro_rules! avx512_blocks {
    ($($block:ty, $offset:expr, |$unit:ident| $scales:expr, |$of:pat_param, $quad:pat_param| $numbers:expr;)*) => {
        $(
            impl Avx512Blocks for $block {
                const OFFSET: i8 = $offset;

                #[inline(always)]
                unsafe fn scales($unit: *const Self, _: *const u8) -> [__m512; 2] {
                    // SAFETY: the caller's promise.
                    unsafe { $scales }
                }

                #[inline(always)]
                unsafe fn numbers($of: *const Self, $quad: usize) -> [__m512i; 2] {
                    // SAFETY: the caller's promise.
                    unsafe { $numbers }
                }
            }
        )*
    };
}

avx512_blocks! {
    Q8Block, i8::MIN, |unit| scale_alone(unit), |unit, _| bytes_of_blocks(unit);
    Q4Block, 8, |unit| scale_alone(unit), |unit, _| nibbles::<Self, 2>(unit);
    Q4_1Block, 0, |unit| scale_and_sum(unit), |unit, _| nibbles::<Self, 4>(unit);
    Q5_0Block, 16, |unit| scale_alone(unit), |unit, _| five_bits::<Self, 6, 2>(unit);
    Q5_1Block, 0, |unit| scale_and_sum(unit), |unit, _| five_bits::<Self, 8, 4>(unit);
    Q2KBlock, 0, |block| q2_scales(block), |block, quad| moved(block, 16 + 32 * quad, 0, 2, 3);
    Q3KBlock, 4, |block| q3_scales(block), |block, quad| {
        or(moved(block, 32 + 32 * quad, 0, 2, 3), moved(block, 0, 4 * quad as i64 - 2, 1, 1 << 2))
    };
    Q4KBlock, 0, |block| six_bit_scales(block), |block, quad| nibbles_of_parts(block, 16 + 64 * quad);
    Q5KBlock, 0, |block| six_bit_scales(block), |block, quad| {
        or(nibbles_of_parts(block, 48 + 64 * quad), moved(block, 16, 4 * quad as i64 - 4, 1, 1 << 4))
    };
    Q6KBlock, 32, |block| q6_scales(block), |block, quad| {
        let all = _mm512_loadu_si512(block.cast::<u8>().add(64 * quad).cast());
        let [first, second] = from_parts([all, _mm512_srli_epi16::<4>(all)]);
        let mask = _mm512_set1_epi8(15);
        let low = [_mm512_and_si512(first, mask), _mm512_and_si512(second, mask)];
        or(low, moved(block, 128 + 32 * quad, -4, 2, 3 << 4))
    };
    Iq4NlBlock, i8::MIN, |unit| scale_alone(unit),
        |unit, _| levels(nibbles::<Self, 2>(unit), const { &raised(&IQ4_LEVELS, i8::MIN) });
    Mxfp4Block, 12, |unit| powers(exponents(unit)), |unit, _| levels(odd_nibbles(unit), const { &raised(&FP4_LEVELS, 12) });
}

/// # Safety
/// As [`Avx512Blocks`] says.
#[inline(always)]
unsafe fn bytes_of_blocks(unit: *const Q8Block) -> [__m512i; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let values = |index: usize| (&raw const (*unit.add(index)).values).cast();
        let low = _mm512_castsi256_si512(_mm256_loadu_si256(values(0)));
        let low = _mm512_inserti64x4::<1>(low, _mm256_loadu_si256(values(1)));
        let high = _mm512_castsi256_si512(_mm256_loadu_si256(values(2)));
        let high = _mm512_inserti64x4::<1>(high, _mm256_loadu_si256(values(3)));
        let [first, second] = from_parts([low, high]);
        let offset = _mm512_set1_epi8(Q8Block::OFFSET);
        [_mm512_xor_si512(first, offset), _mm512_xor_si512(second, offset)]
    }
}

/// Returns the four-bit numbers of blocks that begin with one byte of exponent.
///
/// # Safety
/// As [`Avx512Blocks`] says.
#[inline(always)]
unsafe fn odd_nibbles(unit: *const Mxfp4Block) -> [__m512i; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let numbers = |index: usize| unit.add(index).cast::<u8>().add(1).cast();
        let all = _mm512_castsi128_si512(_mm_loadu_si128(numbers(0)));
        let all = _mm512_mask_broadcast_i32x4(all, 0x00f0, _mm_loadu_si128(numbers(1)));
        let all = _mm512_mask_broadcast_i32x4(all, 0x0f00, _mm_loadu_si128(numbers(2)));
        halves_of_bytes(_mm512_mask_broadcast_i32x4(all, 0xf000, _mm_loadu_si128(numbers(3))))
    }
}

impl Avx512Blocks for Fp4Pairs {
    const OFFSET: i8 = Mxfp4Block::OFFSET;
    const IS_PAIRED: bool = true;

    #[inline(always)]
    unsafe fn scales(_: *const Self, split_scale: *const u8) -> [__m512; 2] {
        // SAFETY: the caller's promise: a unit has four exponents.
        unsafe { powers(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(split_scale.cast::<i32>().read_unaligned()))) }
    }

    #[inline(always)]
    unsafe fn numbers(unit: *const Self, _: usize) -> [__m512i; 2] {
        // SAFETY: the caller's promise: a unit has 64 bytes.
        unsafe {
            levels(halves_of_bytes(_mm512_loadu_si512(unit.cast())), const { &raised(&FP4_LEVELS, Self::OFFSET) })
        }
    }
}

/// Returns the exponents of four blocks that begin with them.
///
/// # Safety
/// As [`Avx512Blocks`] says.
#[inline(always)]
unsafe fn exponents(unit: *const Mxfp4Block) -> __m128i {
    // SAFETY: the caller's promise.
    unsafe {
        let exponent = |index: usize| i32::from((*unit.add(index)).bytes()[0]);
        _mm_set_epi32(exponent(3), exponent(2), exponent(1), exponent(0))
    }
}

/// Returns half of two to the power of each exponent less 127, each four times.
///
/// # Safety
/// As [`Avx512Blocks`] says.
#[inline(always)]
unsafe fn powers(exponents: __m128i) -> [__m512; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        // Exponent 0 gives a subnormal float; all ones, which would be infinite, become NaN.
        let powers = _mm_max_epi32(_mm_slli_epi32::<23>(exponents), _mm_set1_epi32(0x0040_0000));
        let lanes = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
        let powers = std::mem::transmute::<__m512i, __m512>(_mm512_castsi128_si512(powers));
        let powers = _mm512_permutexvar_ps(lanes, powers);
        let nothing = _mm512_sub_ps(powers, powers);
        [_mm512_add_ps(_mm512_mul_ps(powers, core::arch::x86_64::_mm512_set1_ps(0.5)), nothing), _mm512_setzero_ps()]
    }
}

/// Returns the f16 at byte `at` and the one after it, each in all lanes.
///
/// # Safety
/// As [`Avx512Blocks`] says.
#[inline(always)]
unsafe fn two_halves<B>(block: *const B, at: usize) -> [__m512; 2] {
    // SAFETY: the caller's promise.
    unsafe { [half(block, at), half(block, at + 2)] }
}

/// Returns the f16 at byte `at` in all lanes.
///
/// # Safety
/// As [`Avx512Blocks`] says.
#[inline(always)]
unsafe fn half<B>(block: *const B, at: usize) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = block.cast::<u8>().add(at).cast::<u16>().read_unaligned();
        _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))))
    }
}

/// Converts sixteen unsigned bytes to f32.
///
/// # Safety
/// As [`Avx512Blocks`] says.
#[inline(always)]
unsafe fn floats(bytes: __m128i) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)) }
}

/// # Safety
/// As [`Avx512Blocks`] says.
#[inline(always)]
unsafe fn q2_scales(block: *const Q2KBlock) -> [__m512; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let [scale, min] = two_halves(block, 80);
        let both = _mm512_cvtepu8_epi32(_mm_loadu_si128(block.cast()));
        let low = _mm512_and_si512(both, _mm512_set1_epi32(15));
        let high = _mm512_srli_epi32::<4>(both);
        [_mm512_mul_ps(_mm512_cvtepi32_ps(low), scale), _mm512_mul_ps(_mm512_cvtepi32_ps(high), min)]
    }
}

/// # Safety
/// As [`Avx512Blocks`] says.
#[inline(always)]
unsafe fn q3_scales(block: *const Q3KBlock) -> [__m512; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let bytes = block.cast::<u8>();
        let low = bytes.add(96).cast::<u64>().read_unaligned();
        let high = u64::from(bytes.add(104).cast::<u32>().read_unaligned());
        // Two bits of each of four bytes belong to each four scales.
        let high = |at: u32| (high >> (2 * at) & 0x0303_0303) << 4;
        let low = |at: u32| low >> (4 * at) & 0x0f0f_0f0f_0f0f_0f0f;
        let [first, second] = [(low(0), 0), (low(1), 2)].map(|(low, at)| low | high(at) | high(at + 1) << 32);
        let all = _mm512_cvtepu8_epi32(_mm_set_epi64x(second.cast_signed(), first.cast_signed()));
        let all = _mm512_cvtepi32_ps(_mm512_sub_epi32(all, _mm512_set1_epi32(32)));
        [_mm512_mul_ps(all, half(block, 108)), _mm512_setzero_ps()]
    }
}

/// Returns eight scales and eight minima of six bits, from the twelve bytes after their factors.
///
/// # Safety
/// As [`Avx512Blocks`] says.
#[inline(always)]
unsafe fn six_bit_scales<B>(block: *const B) -> [__m512; 2] {
    // SAFETY: the caller's promise: a block has more than 20 bytes.
    unsafe {
        let numbers = six_bits(_mm_loadu_si128(block.cast::<u8>().add(4).cast()));
        let both = _mm_cvtph_ps(_mm_cvtsi32_si128(block.cast::<i32>().read_unaligned()));
        let lanes = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
        let factors = _mm512_permutexvar_ps(lanes, _mm512_castps128_ps512(both));
        [_mm512_mul_ps(floats(numbers), factors); 2]
    }
}

/// # Safety
/// As [`Avx512Blocks`] says.
#[inline(always)]
unsafe fn q6_scales(block: *const Q6KBlock) -> [__m512; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let all = _mm512_cvtepi8_epi32(_mm_loadu_si128(block.cast::<u8>().add(192).cast()));
        [_mm512_mul_ps(_mm512_cvtepi32_ps(all), half(block, 208)), _mm512_setzero_ps()]
    }
}
