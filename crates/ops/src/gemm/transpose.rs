//! Transposition in registers, for packing weights that run across the depth.

#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod x86;

use moeworks_tensor::DType;
#[cfg(target_arch = "aarch64")]
pub(super) use neon::units_of_8;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::words;
#[cfg(target_arch = "x86_64")]
pub(super) use x86::{transpose, units, units_of_8};

use super::Compute;
use super::source::Format;
use crate::simd::Float;

/// How elements become units in steps of 32 bits: elements of f32, pairs of the others, which may become a unit each.
struct Steps {
    elements_per_step: usize,
    units_per_step: usize,
    /// Whole blocks of as many steps as there are rows, and the units in them.
    blocks: usize,
    num_units: usize,
}

/// Nothing where elements would have to be rounded, or there is no whole block.
#[inline(always)]
fn steps<T: Float, const ROWS: usize>(rows: &[&[T]; ROWS], format: Format) -> Option<Steps> {
    let depth = rows.iter().map(|row| row.len()).min().unwrap_or(0);
    let (elements_per_step, units_per_step) = match (T::DTYPE, format.units) {
        (DType::F32, Compute::F32) if format.precision == Compute::F32 => (1, 1),
        (DType::BF16, Compute::Bf16) => (2, 1),
        (DType::BF16, Compute::F32) => (2, 2),
        (DType::F16, Compute::F32) if format.precision == Compute::F32 => (2, 2),
        _ => return None,
    };
    let blocks = depth / (ROWS * elements_per_step);
    let num_units = blocks * ROWS * units_per_step;
    (blocks > 0).then_some(Steps { elements_per_step, units_per_step, blocks, num_units })
}
