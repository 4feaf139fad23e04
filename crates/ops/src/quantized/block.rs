//! Blocks of weights from numbers.

use moeworks_tensor::{BLOCK_LEN, Element, Q4Block, Q8Block, f16};

use super::layouts::Block;

/// A block that numbers can be turned into.
pub(super) trait FromNumbers: Block + Element {
    /// The block nearest to the numbers, or nearly so. A number that is not finite makes the scale NaN, hence all elements.
    fn quantize(x: &[f32; BLOCK_LEN]) -> Self;
}

/// The f16 nearest to a scale, as stored and as computed with; the largest if it would overflow.
#[inline(always)]
fn stored_scale(scale: f32) -> ([u8; 2], f32) {
    let stored = f16::from_f32(if scale.is_nan() { scale } else { scale.clamp(-65_504.0, 65_504.0) });
    (stored.to_le_bytes(), stored.to_f32())
}

/// The largest magnitude with its sign; NaN if a number is not finite.
#[inline(always)]
fn largest(x: &[f32; BLOCK_LEN]) -> f32 {
    let largest = x.iter().copied().fold(0.0_f32, |a, b| if b.abs() > a.abs() { b } else { a });
    if x.iter().all(|x| x.is_finite()) { largest } else { f32::NAN }
}

#[inline(always)]
fn inverse(scale: f32) -> f32 {
    if scale == 0.0 || scale.is_nan() { 0.0 } else { 1.0 / scale }
}

/// The nearest whole number, ties to even, of one below 2^22: adding 1.5 * 2^23 leaves no digits behind the point.
#[inline(always)]
fn nearest(x: f32) -> f32 {
    (x + 12_582_912.0) - 12_582_912.0
}

impl FromNumbers for Q8Block {
    #[inline(always)]
    fn quantize(x: &[f32; BLOCK_LEN]) -> Self {
        let (scale, value) = stored_scale(largest(x).abs() / 127.0);
        let inverse = inverse(value);
        Self { scale, values: x.map(|x| nearest(x * inverse).clamp(-127.0, 127.0) as i8) }
    }
}

impl FromNumbers for Q4Block {
    /// The scale is the best in squares of some about the one that maps the largest magnitude to -8.
    #[inline(always)]
    fn quantize(x: &[f32; BLOCK_LEN]) -> Self {
        let largest = largest(x);
        let candidates = (-4..=8).map(|step| stored_scale(largest / (-8.0 + 0.1 * step as f32)));
        let attempts = candidates.map(|(scale, value)| {
            let inverse = inverse(value);
            let ints = x.map(|x| nearest(x * inverse).clamp(-8.0, 7.0));
            let error: f64 = x.iter().zip(&ints).map(|(x, n)| f64::from(x - value * n).powi(2)).sum();
            (error, scale, ints)
        });
        let best = attempts.min_by(|a, b| a.0.total_cmp(&b.0));
        let (_, scale, ints) = best.expect("there are candidates");
        let nibble = |i: usize| (ints[i] + 8.0) as u8;
        Self { scale, values: std::array::from_fn(|i| nibble(i) | (nibble(i + BLOCK_LEN / 2) << 4)) }
    }
}
