//! Attention of sequences of different lengths in one call, each with rows or blocks of keys and values of its own.

use moeworks_tensor::{DType, Tensor};

use super::sequences::{AttentionHeads, KeyRows, Sequence};
use super::sinks::{self, SinkInputs};
use super::{
    AttentionInputs, AttentionSaved, AttentionShape, attention_backward, attention_with_sinks, run, run_backward,
};
use crate::Context;
use crate::cuda::On;
use crate::elementwise::copy_rows;
use crate::embedding::embedding;
use crate::linear::Write;

/// A sequence of a ragged attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RaggedSequence<'a> {
    /// The number of queries, possibly 0: rows of `q` behind those of the sequences before it.
    pub num_queries: usize,
    /// The number of keys, at least that of queries. The last query is aligned with the last key, as in
    /// [`AttentionShape`].
    pub num_keys: usize,
    /// The rows of the keys and of their values.
    pub keys: KeyRows<'a>,
}

/// The sizes of an attention whose sequences have different lengths.
#[derive(Clone, Copy, Debug)]
pub struct RaggedShape<'a> {
    /// The sizes that all sequences share. Windows apply within each sequence.
    pub heads: AttentionHeads,
    /// The sequences in the order of their queries' rows; there may be none.
    pub sequences: &'a [RaggedSequence<'a>],
}

/// The results of a ragged attention.
pub struct AttentionOutput {
    /// `[rows of q, H value_dim]` in the type of `q`.
    pub o: Tensor,
    /// The log of each softmax's sum, f32, one sequence's `[H, num_queries]` behind the other's: `[H rows of q, 1]`.
    pub lse: Tensor,
}

impl AttentionOutput {
    /// Returns the results for a backward pass.
    #[must_use]
    pub fn saved(&self) -> AttentionSaved<'_> {
        AttentionSaved { o: &self.o, lse: &self.lse }
    }
}

/// The gradients of queries, keys and values, f32 in their shapes.
pub struct AttentionGrads {
    /// The gradient of queries.
    pub dq: Tensor,
    /// The gradient of keys; zeros in rows of no sequence.
    pub dk: Tensor,
    /// The gradient of values; zeros in rows of no sequence.
    pub dv: Tensor,
}

impl<'a> RaggedShape<'a> {
    /// The number of queries of all sequences.
    #[must_use]
    pub fn num_queries(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.num_queries).sum()
    }

    /// Returns the sequences with the places of their queries.
    fn sequences(&self) -> Vec<Sequence<'a>> {
        let heads = self.heads;
        let mut next_query = 0;
        let sequence = |sequence: &RaggedSequence<'a>| {
            let RaggedSequence { num_queries, num_keys, keys } = *sequence;
            let first_query = next_query;
            next_query += num_queries;
            Sequence { heads, first_query, num_queries, num_keys, keys }
        };
        self.sequences.iter().map(sequence).collect()
    }

    /// Returns the shape of one sequence alone, whose rows of keys are the first of `kv_capacity` rows.
    fn alone(&self, sequence: &Sequence<'_>, kv_capacity: usize) -> AttentionShape {
        let AttentionHeads { num_heads, num_kv_heads, head_dim, value_dim, window, scale } = self.heads;
        let (seq_len, kv_len) = (sequence.num_queries, sequence.num_keys);
        AttentionShape {
            batch: 1,
            seq_len,
            kv_len,
            kv_capacity,
            num_heads,
            num_kv_heads,
            head_dim,
            value_dim,
            window,
            scale,
        }
    }

    /// Checks that the rows of all sequences exist.
    fn check(&self, inputs: &AttentionInputs<'_>) {
        let AttentionHeads { num_heads, num_kv_heads, head_dim, value_dim, .. } = self.heads;
        let AttentionInputs { q, k, v, sinks } = *inputs;
        self.heads.check();
        let is_q_whole = q.len() == self.num_queries() * num_heads * head_dim && q.cols() == num_heads * head_dim;
        assert!(is_q_whole, "attention: q {:?}, {self:?}", q.shape());
        let (row, value_row) = (num_kv_heads * head_dim, num_kv_heads * value_dim);
        assert!((k.cols(), v.cols()) == (row, value_row) && k.rows() == v.rows(), "attention: k, v, {:?}", self.heads);
        assert!(sinks.is_none_or(|sinks| sinks.len() == num_heads), "attention: sinks, {:?}", self.heads);
        for (index, sequence) in self.sequences.iter().enumerate() {
            let end = sequence.keys.end(sequence.num_keys);
            let is_whole = sequence.num_queries <= sequence.num_keys && end.is_some_and(|end| end <= k.rows());
            assert!(is_whole, "attention: sequence {index} of {} rows of keys: {sequence:?}", k.rows());
        }
    }

    /// Checks that no two sequences share rows of keys.
    fn check_disjoint(&self) {
        let mut rows: Vec<_> = self
            .sequences
            .iter()
            .map(|sequence| match sequence.keys {
                KeyRows::Consecutive { first } => first..first + sequence.num_keys,
                KeyRows::Blocks { .. } => panic!("attention backward: keys in blocks"),
            })
            .filter(|rows| !rows.is_empty())
            .collect();
        rows.sort_by_key(|rows| rows.start);
        let are_disjoint = rows.windows(2).all(|both| both[0].end <= both[1].start);
        assert!(are_disjoint, "attention backward: sequences share rows of keys: {:?}", self.sequences);
    }
}

/// Computes [`attention_with_sinks`] of sequences of any lengths together. A sequence gets the bits that it gets
/// alone (`batch` 1), whatever others there are and wherever its blocks are.
///
/// Tasks are divided over sequences, heads and blocks of queries at once. A sequence of one query, a decoding step,
/// is divided over its keys as it is alone. A GPU computes one sequence after the other, from copies of its rows.
///
/// # Panics
///
/// If tensors and sequences do not fit each other.
#[must_use]
pub fn attention_ragged(ctx: &Context, inputs: AttentionInputs<'_>, shape: &RaggedShape<'_>) -> AttentionOutput {
    shape.check(&inputs);
    let AttentionHeads { num_heads, value_dim, .. } = shape.heads;
    let rows = shape.num_queries();
    let mut o = ctx.empty_on_device(&[rows, num_heads * value_dim], inputs.q.dtype());
    let mut lse = ctx.empty_on_device(&[rows * num_heads, 1], DType::F32);
    if On::of(ctx).is_none() {
        run(ctx, &inputs, &shape.sequences(), [&mut o, &mut lse]);
        return AttentionOutput { o, lse };
    }
    for sequence in shape.sequences().iter().filter(|sequence| sequence.num_queries > 0) {
        let own = OwnRows::copied(ctx, &inputs, sequence);
        let alone = shape.alone(sequence, sequence.num_keys);
        let (own_o, own_lse) = attention_with_sinks(ctx, own.inputs(inputs.sinks), &alone);
        let (first, count) = (sequence.first_query, sequence.num_queries);
        copy_rows(ctx, &own_o, 0, &mut o, first, count);
        let own_lse = own_lse.reshaped(&[count * num_heads, 1]);
        copy_rows(ctx, &own_lse, 0, &mut lse, first * num_heads, count * num_heads);
    }
    AttentionOutput { o, lse }
}

/// Computes the gradients of [`attention_ragged`] for sequences whose keys are consecutive rows that no other
/// sequence has. `d_o` is the gradient of `o`, f32 or bf16; the gradients of sinks are those of
/// [`sinks_ragged_backward`].
///
/// # Panics
///
/// If tensors and sequences do not fit each other, keys are in blocks, or sequences share rows of keys.
#[must_use]
pub fn attention_ragged_backward(
    ctx: &Context,
    d_o: &Tensor,
    inputs: AttentionInputs<'_>,
    output: &AttentionOutput,
    shape: &RaggedShape<'_>,
) -> AttentionGrads {
    shape.check(&inputs);
    shape.check_disjoint();
    shape.check_output(d_o, output);
    if On::of(ctx).is_some() {
        return backward_one_by_one(ctx, d_o, inputs, output, shape);
    }
    // Keys are cut as those of a sequence alone.
    let num_pairs = shape.heads.num_kv_heads;
    let tensors = [d_o, &output.o, &output.lse];
    let grads = run_backward(ctx, tensors, &inputs, &shape.sequences(), num_pairs);
    AttentionGrads { dq: grads.dq, dk: grads.dk, dv: grads.dv }
}

/// Computes the gradients of one sequence after the other, from copies of its rows.
fn backward_one_by_one(
    ctx: &Context,
    d_o: &Tensor,
    inputs: AttentionInputs<'_>,
    output: &AttentionOutput,
    shape: &RaggedShape<'_>,
) -> AttentionGrads {
    let [mut dq, mut dk, mut dv] = [inputs.q, inputs.k, inputs.v].map(|x| ctx.zeros_on_device(x.shape(), DType::F32));
    let num_heads = shape.heads.num_heads;
    for sequence in shape.sequences().iter().filter(|sequence| sequence.num_queries > 0) {
        let KeyRows::Consecutive { first: first_key } = sequence.keys else {
            unreachable!("checked to be consecutive")
        };
        let own = OwnRows::copied(ctx, &inputs, sequence);
        let (first, count) = (sequence.first_query, sequence.num_queries);
        let [own_d_o, own_o] = [d_o, &output.o].map(|x| rows_of(ctx, x, first, count));
        let own_lse = rows_of(ctx, &output.lse, first * num_heads, count * num_heads);
        let alone = shape.alone(sequence, sequence.num_keys);
        let saved = AttentionSaved { o: &own_o, lse: &own_lse };
        let (own_dq, own_dk, own_dv) = attention_backward(ctx, &own_d_o, own.inputs(None), saved, &alone);
        copy_rows(ctx, &own_dq, 0, &mut dq, first, count);
        copy_rows(ctx, &own_dk, 0, &mut dk, first_key, sequence.num_keys);
        copy_rows(ctx, &own_dv, 0, &mut dv, first_key, sequence.num_keys);
    }
    AttentionGrads { dq, dk, dv }
}

/// Writes the gradient of the sinks `[H]` (f32) of [`attention_ragged`] to `d_sinks` as `write` says. The host
/// computes it on any device.
///
/// # Panics
///
/// If tensors and sequences do not fit each other.
pub fn sinks_ragged_backward(
    ctx: &Context,
    d_o: &Tensor,
    output: &AttentionOutput,
    sinks: &Tensor,
    shape: &RaggedShape<'_>,
    write: Write,
    d_sinks: &mut Tensor,
) {
    shape.check_output(d_o, output);
    let num_heads = shape.heads.num_heads;
    assert!(sinks.len() == num_heads && d_sinks.len() == num_heads, "sinks backward: {:?}", shape.heads);
    let inputs = SinkInputs { d_o, o: &output.o, lse: &output.lse, sinks: sinks.f32s() };
    sinks::write(sinks::grads(ctx, inputs, &shape.heads, &shape.sequences()), write, d_sinks);
}

impl RaggedShape<'_> {
    /// Checks the sizes of an output and its gradient.
    fn check_output(&self, d_o: &Tensor, AttentionOutput { o, lse }: &AttentionOutput) {
        let num_statistics = self.num_queries() * self.heads.num_heads;
        let num_outputs = num_statistics * self.heads.value_dim;
        let sizes = (d_o.len(), o.len(), lse.len());
        assert_eq!(sizes, (num_outputs, num_outputs, num_statistics), "attention backward: {:?}", self.heads);
    }
}

/// Copies of the rows of one sequence.
struct OwnRows {
    q: Tensor,
    k: Tensor,
    v: Tensor,
}

impl OwnRows {
    /// Copies the rows of a sequence; values that are the keys are copied once.
    fn copied(ctx: &Context, inputs: &AttentionInputs<'_>, sequence: &Sequence<'_>) -> Self {
        let AttentionInputs { q, k, v, .. } = *inputs;
        let rows: Vec<u32> = (0..sequence.num_keys).map(|token| sequence.keys.row(token) as u32).collect();
        let own_k = embedding(ctx, &rows, k, k.dtype());
        let own_v = if std::ptr::eq(k, v) { own_k.clone() } else { embedding(ctx, &rows, v, v.dtype()) };
        Self { q: rows_of(ctx, q, sequence.first_query, sequence.num_queries), k: own_k, v: own_v }
    }

    /// Returns the copies as inputs of an attention with these sinks.
    fn inputs<'a>(&'a self, sinks: Option<&'a Tensor>) -> AttentionInputs<'a> {
        AttentionInputs { q: &self.q, k: &self.k, v: &self.v, sinks }
    }
}

/// Returns a copy of `count` rows from `first` on.
fn rows_of(ctx: &Context, x: &Tensor, first: usize, count: usize) -> Tensor {
    let mut rows = ctx.empty_on_device(&[count, x.cols()], x.dtype());
    copy_rows(ctx, x, first, &mut rows, 0, count);
    rows
}
