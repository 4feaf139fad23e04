//! A scan of a model's files for NaN and infinity, including the scales of blocks.

use std::fmt;

use moeworks_ops::{Context, quantized};
use moeworks_tensor::{BLOCK_LEN, DType, bf16, f16};

/// The number of bytes that one task scans.
const PIECE_BYTES: usize = 4 << 20;

/// The storage type of a tensor's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stored {
    F32,
    F16,
    Bf16,
    /// FP8 with four bits of exponent and no infinity.
    F8E4M3,
    /// Powers of two, the scales of MXFP4; 255 is NaN.
    Powers,
    /// Blocks that contain their scales.
    Blocks(DType),
}

impl Stored {
    /// Returns the size in bytes of a number, or of a block.
    fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::F8E4M3 | Self::Powers => 1,
            Self::Blocks(dtype) => dtype.size(),
        }
    }

    /// Returns the numbers in that many bytes.
    fn len(self) -> usize {
        match self {
            Self::Blocks(dtype) => dtype.block_len(),
            _ => 1,
        }
    }
}

/// A tensor of a file.
pub(crate) struct Region<'a> {
    pub(crate) name: String,
    /// Sizes of the dims in numbers, outermost first.
    pub(crate) shape: Vec<usize>,
    pub(crate) stored: Stored,
    pub(crate) bytes: &'a [u8],
    /// True if it belongs to routed experts, most of which a run may never use.
    pub(crate) is_of_experts: bool,
}

/// A tensor with NaN or infinity.
#[derive(Clone, Debug, PartialEq)]
pub struct NotFinite {
    /// Its name in the file.
    pub tensor: String,
    /// The number of elements that are not finite.
    pub count: u64,
    /// The first such element.
    pub first: f32,
    /// Its index, outermost dim first.
    pub place: Vec<usize>,
}

impl fmt::Display for NotFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tensor, count, first, place } = self;
        let plural = if *count == 1 { "number that is" } else { "numbers that are" };
        let first = if first.is_nan() { "NaN" } else { "infinity" };
        write!(f, "tensor {tensor:?} holds {count} {plural} NaN or infinite, the first ({first}) at {place:?}")
    }
}

/// The result of scanning a model's files.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WeightCheck {
    /// Tensors with NaN or infinity, in the order of the file.
    pub not_finite: Vec<NotFinite>,
    /// The size of all tensors in bytes.
    pub num_bytes: u64,
    /// The number of bytes that were scanned.
    pub num_checked: u64,
}

impl WeightCheck {
    /// Describes what was found, on one line; none if all is finite.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        let first = self.not_finite.first()?;
        let others = match &self.not_finite[1..] {
            [] => String::new(),
            [other] => format!("; so does {:?}", other.tensor),
            [other, rest @ ..] => format!("; so do {:?} and {} more", other.tensor, rest.len()),
        };
        Some(format!("{first}{others}: the file may be damaged, or training went wrong"))
    }
}

/// Scans the tensors. If they have more than `most` bytes in all, routed experts are left out.
pub(crate) fn scan(ctx: &Context, regions: &[Region<'_>], most: u64) -> WeightCheck {
    let num_bytes: u64 = regions.iter().map(|region| region.bytes.len() as u64).sum();
    let mut check = WeightCheck { num_bytes, ..WeightCheck::default() };
    let mut pieces = Vec::new();
    for (index, region) in regions.iter().enumerate() {
        if num_bytes > most && region.is_of_experts {
            continue;
        }
        check.num_checked += region.bytes.len() as u64;
        let step = (PIECE_BYTES / region.stored.size()).max(1) * region.stored.size();
        pieces.extend((0..region.bytes.len()).step_by(step).map(|start| (index, start, step)));
    }
    let mut found = vec![Found::default(); pieces.len()];
    ctx.threads().run_pieces(&mut found, 1, |piece, found| {
        let (index, start, step) = pieces[piece];
        let region = &regions[index];
        let bytes = &region.bytes[start..(start + step).min(region.bytes.len())];
        found[0] = look(region.stored, bytes);
    });
    for (&(index, start, _), found) in pieces.iter().zip(&found).filter(|(_, found)| found.count > 0) {
        let region = &regions[index];
        let before = start / region.stored.size() * region.stored.len();
        match check.not_finite.last_mut() {
            Some(last) if last.tensor == region.name => last.count += found.count,
            _ => check.not_finite.push(NotFinite {
                tensor: region.name.clone(),
                count: found.count,
                first: found.first,
                place: place(before + found.index, &region.shape),
            }),
        }
    }
    check
}

/// Converts the index of an element to one index per dim.
pub(crate) fn place(mut index: usize, shape: &[usize]) -> Vec<usize> {
    let mut place: Vec<usize> = shape
        .iter()
        .rev()
        .map(|&dim| {
            let at = index % dim.max(1);
            index /= dim.max(1);
            at
        })
        .collect();
    place.reverse();
    place
}

/// The elements of a chunk that are not finite.
#[derive(Clone, Copy, Default)]
struct Found {
    count: u64,
    first: f32,
    index: usize,
}

impl Found {
    fn add(&mut self, index: usize, value: f32) {
        if self.count == 0 {
            (self.first, self.index) = (value, index);
        }
        self.count += 1;
    }
}

fn look(stored: Stored, bytes: &[u8]) -> Found {
    let mut found = Found::default();
    match stored {
        Stored::F32 => {
            let values = bytes.as_chunks::<4>().0;
            let is_not = |b: &[u8; 4]| u32::from_le_bytes(*b) & 0x7f80_0000 == 0x7f80_0000;
            // A first pass without branches runs at memory bandwidth; only a chunk with a fault is searched.
            if values.iter().fold(false, |any, b| any | is_not(b)) {
                let bad = values.iter().enumerate().filter(|(_, b)| is_not(b));
                bad.for_each(|(i, b)| found.add(i, f32::from_le_bytes(*b)));
            }
        }
        Stored::F16 => halves(bytes, 0x7c00, |b| f16::from_bits(b).to_f32(), &mut found),
        Stored::Bf16 => halves(bytes, 0x7f80, |b| bf16::from_bits(b).to_f32(), &mut found),
        Stored::F8E4M3 => ones(bytes, |b| b & 0x7f == 0x7f, &mut found),
        Stored::Powers => ones(bytes, |b| b == 255, &mut found),
        Stored::Blocks(dtype) => blocks(dtype, bytes, &mut found),
    }
    found
}

fn halves(bytes: &[u8], exponent: u16, value: impl Fn(u16) -> f32, found: &mut Found) {
    let values = bytes.as_chunks::<2>().0;
    let is_not = |b: &[u8; 2]| u16::from_le_bytes(*b) & exponent == exponent;
    if values.iter().fold(false, |any, b| any | is_not(b)) {
        let bad = values.iter().enumerate().filter(|(_, b)| is_not(b));
        bad.for_each(|(i, b)| found.add(i, value(u16::from_le_bytes(*b))));
    }
}

fn ones(bytes: &[u8], is_not: impl Fn(u8) -> bool, found: &mut Found) {
    if bytes.iter().fold(false, |any, &b| any | is_not(b)) {
        bytes.iter().enumerate().filter(|(_, b)| is_not(**b)).for_each(|(i, _)| found.add(i, f32::NAN));
    }
}

/// Scans the scales of blocks, and decodes the blocks whose scale may make them overflow.
fn blocks(dtype: DType, bytes: &[u8], found: &mut Found) {
    let (size, len) = (dtype.size(), dtype.block_len());
    let halves = half_scales(dtype);
    let is_suspect = |block: &[u8]| {
        let is_not = |at: &usize| u16::from_le_bytes([block[*at], block[*at + 1]]) & 0x7c00 == 0x7c00;
        halves.iter().any(is_not) || (dtype == DType::Mxfp4 && block[0] >= 252)
    };
    let mut values = vec![0.0; len];
    for (index, block) in bytes.chunks_exact(size).enumerate().filter(|(_, block)| is_suspect(block)) {
        if dtype == DType::Mxfp4 && block[0] == 255 {
            (0..len).for_each(|i| found.add(index * len + i, f32::NAN));
            continue;
        }
        quantized::decode(dtype, block, &mut values);
        let bad = values.iter().enumerate().filter(|(_, x)| !x.is_finite());
        bad.for_each(|(i, &x)| found.add(index * len + i, x));
    }
}

/// Returns the offsets of a block's f16 scales in bytes (`ggml-common.h`).
fn half_scales(dtype: DType) -> &'static [usize] {
    match dtype {
        DType::Q8 | DType::Q4 | DType::Q5_0 | DType::Iq4Nl => &[0],
        DType::Q4_1 | DType::Q5_1 | DType::Q4K | DType::Q5K => &[0, 2],
        DType::Q2K => &[80, 82],
        DType::Q3K => &[108],
        DType::Q6K => &[208],
        _ => &[],
    }
}

/// Returns the storage type that corresponds to `own`, if it can hold NaN or infinity.
pub(crate) fn stored_as(own: DType) -> Option<Stored> {
    match own {
        DType::F32 => Some(Stored::F32),
        DType::F16 => Some(Stored::F16),
        DType::BF16 => Some(Stored::Bf16),
        dtype if dtype.is_quantized() && dtype != DType::F8 && dtype.block_len() >= BLOCK_LEN => {
            Some(Stored::Blocks(dtype))
        }
        _ => None,
    }
}

#[cfg(test)]
#[path = "scan_tests.rs"]
mod tests;
