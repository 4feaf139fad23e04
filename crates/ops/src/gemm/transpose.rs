//! Transposition in registers, for packing rows that run along the depth.

/// The body of a function that writes unit u of each of `$count` rows r to `$to[u * width + r]`, as far as whole
/// blocks go, and returns the number of units. It does nothing and returns 0 if elements would have to be rounded. It
/// is a macro so that `$transpose` (of the rows' pointers), `$widened` (splits a vector of pairs into its elements)
/// and `$store` are inlined into a function with the CPU features.
macro_rules! write_blocks {
    ($count:literal, $rows:ident, $format:ident, ($width:ident, $to:ident), $transpose:expr, $widened:expr, $store:expr) => {{
        let Some(steps) = $crate::gemm::transpose::steps($rows, $format) else { return 0 };
        let $crate::gemm::transpose::Steps { elements_per_step, units_per_step, blocks, num_units } = steps;
        assert!($to.len() >= (num_units - 1) * $width + $count, "space for the transposed block");
        for block in 0..blocks {
            let mut from: [*const f32; $count] = [std::ptr::null(); $count];
            for (from, row) in from.iter_mut().zip($rows) {
                *from = row[block * $count * elements_per_step..].as_ptr().cast();
            }
            // SAFETY: as many steps of each row as there are rows, and as many lanes of each unit's place, are inside
            // the slices, as checked above; the machine has the instructions by the caller's promise.
            unsafe {
                let columns = $transpose(&from);
                let to = $to.as_mut_ptr().add(block * $count * units_per_step * $width);
                for (i, &column) in columns.iter().enumerate() {
                    if units_per_step == 2 {
                        let [low, high] = $widened(column);
                        $store(to.add(2 * i * $width).cast(), low);
                        $store(to.add((2 * i + 1) * $width).cast(), high);
                    } else {
                        $store(to.add(i * $width).cast(), column);
                    }
                }
            }
        }
        num_units
    }};
}

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

/// The steps of 32 bits in which elements become units: one f32, or a pair of the other types, which may become a
/// unit each.
struct Steps {
    elements_per_step: usize,
    units_per_step: usize,
    /// Whole blocks of as many steps as there are rows, and the units in them.
    blocks: usize,
    num_units: usize,
}

/// Returns nothing if elements would have to be rounded or there is no whole block.
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
