//! Blocks of quantized weights: 32 neighbours of a row with one scale. The layouts are GGUF's `Q8_0` and `Q4_0`
//! (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>), so that mapped files are used as they are.

use bytemuck::{Pod, Zeroable};
use half::f16;

use crate::dtype::{DType, Element};

/// Elements of a block.
pub const BLOCK_LEN: usize = 32;

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

impl Element for Q8Block {
    const DTYPE: DType = DType::Q8;
}

impl Element for Q4Block {
    const DTYPE: DType = DType::Q4;
}
