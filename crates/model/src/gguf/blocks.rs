//! The element types of GGUF tensors: plain numbers, and blocks of small integers with scales.
//!
//! The layouts are those of ggml's reference quantisation (`ggml-common.h`, `ggml-quants.c`); integers are little-endian,
//! a scale is an f16 unless said otherwise.

use half::{bf16, f16};

use crate::hf::fp4_value;

/// How the elements of a tensor are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // ggml's names.
pub enum GgmlType {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Iq4Nl,
    Mxfp4,
}

/// Turns the bytes of one block into its elements.
type Decode = fn(&[u8], &mut [f32]);

/// What there is to know of a type.
struct Entry {
    ty: GgmlType,
    name: &'static str,
    /// Its number in files.
    number: u32,
    /// Elements of a block, and the bytes that they take.
    elements: usize,
    bytes: usize,
    decode: Decode,
}

const fn entry(
    ty: GgmlType,
    name: &'static str,
    number: u32,
    (elements, bytes): (usize, usize),
    decode: Decode,
) -> Entry {
    Entry { ty, name, number, elements, bytes, decode }
}

/// Elements of a block of the types whose names end in K.
const K: usize = 256;

const TYPES: [Entry; 15] = [
    entry(GgmlType::F32, "F32", 0, (1, 4), |from, to| to[0] = f32::from_le_bytes([from[0], from[1], from[2], from[3]])),
    entry(GgmlType::F16, "F16", 1, (1, 2), |from, to| to[0] = half_at(from, 0)),
    entry(GgmlType::Q4_0, "Q4_0", 2, (32, 18), q4_0),
    entry(GgmlType::Q4_1, "Q4_1", 3, (32, 20), q4_1),
    entry(GgmlType::Q5_0, "Q5_0", 6, (32, 22), q5_0),
    entry(GgmlType::Q5_1, "Q5_1", 7, (32, 24), q5_1),
    entry(GgmlType::Q8_0, "Q8_0", 8, (32, 34), q8_0),
    entry(GgmlType::Q2K, "Q2_K", 10, (K, 84), q2_k),
    entry(GgmlType::Q3K, "Q3_K", 11, (K, 110), q3_k),
    entry(GgmlType::Q4K, "Q4_K", 12, (K, 144), q4_k),
    entry(GgmlType::Q5K, "Q5_K", 13, (K, 176), q5_k),
    entry(GgmlType::Q6K, "Q6_K", 14, (K, 210), q6_k),
    entry(GgmlType::Iq4Nl, "IQ4_NL", 20, (32, 18), iq4_nl),
    entry(GgmlType::Bf16, "BF16", 30, (1, 2), |from, to| to[0] = bf16::from_le_bytes([from[0], from[1]]).to_f32()),
    entry(GgmlType::Mxfp4, "MXFP4", 39, (32, 17), mxfp4),
];

impl GgmlType {
    /// The type of this number, if it is one that is read.
    pub(super) fn from_number(number: u32) -> Option<Self> {
        TYPES.iter().find(|entry| entry.number == number).map(|entry| entry.ty)
    }

    /// The names of all types that are read, for messages.
    pub(super) fn supported() -> String {
        TYPES.map(|entry| entry.name).join(", ")
    }

    fn entry(self) -> &'static Entry {
        TYPES.iter().find(|entry| entry.ty == self).unwrap_or(&TYPES[0])
    }

    /// ggml's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.entry().name
    }

    /// Elements of a block: rows are whole blocks.
    #[must_use]
    pub fn block_len(self) -> usize {
        self.entry().elements
    }

    /// The bytes of a block.
    #[must_use]
    pub fn block_bytes(self) -> usize {
        self.entry().bytes
    }

    /// Turns whole blocks into f32; `to` must be as long as the blocks have elements.
    pub(super) fn decode(self, bytes: &[u8], to: &mut [f32]) {
        let Entry { elements, bytes: block_bytes, decode, .. } = *self.entry();
        assert_eq!(bytes.len() / block_bytes * elements, to.len(), "elements of a tensor");
        for (bytes, to) in bytes.chunks_exact(block_bytes).zip(to.chunks_exact_mut(elements)) {
            decode(bytes, to);
        }
    }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// The low and high four bits of sixteen bytes are elements 0 to 15 and 16 to 31.
fn nibbles(bytes: &[u8]) -> impl Iterator<Item = (usize, u8)> + '_ {
    let high = bytes.iter().map(|byte| byte >> 4);
    bytes.iter().map(|byte| byte & 15).chain(high).enumerate()
}

/// A scale, 32 integers from 0 to 15, 8 stands for zero.
fn q4_0(from: &[u8], to: &mut [f32]) {
    let d = half_at(from, 0);
    nibbles(&from[2..]).for_each(|(i, q)| to[i] = d * (f32::from(q) - 8.0));
}

/// A scale, a least value, 32 integers from 0 to 15.
fn q4_1(from: &[u8], to: &mut [f32]) {
    let (d, m) = (half_at(from, 0), half_at(from, 2));
    nibbles(&from[4..]).for_each(|(i, q)| to[i] = d * f32::from(q) + m);
}

/// The fifth bit of each of 32 integers, times 16.
fn fifth_bits(bytes: &[u8]) -> impl Fn(usize) -> u8 {
    let bits = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    move |i| (bits >> i & 1) as u8 * 16
}

/// As `q4_0` with a fifth bit for each integer, 16 stands for zero.
fn q5_0(from: &[u8], to: &mut [f32]) {
    let (d, fifth) = (half_at(from, 0), fifth_bits(&from[2..]));
    nibbles(&from[6..]).for_each(|(i, q)| to[i] = d * (f32::from(q | fifth(i)) - 16.0));
}

/// As `q4_1` with a fifth bit for each integer.
fn q5_1(from: &[u8], to: &mut [f32]) {
    let (d, m, fifth) = (half_at(from, 0), half_at(from, 2), fifth_bits(&from[4..]));
    nibbles(&from[8..]).for_each(|(i, q)| to[i] = d * f32::from(q | fifth(i)) + m);
}

/// A scale and 32 signed bytes.
fn q8_0(from: &[u8], to: &mut [f32]) {
    let d = half_at(from, 0);
    to.iter_mut().zip(&from[2..]).for_each(|(to, &q)| *to = d * f32::from(q.cast_signed()));
}

/// A power of two in one byte, 32 four-bit floats (OCP Microscaling Formats 1.0).
fn mxfp4(from: &[u8], to: &mut [f32]) {
    let scale = 2.0_f32.powi(i32::from(from[0]) - 127);
    nibbles(&from[1..]).for_each(|(i, q)| to[i] = scale * fp4_value(q));
}

/// The sixteen levels of `iq4_nl`, close together around zero.
const IQ4_LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// A scale and 32 numbers of levels.
fn iq4_nl(from: &[u8], to: &mut [f32]) {
    let d = half_at(from, 0);
    nibbles(&from[2..]).for_each(|(i, q)| to[i] = d * f32::from(IQ4_LEVELS[usize::from(q)]));
}

/// Sixteen bytes of a four-bit scale and a four-bit least value for 16 elements each, 64 bytes of two-bit integers, the two
/// scales of those. The elements of 128 lie in 32 bytes, by pairs of bits.
fn q2_k(from: &[u8], to: &mut [f32]) {
    let (scales, qs) = (&from[..16], &from[16..80]);
    let (d, dmin) = (half_at(from, 80), half_at(from, 82));
    for (i, to) in to.iter_mut().enumerate() {
        let (half, pair, byte) = (i / 128, i % 128 / 32, i % 32);
        let q = qs[32 * half + byte] >> (2 * pair) & 3;
        let scale = scales[i / 16];
        *to = d * f32::from(scale & 15) * f32::from(q) - dmin * f32::from(scale >> 4);
    }
}

/// 32 bytes of third bits, 64 of the lower two as in `q2_k`, sixteen six-bit scales, the scale of those. A third bit that is
/// not set takes four away.
fn q3_k(from: &[u8], to: &mut [f32]) {
    let (third, qs, scales, d) = (&from[..32], &from[32..96], &from[96..108], half_at(from, 108));
    // Four low bits of the scales 0 to 7 and 8 to 15 in bytes 0 to 7, two high bits in bytes 8 to 11.
    let scale = |j: usize| {
        let low = scales[j % 8] >> (4 * (j / 8)) & 15;
        let high = scales[8 + j % 4] >> (2 * (j / 4)) & 3;
        f32::from(low | high << 4) - 32.0
    };
    for (i, to) in to.iter_mut().enumerate() {
        let (half, pair, byte) = (i / 128, i % 128 / 32, i % 32);
        let low = qs[32 * half + byte] >> (2 * pair) & 3;
        let is_set = third[byte] >> (4 * half + pair) & 1 == 1;
        *to = d * scale(i / 16) * (f32::from(low) - if is_set { 0.0 } else { 4.0 });
    }
}

/// The six-bit scale and least value of the 32 elements `j`, from twelve bytes that hold eight of each.
fn scale_and_min(bytes: &[u8], j: usize) -> (f32, f32) {
    let (scale, min) = if j < 4 {
        (bytes[j] & 63, bytes[j + 4] & 63)
    } else {
        let both = bytes[j + 4];
        (both & 15 | bytes[j - 4] >> 2 & 48, both >> 4 | bytes[j] >> 2 & 48)
    };
    (f32::from(scale), f32::from(min))
}

/// Two scales, twelve bytes of scales and least values, 128 bytes of four-bit integers: of 64 elements the first 32 in low
/// halves of 32 bytes, the others in the high ones.
fn q4_k(from: &[u8], to: &mut [f32]) {
    let (d, dmin) = (half_at(from, 0), half_at(from, 2));
    for (j, to) in to.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_and_min(&from[4..16], j);
        let qs = &from[16 + 32 * (j / 2)..];
        for (to, q) in to.iter_mut().zip(qs) {
            *to = d * scale * f32::from(q >> (4 * (j % 2)) & 15) - dmin * min;
        }
    }
}

/// As `q4_k` with 32 bytes of fifth bits before the integers, bit j of each for the elements `j`.
fn q5_k(from: &[u8], to: &mut [f32]) {
    let (d, dmin) = (half_at(from, 0), half_at(from, 2));
    for (j, to) in to.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_and_min(&from[4..16], j);
        let qs = &from[48 + 32 * (j / 2)..];
        for ((to, q), fifth) in to.iter_mut().zip(qs).zip(&from[16..48]) {
            let q = q >> (4 * (j % 2)) & 15 | (fifth >> j & 1) << 4;
            *to = d * scale * f32::from(q) - dmin * min;
        }
    }
}

/// 128 bytes of low four bits, 64 of high two, sixteen signed scales, the scale of those. Of 128 elements the quarters take
/// turns: low halves of 64 bytes, then their high halves.
fn q6_k(from: &[u8], to: &mut [f32]) {
    let (low, high, scales, d) = (&from[..128], &from[128..192], &from[192..208], half_at(from, 208));
    for (i, to) in to.iter_mut().enumerate() {
        let (half, quarter, byte) = (i / 128, i % 128 / 32, i % 32);
        let low = low[64 * half + 32 * (quarter % 2) + byte] >> (4 * (quarter / 2)) & 15;
        let high = high[32 * half + byte] >> (2 * quarter) & 3;
        *to = d * f32::from(scales[i / 16].cast_signed()) * (f32::from(low | high << 4) - 32.0);
    }
}

#[cfg(test)]
#[path = "blocks_tests.rs"]
mod tests;
