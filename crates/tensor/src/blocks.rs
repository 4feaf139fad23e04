//! Blocks of quantized weights: neighbours of a row with a scale. The layouts are those of GGUF files
//! (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>), so that mapped files are used as they are. `Q8_0` and `Q4_0`
//! are also what we quantize to ourselves; the others are read alone.

use bytemuck::{Pod, Zeroable};
use half::f16;

use crate::dtype::{DType, Element};

/// Elements of a block of the simple types.
pub const BLOCK_LEN: usize = 32;

/// Elements of a block of eight-bit floats.
pub const F8_BLOCK_LEN: usize = 128;

/// Elements of a block of the types whose names end in K.
pub const LONG_BLOCK_LEN: usize = 256;

/// 32 weights of 8 bits: weight i is `scale * values[i]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Q8Block {
    /// An f16, little-endian: a block of a mapped file may start at any byte.
    pub scale: [u8; 2],
    /// From -127 to 127.
    pub values: [i8; BLOCK_LEN],
}

/// 32 weights of 4 bits: weight i is `scale * (n_i - 8)`, where n_i for the first 16 is the low half of byte i, for the
/// others the high half of byte i - 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Q4Block {
    /// An f16, little-endian.
    pub scale: [u8; 2],
    /// Two weights a byte.
    pub values: [u8; BLOCK_LEN / 2],
}

impl Q8Block {
    /// The scale.
    #[inline(always)]
    #[must_use]
    pub fn scale(&self) -> f32 {
        f16::from_le_bytes(self.scale).to_f32()
    }
}

impl Q4Block {
    /// The scale.
    #[inline(always)]
    #[must_use]
    pub fn scale(&self) -> f32 {
        f16::from_le_bytes(self.scale).to_f32()
    }
}

/// 128 floats of eight bits (E4M3 of OCP 8-bit Floating Point 1.0) and what they are multiplied by: weights of DeepSeek-V3, which has
/// a scale for 128 rows of 128.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct F8Block {
    /// An f32, little-endian.
    pub scale: [u8; 4],
    /// The floats.
    pub values: [[u8; BLOCK_LEN]; F8_BLOCK_LEN / BLOCK_LEN],
}

impl F8Block {
    /// The block of some floats and of their scale.
    #[must_use]
    pub fn joined(values: &[u8; F8_BLOCK_LEN], scale: &[u8; 4]) -> Self {
        Self { scale: *scale, values: bytemuck::cast(*values) }
    }
}

/// The value of an E4M3 float without infinities (OCP 8-bit Floating Point 1.0): bias 7, NaN is all ones.
#[must_use]
pub const fn f8_value(byte: u8) -> f32 {
    let (sign, exponent, mantissa) = ((byte as u32 & 0x80) << 24, (byte >> 3 & 15) as u32, byte & 7);
    match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        // Multiples of 2^-9.
        (0, _) => f32::from_bits(sign | (mantissa as f32 / 512.0).to_bits()),
        _ => f32::from_bits(sign | (exponent + 120) << 23 | (mantissa as u32) << 20),
    }
}

impl Element for F8Block {
    const DTYPE: DType = DType::F8;
}

impl Mxfp4Block {
    /// The block of floats two a byte, the first in its low half, and of the exponent of their scale: the two tensors that GPT-OSS
    /// has of a matrix.
    #[must_use]
    pub fn joined(values: &[u8; BLOCK_LEN / 2], &[scale]: &[u8; 1]) -> Self {
        let value = |i: usize| values[i / 2] >> (4 * (i % 2)) & 15;
        let mut block = [scale; 1 + BLOCK_LEN / 2];
        for (i, to) in block[1..].iter_mut().enumerate() {
            *to = value(i) | value(i + BLOCK_LEN / 2) << 4;
        }
        Self([block])
    }

    /// What [`joined`](Self::joined) makes this block of.
    #[must_use]
    pub fn parted(&self) -> ([u8; BLOCK_LEN / 2], u8) {
        let value = |i: usize| self.bytes()[1 + i % (BLOCK_LEN / 2)] >> (4 * (i / (BLOCK_LEN / 2))) & 15;
        (std::array::from_fn(|i| value(2 * i) | value(2 * i + 1) << 4), self.bytes()[0])
    }
}

impl Element for Q8Block {
    const DTYPE: DType = DType::Q8;
}

impl Element for Q4Block {
    const DTYPE: DType = DType::Q4;
}

/// Defines blocks as the bytes that they are in files.
macro_rules! blocks_of_bytes {
    ($($(#[$doc:meta])+ $name:ident($dtype:ident): $rows:literal x $cols:literal;)*) => {
        $(
            $(#[$doc])+
            #[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
            #[repr(C)]
            pub struct $name(
                /// As in the file, as rows of bytes for the sake of a length that `bytemuck` knows.
                pub [[u8; $cols]; $rows],
            );

            impl $name {
                /// The bytes as in the file.
                #[inline(always)]
                #[must_use]
                pub const fn bytes(&self) -> &[u8] {
                    self.0.as_flattened()
                }
            }

            impl Element for $name {
                const DTYPE: DType = DType::$dtype;
            }
        )*
    };
}

blocks_of_bytes! {
    /// 32 weights `scale * n + least`: two f16, then `n` of 4 bits each as in [`Q4Block`].
    Q4_1Block(Q4_1): 1 x 20;
    /// 32 weights `scale * (n - 16)`: an f16, the 32 fifth bits, then the lower four as in [`Q4Block`].
    Q5_0Block(Q5_0): 1 x 22;
    /// 32 weights `scale * n + least`: two f16, then `n` as in [`Q5_0Block`].
    Q5_1Block(Q5_1): 1 x 24;
    /// 256 weights `scale * n - least` with a scale and a least value of four bits for each 16: these, `n` of two bits, and the
    /// f16 factors of scales and of least values.
    Q2KBlock(Q2K): 4 x 21;
    /// 256 weights `scale * (n - 4)` with a scale of six bits for each 16: the 256 third bits, the lower two of each, the scales,
    /// and their f16 factor.
    Q3KBlock(Q3K): 5 x 22;
    /// 256 weights `scale * n - least` with a scale and a least value of six bits for each 32: the f16 factors of both, these, and
    /// `n` of four bits.
    Q4KBlock(Q4K): 9 x 16;
    /// As [`Q4KBlock`], with the 256 fifth bits before the lower four.
    Q5KBlock(Q5K): 11 x 16;
    /// 256 weights `scale * (n - 32)` with a signed byte as the scale of each 16: the lower four bits of `n`, the upper two, the
    /// scales, and their f16 factor.
    Q6KBlock(Q6K): 10 x 21;
    /// 32 weights `scale * level`: an f16 and numbers of 16 levels as in [`Q4Block`].
    Iq4NlBlock(Iq4Nl): 1 x 18;
    /// 32 floats of four bits with a power of two: its exponent in a byte, the floats as in [`Q4Block`] (OCP Microscaling Formats
    /// 1.0).
    Mxfp4Block(Mxfp4): 1 x 17;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_bit_floats_have_the_values_of_the_standard() {
        for (byte, value) in
            [(0x00, 0.0), (0x38, 1.0), (0xb8, -1.0), (0x7e, 448.0), (0x01, 2.0_f32.powi(-9)), (0x3c, 1.5)]
        {
            assert_eq!(f8_value(byte), value, "{byte:#x}");
        }
        assert!(f8_value(0x7f).is_nan() && f8_value(0xff).is_nan());
    }
}
