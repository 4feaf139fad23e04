//! Element types and devices.

use half::{bf16, f16};

use crate::blocks::{
    BLOCK_LEN, F8_BLOCK_LEN, F8Block, Iq4NlBlock, LONG_BLOCK_LEN, Mxfp4Block, Q2KBlock, Q3KBlock, Q4_1Block, Q4Block,
    Q4KBlock, Q5_0Block, Q5_1Block, Q5KBlock, Q6KBlock, Q8Block,
};

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE single precision, the reference precision.
    F32,
    /// bfloat16: f32 with a 7-bit mantissa.
    BF16,
    /// IEEE half precision, for inference with weights that files have in it; they are multiplied as f32.
    F16,
    /// Unsigned 32-bit integers: token ids, expert ids, row maps.
    U32,
    /// Weights for inference in blocks of 32 with one scale, 8 bits each: [`Q8Block`](crate::Q8Block).
    Q8,
    /// Weights for inference in blocks of 32 with one scale, 4 bits each: [`Q4Block`](crate::Q4Block).
    Q4,
    /// [`Q4_1Block`](crate::Q4_1Block).
    Q4_1,
    /// [`Q5_0Block`](crate::Q5_0Block).
    Q5_0,
    /// [`Q5_1Block`](crate::Q5_1Block).
    Q5_1,
    /// [`Q2KBlock`](crate::Q2KBlock).
    Q2K,
    /// [`Q3KBlock`](crate::Q3KBlock).
    Q3K,
    /// [`Q4KBlock`](crate::Q4KBlock).
    Q4K,
    /// [`Q5KBlock`](crate::Q5KBlock).
    Q5K,
    /// [`Q6KBlock`](crate::Q6KBlock).
    Q6K,
    /// [`Iq4NlBlock`](crate::Iq4NlBlock).
    Iq4Nl,
    /// [`Mxfp4Block`](crate::Mxfp4Block).
    Mxfp4,
    /// [`F8Block`](crate::F8Block).
    F8,
}

impl DType {
    /// Returns the bytes of one item of a [`slice`](crate::Tensor::slice) of the type: an element, or a block.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::F32 | Self::U32 => 4,
            Self::BF16 | Self::F16 => 2,
            Self::Q8 => size_of::<Q8Block>(),
            Self::Q4 => size_of::<Q4Block>(),
            Self::Q4_1 => size_of::<Q4_1Block>(),
            Self::Q5_0 => size_of::<Q5_0Block>(),
            Self::Q5_1 => size_of::<Q5_1Block>(),
            Self::Q2K => size_of::<Q2KBlock>(),
            Self::Q3K => size_of::<Q3KBlock>(),
            Self::Q4K => size_of::<Q4KBlock>(),
            Self::Q5K => size_of::<Q5KBlock>(),
            Self::Q6K => size_of::<Q6KBlock>(),
            Self::Iq4Nl => size_of::<Iq4NlBlock>(),
            Self::Mxfp4 => size_of::<Mxfp4Block>(),
            Self::F8 => size_of::<F8Block>(),
        }
    }

    /// Returns the number of elements in [`size`](Self::size) bytes; the last dim of a tensor is a multiple of it.
    #[must_use]
    pub const fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::BF16 | Self::F16 | Self::U32 => 1,
            Self::Q8 | Self::Q4 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Iq4Nl | Self::Mxfp4 => BLOCK_LEN,
            Self::F8 => F8_BLOCK_LEN,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K => LONG_BLOCK_LEN,
        }
    }

    /// Returns true for types of blocks with scales.
    #[must_use]
    pub const fn is_quantized(self) -> bool {
        self.block_len() > 1
    }

    /// Returns the type of activations for weights of this type: bf16 for bf16, f32 for all others.
    #[must_use]
    pub const fn of_activations(self) -> Self {
        if matches!(self, Self::BF16) { self } else { Self::F32 }
    }

    /// Returns the required alignment of memory in bytes.
    pub(crate) const fn align(self) -> usize {
        if self.is_quantized() { 1 } else { self.size() }
    }
}

/// A Rust type that a tensor can hold.
pub trait Element: bytemuck::Pod + Send + Sync {
    /// The matching [`DType`].
    const DTYPE: DType;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}

impl Element for bf16 {
    const DTYPE: DType = DType::BF16;
}

impl Element for f16 {
    const DTYPE: DType = DType::F16;
}

impl Element for u32 {
    const DTYPE: DType = DType::U32;
}

/// The device of a tensor's memory and computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Device {
    /// The CPU.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}
