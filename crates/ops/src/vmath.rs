//! Elementary functions without branches, so that loops over them turn into vector code (see [`simd`](crate::simd)).

use crate::simd::Level;

/// Returns `e^x` within 2 units in the last place. Results below the smallest normal number are 0, above the largest
/// infinite; NaN stays NaN.
///
/// Range reduction to `x = n ln 2 + r` with `|r| <= ln 2 / 2` and the polynomial of Cephes' `expf`.
#[inline(always)]
pub(crate) fn exp<S: Level>(x: f32) -> f32 {
    /// The logs of the largest and of the smallest normal number.
    const MAX: f32 = 88.722_84;
    const MIN: f32 = -87.336_54;
    /// ln 2 in two parts; products of the first with small integers are exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    /// 1.5 * 2^23: adding it leaves an integer in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    // Comparisons rather than `clamp`, `min` and `max`: these must let NaN through.
    let mut c = if x > MAX { MAX } else { x };
    c = if c < MIN { MIN } else { c };
    let shifted = S::mul_add(c, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = S::mul_add(n, -LN_2_LOW, S::mul_add(n, -LN_2_HIGH, c));
    let mut p = S::mul_add(1.987_569_1e-4, r, 1.398_199_9e-3);
    p = S::mul_add(p, r, 8.333_452e-3);
    p = S::mul_add(p, r, 4.166_579_6e-2);
    p = S::mul_add(p, r, 0.166_666_65);
    p = S::mul_add(p, r, 0.5);
    let value = S::mul_add(p, r * r, r) + 1.0;
    // 2^n in two factors, because n can be 128.
    let whole = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = whole >> 1;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
    let y = value * power(half) * power(whole.wrapping_sub(half));
    let y = if x < MIN { 0.0 } else { y };
    if x > MAX { f32::INFINITY } else { y }
}

/// The least exponent of [`exp2_falling`] whose result is not zero. There are no subnormal results, which some CPUs
/// take a hundred times as long for.
pub(crate) const LEAST_POWER: f32 = -125.0;

/// Returns `2^x` for `x <= 0` within 2 units in the last place, with about half the work of [`exp`]. 0 from `x <
/// -125` down, exactly 1 at 0; NaN stays NaN. The result for `x` of 1 and more is unspecified.
#[inline(always)]
pub(crate) fn exp2_falling<S: Level>(x: f32) -> f32 {
    const MIN: f32 = LEAST_POWER;
    /// 1.5 * 2^23 + 127: the low bits of a sum with it are a rounded exponent as f32 stores it.
    const ROUND: f32 = 12_583_039.0;
    let c = if x < MIN { MIN } else { x };
    let shifted = c + ROUND;
    let r = c - (shifted - ROUND);
    // The polynomial of least relative error over |r| <= 1/2, found by Remez' exchange.
    let mut p = S::mul_add(1.534_581_2e-4, r, 1.339_993_1e-3);
    p = S::mul_add(p, r, 9.618_489e-3);
    p = S::mul_add(p, r, 5.550_328_6e-2);
    p = S::mul_add(p, r, 0.240_226_46);
    p = S::mul_add(p, r, std::f32::consts::LN_2);
    p = S::mul_add(p, r, 1.0);
    let y = p * f32::from_bits(shifted.to_bits() << 23);
    if x < MIN { 0.0 } else { y }
}

/// Returns `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid<S: Level>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<S>(-x))
}

/// Returns the hyperbolic tangent within a few units in the last place.
#[inline(always)]
pub(crate) fn tanh<S: Level>(x: f32) -> f32 {
    /// Below this the difference from 1 would cancel; the first omitted term of the series is 2e-8 of the value.
    const SMALL: f32 = 0.28;
    let z = x * x;
    let mut p = S::mul_add(z, 62.0 / 2835.0, -17.0 / 315.0);
    p = S::mul_add(p, z, 2.0 / 15.0);
    p = S::mul_add(p, z, -1.0 / 3.0);
    let small = S::mul_add(p * z, x, x);
    let large = 1.0 - 2.0 / (exp::<S>(2.0 * x) + 1.0);
    if x.abs() < SMALL { small } else { large }
}

/// Returns `2 artanh(s)` for `|s|` of at most 1/3.
#[inline(always)]
fn twice_artanh<S: Level>(s: f32) -> f32 {
    let z = s * s;
    let mut p = S::mul_add(z, 1.0 / 15.0, 1.0 / 13.0);
    p = S::mul_add(p, z, 1.0 / 11.0);
    p = S::mul_add(p, z, 1.0 / 9.0);
    p = S::mul_add(p, z, 1.0 / 7.0);
    p = S::mul_add(p, z, 1.0 / 5.0);
    p = S::mul_add(p, z, 1.0 / 3.0);
    2.0 * s * S::mul_add(p, z, 1.0)
}

/// Returns `ln(x)` within a few units in the last place; minus infinity for 0, NaN for negative numbers and NaN.
/// Subnormal numbers count as 0.
#[inline(always)]
pub(crate) fn ln<S: Level>(x: f32) -> f32 {
    /// ln 2 in two parts; products of the first with exponents are exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    // x = 2^n m with m from sqrt(1/2) to sqrt(2), and ln(m) = 2 artanh((m - 1) / (m + 1)).
    let n = x.to_bits().wrapping_sub(std::f32::consts::FRAC_1_SQRT_2.to_bits()) as i32 >> 23;
    let m = f32::from_bits(x.to_bits().wrapping_sub((n << 23) as u32));
    let log = twice_artanh::<S>((m - 1.0) / (m + 1.0));
    let n = n as f32;
    let y = S::mul_add(n, LN_2_HIGH, S::mul_add(n, LN_2_LOW, log));
    let y = if x < f32::MIN_POSITIVE { f32::NEG_INFINITY } else { y };
    let y = if x < f32::INFINITY { y } else { x };
    if x < 0.0 { f32::NAN } else { y }
}

/// Returns `ln(1 + e^x)` within a few units in the last place.
#[inline(always)]
pub(crate) fn softplus<S: Level>(x: f32) -> f32 {
    // ln(1 + y) = 2 artanh(y / (2 + y)) with y at most 1.
    let y = exp::<S>(-x.abs());
    let log = twice_artanh::<S>(y / (2.0 + y));
    // Not `max`, which would lose a NaN.
    if x < 0.0 { log } else { x + log }
}

/// Returns the cumulative distribution function and the density of the standard normal distribution at `x`, each
/// within 3e-7. `x` times the first is the exact GELU.
#[inline(always)]
pub(crate) fn normal<S: Level>(x: f32) -> (f32, f32) {
    const INV_SQRT_2_PI: f32 = 0.398_942_3;
    // Abramowitz and Stegun 7.1.26 for erfc(z), z = |x| / sqrt(2): a polynomial in t times e^(-z^2), error 1.5e-7.
    let t = 1.0 / (1.0 + 0.327_591_1 * std::f32::consts::FRAC_1_SQRT_2 * x.abs());
    let bell = exp::<S>(-0.5 * x * x);
    let mut p = S::mul_add(1.061_405_4, t, -1.453_152);
    p = S::mul_add(p, t, 1.421_413_7);
    p = S::mul_add(p, t, -0.284_496_74);
    p = S::mul_add(p, t, 0.254_829_6);
    let tail = 0.5 * p * t * bell;
    (if x < 0.0 { tail } else { 1.0 - tail }, INV_SQRT_2_PI * bell)
}

#[cfg(test)]
#[path = "vmath_tests.rs"]
mod tests;
