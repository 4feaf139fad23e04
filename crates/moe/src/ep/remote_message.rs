//! Messages from the root to a rank that holds experts: a header of fixed size, then the rows of its experts.
//!
//! The second message has the number of rows of each expert that the rank holds, the token of each row, and the
//! tokens, each once.

use std::ops::Range;

use moeworks_ops::Context;
use moeworks_tensor::{DType, Tensor};

use crate::MoeWeights;

/// The tags of the messages.
pub(super) const TAG_HEADER: u32 = 1;
pub(super) const TAG_ROWS: u32 = 2;
pub(super) const TAG_OUTPUTS: u32 = 3;

/// The size of a number in a message, in bytes.
const WORD: usize = size_of::<u32>();

/// The first of two messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// The number of the layer.
    pub(super) layer: u32,
    num_tokens: u32,
    num_rows: u32,
    /// The number of experts that the rank holds.
    num_experts: u32,
}

impl Header {
    /// The number of words.
    pub(super) const LEN: usize = 4;
    /// The header that says that there is no more work.
    pub(super) const END: Self = Self { layer: u32::MAX, num_tokens: 0, num_rows: 0, num_experts: 0 };

    /// Creates the header of a move of experts, with the bytes of the texts of both placements.
    pub(super) fn of_move(layer: u32, [from, to]: [u32; 2]) -> Self {
        Self { layer, num_tokens: from, num_rows: to, num_experts: u32::MAX }
    }

    /// Returns whether experts are to move.
    pub(super) fn is_move(&self) -> bool {
        self.num_experts == u32::MAX
    }

    /// Returns the bytes of the texts of both placements of a move.
    pub(super) fn lens_of_move(&self) -> [usize; 2] {
        [self.num_tokens, self.num_rows].map(|len| len as usize)
    }

    pub(super) fn to_words(self) -> [u32; Self::LEN] {
        [self.layer, self.num_tokens, self.num_rows, self.num_experts]
    }

    pub(super) fn from_words(words: &[u32]) -> Self {
        let word = |index: usize| words.get(index).copied().unwrap_or(0);
        Self { layer: word(0), num_tokens: word(1), num_rows: word(2), num_experts: word(3) }
    }

    /// Returns whether the rank has as many experts as the header says.
    pub(super) fn fits(&self, weights: &MoeWeights) -> bool {
        self.num_experts as usize == weights.gate_up.shape()[0]
    }

    /// Returns the size of the second message.
    pub(super) fn num_bytes(&self, weights: &MoeWeights) -> usize {
        let row = weights.gate_up.cols() * dtype_of_tokens(weights).size();
        (self.num_experts as usize + self.num_rows as usize) * WORD + self.num_tokens as usize * row
    }
}

/// Returns the type of an MoE layer's input.
fn dtype_of_tokens(weights: &MoeWeights) -> DType {
    weights.gate_up.dtype().of_activations()
}

/// The rows of a dispatch that go to one rank.
pub(super) struct RowsOut<'a> {
    /// The number of rows of each expert that the rank holds.
    pub(super) counts: Vec<u32>,
    /// The ranges of these rows in the dispatch, in the order of the experts.
    pub(super) ranges: Vec<Range<usize>>,
    /// The token of each row of the dispatch.
    pub(super) tokens: &'a [u32],
}

/// The rows of the experts of one rank.
pub(super) struct Message {
    counts: Vec<u32>,
    /// The token of each row, by its place among the tokens of the message.
    tokens: Vec<u32>,
    /// The bytes of the tokens.
    bytes: Vec<u8>,
    dtype: DType,
    width: usize,
}

impl Message {
    /// Collects the tokens of the rows out of `x [T, D]`.
    pub(super) fn new(rows: &RowsOut<'_>, x: &Tensor) -> Self {
        let (mut places, mut tokens, mut bytes) = (vec![u32::MAX; x.rows()], Vec::new(), Vec::new());
        let (len, mut num_tokens) = (x.cols() * x.dtype().size(), 0);
        for &token in rows.ranges.iter().flat_map(|range| &rows.tokens[range.clone()]) {
            let place = &mut places[token as usize];
            if *place == u32::MAX {
                *place = num_tokens;
                num_tokens += 1;
                bytes.extend_from_slice(&x.bytes()[token as usize * len..][..len]);
            }
            tokens.push(*place);
        }
        Self { counts: rows.counts.clone(), tokens, bytes, dtype: x.dtype(), width: x.cols() }
    }

    fn num_tokens(&self) -> usize {
        self.bytes.len() / (self.width * self.dtype.size()).max(1)
    }

    pub(super) fn header(&self, layer: u32) -> Header {
        let [num_tokens, num_rows, num_experts] =
            [self.num_tokens(), self.tokens.len(), self.counts.len()].map(|len| len as u32);
        Header { layer, num_tokens, num_rows, num_experts }
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        let words = [bytemuck::cast_slice::<u32, u8>(&self.counts), bytemuck::cast_slice(&self.tokens)];
        [words[0], words[1], &self.bytes].concat()
    }

    /// Reads a message of the sizes that `header` says; none if its parts do not agree.
    pub(super) fn from_bytes(header: &Header, weights: &MoeWeights, bytes: Vec<u8>) -> Option<Self> {
        let (num_experts, num_rows) = (header.num_experts as usize, header.num_rows as usize);
        let words = bytes.get(..(num_experts + num_rows) * WORD)?;
        let mut words: Vec<u32> = words.as_chunks().0.iter().map(|word| u32::from_ne_bytes(*word)).collect();
        let tokens = words.split_off(num_experts);
        let are_rows = words.iter().map(|&count| count as usize).sum::<usize>() == num_rows;
        let are_tokens = tokens.iter().all(|&token| token < header.num_tokens);
        let bytes = bytes[(num_experts + num_rows) * WORD..].to_vec();
        let (dtype, width) = (dtype_of_tokens(weights), weights.gate_up.cols());
        (are_rows && are_tokens).then_some(Self { counts: words, tokens, bytes, dtype, width })
    }

    /// Returns `[E + 1]`: the first row of each expert, and the end.
    pub(super) fn offsets(&self) -> Vec<u32> {
        let ends = self.counts.iter().scan(0, |end, count| {
            *end += count;
            Some(*end)
        });
        std::iter::once(0).chain(ends).collect()
    }

    /// Returns `[R, D]`: the token of each row.
    pub(super) fn rows(&self, ctx: &Context) -> Tensor {
        let mut rows = ctx.empty(&[self.tokens.len(), self.width], self.dtype);
        let len = self.width * self.dtype.size();
        for (to, &token) in rows.bytes_mut().chunks_exact_mut(len.max(1)).zip(&self.tokens) {
            to.copy_from_slice(&self.bytes[token as usize * len..][..len]);
        }
        rows
    }
}
