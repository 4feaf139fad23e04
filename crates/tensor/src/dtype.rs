//! Element types and devices.

use half::bf16;

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE single precision: the reference precision.
    F32,
    /// bfloat16: f32 with a 7-bit mantissa.
    BF16,
    /// Unsigned 32-bit integers: token ids, expert ids, row maps.
    U32,
}

impl DType {
    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::F32 | Self::U32 => 4,
            Self::BF16 => 2,
        }
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

impl Element for u32 {
    const DTYPE: DType = DType::U32;
}

/// Where a tensor's memory is and who computes on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Device {
    /// The host processor.
    Cpu,
}
