//! Attention with a bias on its scores that depends on the distance of query and key: T5 (Raffel et al., 1910.10683,
//! section 2.1), forward and backward, causal or over all keys.
//!
//! A task takes 64 queries of one head and holds their scores over all keys at once, so that there is no running
//! maximum. Scores are stored keys by queries, as in the blockwise pass, whose products are used here.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use moeworks_tensor::{DType, Tensor};

use super::AttentionShape;
use super::blocks::{COL_UNIT, KEYS, ROW_UNIT, ROWS};
use super::operands::{OperandFormat, Rows, Values, transpose};
use super::products::{Left, Right, Size, product};
use super::sequences::Sequence;
use crate::parallel::{Lent, piece_range};
use crate::simd::{Float, kernel, with_float};
use crate::{Context, vmath};

/// Scores and their gradients are sums over few elements: they are f32, whatever the tensors' types.
const FORMAT: OperandFormat = OperandFormat::F32;

/// The bias of scores, and the keys that a query sees. Query i is at position `i + kv_len - seq_len`.
#[derive(Clone, Copy, Debug)]
pub struct ScoreRule<'a> {
    /// `[H, seq_len + kv_len - 1]`: the bias of a head's scaled score of key j for the query at position p is at `j -
    /// p + kv_len - 1`. None: no bias.
    pub bias: Option<&'a [f32]>,
    /// Limits a query to the keys up to its own position; otherwise it sees all.
    pub is_causal: bool,
}

impl ScoreRule<'_> {
    fn check(&self, shape: &AttentionShape) {
        let AttentionShape { seq_len, kv_len, num_heads, .. } = *shape;
        assert!(shape.window.is_none() && kv_len > 0 && (!self.is_causal || seq_len <= kv_len), "{self:?}, {shape:?}");
        assert!(self.bias.is_none_or(|bias| bias.len() == num_heads * (seq_len + kv_len - 1)), "bias, {shape:?}");
    }
}

/// Computes `softmax(scale q k^T + bias) v` over the keys that `rule` allows, without a window. Arguments are those
/// of [`attention`](super::attention). Without causality there may be fewer keys than queries, at least one. Returns
/// `o` in the type of `q`.
///
/// All sequences have the same length: [`attention_ragged`](super::attention_ragged) has no bias.
#[must_use]
pub fn attention_biased(
    ctx: &Context,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    rule: &ScoreRule<'_>,
    shape: &AttentionShape,
) -> Tensor {
    shape.check_sizes(q, k, v);
    rule.check(shape);
    let AttentionShape { batch, seq_len, num_heads, head_dim, value_dim, .. } = *shape;
    let mut o = ctx.empty(&[batch * seq_len, num_heads * value_dim], q.dtype());
    let blocks = seq_len.div_ceil(ROWS);
    let [q, k, v] = [(q, head_dim), (k, head_dim), (v, value_dim)].map(|(tensor, dim)| Heads::new(tensor, dim));
    with_float!(o.dtype(), T => {
        let o = Lent::new(o.slice_mut::<T>());
        ctx.threads().run(batch * num_heads * blocks, |task| {
            let (pair, index) = (task / blocks, task % blocks);
            let block = Block::new(shape, rule, pair / num_heads, pair % num_heads, index);
            let weights = block.weights(ctx, &block.rows_of(ctx, q), k);
            for (row, sum) in block.sums(ctx, &weights, v).f32s().chunks_exact(v.width()).take(block.queries.len()).enumerate() {
                // SAFETY: each row of a head belongs to one block, and each block to one task.
                let o = unsafe { o.range(block.elements(row, value_dim)) };
                o.iter_mut().zip(sum).for_each(|(o, &x)| *o = T::store(x));
            }
        });
    });
    o
}

/// The gradients of [`attention_biased`].
pub struct BiasedGrads {
    /// The gradients of queries, keys and values, f32 in their shapes. Rows of keys and values beyond `kv_len` are
    /// zeros.
    pub qkv: [Tensor; 3],
    /// `[H, seq_len + kv_len - 1]`: the gradient of the bias; none without a bias.
    pub bias: Option<Vec<f32>>,
}

/// Computes the gradients of [`attention_biased`]. `d_o` is the gradient of its result, f32 or bf16.
///
/// With `p` the softmax, recomputed: `dv = p^T d_o`, `ds = p (d_o v^T - rowsum(p d_o v^T))`, `dq = scale ds k`, `dk =
/// scale ds^T q`, and the gradient of the bias is the sum of `ds` over all pairs at a distance. A task owns a key
/// head of a sequence; the gradient of the bias is summed in the order of the sequences.
#[must_use]
pub fn attention_biased_backward(
    ctx: &Context,
    d_o: &Tensor,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    rule: &ScoreRule<'_>,
    shape: &AttentionShape,
) -> BiasedGrads {
    shape.check_sizes(q, k, v);
    rule.check(shape);
    let AttentionShape { batch, seq_len, kv_len, num_heads, num_kv_heads, head_dim, value_dim, .. } = *shape;
    assert_eq!(d_o.len(), batch * seq_len * num_heads * value_dim, "attention backward: {shape:?}");
    let distances = num_heads * (seq_len + kv_len - 1);
    let mut qkv = [q, k, v].map(|x| ctx.zeros(x.shape(), DType::F32));
    let mut bias = ctx.zeros(&[batch, distances], DType::F32);
    let [dq, dk, dv] = qkv.each_mut().map(|d| Lent::new(d.f32s_mut()));
    let outputs = Outputs { dq, dk, dv, bias: Lent::new(bias.f32s_mut()) };
    let inputs =
        [(q, head_dim), (d_o, value_dim), (k, head_dim), (v, value_dim)].map(|(tensor, dim)| Heads::new(tensor, dim));
    ctx.threads().run(batch * num_kv_heads, |task| {
        let task = KeyHead { shape, rule, batch: task / num_kv_heads, kv_head: task % num_kv_heads };
        task.backward(ctx, inputs, &outputs);
    });
    let of_sequences = || bias.f32s().chunks_exact(distances.max(1));
    let bias = rule.bias.map(|_| (0..distances).map(|i| of_sequences().map(|bias| bias[i]).sum()).collect());
    BiasedGrads { qkv, bias }
}

/// The memory of the gradients, lent to the tasks. The bias has a part for each sequence: `[batch, H, seq_len +
/// kv_len - 1]`.
struct Outputs<'a> {
    dq: Lent<'a, f32>,
    dk: Lent<'a, f32>,
    dv: Lent<'a, f32>,
    bias: Lent<'a, f32>,
}

/// A task of backward: a key head of a sequence, with all queries that use it.
struct KeyHead<'a> {
    shape: &'a AttentionShape,
    rule: &'a ScoreRule<'a>,
    batch: usize,
    kv_head: usize,
}

impl KeyHead<'_> {
    /// Computes the gradients of the key head's queries, keys and values, and of their heads' biases.
    fn backward(&self, ctx: &Context, [q, d_o, k, v]: [Heads<'_>; 4], outputs: &Outputs<'_>) {
        let shape = self.shape;
        let (group, distances) = (shape.num_heads / shape.num_kv_heads, shape.seq_len + shape.kv_len - 1);
        let padded_keys = shape.kv_len.next_multiple_of(ROW_UNIT);
        let [mut dk, mut dv] = [k, v].map(|of| ctx.zeros(&[padded_keys, of.width()], DType::F32));
        for head in self.kv_head * group..(self.kv_head + 1) * group {
            let start = (self.batch * shape.num_heads + head) * distances;
            // SAFETY: each head of a sequence belongs to one task.
            let d_bias = unsafe { outputs.bias.range(start..start + distances) };
            for index in 0..shape.seq_len.div_ceil(ROWS) {
                let block = Block::new(shape, self.rule, self.batch, head, index);
                let (q, d_o) = (block.rows_of(ctx, q), block.rows_of(ctx, d_o));
                let weights = block.weights(ctx, &q, k);
                let mut d_scores = block.products(ctx, v, &d_o);
                let len = shape.kv_len * ROWS;
                softmax_backward(ctx.isa(), &weights.f32s()[..len], &mut d_scores.f32s_mut()[..len]);
                block.add_to_keys(ctx, &weights, &d_o, &mut dv);
                block.add_to_keys(ctx, &d_scores, &q, &mut dk);
                block.add_to_bias(&d_scores, d_bias);
                block.store_dq(&block.sums(ctx, &d_scores, k), &outputs.dq);
            }
        }
        self.store(&dk, shape.head_dim, shape.scale, &outputs.dk);
        self.store(&dv, shape.value_dim, 1.0, &outputs.dv);
    }

    /// Writes `scale` times the rows of `from` to the rows of the keys in `to`, which has `dim` elements a head.
    fn store(&self, from: &Tensor, dim: usize, scale: f32, to: &Lent<'_, f32>) {
        let (keys, sequence) = (0..self.shape.kv_len, Sequence::nth(self.shape, self.batch));
        for (key, from) in keys.zip(from.f32s().chunks_exact(from.cols())) {
            let [start] = sequence.key_starts(self.kv_head, &(key..key + 1), dim);
            // SAFETY: each key of a sequence and head belongs to one task.
            let to = unsafe { to.range(start..start + dim) };
            to.iter_mut().zip(from).for_each(|(to, x)| *to = scale * x);
        }
    }
}

/// A tensor whose rows are heads of `dim` elements, one behind the other.
#[derive(Clone, Copy)]
struct Heads<'a> {
    values: Values<'a>,
    dim: usize,
}

impl<'a> Heads<'a> {
    fn new(tensor: &'a Tensor, dim: usize) -> Self {
        Self { values: tensor.into(), dim }
    }

    /// Returns the length of a copied row, which is padded with zeros.
    fn width(&self) -> usize {
        self.dim.next_multiple_of(COL_UNIT)
    }
}

/// The rows of a block's queries, `[ROWS, width]`, and their transpose.
struct BlockRows {
    rows: Tensor,
    transposed: Tensor,
}

/// The bias of a block's scores.
#[derive(Clone, Copy)]
struct BlockBias<'a> {
    /// The bias of the last query's scores, key by key. The bias of each query begins one element behind its
    /// successor's.
    values: &'a [f32],
    /// The number of queries before the last.
    num_before: usize,
}

/// At most [`ROWS`] queries of one head of a sequence.
struct Block<'a> {
    shape: &'a AttentionShape,
    rule: &'a ScoreRule<'a>,
    batch: usize,
    head: usize,
    queries: Range<usize>,
}

impl<'a> Block<'a> {
    fn new(shape: &'a AttentionShape, rule: &'a ScoreRule<'a>, batch: usize, head: usize, index: usize) -> Self {
        Self { shape, rule, batch, head, queries: piece_range(index, ROWS, shape.seq_len) }
    }

    /// Returns the elements of query i in a tensor with `dim` elements a head.
    fn elements(&self, i: usize, dim: usize) -> Range<usize> {
        let row = (self.batch * self.shape.seq_len + self.queries.start + i) * self.shape.num_heads + self.head;
        row * dim..(row + 1) * dim
    }

    /// Copies the rows of the block's queries.
    fn rows_of(&self, ctx: &Context, of: Heads<'_>) -> BlockRows {
        let (isa, len) = (ctx.isa(), self.queries.len());
        let starts: [usize; ROWS] = std::array::from_fn(|i| self.elements(i.min(len - 1), of.dim).start);
        let mut rows = ctx.empty(&[ROWS, of.width()], DType::F32);
        let mut transposed = ctx.empty(&[of.width(), ROWS], DType::F32);
        of.values.copy_rows(isa, Rows { starts: &starts[..len], cols: of.dim, width: of.width() }, rows.f32s_mut());
        transpose(isa, rows.f32s(), len, of.width(), of.dim, transposed.f32s_mut());
        BlockRows { rows, transposed }
    }

    /// Returns the softmax over all keys for the queries `q`, `[kv_len, ROWS]`.
    fn weights(&self, ctx: &Context, q: &BlockRows, k: Heads<'_>) -> Tensor {
        let mut scores = self.products(ctx, k, q);
        let (scale, len) = (self.shape.scale * LOG2_E, self.shape.kv_len * ROWS);
        softmax(ctx.isa(), self.bias(), scale, self.visible(), &mut scores.f32s_mut()[..len]);
        scores
    }

    /// Returns the products of all keys (or values) with the block's rows, `[kv_len, ROWS]`. Columns beyond the last
    /// query are unspecified.
    fn products(&self, ctx: &Context, keys_of: Heads<'_>, rows: &BlockRows) -> Tensor {
        let cols = self.queries.len().next_multiple_of(COL_UNIT);
        // Units of rows at the end are whole.
        let mut products = ctx.empty(&[self.shape.kv_len.next_multiple_of(ROW_UNIT), ROWS], DType::F32);
        self.with_keys(ctx, keys_of, |keys, copy| {
            let size = Size { rows: keys.len().next_multiple_of(ROW_UNIT), cols, inner: keys_of.dim, format: FORMAT };
            let right = Right { values: rows.transposed.f32s(), stride: ROWS };
            let to = &mut products.f32s_mut()[keys.start * ROWS..];
            product(ctx.isa(), size, Left::rows(copy, keys_of.width()), right, false, to, ROWS);
        });
        products
    }

    /// Returns the sums of keys (or values) times `weights [kv_len, ROWS]`, a row for each query.
    fn sums(&self, ctx: &Context, weights: &Tensor, keys_of: Heads<'_>) -> Tensor {
        let mut sums = ctx.zeros(&[ROWS, keys_of.width()], DType::F32);
        let rows = self.queries.len().next_multiple_of(ROW_UNIT);
        self.with_keys(ctx, keys_of, |keys, copy| {
            let size = Size { rows, cols: keys_of.width(), inner: keys.len(), format: FORMAT };
            let right = Right { values: copy, stride: keys_of.width() };
            let left = Left::columns(&weights.f32s()[keys.start * ROWS..], ROWS);
            product(ctx.isa(), size, left, right, true, sums.f32s_mut(), keys_of.width());
        });
        sums
    }

    /// Adds the products of `weights [kv_len, ROWS]` and the block's rows to the rows of keys `to [kv_len, width]`.
    fn add_to_keys(&self, ctx: &Context, weights: &Tensor, rows: &BlockRows, to: &mut Tensor) {
        let width = to.cols();
        let size = Size { rows: to.rows(), cols: width, inner: self.queries.len(), format: FORMAT };
        let right = Right { values: rows.rows.f32s(), stride: width };
        product(ctx.isa(), size, Left::rows(weights.f32s(), ROWS), right, true, to.f32s_mut(), width);
    }

    /// Adds the gradients of the scores to the gradient of a head's bias.
    fn add_to_bias(&self, d_scores: &Tensor, to: &mut [f32]) {
        let len = self.queries.len();
        let first = self.shape.seq_len - self.queries.end;
        for (key, d_scores) in d_scores.f32s().chunks_exact(ROWS).take(self.shape.kv_len).enumerate() {
            // The bias of the last query begins first.
            let to = &mut to[first + key..][..len];
            to.iter_mut().rev().zip(d_scores).for_each(|(to, d)| *to += d);
        }
    }

    /// Writes the gradient of the queries, `scale` times the sums.
    fn store_dq(&self, sums: &Tensor, to: &Lent<'_, f32>) {
        for (i, row) in sums.f32s().chunks_exact(sums.cols()).take(self.queries.len()).enumerate() {
            // SAFETY: each row of a head belongs to one block, and all blocks of a head to one task.
            let to = unsafe { to.range(self.elements(i, self.shape.head_dim)) };
            to.iter_mut().zip(row).for_each(|(to, x)| *to = self.shape.scale * x);
        }
    }

    /// Calls `look` with each block of keys (or values) and a copy of their rows.
    fn with_keys(&self, ctx: &Context, of: Heads<'_>, mut look: impl FnMut(Range<usize>, &[f32])) {
        let sequence = Sequence::nth(self.shape, self.batch);
        let kv_head = self.head / sequence.heads.group();
        let mut copy = ctx.empty(&[KEYS, of.width()], DType::F32);
        for block in 0..self.shape.kv_len.div_ceil(KEYS) {
            let keys = piece_range(block, KEYS, self.shape.kv_len);
            let starts = sequence.key_starts::<KEYS>(kv_head, &keys, of.dim);
            let rows = Rows { starts: &starts[..keys.len()], cols: of.dim, width: of.width() };
            of.values.copy_rows(ctx.isa(), rows, copy.f32s_mut());
            look(keys, copy.f32s());
        }
    }

    /// Returns the bias of the block's scores; none without one.
    fn bias(&self) -> Option<BlockBias<'_>> {
        let AttentionShape { seq_len, kv_len, .. } = *self.shape;
        let of_head = self.rule.bias?.chunks_exact(seq_len + kv_len - 1).nth(self.head)?;
        let last = seq_len - self.queries.end;
        Some(BlockBias { values: &of_head[last..], num_before: self.queries.len() - 1 })
    }

    /// Returns the number of keys that each query sees.
    fn visible(&self) -> [usize; ROWS] {
        let AttentionShape { seq_len, kv_len, .. } = *self.shape;
        let position = |i: usize| self.queries.start + i.min(self.queries.len() - 1) + kv_len - seq_len;
        if self.rule.is_causal { std::array::from_fn(|i| position(i) + 1) } else { [kv_len; ROWS] }
    }
}

kernel! {
    /// Turns `scores [keys, ROWS]` into weights that sum to 1 down each column. Keys that a query does not see get
    /// the weight 0. `scale` makes scores, which come without bias, exponents of 2.
    fn softmax<S: Level>(bias: Option<BlockBias<'_>>, scale: f32, visible: [usize; ROWS], scores: &mut [f32]) {
        let mut max = [f32::NEG_INFINITY; ROWS];
        for (key, scores) in scores.as_chunks_mut::<ROWS>().0.iter_mut().enumerate() {
            scores.iter_mut().for_each(|score| *score *= scale);
            if let Some(BlockBias { values, num_before }) = bias {
                // The last of the queries has the first of these.
                let bias = &values[key..=key + num_before];
                scores.iter_mut().zip(bias.iter().rev()).for_each(|(score, bias)| *score += LOG2_E * bias);
            }
            for i in 0..ROWS {
                scores[i] = if key < visible[i] { scores[i] } else { f32::NEG_INFINITY };
                max[i] = if scores[i] > max[i] { scores[i] } else { max[i] };
            }
        }
        let mut sum = [0.0; ROWS];
        for scores in scores.as_chunks_mut::<ROWS>().0 {
            for i in 0..ROWS {
                scores[i] = vmath::exp2_falling::<S>(scores[i] - max[i]);
                sum[i] += scores[i];
            }
        }
        let scale = sum.map(|sum| 1.0 / sum);
        for scores in scores.as_chunks_mut::<ROWS>().0 {
            for i in 0..ROWS {
                scores[i] *= scale[i];
            }
        }
    }
}

kernel! {
    /// Turns `grads [keys, ROWS]`, the gradients of the softmax's `weights`, into the gradients of the scores.
    fn softmax_backward<S: Level>(weights: &[f32], grads: &mut [f32]) {
        let mut sum = [0.0; ROWS];
        for (weights, grads) in weights.as_chunks::<ROWS>().0.iter().zip(grads.as_chunks::<ROWS>().0) {
            for i in 0..ROWS {
                sum[i] += weights[i] * grads[i];
            }
        }
        for (weights, grads) in weights.as_chunks::<ROWS>().0.iter().zip(grads.as_chunks_mut::<ROWS>().0) {
            for i in 0..ROWS {
                grads[i] = weights[i] * (grads[i] - sum[i]);
            }
        }
    }
}
