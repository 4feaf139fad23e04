//! Quantization of numbers to blocks of weights.

use moeworks_tensor::{BLOCK_LEN, Element, Q4Block, Q8Block, f16};

use super::layouts::Block;

/// A block that numbers can be quantized to.
pub(super) trait FromNumbers: Block + Element {
    /// Returns a block near the numbers. A number that is not finite makes the scale NaN, hence all elements.
    fn quantize(x: &[f32; BLOCK_LEN]) -> Self;
}

/// The largest finite f16.
const MAX_HALF: f32 = 65_504.0;

/// Returns the f16 nearest to a number, as f32; the largest one if it would overflow. It is written as f32 arithmetic
/// so that it vectorises.
#[inline(always)]
fn nearest_half(x: f32) -> f32 {
    // The smallest normal f16. Below it, f16 are multiples of 2^-24, as f32 are from 0.5 to 1.
    const MIN_NORMAL: f32 = 1.0 / 16_384.0;
    let x = x.clamp(-MAX_HALF, MAX_HALF);
    let bits = x.to_bits();
    let normal = f32::from_bits((bits + 0xfff + (bits >> 13 & 1)) & !0x1fff);
    let small = ((x.abs() + 0.5) - 0.5).copysign(x);
    if x.abs() < MIN_NORMAL { small } else { normal }
}

/// Returns the bytes of a scale that [`nearest_half`] rounded.
#[inline(always)]
fn stored(scale: f32) -> [u8; 2] {
    f16::from_f32(scale).to_le_bytes()
}

/// Returns the number of largest magnitude, the first of several; NaN if a number is not finite.
#[inline(always)]
fn largest(x: &[f32; BLOCK_LEN]) -> f32 {
    const INFINITE: u32 = f32::INFINITY.to_bits();
    let size = |x: f32| x.to_bits() & 0x7fff_ffff;
    // Compared as integers, whose maximum vectors have.
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

/// Added to a number below 2^22 it leaves no fraction bits: the nearest integer, ties to even, is in the last bits.
const WHOLE: f32 = 12_582_912.0;

/// Rounds a number below 2^22 to the nearest integer.
#[inline(always)]
fn nearest(x: f32) -> f32 {
    (x + WHOLE) - WHOLE
}

/// Returns the last byte of an integer below 2^22.
#[inline(always)]
fn byte(x: f32) -> u8 {
    (x + WHOLE).to_bits() as u8
}

// Loops instead of closures, because closures are compiled without the CPU features of the function that calls them.

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

/// The scales tried for a block of four bits, which map the largest magnitude to numbers 0.1 apart around -8.
const TRIED: usize = 13;

/// The distance of the first of these numbers from -8, in tenths.
const FIRST: f32 = -4.0;

/// The tried scales, the last one repeated to fill whole vectors.
const LANES: usize = TRIED.next_multiple_of(16);

/// Returns the four-bit integer nearest to a number divided by the scale.
#[inline(always)]
fn four_bits(x: f32) -> f32 {
    nearest(x).clamp(-8.0, 7.0)
}

/// Returns the sum of squared errors for each scale.
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
    /// Takes the scale of the least squared error among [`TRIED`], the first of equally good ones.
    #[inline(always)]
    fn quantize(x: &[f32; BLOCK_LEN]) -> Self {
        let largest = largest(x);
        let mut scales = [0.0; LANES];
        for (i, scale) in scales.iter_mut().enumerate() {
            *scale = nearest_half(largest / (-8.0 + 0.1 * (FIRST + i.min(TRIED - 1) as f32)));
        }
        // Comparisons with NaN are false, so NaN never wins.
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
