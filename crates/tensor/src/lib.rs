//! Tensors, their memory and random numbers.
//!
//! There is no mathematics on tensors here; that is `moeworks-ops`. A [`Tensor`] is row-major. Its memory comes from
//! a [`MemoryPool`], which reuses freed blocks. Random numbers come from [`Random`], whose values depend only on
//! (seed, purpose, step, position).

mod blocks;
mod dtype;
mod host_device;
mod pool;
mod random;
mod split_scales;
mod tensor;
mod transposed;

pub use blocks::{
    BLOCK_LEN, F8_BLOCK_LEN, F8Block, Iq4NlBlock, LONG_BLOCK_LEN, Mxfp4Block, Q2KBlock, Q3KBlock, Q4_1Block, Q4Block,
    Q4KBlock, Q5_0Block, Q5_1Block, Q5KBlock, Q6KBlock, Q8Block, f8_value,
};
pub use dtype::{DType, Device, Element};
pub use half::{bf16, f16};
pub use host_device::{DeviceBlock, DeviceMemory};
pub use pool::{MemoryPool, PoolStats};
pub use random::{Purpose, Random};
pub use split_scales::{Lines, Place};
pub use tensor::{Bytes, Tensor};
