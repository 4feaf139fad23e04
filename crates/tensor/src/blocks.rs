//! Blocks of quantized weights: neighbours of a row with a common scale. The layouts are those of GGUF files
//! (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>), so that mapped files are used as they are. We
//! quantize to `Q8_0` and `Q4_0`; the other types are only read.

use bytemuck::{Pod, Zeroable};
use half::f16;

use crate::dtype::{DType, Element};

/// The number of elements of a block of the simple types.
pub const BLOCK_LEN: usize = 32;

/// The number of elements of a block of FP8.
pub const F8_BLOCK_LEN: usize = 128;

/// The number of elements of a block of the types whose names end in K.
pub const LONG_BLOCK_LEN: usize = 256;

/// 32 weights of 8 bits: weight i is `scale * values[i]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Q8Block {
    /// An f16, little-endian. Blocks of a mapped file may start at any byte.
    pub scale: [u8; 2],
    /// The values, from -127 to 127.
    pub values: [i8; BLOCK_LEN],
}

/// 32 weights of 4 bits: weight i is `scale * (n_i - 8)`. The first 16 n_i are the low halves of the bytes, the
/// others the high halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Q4Block {
    /// An f16, little-endian.
    pub scale: [u8; 2],
    /// Two weights per byte.
    pub values: [u8; BLOCK_LEN / 2],
}

impl Q8Block {
    /// Returns the scale.
    #[inline(always)]
    #[must_use]
    pub fn scale(&self) -> f32 {
        f16::from_le_bytes(self.scale).to_f32()
    }
}

impl Q4Block {
    /// Returns the scale.
    #[inline(always)]
    #[must_use]
    pub fn scale(&self) -> f32 {
        f16::from_le_bytes(self.scale).to_f32()
    }
}

/// 128 values of FP8 (E4M3 of OCP 8-bit Floating Point 1.0) with a scale: weights of DeepSeek-V3, where 128 rows of
/// 128 share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct F8Block {
    /// An f32, little-endian.
    pub scale: [u8; 4],
    /// The values.
    pub values: [[u8; BLOCK_LEN]; F8_BLOCK_LEN / BLOCK_LEN],
}

impl F8Block {
    /// Makes a block of values and their scale.
    #[must_use]
    pub fn joined(values: &[u8; F8_BLOCK_LEN], scale: &[u8; 4]) -> Self {
        Self { scale: *scale, values: bytemuck::cast(*values) }
    }
}

/// Decodes FP8 E4M3 without infinities (OCP 8-bit Floating Point 1.0): bias 7, NaN has all bits set.
#[must_use]
pub const fn f8_value(byte: u8) -> f32 {
    let (sign, exponent, mantissa) = ((byte as u32 & 0x80) << 24, (byte >> 3 & 15) as u32, byte & 7);
    match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        // Subnormal numbers are multiples of 2^-9.
        (0, _) => f32::from_bits(sign | (mantissa as f32 / 512.0).to_bits()),
        _ => f32::from_bits(sign | (exponent + 120) << 23 | (mantissa as u32) << 20),
    }
}

impl Element for F8Block {
    const DTYPE: DType = DType::F8;
}

impl Mxfp4Block {
    /// Makes a block of values, two per byte with the first in its low half, and the exponent of their scale: the
    /// layout of GPT-OSS's two tensors.
    #[must_use]
    pub fn joined(values: &[u8; BLOCK_LEN / 2], &[scale]: &[u8; 1]) -> Self {
        let value = |i: usize| values[i / 2] >> (4 * (i % 2)) & 15;
        let mut block = [scale; 1 + BLOCK_LEN / 2];
        for (i, to) in block[1..].iter_mut().enumerate() {
            *to = value(i) | value(i + BLOCK_LEN / 2) << 4;
        }
        Self([block])
    }

    /// Splits the block into the values and the scale of [`joined`](Self::joined).
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
                /// The bytes as in the file, in rows of a length that `bytemuck` supports.
                pub [[u8; $cols]; $rows],
            );

            impl $name {
                /// Returns the bytes as in the file.
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
    /// 32 weights `scale * (n - 16)`: an f16, the fifth bits, then the lower four as in [`Q4Block`].
    Q5_0Block(Q5_0): 1 x 22;
    /// 32 weights `scale * n + least`: two f16, then `n` as in [`Q5_0Block`].
    Q5_1Block(Q5_1): 1 x 24;
    /// 256 weights `scale * n - least`, with a scale and a least value of four bits for each 16: these, `n` of two
    /// bits, and the f16 factors of scales and least values.
    Q2KBlock(Q2K): 4 x 21;
    /// 256 weights `scale * (n - 4)`, with a scale of six bits for each 16: the third bits, the lower two of each,
    /// the scales, and their f16 factor.
    Q3KBlock(Q3K): 5 x 22;
    /// 256 weights `scale * n - least`, with a scale and a least value of six bits for each 32: the f16 factors of
    /// both, these, and `n` of four bits.
    Q4KBlock(Q4K): 9 x 16;
    /// 256 weights like [`Q4KBlock`], with the fifth bits before the lower four.
    Q5KBlock(Q5K): 11 x 16;
    /// 256 weights `scale * (n - 32)`, with a signed byte as the scale of each 16: the lower four bits of `n`, the
    /// upper two, the scales, and their f16 factor.
    Q6KBlock(Q6K): 10 x 21;
    /// 32 weights `scale * level`: an f16, and the indices of 16 levels as in [`Q4Block`].
    Iq4NlBlock(Iq4Nl): 1 x 18;
    /// 32 values of MXFP4 (OCP Microscaling Formats 1.0): the exponent of their scale, a power of two, in a byte,
    /// then the values as in [`Q4Block`].
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
