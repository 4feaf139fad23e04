//! The element types of GGUF tensors: plain numbers, and blocks of small integers with scales.

use moeworks_ops::quantized;
use moeworks_tensor::{DType, bf16, f16};

/// The storage type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GgmlType(&'static Entry);

/// The entry of a type in the table.
#[derive(Debug, PartialEq, Eq)]
struct Entry {
    name: &'static str,
    /// The type's number in files.
    number: u32,
    /// Our type with the same bytes.
    own: DType,
}

const fn entry(name: &'static str, number: u32, own: DType) -> Entry {
    Entry { name, number, own }
}

static TYPES: [Entry; 15] = [
    entry("F32", 0, DType::F32),
    entry("F16", 1, DType::F16),
    entry("Q4_0", 2, DType::Q4),
    entry("Q4_1", 3, DType::Q4_1),
    entry("Q5_0", 6, DType::Q5_0),
    entry("Q5_1", 7, DType::Q5_1),
    entry("Q8_0", 8, DType::Q8),
    entry("Q2_K", 10, DType::Q2K),
    entry("Q3_K", 11, DType::Q3K),
    entry("Q4_K", 12, DType::Q4K),
    entry("Q5_K", 13, DType::Q5K),
    entry("Q6_K", 14, DType::Q6K),
    entry("IQ4_NL", 20, DType::Iq4Nl),
    entry("BF16", 30, DType::BF16),
    entry("MXFP4", 39, DType::Mxfp4),
];

/// Lists the block types with ggml's names.
pub fn block_types() -> impl Iterator<Item = (DType, &'static str)> {
    TYPES.iter().filter(|entry| entry.own.is_quantized()).map(|entry| (entry.own, entry.name))
}

impl GgmlType {
    /// Returns the type with this number, if it is supported.
    pub(super) fn from_number(number: u32) -> Option<Self> {
        TYPES.iter().find(|entry| entry.number == number).map(Self)
    }

    /// Returns the names of all supported types, for messages.
    pub(super) fn supported() -> String {
        TYPES.each_ref().map(|entry| entry.name).join(", ")
    }

    /// Returns ggml's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// Returns our type with the same bytes.
    #[must_use]
    pub fn own(self) -> DType {
        self.0.own
    }

    /// Returns the number of elements of a block. A row is a whole number of blocks.
    #[must_use]
    pub fn block_len(self) -> usize {
        self.own().block_len()
    }

    /// Returns the size of a block in bytes.
    #[must_use]
    pub fn block_bytes(self) -> usize {
        self.own().size()
    }

    /// Decodes whole blocks to f32. Panics unless `to` has as many elements as the blocks.
    pub(super) fn decode(self, bytes: &[u8], to: &mut [f32]) {
        assert_eq!(bytes.len() / self.block_bytes() * self.block_len(), to.len(), "elements of a tensor");
        let pairs = || bytes.as_chunks::<2>().0.iter();
        match self.own() {
            DType::F16 => to.iter_mut().zip(pairs()).for_each(|(to, x)| *to = f16::from_le_bytes(*x).to_f32()),
            DType::BF16 => to.iter_mut().zip(pairs()).for_each(|(to, x)| *to = bf16::from_le_bytes(*x).to_f32()),
            dtype if dtype.is_quantized() => quantized::decode(dtype, bytes, to),
            _ => to.iter_mut().zip(bytes.as_chunks().0).for_each(|(to, x)| *to = f32::from_le_bytes(*x)),
        }
    }
}

#[cfg(test)]
#[path = "blocks_tests.rs"]
mod tests;
