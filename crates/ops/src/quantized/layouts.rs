//! The meaning of the bytes of each type of block.
//!
//! The layouts are those of ggml's reference quantization (`ggml-common.h`, `ggml-quants.c`); integers are
//! little-endian.

use bytemuck::{Pod, Zeroable};
use moeworks_tensor::{BLOCK_LEN, LONG_BLOCK_LEN, f16};
pub(super) use moeworks_tensor::{
    F8Block, Iq4NlBlock, Mxfp4Block, Q2KBlock, Q3KBlock, Q4_1Block, Q4Block, Q4KBlock, Q5_0Block, Q5_1Block, Q5KBlock,
    Q6KBlock, Q8Block,
};

pub(super) use super::float8::F8Values;

/// Elements whose integers are taken at a time.
pub(super) const PART: usize = BLOCK_LEN;

/// A block of weights, of integers or of floats of few bits. Its scale may be in a tensor of its own (split).
pub(super) trait Values: Pod + Send + Sync {
    /// Number of elements.
    const LEN: usize;

    /// Bytes of the scale if it is split, otherwise 0.
    const SPLIT_BYTES: usize;

    /// Converts the block to its elements; `split_scale` holds the scale if it is split.
    fn decode(&self, split_scale: &[u8], to: &mut [f32]);
}

/// A block of integers: element i is `scale * ints[i] - min`, with a scale and a minimum for some consecutive
/// elements.
pub(super) trait Block: Pod + Send + Sync {
    /// Number of elements.
    const LEN: usize = PART;

    /// Bytes of the scale if it is split, otherwise 0.
    const SPLIT_BYTES: usize = 0;

    /// Number of consecutive elements that share a scale: 32 or 16.
    const SHARED: usize = PART;

    /// True if there are minima other than 0.
    const HAS_MIN: bool = false;

    /// Returns the integers of the 32 elements from `32 * part` on.
    fn ints(&self, part: usize) -> [i8; PART];

    /// Returns scale and minimum of the elements from [`SHARED`](Self::SHARED) times `index` on; `split_scale` holds
    /// the scale's bytes if it is split.
    fn scale(&self, index: usize, split_scale: &[u8]) -> Scale;
}
/// The scale of some consecutive elements, and the minimum that is taken from them.
#[derive(Clone, Copy)]
pub(super) struct Scale {
    pub(super) scale: f32,
    pub(super) min: f32,
}

impl Scale {
    #[inline(always)]
    fn new(scale: f32, min: f32) -> Self {
        Self { scale, min }
    }
}
impl<B: Block> Values for B {
    const LEN: usize = B::LEN;
    const SPLIT_BYTES: usize = B::SPLIT_BYTES;

    #[inline(always)]
    fn decode(&self, split_scale: &[u8], to: &mut [f32]) {
        for (part, to) in to.as_chunks_mut::<PART>().0.iter_mut().enumerate() {
            let ints = self.ints(part);
            for at in 0..PART / B::SHARED {
                let Scale { scale, min } = self.scale(PART / B::SHARED * part + at, split_scale);
                for i in at * B::SHARED..(at + 1) * B::SHARED {
                    to[i] = scale * f32::from(ints[i]) - min;
                }
            }
        }
    }
}

#[inline(always)]
fn half_at(bytes: &[u8], at: usize) -> f32 {
    widen(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
}

/// Converts the bits of an f16. The conversion of the crate `half` tests for the instruction in each call.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
fn widen(bits: u16) -> f32 {
    use core::arch::aarch64::{vcvt_f32_f16, vdup_n_u16, vgetq_lane_f32, vreinterpret_f16_u16};
    // SAFETY: all machines of this kind have NEON.
    unsafe { vgetq_lane_f32::<0>(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits)))) }
}

#[cfg(not(target_arch = "aarch64"))]
#[inline(always)]
fn widen(bits: u16) -> f32 {
    f16::from_bits(bits).to_f32()
}

/// Returns element i of 32 in 16 bytes: the low four bits are the first 16 elements, the high ones the others.
#[inline(always)]
fn nibble(bytes: &[u8], i: usize) -> u8 {
    let byte = bytes[i % (PART / 2)];
    if i < PART / 2 { byte & 15 } else { byte >> 4 }
}

/// Returns bit i of 32, times 16.
#[inline(always)]
fn fifth_bit(bytes: &[u8], i: usize) -> u8 {
    (bytes[i / 8] >> (i % 8) & 1) << 4
}

#[inline(always)]
fn ints(of: impl Fn(usize) -> u8, zero: u8) -> [i8; PART] {
    std::array::from_fn(|i| of(i).wrapping_sub(zero).cast_signed())
}

impl Block for Q8Block {
    #[inline(always)]
    fn ints(&self, _: usize) -> [i8; PART] {
        self.values
    }

    #[inline(always)]
    fn scale(&self, _: usize, _: &[u8]) -> Scale {
        Scale::new(half_at(bytemuck::bytes_of(self), 0), 0.0)
    }
}

impl Block for Q4Block {
    #[inline(always)]
    fn ints(&self, _: usize) -> [i8; PART] {
        ints(|i| nibble(&self.values, i), 8)
    }

    #[inline(always)]
    fn scale(&self, _: usize, _: &[u8]) -> Scale {
        Scale::new(half_at(bytemuck::bytes_of(self), 0), 0.0)
    }
}

impl Block for Q4_1Block {
    const HAS_MIN: bool = true;

    #[inline(always)]
    fn ints(&self, _: usize) -> [i8; PART] {
        ints(|i| nibble(&self.bytes()[4..], i), 0)
    }

    #[inline(always)]
    fn scale(&self, _: usize, _: &[u8]) -> Scale {
        Scale::new(half_at(self.bytes(), 0), -half_at(self.bytes(), 2))
    }
}

impl Block for Q5_0Block {
    #[inline(always)]
    fn ints(&self, _: usize) -> [i8; PART] {
        ints(|i| nibble(&self.bytes()[6..], i) | fifth_bit(&self.bytes()[2..], i), 16)
    }

    #[inline(always)]
    fn scale(&self, _: usize, _: &[u8]) -> Scale {
        Scale::new(half_at(self.bytes(), 0), 0.0)
    }
}

impl Block for Q5_1Block {
    const HAS_MIN: bool = true;

    #[inline(always)]
    fn ints(&self, _: usize) -> [i8; PART] {
        ints(|i| nibble(&self.bytes()[8..], i) | fifth_bit(&self.bytes()[4..], i), 0)
    }

    #[inline(always)]
    fn scale(&self, _: usize, _: &[u8]) -> Scale {
        Scale::new(half_at(self.bytes(), 0), -half_at(self.bytes(), 2))
    }
}

/// Returns element i of a part: 128 elements of two bits are in 32 bytes, the parts in consecutive pairs of bits.
#[inline(always)]
fn two_bits(bytes: &[u8], part: usize, i: usize) -> u8 {
    bytes[part / 4 * 32 + i] >> (2 * (part % 4)) & 3
}

impl Block for Q2KBlock {
    const LEN: usize = LONG_BLOCK_LEN;
    const SHARED: usize = 16;
    const HAS_MIN: bool = true;

    #[inline(always)]
    fn ints(&self, part: usize) -> [i8; PART] {
        ints(|i| two_bits(&self.bytes()[16..80], part, i), 0)
    }

    #[inline(always)]
    fn scale(&self, index: usize, _: &[u8]) -> Scale {
        let both = self.bytes()[index];
        Scale::new(half_at(self.bytes(), 80) * f32::from(both & 15), half_at(self.bytes(), 82) * f32::from(both >> 4))
    }
}

impl Block for Q3KBlock {
    const LEN: usize = LONG_BLOCK_LEN;
    const SHARED: usize = 16;

    #[inline(always)]
    fn ints(&self, part: usize) -> [i8; PART] {
        ints(|i| two_bits(&self.bytes()[32..96], part, i) | (self.bytes()[i] >> part & 1) << 2, 4)
    }

    /// Decodes six bits: the low four of scales 0 to 7 and 8 to 15 are in bytes 0 to 7, the high two in bytes 8 to
    /// 11.
    #[inline(always)]
    fn scale(&self, index: usize, _: &[u8]) -> Scale {
        let bytes = &self.bytes()[96..108];
        let low = bytes[index % 8] >> (4 * (index / 8)) & 15;
        let high = bytes[8 + index % 4] >> (2 * (index / 4)) & 3;
        Scale::new(half_at(self.bytes(), 108) * (f32::from(low | high << 4) - 32.0), 0.0)
    }
}

/// Returns scale and minimum of the 32 elements `index` of a `Q4_K` or `Q5_K`. The f16 factors of both come first,
/// then twelve bytes with eight of each in six bits.
#[inline(always)]
fn scale_and_min(block: &[u8], index: usize) -> Scale {
    let bytes = &block[4..16];
    let (scale, min) = if index < 4 {
        (bytes[index] & 63, bytes[index + 4] & 63)
    } else {
        let both = bytes[index + 4];
        (both & 15 | bytes[index - 4] >> 2 & 48, both >> 4 | bytes[index] >> 2 & 48)
    };
    Scale::new(half_at(block, 0) * f32::from(scale), half_at(block, 2) * f32::from(min))
}

/// Returns element i of a part: of 64 elements the first 32 are the low four bits of 32 bytes, the others the high
/// ones.
#[inline(always)]
fn long_nibble(bytes: &[u8], part: usize, i: usize) -> u8 {
    bytes[32 * (part / 2) + i] >> (4 * (part % 2)) & 15
}

impl Block for Q4KBlock {
    const LEN: usize = LONG_BLOCK_LEN;
    const HAS_MIN: bool = true;

    #[inline(always)]
    fn ints(&self, part: usize) -> [i8; PART] {
        ints(|i| long_nibble(&self.bytes()[16..], part, i), 0)
    }

    #[inline(always)]
    fn scale(&self, index: usize, _: &[u8]) -> Scale {
        scale_and_min(self.bytes(), index)
    }
}

impl Block for Q5KBlock {
    const LEN: usize = LONG_BLOCK_LEN;
    const HAS_MIN: bool = true;

    /// Takes bit `part` of 32 bytes as the fifth one.
    #[inline(always)]
    fn ints(&self, part: usize) -> [i8; PART] {
        ints(|i| long_nibble(&self.bytes()[48..], part, i) | (self.bytes()[16 + i] >> part & 1) << 4, 0)
    }

    #[inline(always)]
    fn scale(&self, index: usize, _: &[u8]) -> Scale {
        scale_and_min(self.bytes(), index)
    }
}

impl Block for Q6KBlock {
    const LEN: usize = LONG_BLOCK_LEN;
    const SHARED: usize = 16;

    /// Takes quarters of 128 elements in turn: the low four bits of 64 bytes, then the high ones.
    #[inline(always)]
    fn ints(&self, part: usize) -> [i8; PART] {
        let (half, quarter) = (part / 4, part % 4);
        let low = &self.bytes()[64 * half + 32 * (quarter % 2)..][..PART];
        ints(|i| low[i] >> (4 * (quarter / 2)) & 15 | two_bits(&self.bytes()[128..192], part, i) << 4, 32)
    }

    #[inline(always)]
    fn scale(&self, index: usize, _: &[u8]) -> Scale {
        Scale::new(half_at(self.bytes(), 208) * f32::from(self.bytes()[192 + index].cast_signed()), 0.0)
    }
}

/// The sixteen levels of `IQ4_NL`, closer together around zero.
pub(super) const IQ4_LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

impl Block for Iq4NlBlock {
    #[inline(always)]
    fn ints(&self, _: usize) -> [i8; PART] {
        std::array::from_fn(|i| IQ4_LEVELS[usize::from(nibble(&self.bytes()[2..], i))])
    }

    #[inline(always)]
    fn scale(&self, _: usize, _: &[u8]) -> Scale {
        Scale::new(half_at(self.bytes(), 0), 0.0)
    }
}

/// The E2M1 values, doubled.
pub(super) const FP4_LEVELS: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Returns half of two to the power of `exponent` less 127; all ones are NaN.
#[inline(always)]
fn half_power(exponent: u8) -> f32 {
    f32::from_bits(match exponent {
        // The first two are subnormal.
        0 => 0x0020_0000,
        1 => 0x0040_0000,
        255 => 0x7fc0_0000,
        _ => u32::from(exponent - 1) << 23,
    })
}

impl Block for Mxfp4Block {
    #[inline(always)]
    fn ints(&self, _: usize) -> [i8; PART] {
        std::array::from_fn(|i| FP4_LEVELS[usize::from(nibble(&self.bytes()[1..], i))])
    }

    #[inline(always)]
    fn scale(&self, _: usize, _: &[u8]) -> Scale {
        Scale::new(half_power(self.bytes()[0]), 0.0)
    }
}

/// The floats of an [`Mxfp4Block`] whose exponent is split off: two consecutive ones per byte, the first in its low
/// half.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(transparent)]
pub(super) struct Fp4Pairs([u8; PART / 2]);

impl Block for Fp4Pairs {
    const SPLIT_BYTES: usize = 1;

    #[inline(always)]
    fn ints(&self, _: usize) -> [i8; PART] {
        std::array::from_fn(|i| FP4_LEVELS[usize::from(self.0[i / 2] >> (4 * (i % 2)) & 15)])
    }

    #[inline(always)]
    fn scale(&self, _: usize, split_scale: &[u8]) -> Scale {
        Scale::new(half_power(split_scale[0]), 0.0)
    }
}
