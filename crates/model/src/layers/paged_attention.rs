//! Attention to keys and values in the blocks of a paged cache, whatever type they are kept in.
//!
//! Keys and values in 8 bits are decoded for some sequences at a time, so that memory for decoded rows is bounded. A
//! sequence gets the same bits whichever others there are: a decoded row depends on its own numbers alone.

use moeworks_ops::Context;
use moeworks_ops::attention::{
    AttentionHeads, AttentionInputs, KeyRows, RaggedSequence, RaggedShape, attention_ragged,
};
use moeworks_ops::elementwise::copy_rows;
use moeworks_tensor::Tensor;

use crate::paged_kv_cache::PagedLayer;

/// Tokens whose keys and values are decoded at a time, unless a single sequence has more.
const MAX_DECODED: usize = 16 << 10;

/// The queries of a pass.
pub(crate) struct PagedQueries<'a> {
    /// One row a token.
    pub(crate) q: &'a Tensor,
    /// The sinks of the heads, if there are any.
    pub(crate) sinks: Option<&'a Tensor>,
    /// The sizes of heads.
    pub(crate) heads: AttentionHeads,
}

/// Attends to the keys and values of `layer`, with `sequences` in its blocks. Returns the heads' outputs. A layer
/// with one tensor has the same rows as keys and as values.
pub(crate) fn attend_to_blocks(
    ctx: &Context,
    queries: &PagedQueries<'_>,
    layer: &PagedLayer,
    sequences: &[RaggedSequence<'_>],
) -> Tensor {
    let PagedQueries { q, sinks, heads } = *queries;
    if !layer.is_quantized() {
        return attend(ctx, queries, layer.kept(), sequences);
    }
    let mut o = ctx.empty_on_device(&[q.rows(), heads.num_heads * heads.value_dim], q.dtype());
    let mut first = 0;
    for group in groups(sequences) {
        let count = group.iter().map(|sequence| sequence.num_queries).sum();
        let mut own_q = ctx.empty_on_device(&[count, q.cols()], q.dtype());
        copy_rows(ctx, q, first, &mut own_q, 0, count);
        let kept = layer.decoded(ctx, group, q.dtype());
        let own = PagedQueries { q: &own_q, sinks, heads };
        copy_rows(ctx, &attend(ctx, &own, &kept, &one_behind_the_other(group)), 0, &mut o, first, count);
        first += count;
    }
    o
}

fn attend(ctx: &Context, queries: &PagedQueries<'_>, kept: &[Tensor], sequences: &[RaggedSequence<'_>]) -> Tensor {
    let PagedQueries { q, sinks, heads } = *queries;
    let (Some(k), Some(v)) = (kept.first(), kept.last()) else { unreachable!("keys and values were written") };
    attention_ragged(ctx, AttentionInputs { q, k, v, sinks }, &RaggedShape { heads, sequences }).o
}

/// Cuts sequences into groups with few enough keys to be decoded at a time.
fn groups<'a, 'b>(sequences: &'a [RaggedSequence<'b>]) -> Vec<&'a [RaggedSequence<'b>]> {
    let (mut groups, mut start, mut num_keys) = (Vec::new(), 0, 0);
    for (index, sequence) in sequences.iter().enumerate() {
        if index > start && num_keys + sequence.num_keys > MAX_DECODED {
            groups.push(&sequences[start..index]);
            (start, num_keys) = (index, 0);
        }
        num_keys += sequence.num_keys;
    }
    groups.push(&sequences[start..]);
    groups
}

/// Returns the sequences with their keys in consecutive rows.
fn one_behind_the_other(sequences: &[RaggedSequence<'_>]) -> Vec<RaggedSequence<'static>> {
    let mut first = 0;
    let sequence = |&RaggedSequence { num_queries, num_keys, .. }: &RaggedSequence<'_>| {
        let keys = KeyRows::Consecutive { first };
        first += num_keys;
        RaggedSequence { num_queries, num_keys, keys }
    };
    sequences.iter().map(sequence).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_are_decoded_together_as_far_as_their_keys_are_few() {
        let with_keys = |num_keys| RaggedSequence { num_queries: 1, num_keys, keys: KeyRows::Consecutive { first: 0 } };
        let sequences = [9_000, 7_000, 2_000, 40_000, 5].map(with_keys);
        let lens: Vec<usize> = groups(&sequences).iter().map(|group| group.len()).collect();
        assert_eq!(lens, [2, 1, 1, 1]);
        let firsts: Vec<KeyRows<'_>> =
            one_behind_the_other(&sequences[..3]).iter().map(|sequence| sequence.keys).collect();
        assert_eq!(firsts, [0, 9_000, 16_000].map(|first| KeyRows::Consecutive { first }));
    }
}
