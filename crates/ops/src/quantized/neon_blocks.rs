//! The integers of blocks in NEON vectors of sixteen bytes: [`Block::ints`] as vectors.

use core::arch::aarch64::{
    int8x16_t, uint8x16_t, vandq_u8, vdupq_n_s8, vdupq_n_u8, vdupq_n_u32, vld1q_s8, vld1q_u8, vorrq_u8, vqtbl1q_s8,
    vqtbl1q_u8, vreinterpretq_s8_u8, vreinterpretq_u8_u32, vshlq_n_u8, vshlq_u8, vshrq_n_u8, vsubq_s8, vtstq_u8,
    vzip1q_s8, vzip2q_s8,
};

use super::layouts::{
    Block, FP4_LEVELS, Fp4Pairs, IQ4_LEVELS, Iq4NlBlock, Mxfp4Block, PART, Q2KBlock, Q3KBlock, Q4_1Block, Q4Block,
    Q4KBlock, Q5_0Block, Q5_1Block, Q5KBlock, Q6KBlock, Q8Block,
};

/// Bytes of a vector.
const LEN: usize = PART / 2;

/// The halves of a part, before the offset is subtracted.
type Halves = [uint8x16_t; 2];

/// A block whose integers come as vectors.
pub(super) trait NeonBlocks: Block {
    /// Returns [`ints`](Block::ints) as two vectors: the first sixteen, and the others.
    fn numbers(&self, part: usize) -> [int8x16_t; 2];
}

// All functions below need NEON, which every aarch64 machine has.

#[inline(always)]
fn load(bytes: &[u8], at: usize) -> uint8x16_t {
    let bytes: &[u8; LEN] = bytes[at..].first_chunk().expect("a block's bytes");
    // SAFETY: see above; the array is as long as a vector.
    unsafe { vld1q_u8(bytes.as_ptr()) }
}

/// Loads 32 bytes.
#[inline(always)]
fn load_part(bytes: &[u8], at: usize) -> Halves {
    [load(bytes, at), load(bytes, at + LEN)]
}

#[inline(always)]
fn and(x: uint8x16_t, mask: u8) -> uint8x16_t {
    // SAFETY: see above.
    unsafe { vandq_u8(x, vdupq_n_u8(mask)) }
}

/// Returns the low four bits of 16 bytes, and the high ones.
#[inline(always)]
fn nibbles(x: uint8x16_t) -> Halves {
    // SAFETY: see above.
    [and(x, 15), unsafe { vshrq_n_u8::<4>(x) }]
}

#[inline(always)]
fn or(x: Halves, y: Halves) -> Halves {
    // SAFETY: see above.
    unsafe { [vorrq_u8(x[0], y[0]), vorrq_u8(x[1], y[1])] }
}

/// Shifts each byte right.
#[inline(always)]
fn shifted(x: Halves, by: usize) -> Halves {
    // SAFETY: see above.
    unsafe { x.map(|x| vshlq_u8(x, vdupq_n_s8(-(by as i8)))) }
}

/// Returns the bits from `bit` on of each byte, masked with `mask` and shifted up by `UP`.
#[inline(always)]
fn bits<const UP: i32>(x: Halves, bit: usize, mask: u8) -> Halves {
    // SAFETY: see above.
    unsafe { shifted(x, bit).map(|x| vshlq_n_u8::<UP>(and(x, mask))) }
}

/// Returns bit i of 32 as 16 times a byte.
#[inline(always)]
fn fifth_bits(bytes: &[u8], at: usize) -> Halves {
    const BYTES: [[u8; LEN]; 2] =
        [[0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1], [2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3]];
    const BITS: [u8; LEN] = [1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128];
    let word: &[u8; 4] = bytes[at..].first_chunk().expect("a block's bytes");
    // SAFETY: see above.
    unsafe {
        let word = vreinterpretq_u8_u32(vdupq_n_u32(u32::from_le_bytes(*word)));
        let one_each = load(&BITS, 0);
        BYTES.map(|bytes| and(vtstq_u8(vqtbl1q_u8(word, load(&bytes, 0)), one_each), 16))
    }
}

#[inline(always)]
fn less(x: Halves, zero: i8) -> [int8x16_t; 2] {
    // SAFETY: see above.
    unsafe { x.map(|x| vsubq_s8(vreinterpretq_s8_u8(x), vdupq_n_s8(zero))) }
}

/// Looks up the levels of numbers below 16.
#[inline(always)]
fn levels(levels: &[i8; LEN], x: Halves) -> [int8x16_t; 2] {
    // SAFETY: see above; the array is as long as a vector.
    unsafe {
        let levels = vld1q_s8(levels.as_ptr());
        x.map(|x| vqtbl1q_s8(levels, x))
    }
}

/// Returns the four-bit numbers of a part: of 64 elements the first 32 are the low four bits of 32 bytes, the others
/// the high ones.
#[inline(always)]
fn long_nibbles(bytes: &[u8], at: usize, part: usize) -> Halves {
    bits::<0>(load_part(bytes, at + 32 * (part / 2)), 4 * (part % 2), 15)
}

/// Returns the two-bit numbers of a part, shifted up by `UP`: 128 elements are in 32 bytes, the parts in consecutive
/// pairs of bits.
#[inline(always)]
fn pairs_of_bits<const UP: i32>(bytes: &[u8], at: usize, part: usize) -> Halves {
    bits::<UP>(load_part(bytes, at + 32 * (part / 4)), 2 * (part % 4), 3)
}

impl NeonBlocks for Q8Block {
    #[inline(always)]
    fn numbers(&self, _: usize) -> [int8x16_t; 2] {
        less(load_part(bytemuck::cast_slice(&self.values), 0), 0)
    }
}

impl NeonBlocks for Q4Block {
    #[inline(always)]
    fn numbers(&self, _: usize) -> [int8x16_t; 2] {
        less(nibbles(load(&self.values, 0)), 8)
    }
}

impl NeonBlocks for Q4_1Block {
    #[inline(always)]
    fn numbers(&self, _: usize) -> [int8x16_t; 2] {
        less(nibbles(load(self.bytes(), 4)), 0)
    }
}

impl NeonBlocks for Q5_0Block {
    #[inline(always)]
    fn numbers(&self, _: usize) -> [int8x16_t; 2] {
        less(or(nibbles(load(self.bytes(), 6)), fifth_bits(self.bytes(), 2)), 16)
    }
}

impl NeonBlocks for Q5_1Block {
    #[inline(always)]
    fn numbers(&self, _: usize) -> [int8x16_t; 2] {
        less(or(nibbles(load(self.bytes(), 8)), fifth_bits(self.bytes(), 4)), 0)
    }
}

impl NeonBlocks for Q2KBlock {
    #[inline(always)]
    fn numbers(&self, part: usize) -> [int8x16_t; 2] {
        less(pairs_of_bits::<0>(self.bytes(), 16, part), 0)
    }
}

impl NeonBlocks for Q3KBlock {
    #[inline(always)]
    fn numbers(&self, part: usize) -> [int8x16_t; 2] {
        let third = bits::<2>(load_part(self.bytes(), 0), part, 1);
        less(or(pairs_of_bits::<0>(self.bytes(), 32, part), third), 4)
    }
}

impl NeonBlocks for Q4KBlock {
    #[inline(always)]
    fn numbers(&self, part: usize) -> [int8x16_t; 2] {
        less(long_nibbles(self.bytes(), 16, part), 0)
    }
}

impl NeonBlocks for Q5KBlock {
    #[inline(always)]
    fn numbers(&self, part: usize) -> [int8x16_t; 2] {
        let fifth = bits::<4>(load_part(self.bytes(), 16), part, 1);
        less(or(long_nibbles(self.bytes(), 48, part), fifth), 0)
    }
}

impl NeonBlocks for Q6KBlock {
    #[inline(always)]
    fn numbers(&self, part: usize) -> [int8x16_t; 2] {
        let (half, quarter) = (part / 4, part % 4);
        let low = bits::<0>(load_part(self.bytes(), 64 * half + 32 * (quarter % 2)), 4 * (quarter / 2), 15);
        less(or(low, pairs_of_bits::<4>(self.bytes(), 128, part)), 32)
    }
}

impl NeonBlocks for Iq4NlBlock {
    #[inline(always)]
    fn numbers(&self, _: usize) -> [int8x16_t; 2] {
        levels(&IQ4_LEVELS, nibbles(load(self.bytes(), 2)))
    }
}

impl NeonBlocks for Mxfp4Block {
    #[inline(always)]
    fn numbers(&self, _: usize) -> [int8x16_t; 2] {
        levels(&FP4_LEVELS, nibbles(load(self.bytes(), 1)))
    }
}

impl NeonBlocks for Fp4Pairs {
    #[inline(always)]
    fn numbers(&self, _: usize) -> [int8x16_t; 2] {
        let [first, second] = levels(&FP4_LEVELS, nibbles(load(bytemuck::bytes_of(self), 0)));
        // SAFETY: see above.
        unsafe { [vzip1q_s8(first, second), vzip2q_s8(first, second)] }
    }
}
