//! The segments of a pass: tokens of sequences of different lengths, which do not attend to each other.

use moeworks_ops::Context;
use moeworks_ops::attention::{KeyRows, RaggedSequence};
use moeworks_tensor::{DType, Tensor};

use crate::paged_kv_cache::{RowRun, row_runs};
use crate::pass::SequencePart;

/// Consecutive tokens of a pass that belong to one sequence or document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    /// The number of tokens.
    pub(crate) len: usize,
    /// The position of the first token in its sequence.
    pub(crate) start: usize,
    /// The sequence's blocks in a paged cache; empty without a cache.
    pub(crate) blocks: Vec<u32>,
}

/// The segments of a pass, in the order of its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Segments {
    segments: Vec<Segment>,
    /// The number of tokens of a block of the paged cache; 0 without one.
    block_len: usize,
    /// The rows of the paged cache that the tokens are written to.
    runs: Vec<RowRun>,
}

impl Segments {
    /// Returns documents of these lengths, each from position 0 on.
    pub(crate) fn documents(lens: &[usize]) -> Self {
        let segments = lens.iter().map(|&len| Segment { len, start: 0, blocks: Vec::new() }).collect();
        Self { segments, block_len: 0, runs: Vec::new() }
    }

    /// Returns the next tokens of sequences in a paged cache with blocks of `block_len` tokens.
    pub(crate) fn paged(parts: &[SequencePart<'_>], block_len: usize) -> Self {
        let segment = |part: &SequencePart<'_>| {
            let SequencePart { ids, start, blocks, .. } = *part;
            Segment { len: ids.len(), start, blocks: blocks.to_vec() }
        };
        Self::in_blocks(parts.iter().map(segment).collect(), block_len)
    }

    /// Returns segments whose blocks in a paged cache have `block_len` tokens.
    pub(crate) fn in_blocks(segments: Vec<Segment>, block_len: usize) -> Self {
        let mut runs = Vec::new();
        let mut first = 0;
        for Segment { len, start, blocks } in &segments {
            runs.extend(row_runs(first, *start, *len, blocks, block_len));
            first += len;
        }
        Self { segments, block_len, runs }
    }

    /// Returns the segments in the order of their tokens.
    pub(crate) fn as_slice(&self) -> &[Segment] {
        &self.segments
    }

    /// Returns the number of tokens, T.
    pub(crate) fn num_tokens(&self) -> usize {
        self.segments.iter().map(|segment| segment.len).sum()
    }

    /// Returns the position after the last token of the longest sequence.
    pub(crate) fn longest_end(&self) -> usize {
        self.segments.iter().map(|segment| segment.start + segment.len).max().unwrap_or(0)
    }

    /// Returns the rows of the paged cache that the tokens are written to.
    pub(crate) fn runs(&self) -> &[RowRun] {
        &self.runs
    }

    /// Returns true if every sequence begins in this pass.
    pub(crate) fn begin_here(&self) -> bool {
        self.segments.iter().all(|segment| segment.start == 0)
    }

    /// Returns true if `rule` holds for every segment, given its number of tokens and that of its sequence so far.
    pub(crate) fn all(&self, rule: impl Fn(usize, usize) -> bool) -> bool {
        self.segments.iter().all(|segment| rule(segment.len, segment.start + segment.len))
    }

    /// Returns the position of each token in its sequence, `[T]` u32.
    pub(crate) fn positions(&self, ctx: &Context) -> Tensor {
        let mut positions = ctx.empty(&[self.num_tokens()], DType::U32);
        let each = self.segments.iter().flat_map(|segment| segment.start..segment.start + segment.len);
        positions.u32s_mut().iter_mut().zip(each).for_each(|(to, position)| *to = position as u32);
        positions
    }

    /// Returns the sequences of attention with the rows of this pass as keys: all sequences begin in it.
    pub(crate) fn own_sequences(&self) -> Vec<RaggedSequence<'static>> {
        let mut first = 0;
        let sequence = |segment: &Segment| {
            let keys = KeyRows::Consecutive { first };
            first += segment.len;
            RaggedSequence { num_queries: segment.len, num_keys: segment.len, keys }
        };
        self.segments.iter().map(sequence).collect()
    }

    /// Returns the sequences of attention with keys in the blocks of a paged cache.
    pub(crate) fn paged_sequences(&self) -> Vec<RaggedSequence<'_>> {
        let mut sequences = Vec::with_capacity(self.segments.len());
        for Segment { len, start, blocks } in &self.segments {
            let keys = KeyRows::Blocks { blocks, block_len: self.block_len };
            sequences.push(RaggedSequence { num_queries: *len, num_keys: start + len, keys });
        }
        sequences
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_go_on_in_each_sequence() {
        let blocks = [3, 1];
        let part = |ids, start| SequencePart { ids, start, blocks: &blocks, ..SequencePart::default() };
        let segments = Segments::paged(&[part(&[7, 8], 3), part(&[9], 0)], 4);
        let ctx = Context::cpu(1);
        assert_eq!(segments.positions(&ctx).u32s(), [3, 4, 0]);
        assert_eq!((segments.num_tokens(), segments.longest_end(), segments.begin_here()), (3, 5, false));
        assert_eq!(Segments::documents(&[2, 3]).positions(&ctx).u32s(), [0, 1, 0, 1, 2]);
    }
}
