//! Heat maps of expert load: one for each layer, steps from left to right, experts from top to bottom.
//!
//! The cells are pixels of a PNG inside the SVG, which takes a hundredth of the bytes of rectangles. The even share
//! is transparent, more is warm and less is cold, so that one picture serves light and dark backgrounds.

use std::fmt::Write as _;

use super::data::LayerLoad;
use super::numbers::{Unit, short, tick_labels, ticks};

/// The most heat maps on a page; of more layers, evenly spaced ones are shown.
pub(super) const MAX_MAPS: usize = 64;
/// The most rows of a heat map; of more experts, neighbours share a row.
const MAX_ROWS: usize = 128;
/// The most pixels of all heat maps together, which limits the size of the page.
const MAX_PIXELS: usize = 500_000;
/// The number of colours on each side of the even share.
const SHADES: usize = 100;

/// Heat maps of some layers with a common colour scale.
pub(super) struct HeatMaps<'a> {
    layers: Vec<&'a LayerLoad>,
    /// The load, as a multiple of the even share, at which the colour is full; its inverse has the full colour of the
    /// other side.
    pub(super) full_at: f64,
    /// The number of experts that share a row.
    pub(super) experts_per_row: usize,
}

impl<'a> HeatMaps<'a> {
    /// Chooses the layers and the colour scale.
    pub(super) fn new(loads: &'a [LayerLoad]) -> Self {
        let count = loads.len().min(MAX_MAPS);
        let choose = |index: usize| if count > 1 { index * (loads.len() - 1) / (count - 1) } else { 0 };
        let layers: Vec<&LayerLoad> = (0..count).map(|index| &loads[choose(index)]).collect();
        let num_experts = layers.iter().map(|layer| layer.recent.tokens_per_expert.len()).max().unwrap_or(0).max(1);
        // The ratio of each load to the even share, in either direction; the top 2% do not affect the scale.
        let distance = |count: f64, even: f64| (count / even).max(even / count);
        let mut distances: Vec<f64> = Vec::new();
        for (_, counts) in layers.iter().flat_map(|layer| &layer.columns) {
            let even = even_share(counts);
            distances.extend(counts.iter().map(|&count| distance(count, even)).filter(|far| !far.is_nan()));
        }
        distances.sort_by(f64::total_cmp);
        let high = distances.get(distances.len().saturating_sub(1) * 49 / 50).copied().unwrap_or(1.0);
        let full_at = [1.5, 2.0, 3.0, 4.0, 8.0].into_iter().find(|full| high <= *full).unwrap_or(8.0);
        Self { layers, full_at, experts_per_row: num_experts.div_ceil(MAX_ROWS) }
    }

    /// Returns the number of layers shown.
    pub(super) fn len(&self) -> usize {
        self.layers.len()
    }

    /// Renders the maps as a grid of figures.
    pub(super) fn html(&self) -> String {
        // Two, three or four maps per row, so that the last row is full where possible.
        let (class, width) = match self.layers.len() {
            0..=4 => ("maps two", 460.0),
            len if len.is_multiple_of(4) && !len.is_multiple_of(3) => ("maps four", 230.0),
            _ => ("maps", 310.0),
        };
        let maps: String = self.layers.iter().map(|layer| self.map(layer, width)).collect();
        format!("<div class=\"{class}\">{maps}</div>{}", self.scale())
    }

    fn map(&self, load: &LayerLoad, width: f64) -> String {
        let num_experts = load.recent.tokens_per_expert.len();
        let rows = num_experts.div_ceil(self.experts_per_row);
        let fit = MAX_PIXELS / (rows * self.layers.len()).max(1);
        let first = load.columns.first().map_or(0.0, |column| column.0);
        let last = load.columns.last().map_or(0.0, |column| column.0);
        let columns = load.columns.len().min(fit.max(16));
        let mut pixels = Vec::with_capacity(rows * columns);
        let column_of = |index: usize| &load.columns[index * load.columns.len() / columns].1;
        for row in 0..rows {
            let experts = row * self.experts_per_row..((row + 1) * self.experts_per_row).min(num_experts);
            for index in 0..columns {
                let counts = column_of(index);
                let mean = counts[experts.clone()].iter().sum::<f64>() / experts.len() as f64;
                pixels.push(self.shade(mean / even_share(counts)));
            }
        }
        let image = base64(&png(columns, &pixels));
        let left = 30.0;
        let (plot, height) = (width - left - 2.0, (rows as f64 * 14.0).clamp(90.0, 200.0));
        let mut svg = format!(
            "<svg viewBox=\"0 0 {width} {}\" role=\"img\" aria-label=\"expert load of layer {}\">\
             <image x=\"{left}\" y=\"1\" width=\"{plot}\" height=\"{height}\" preserveAspectRatio=\"none\" \
             href=\"data:image/png;base64,{image}\"/>\
             <rect class=\"frame\" x=\"{left}\" y=\"1\" width=\"{plot}\" height=\"{height}\"/>",
            height + 20.0,
            load.layer
        );
        for expert in expert_ticks(num_experts) {
            let y = 1.0 + (expert as f64 + 0.5) / num_experts as f64 * height + 4.0;
            let y = y.clamp(10.0, height + 2.0);
            let _ = write!(svg, "<text x=\"{:.1}\" y=\"{y:.1}\" text-anchor=\"end\">{expert}</text>", left - 6.0);
        }
        let x_ticks: Vec<f64> = ticks(first, last, 4).into_iter().filter(|tick| tick.fract() == 0.0).collect();
        for (&tick, label) in x_ticks.iter().zip(tick_labels(&x_ticks, Unit::Plain)) {
            let x = left + if last > first { (tick - first) / (last - first) } else { 0.5 } * plot;
            if x < left + plot - 8.0 {
                let _ =
                    write!(svg, "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>", height + 16.0);
            }
        }
        let (layer, busiest) = (load.layer, load.recent.e_max_violation() + 1.0);
        format!("<figure><figcaption>Layer {layer} <span>busiest {busiest:.2}×</span></figcaption>{svg}</svg></figure>")
    }

    /// Returns the colour index of a load given as a multiple of the even share, which has index `SHADES`.
    fn shade(&self, ratio: f64) -> u8 {
        let share = if ratio > 0.0 { ratio.ln() / self.full_at.ln() } else { -1.0 };
        (SHADES as f64 + share.clamp(-1.0, 1.0) * SHADES as f64).round() as u8
    }

    fn scale(&self) -> String {
        let stops: Vec<String> = (0..=10)
            .map(|tenth| {
                let ([red, green, blue], alpha) = colour(tenth * SHADES / 5);
                format!("rgba({red},{green},{blue},{:.2})", f64::from(alpha) / 255.0)
            })
            .collect();
        let full = short(self.full_at, Unit::Plain);
        format!(
            "<div class=\"scale\"><span>≤ 1/{full}</span><i style=\"background:linear-gradient(90deg,{})\"></i>\
             <span>≥ {full}×</span><em>the middle is the even share</em></div>",
            stops.join(",")
        )
    }
}

fn even_share(counts: &[f64]) -> f64 {
    counts.iter().sum::<f64>() / counts.len() as f64
}

/// Chooses the experts that get a label: all of a few, round numbers of many.
fn expert_ticks(num_experts: usize) -> Vec<usize> {
    if num_experts <= 8 {
        return (0..num_experts).collect();
    }
    ticks(0.0, (num_experts - 1) as f64, 5)
        .into_iter()
        .filter(|tick| tick.fract() == 0.0)
        .map(|tick| tick as usize)
        .collect()
}

/// Returns the colour and opacity of a shade: cold below the even share, transparent at it, warm above.
fn colour(shade: usize) -> ([u8; 3], u8) {
    let distance = (shade as f64 - SHADES as f64).abs() / SHADES as f64;
    let (near, far) = if shade < SHADES { ([86, 165, 255], [40, 88, 225]) } else { ([255, 170, 40], [222, 45, 22]) };
    let mix = |channel: usize| {
        (f64::from(near[channel]) + (f64::from(far[channel]) - f64::from(near[channel])) * distance).round() as u8
    };
    ([mix(0), mix(1), mix(2)], (distance.powf(0.75) * 255.0).round() as u8)
}

/// Encodes an uncompressed PNG with the palette of [`colour`] and one byte per pixel.
fn png(width: usize, pixels: &[u8]) -> Vec<u8> {
    let mut file = b"\x89PNG\r\n\x1a\n".to_vec();
    let mut chunk = |kind: &[u8; 4], data: &[u8]| {
        file.extend((data.len() as u32).to_be_bytes());
        let start = file.len();
        file.extend(kind);
        file.extend(data);
        let crc = crc32(&file[start..]);
        file.extend(crc.to_be_bytes());
    };
    let size = [width as u32, (pixels.len() / width.max(1)) as u32].map(u32::to_be_bytes).concat();
    // 8 bits per pixel, palette, no interlacing.
    chunk(b"IHDR", &[&size[..], &[8, 3, 0, 0, 0]].concat());
    let palette: Vec<_> = (0..=2 * SHADES).map(colour).collect();
    chunk(b"PLTE", &palette.iter().flat_map(|(rgb, _)| *rgb).collect::<Vec<_>>());
    chunk(b"tRNS", &palette.iter().map(|(_, alpha)| *alpha).collect::<Vec<_>>());
    // Each row starts with its filter type: none.
    let rows: Vec<u8> =
        pixels.chunks(width.max(1)).flat_map(|row| [0].into_iter().chain(row.iter().copied())).collect();
    chunk(b"IDAT", &zlib_stored(&rows));
    chunk(b"IEND", &[]);
    file
}

/// Wraps `data` in a zlib stream of stored blocks.
fn zlib_stored(data: &[u8]) -> Vec<u8> {
    let mut stream = vec![0x78, 0x01];
    let num_blocks = data.len().div_ceil(0xffff);
    for (index, block) in data.chunks(0xffff).enumerate() {
        let len = block.len() as u16;
        stream.push(u8::from(index + 1 == num_blocks));
        stream.extend(len.to_le_bytes());
        stream.extend((!len).to_le_bytes());
        stream.extend(block);
    }
    let (a, b) = data.iter().fold((1u32, 0u32), |(a, b), &byte| {
        let a = (a + u32::from(byte)) % 65_521;
        (a, (b + a) % 65_521)
    });
    stream.extend((b << 16 | a).to_be_bytes());
    stream
}

/// Computes the CRC-32 of PNG bit by bit; the pictures are small.
fn crc32(data: &[u8]) -> u32 {
    !data.iter().fold(!0u32, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 })
    })
}

fn base64(data: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(data.len().div_ceil(3) * 4);
    for group in data.chunks(3) {
        let bits = group.iter().fold(0u32, |bits, &byte| bits << 8 | u32::from(byte)) << (8 * (3 - group.len()));
        for digit in 0..4 {
            let is_padding = digit > group.len();
            let index = (bits >> (18 - 6 * digit) & 63) as usize;
            text.push(if is_padding { '=' } else { char::from(DIGITS[index]) });
        }
    }
    text
}

#[cfg(test)]
#[path = "heat_tests.rs"]
mod tests;
