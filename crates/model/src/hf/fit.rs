//! Checks that the numbers of a tensor fit the type to write.

use moeworks_tensor::{DType, bf16, f16};

use crate::safetensors::FileDType;

/// The smallest number that becomes infinity as f16.
const F16_OVERFLOW: f32 = 65_520.0;
/// The bits of the smallest number that becomes infinity as bf16.
const BF16_OVERFLOW: u32 = 0x7f7f_8000;
/// The largest scale of blocks, an f16.
const MAX_SCALE: f32 = 65_504.0;

/// A number that does not fit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Misfit {
    /// The index among the numbers that were checked.
    pub(super) index: usize,
    pub(super) value: f32,
}

/// Iterates over the little-endian numbers of type `from` in `bytes`, as f32.
pub(super) fn values(bytes: &[u8], from: FileDType) -> Box<dyn Iterator<Item = f32> + '_> {
    match from {
        FileDType::F16 => Box::new(bytes.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32())),
        FileDType::BF16 => Box::new(bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32())),
        _ => Box::new(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b))),
    }
}

/// Returns the first finite number that becomes infinite on conversion from type `from` to type `to`.
pub(super) fn overflow(bytes: &[u8], from: FileDType, to: FileDType) -> Option<Misfit> {
    let limit = match to {
        FileDType::F16 if from != FileDType::F16 => F16_OVERFLOW,
        FileDType::BF16 if from == FileDType::F32 => f32::from_bits(BF16_OVERFLOW),
        _ => return None,
    };
    let is_misfit = |x: f32| x.abs() >= limit && x.is_finite();
    values(bytes, from).enumerate().find(|(_, x)| is_misfit(*x)).map(|(index, value)| Misfit { index, value })
}

/// Returns `x` clamped to the largest finite magnitude of type `to`; NaN and infinity stay.
pub(super) fn clamped(x: f32, to: FileDType) -> f32 {
    let most = match to {
        FileDType::F16 => f16::MAX.to_f32(),
        FileDType::BF16 => bf16::MAX.to_f32(),
        _ => return x,
    };
    if x.is_finite() { x.clamp(-most, most) } else { x }
}

/// Returns the largest magnitude that blocks of `dtype` can represent.
pub(super) fn largest_in_blocks(dtype: DType) -> f32 {
    MAX_SCALE * if dtype == DType::Q8 { 127.0 } else { 8.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_become_infinity_from_half_way_to_the_next_on() {
        let overflows = |x: f32, to| overflow(&x.to_le_bytes(), FileDType::F32, to).is_some();
        for (to, fits, not) in [(FileDType::F16, 65_519.996, 65_520.0), (FileDType::BF16, 3.396e38, 3.397e38)] {
            for sign in [1.0, -1.0] {
                assert!(!overflows(sign * fits, to) && overflows(sign * not, to), "{to}");
            }
            assert!(!overflows(f32::INFINITY, to) && !overflows(f32::NAN, to));
        }
        assert!(f16::from_f32(65_519.996).is_finite() && f16::from_f32(65_520.0).is_infinite());
        let edge = f32::from_bits(BF16_OVERFLOW);
        assert!(bf16::from_f32(edge).is_infinite() && bf16::from_f32(f32::from_bits(BF16_OVERFLOW - 1)).is_finite());
        assert_eq!((clamped(1e9, FileDType::F16), clamped(-1e9, FileDType::F16)), (65_504.0, -65_504.0));
        assert!(clamped(f32::NAN, FileDType::F16).is_nan());
    }
}
