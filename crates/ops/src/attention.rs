//! Grouped-query causal attention, computed block by block (Dao et al., 2205.14135): never S x S numbers in memory.
//! With a sliding window (Beltagy et al., 2004.05150) and with sinks (Xiao et al., 2309.17453) where a model has
//! them.
//!
//! Query head `n` uses key and value head `n / (H / G)`. The last query is aligned with the last key, so query i sees
//! keys `0..=i + kv_len - seq_len`: that serves training (`kv_len = seq_len`), prefill in pieces and decoding from a
//! cache alike.
//!
//! All queries that share a key head, ordered by position and then by head, form the rows of one matrix, cut into
//! blocks of 64: so keys and values are read once for a whole group of heads, and copied once for the several blocks
//! of a task. A single query, a step of decoding, has code of its own. Scores are held transposed, keys by rows: then
//! neither keys nor values need a transposed copy, and the softmax runs down columns without sums across lanes.
//! Softmax and sums are f32 whatever the tensors' types. Products of bf16 tensors are bf16 where the machine has that
//! product in vectors or in tiles: then the softmax's weights and the gradient of the scores are rounded before they
//! are multiplied, as Dao et al. do; elsewhere products are f32. Blocks that the causal mask or the window hides are
//! skipped, down to panels of 8 keys at the causal end, of 32 with tiles, which have outputs and gradients of queries
//! transposed, too.

mod backward;
mod biased;
mod blocks;
mod decode;
mod forward;
mod operands;
mod products;
mod ragged;
mod sequences;
mod sinks;
mod softmax;
mod token_rows;

use moeworks_tensor::{DType, Tensor};

use self::sequences::Sequence;
use crate::Context;
use crate::cuda::{self, On};
use crate::linear::Write;
use crate::parallel::Lent;
use crate::simd::{Float, with_float};

/// Keys that the forward pass sums up before it rescales, at most. Keys that lie a multiple of this further on are
/// summed in the same order.
pub const KEYS_OF_BLOCK: usize = blocks::MAX_KEYS;

pub use biased::{BiasedGrads, ScoreRule, attention_biased, attention_biased_backward};
pub use ragged::{
    AttentionGrads, AttentionOutput, RaggedSequence, RaggedShape, attention_ragged, attention_ragged_backward,
    sinks_ragged_backward,
};
pub use sequences::{AttentionHeads, KeyRows};

/// The sizes of an attention. H query heads share G key and value heads, h elements each.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: usize,
    /// Queries of each sequence.
    pub seq_len: usize,
    /// Keys of each sequence that are used, at least `seq_len`.
    pub kv_len: usize,
    /// Rows that each sequence has in `k` and `v`, at least `kv_len`.
    pub kv_capacity: usize,
    /// H, a multiple of G.
    pub num_heads: usize,
    /// G.
    pub num_kv_heads: usize,
    /// h: elements of a head of queries and keys.
    pub head_dim: usize,
    /// Elements of a head of values, hence of `o`; usually `head_dim`.
    pub value_dim: usize,
    /// Keys that a query sees at most, its own position included; none: all up to it.
    pub window: Option<usize>,
    /// Multiplies the scores; usually `1 / sqrt(h)`.
    pub scale: f32,
}

/// The tensors that an attention reads.
#[derive(Clone, Copy)]
pub struct AttentionInputs<'a> {
    /// Queries, a row for each token: `[rows, H h]`, f32 or bf16.
    pub q: &'a Tensor,
    /// Keys, `[rows, G h]`, f32 or bf16.
    pub k: &'a Tensor,
    /// Values, `[rows, G value_dim]`, f32 or bf16; `k` itself where keys are values.
    pub v: &'a Tensor,
    /// `[H]`, f32: a further score for each head that takes part in the softmax and has no value; none without.
    pub sinks: Option<&'a Tensor>,
}

/// The results of an attention that its backward pass reads.
#[derive(Clone, Copy)]
pub struct AttentionSaved<'a> {
    /// Outputs, `[rows, H value_dim]`, f32 or bf16.
    pub o: &'a Tensor,
    /// The log of each softmax's sum, f32.
    pub lse: &'a Tensor,
}

/// `softmax(scale q k^T, causal) v`. `q` `[batch seq_len, H h]`, `k` `[batch kv_capacity, G h]` and `v`
/// `[batch kv_capacity, G value_dim]`, each f32 or bf16. Returns `o` `[batch seq_len, H value_dim]` in the type of
/// `q`, and the log of each softmax's sum, `[batch, H, seq_len]` f32, which backward needs.
#[must_use]
pub fn attention(ctx: &Context, q: &Tensor, k: &Tensor, v: &Tensor, shape: &AttentionShape) -> (Tensor, Tensor) {
    attention_with_sinks(ctx, AttentionInputs { q, k, v, sinks: None }, shape)
}

/// Computes [`attention`] with a further score for each head, the inputs' sinks, that takes part in the softmax and
/// has no value (GPT-OSS). The gradients of the others are those of [`attention_backward`], as the log-sums contain
/// the sinks; that of the sinks is [`sinks_backward`].
#[must_use]
pub fn attention_with_sinks(ctx: &Context, inputs: AttentionInputs<'_>, shape: &AttentionShape) -> (Tensor, Tensor) {
    let AttentionInputs { q, k, v, sinks } = inputs;
    shape.check(q, k, v);
    assert!(sinks.is_none_or(|sinks| sinks.len() == shape.num_heads), "attention: sinks, {shape:?}");
    if let Some(on) = On::of(ctx).filter(|&on| cuda::attention::takes(on, inputs, shape, false)) {
        return cuda::attention::forward(on, inputs, shape);
    }
    let mut o = ctx.empty(&[shape.batch * shape.seq_len, shape.num_heads * shape.value_dim], q.dtype());
    let mut lse = ctx.empty(&[shape.batch, shape.num_heads, shape.seq_len], DType::F32);
    run(ctx, &inputs, &Sequence::all(shape), [&mut o, &mut lse]);
    (o, lse)
}

/// The results of an attention, lent to its tasks.
#[derive(Clone, Copy)]
struct Outputs<'a, T> {
    o: Lent<'a, T>,
    lse: Lent<'a, f32>,
}

/// Computes `o` and `lse` of sequences that share their heads' sizes, on the host.
fn run(ctx: &Context, inputs: &AttentionInputs<'_>, sequences: &[Sequence<'_>], [o, lse]: [&mut Tensor; 2]) {
    let lse = Lent::new(lse.f32s_mut());
    with_float!(o.dtype(), T => {
        let o = Lent::new(o.slice_mut::<T>());
        run_tasks(ctx, inputs, sequences, Outputs { o, lse });
    });
}

/// Runs the tasks of all sequences together: one parallel section, and another that joins the parts of single queries
/// if there are any.
fn run_tasks<T: Float>(
    ctx: &Context,
    inputs: &AttentionInputs<'_>,
    sequences: &[Sequence<'_>],
    outputs: Outputs<'_, T>,
) {
    let Some(Sequence { heads, .. }) = sequences.first() else { return };
    let has_values = heads.num_heads * heads.value_dim > 0;
    let is_single = |sequence: &Sequence<'_>| sequence.num_queries == 1 && has_values && !ctx.is_batch_invariant();
    let (singles, others): (Vec<_>, Vec<_>) = sequences.iter().copied().partition(is_single);
    let blocks = forward::BlockTasks::new(ctx, inputs, &others);
    let ranges = decode::RangeTasks::new(ctx, inputs, heads, &singles);
    let len = ranges.part_len();
    let mut parts = ctx.empty(&[ranges.len(), len], DType::F32);
    let lent = Lent::new(parts.f32s_mut());
    ctx.threads().run(blocks.len() + ranges.len(), |task| match task.checked_sub(blocks.len()) {
        None => blocks.run(task, outputs),
        // SAFETY: each task has a part of its own.
        Some(task) => ranges.run(task, unsafe { lent.range(task * len..(task + 1) * len) }),
    });
    ctx.threads().run(ranges.num_rows(), |row| ranges.join(row, parts.f32s(), outputs));
}

/// Writes the gradient of the sinks `[H]` (f32) to `d_sinks` as `write` says: `-sum over queries of p (d_o . o)`,
/// with `p` the sink's share of the softmax. `d_o` and `o` are f32 or bf16.
pub fn sinks_backward(
    ctx: &Context,
    d_o: &Tensor,
    saved: AttentionSaved<'_>,
    sinks: &Tensor,
    shape: &AttentionShape,
    write: Write,
    d_sinks: &mut Tensor,
) {
    let AttentionSaved { o, lse } = saved;
    let sizes = [(d_o.len(), o.len()), (sinks.len(), shape.num_heads), (d_sinks.len(), shape.num_heads)];
    assert!(sizes.iter().all(|(a, b)| a == b), "sinks backward: {shape:?}");
    if let Some(on) = On::taking(ctx, &[d_o.dtype(), o.dtype()]) {
        return cuda::attention::sinks_backward(on, d_o, saved, sinks, shape, write, d_sinks);
    }
    let inputs = sinks::SinkInputs { d_o, o, lse, sinks: sinks.f32s() };
    sinks::write(sinks::grads(ctx, inputs, &shape.heads(), &Sequence::all(shape)), write, d_sinks);
}

/// Returns whether a head whose keys are its values, of `head_dim` elements, is computed on the host although `ctx`
/// has a GPU. A cache of such keys is best kept on the host.
#[must_use]
pub fn is_for_host(ctx: &Context, head_dim: usize, dtype: DType) -> bool {
    On::of(ctx).is_some_and(|on| !cuda::attention::takes_kept(on, head_dim, dtype))
}

/// The gradients of [`attention`] for `q`, `k` and `v`, f32 in their shapes; rows of `k` and `v` beyond `kv_len` get
/// zeros. `d_o` is the gradient of `o`, f32 or bf16; `o` and `lse` are what forward returned.
///
/// With `p` the softmax, recomputed from `lse`: `dv = p^T d_o`, `ds = p (d_o v^T - rowsum(d_o o))`,
/// `dq = scale ds k`, `dk = scale ds^T q`. A task owns the keys that it sums over, in the order of the queries.
#[must_use]
pub fn attention_backward(
    ctx: &Context,
    d_o: &Tensor,
    inputs: AttentionInputs<'_>,
    saved: AttentionSaved<'_>,
    shape: &AttentionShape,
) -> (Tensor, Tensor, Tensor) {
    let AttentionSaved { o, lse } = saved;
    shape.check(inputs.q, inputs.k, inputs.v);
    let num_rows = shape.batch * shape.num_heads * shape.seq_len;
    let num_outputs = num_rows * shape.value_dim;
    assert_eq!((d_o.len(), o.len(), lse.len()), (num_outputs, num_outputs, num_rows), "attention backward: {shape:?}");
    let inputs = AttentionInputs { sinks: None, ..inputs };
    if let Some(on) = On::of(ctx).filter(|&on| cuda::attention::takes(on, inputs, shape, true)) {
        return cuda::attention::backward(on, d_o, inputs, saved, shape);
    }
    let num_pairs = shape.batch * shape.num_kv_heads;
    let grads = run_backward(ctx, [d_o, o, lse], &inputs, &Sequence::all(shape), num_pairs);
    (grads.dq, grads.dk, grads.dv)
}

/// Computes the gradients on the host: `num_pairs` as in [`backward::run`]. Rows of keys and values that no query
/// sees get zeros.
fn run_backward(
    ctx: &Context,
    [d_o, o, lse]: [&Tensor; 3],
    inputs: &AttentionInputs<'_>,
    sequences: &[Sequence<'_>],
    num_pairs: usize,
) -> backward::Grads {
    let AttentionInputs { q, k, v, .. } = *inputs;
    let has_queries = |sequence: &&Sequence<'_>| sequence.num_queries > 0 && sequence.heads.head_dim > 0;
    let num_written: usize = sequences.iter().filter(has_queries).map(|sequence| sequence.num_keys).sum();
    let of_keys = |x: &Tensor, dim: fn(&AttentionHeads) -> usize| {
        let row = sequences.first().map_or(0, |sequence| sequence.heads.num_kv_heads * dim(&sequence.heads));
        if num_written * row == x.len() { ctx.empty(x.shape(), DType::F32) } else { ctx.zeros(x.shape(), DType::F32) }
    };
    let mut grads = backward::Grads {
        dq: ctx.empty(q.shape(), DType::F32),
        dk: of_keys(k, |heads| heads.head_dim),
        dv: of_keys(v, |heads| heads.value_dim),
    };
    let format = operands::OperandFormat::new(ctx.isa(), &[q.dtype(), k.dtype(), v.dtype()]);
    let (d_o, o, lse) = (d_o.into(), o.into(), lse.f32s());
    let inputs = backward::Inputs { d_o, q: q.into(), k: k.into(), v: v.into(), o, lse, format };
    backward::run(ctx, &inputs, sequences, num_pairs, &mut grads);
    grads
}

impl AttentionShape {
    /// The sizes that its sequences share.
    pub(crate) fn heads(&self) -> AttentionHeads {
        let Self { num_heads, num_kv_heads, head_dim, value_dim, window, scale, .. } = *self;
        AttentionHeads { num_heads, num_kv_heads, head_dim, value_dim, window, scale }
    }

    fn check(&self, q: &Tensor, k: &Tensor, v: &Tensor) {
        self.check_sizes(q, k, v);
        assert!(self.seq_len <= self.kv_len, "attention: {self:?}");
    }

    fn check_sizes(&self, q: &Tensor, k: &Tensor, v: &Tensor) {
        let (rows, kv_rows) = (self.batch * self.seq_len, self.batch * self.kv_capacity);
        assert!(self.num_kv_heads > 0 && self.num_heads.is_multiple_of(self.num_kv_heads), "attention: {self:?}");
        assert!(self.kv_len <= self.kv_capacity, "attention: {self:?}");
        assert_eq!(q.len(), rows * self.num_heads * self.head_dim, "attention: q {:?}, {self:?}", q.shape());
        assert_eq!(k.len(), kv_rows * self.num_kv_heads * self.head_dim, "attention: k {:?}, {self:?}", k.shape());
        assert_eq!(v.len(), kv_rows * self.num_kv_heads * self.value_dim, "attention: v {:?}, {self:?}", v.shape());
        assert!(self.window != Some(0), "attention: {self:?}");
    }
}
