//! Colours of experts: behind dark letters on light paper, and behind light letters on dark paper.
//!
//! Hues are in OKLCH (B. Ottosson, "A perceptual color space for image processing", 2020), where equal steps look
//! equally large. A few experts share the circle of hues evenly, on two levels of lightness in turn. Of many, each third shares it
//! evenly on a level of its own, in strides that take neighbours in number far apart. Chroma is lowered where a screen
//! cannot show it.

/// Experts up to this share the circle evenly.
const FEW: usize = 12;
/// Of the circle: strides of about this share spread consecutive points best.
const GOLDEN: f64 = 0.618_034;

/// An expert's colour on both papers, sRGB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shade {
    pub(super) light: [u8; 3],
    pub(super) dark: [u8; 3],
}

/// A colour for each of `num_experts` experts.
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
    // Of many, the three levels are a third of a place apart.
    let offset = if num_experts <= FEW { 0.0 } else { level as f64 / 3.0 };
    let hue = 40.0 + 360.0 * (place as f64 + offset) / places as f64;
    let (light, dark) = [(0.88, 0.36), (0.80, 0.42), (0.72, 0.49)][level];
    Shade { light: oklch(light, 0.15, hue), dark: oklch(dark, 0.13, hue) }
}

/// The number nearest to the golden share of `places` whose multiples come to every place.
fn stride(places: usize) -> usize {
    let golden = (places as f64 * GOLDEN).round() as usize;
    let is_coprime = |step: &usize| *step > 0 && gcd(*step, places) == 1;
    (0..=places).flat_map(|away| [golden.saturating_sub(away), golden + away]).find(is_coprime).unwrap_or(1)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// A colour of sRGB with this lightness and hue, and this chroma or as much of it as there is.
fn oklch(lightness: f64, chroma: f64, hue: f64) -> [u8; 3] {
    let (sin, cos) = hue.to_radians().sin_cos();
    let linear = |chroma: f64| linear_rgb(lightness, chroma * cos, chroma * sin);
    let is_shown = |chroma: &f64| linear(*chroma).iter().all(|channel| (0.0..=1.0).contains(channel));
    let steps = (0..=20).map(|step| chroma * f64::from(20 - step) / 20.0);
    linear(steps.into_iter().find(is_shown).unwrap_or(0.0)).map(|channel| (gamma(channel) * 255.0).round() as u8)
}

/// Oklab to linear sRGB: the matrices of the paper.
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
