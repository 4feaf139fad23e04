//! Colours of experts: light ones for dark letters on a light page, dark ones for light letters on a dark page.
//!
//! Hues are chosen in OKLCH (B. Ottosson, "A perceptual color space for image processing", 2020), where equal steps
//! look equally large. Up to [`FEW`] experts are spread evenly over the circle of hues, alternating between two
//! levels of lightness. More experts are dealt out to three levels of lightness. Each level spreads its experts
//! evenly over the circle, in strides that give consecutive experts distant hues. Chroma is lowered where sRGB cannot
//! show it.

/// The most experts that share one circle of hues.
const FEW: usize = 12;
/// The share of the circle whose multiples spread consecutive points best (the golden ratio minus 1).
const GOLDEN: f64 = 0.618_034;

/// An expert's colour on a light and on a dark page, in sRGB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shade {
    pub(super) light: [u8; 3],
    pub(super) dark: [u8; 3],
}

/// Returns a colour for each of `num_experts` experts.
pub(super) fn palette(num_experts: usize) -> Vec<Shade> {
    (0..num_experts).map(|expert| shade(expert, num_experts)).collect()
}

fn shade(expert: usize, num_experts: usize) -> Shade {
    let (place, places, level) = if num_experts <= FEW {
        (expert, num_experts, expert % 2 * 2)
    } else {
        let places = num_experts.div_ceil(3);
        (expert / 3 * stride(places) % places, places, expert % 3)
    };
    // The hues of the three levels are offset by a third of a step from each other.
    let offset = if num_experts <= FEW { 0.0 } else { level as f64 / 3.0 };
    let hue = 40.0 + 360.0 * (place as f64 + offset) / places as f64;
    let (light, dark) = [(0.88, 0.36), (0.80, 0.42), (0.72, 0.49)][level];
    Shade { light: oklch(light, 0.15, hue), dark: oklch(dark, 0.13, hue) }
}

/// Finds the number nearest to the golden share of `places` that is coprime to it, so that its multiples visit every
/// place.
fn stride(places: usize) -> usize {
    let golden = (places as f64 * GOLDEN).round() as usize;
    let is_coprime = |step: &usize| *step > 0 && gcd(*step, places) == 1;
    (0..=places).flat_map(|away| [golden.saturating_sub(away), golden + away]).find(is_coprime).unwrap_or(1)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Converts OKLCH to sRGB, with `chroma` lowered as far as sRGB needs.
fn oklch(lightness: f64, chroma: f64, hue: f64) -> [u8; 3] {
    let (sin, cos) = hue.to_radians().sin_cos();
    let linear = |chroma: f64| linear_rgb(lightness, chroma * cos, chroma * sin);
    let is_shown = |chroma: &f64| linear(*chroma).iter().all(|channel| (0.0..=1.0).contains(channel));
    let steps = (0..=20).map(|step| chroma * f64::from(20 - step) / 20.0);
    linear(steps.into_iter().find(is_shown).unwrap_or(0.0)).map(|channel| (gamma(channel) * 255.0).round() as u8)
}

/// Converts Oklab to linear sRGB with the matrices of Ottosson's article.
fn linear_rgb(lightness: f64, a: f64, b: f64) -> [f64; 3] {
    let l = (lightness + 0.396_337_777_4 * a + 0.215_803_757_3 * b).powi(3);
    let m = (lightness - 0.105_561_345_8 * a - 0.063_854_172_8 * b).powi(3);
    let s = (lightness - 0.089_484_177_5 * a - 1.291_485_548_0 * b).powi(3);
    [
        4.076_741_662_1 * l - 3.307_711_591_3 * m + 0.230_969_929_2 * s,
        -1.268_438_004_6 * l + 2.609_757_401_1 * m - 0.341_319_396_5 * s,
        -0.004_196_086_3 * l - 0.703_418_614_7 * m + 1.707_614_701_0 * s,
    ]
}

fn gamma(linear: f64) -> f64 {
    let linear = linear.clamp(0.0, 1.0);
    if linear <= 0.003_130_8 { 12.92 * linear } else { 1.055 * linear.powf(1.0 / 2.4) - 0.055 }
}

#[cfg(test)]
#[path = "palette_tests.rs"]
mod tests;
