//! Blocks of weights from numbers.

use moeworks_tensor::{BLOCK_LEN, Element, Q4Block, Q8Block, f16};

use super::layouts::Block;

/// A block that numbers can be turned into.
pub(super) trait FromNumbers: Block + Element {
    /// The block nearest to the numbers, or nearly so. A number that is not finite makes the scale NaN, hence all elements.
    fn quantize(x: &[f32; BLOCK_LEN]) -> Self;
}

/// The largest number that an f16 holds.
const MAX_HALF: f32 = 65_504.0;

/// The f16 nearest to a number, the largest if it would overflow: in whole vectors, for which it is a few operations of numbers.
#[inline(always)]
fn nearest_half(x: f32) -> f32 {
    // The smallest that has all its digits there; below, halves are multiples of 2^-24, as are floats from 0.5 to 1.
    const MIN_NORMAL: f32 = 1.0 / 16_384.0;
    let x = x.clamp(-MAX_HALF, MAX_HALF);
    let bits = x.to_bits();
    let normal = f32::from_bits((bits + 0xfff + (bits >> 13 & 1)) & !0x1fff);
    let small = ((x.abs() + 0.5) - 0.5).copysign(x);
    if x.abs() < MIN_NORMAL { small } else { normal }
}

/// As it is stored, a scale that [`nearest_half`] gave.
#[inline(always)]
fn stored(scale: f32) -> [u8; 2] {
    f16::from_f32(scale).to_le_bytes()
}

/// The largest magnitude with its sign, of equal ones that of the first; NaN if a number is not finite.
#[inline(always)]
fn largest(x: &[f32; BLOCK_LEN]) -> f32 {
    const INFINITE: u32 = f32::INFINITY.to_bits();
    let size = |x: f32| x.to_bits() & 0x7fff_ffff;
    // Of whole numbers, which have an order that vectors know.
    let mut most = 0;
    for &x in x {
        most = most.max(size(x));
    }
    if most >= INFINITE {
        return f32::NAN;
    }
    let first = x.iter().find(|&&x| size(x) == most);
    first.copied().unwrap_or(0.0)
}

#[inline(always)]
fn inverse(scale: f32) -> f32 {
    if scale == 0.0 || scale.is_nan() { 0.0 } else { 1.0 / scale }
}

/// To a number below 2^22 it adds what leaves no digits behind the point: the nearest whole number is in the last bits, ties to even.
const WHOLE: f32 = 12_582_912.0;

/// The nearest whole number of one below 2^22.
#[inline(always)]
fn nearest(x: f32) -> f32 {
    (x + WHOLE) - WHOLE
}

/// The last byte of a whole number below 2^22.
#[inline(always)]
fn byte(x: f32) -> u8 {
    (x + WHOLE).to_bits() as u8
}

// Loops instead of closures, which would not have the instructions of the function that they are called from.

impl FromNumbers for Q8Block {
    #[inline(always)]
    fn quantize(x: &[f32; BLOCK_LEN]) -> Self {
        let scale = nearest_half(largest(x).abs() / 127.0);
        let inverse = inverse(scale);
        let mut values = [0; BLOCK_LEN];
        for (value, &x) in values.iter_mut().zip(x) {
            *value = byte((x * inverse).clamp(-127.0, 127.0)).cast_signed();
        }
        Self { scale: stored(scale), values }
    }
}

/// Scales that are tried for a block of four bits: those that map the largest magnitude to numbers a tenth apart, about -8.
const TRIED: usize = 13;

/// How many tenths the first of these numbers is from -8.
const FIRST: f32 = -4.0;

/// Those and others, which are the last once more: whole vectors.
const LANES: usize = TRIED.next_multiple_of(16);

/// The whole number of four bits nearest to a number of scales.
#[inline(always)]
fn four_bits(x: f32) -> f32 {
    nearest(x).clamp(-8.0, 7.0)
}

/// For each scale the sum of the squares of what numbers are off by.
#[inline(always)]
fn errors(x: &[f32; BLOCK_LEN], scales: &[f32; LANES]) -> [f64; LANES] {
    let mut inverses = [0.0; LANES];
    for (to, &scale) in inverses.iter_mut().zip(scales) {
        *to = inverse(scale);
    }
    let mut errors = [0.0; LANES];
    for &x in x {
        for ((error, &scale), &inverse) in errors.iter_mut().zip(scales).zip(&inverses) {
            let off = f64::from(x - scale * four_bits(x * inverse));
            *error += off * off;
        }
    }
    errors
}

impl FromNumbers for Q4Block {
    /// The scale is the best in squares of [`TRIED`] ones, the first of equally good ones.
    #[inline(always)]
    fn quantize(x: &[f32; BLOCK_LEN]) -> Self {
        let largest = largest(x);
        let mut scales = [0.0; LANES];
        for (i, scale) in scales.iter_mut().enumerate() {
            *scale = nearest_half(largest / (-8.0 + 0.1 * (FIRST + i.min(TRIED - 1) as f32)));
        }
        // No error is less than NaN, nor is NaN less than one.
        let (mut least, mut scale) = (f64::INFINITY, f32::NAN);
        for (error, tried) in errors(x, &scales).into_iter().zip(scales) {
            if error < least {
                (least, scale) = (error, tried);
            }
        }
        let inverse = inverse(scale);
        let mut ints = [0; BLOCK_LEN];
        for (int, &x) in ints.iter_mut().zip(x) {
            *int = byte(four_bits(x * inverse) + 8.0) & 15;
        }
        let mut values = [0; BLOCK_LEN / 2];
        let (low, high) = ints.split_at(BLOCK_LEN / 2);
        for ((value, low), high) in values.iter_mut().zip(low).zip(high) {
            *value = low | high << 4;
        }
        Self { scale: stored(scale), values }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_is_the_nearest_f16_and_finite() {
        let all = (0..=u32::MAX).step_by(4_099).map(f32::from_bits);
        let halves = (0..0x7c00).map(|bits| f16::from_bits(bits).to_f32());
        let between =
            (0..0x7bff_u16).map(|bits| (f16::from_bits(bits).to_f32() + f16::from_bits(bits + 1).to_f32()) / 2.0);
        for x in all.chain(halves).chain(between).filter(|x| !x.is_nan()).flat_map(|x| [x, -x]) {
            let expected = f16::from_f32(x.clamp(-MAX_HALF, MAX_HALF)).to_f32();
            assert_eq!(nearest_half(x).to_bits(), expected.to_bits(), "{x:e}");
        }
        assert!(nearest_half(f32::NAN).is_nan());
    }
}
