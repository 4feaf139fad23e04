//! Attention whose scores get something added that depends on the distance of query and key, over the keys up to the
//! query's own or over all of them: what T5 needs (Raffel et al., 1910.10683, section 2.1), forward and backward.
//!
//! A task takes 64 queries of one head and holds their scores over all keys at once, so that there is no running maximum.
//! Scores stand keys by queries, as in the pass over blocks, whose products are used here.

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

/// Scores and their gradients are sums over few elements: f32, whatever the tensors' types.
const FORMAT: OperandFormat = OperandFormat::F32;

/// What is added to scores, and which keys there are for a query. Query i stands at position `i + kv_len - seq_len`.
#[derive(Clone, Copy, Debug)]
pub struct ScoreRule<'a> {
    /// `[H, seq_len + kv_len - 1]`: what is added to a head's score of key j for the query at position p, after scaling, is
    /// at `j - p + kv_len - 1`. None: nothing.
    pub bias: Option<&'a [f32]>,
    /// Whether a query sees keys up to its own position only, or all.
    pub is_causal: bool,
}

impl ScoreRule<'_> {
    fn check(&self, shape: &AttentionShape) {
        let AttentionShape { seq_len, kv_len, num_heads, .. } = *shape;
        assert!(shape.window.is_none() && kv_len > 0 && (!self.is_causal || seq_len <= kv_len), "{self:?}, {shape:?}");
        assert!(self.bias.is_none_or(|bias| bias.len() == num_heads * (seq_len + kv_len - 1)), "bias, {shape:?}");
    }
}

/// `softmax(scale q k^T + bias) v` over the keys that `rule` says; arguments as in [`attention`](super::attention), no
/// window. Without causality there may be fewer keys than queries, at least one. Returns `o` in the type of `q`.
///
/// All sequences are equally long: [`attention_ragged`](super::attention_ragged) has no bias.
#[must_use]
pub fn attention_biased(
    ctx: &Context,
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    rule: &ScoreRule<'_>,
    shape: &AttentionShape,
) -> Tensor {
    shape.check_sizes(q, k, v);
    rule.check(shape);
    let AttentionShape { batch, seq_len, num_heads, head_dim, value_dim, .. } = *shape;
    let mut o = ctx.empty(&[batch * seq_len, num_heads * value_dim], q.dtype());
    let blocks = seq_len.div_ceil(ROWS);
    let [q, k, v] = [(q, head_dim), (k, head_dim), (v, value_dim)].map(Heads::of);
    with_float!(o.dtype(), T => {
        let o = Lent::new(o.slice_mut::<T>());
        ctx.threads().run(batch * num_heads * blocks, |task| {
            let (pair, index) = (task / blocks, task % blocks);
            let block = Block::new((shape, rule), (pair / num_heads, pair % num_heads), index);
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
    /// Of queries, keys and values, f32 in their shapes; rows of keys and values beyond `kv_len` are zeros.
    pub qkv: [Tensor; 3],
    /// `[H, seq_len + kv_len - 1]`: of the bias; none without.
    pub bias: Option<Vec<f32>>,
}

/// The gradients of [`attention_biased`], with `d_o` that of its result, f32 or bf16.
///
/// With `p` the softmax, computed again: `dv = p^T d_o`, `ds = p (d_o v^T - rowsum(p d_o v^T))`, `dq = scale ds k`,
/// `dk = scale ds^T q`, and the bias takes the sum of `ds` over all pairs at a distance. A task owns a key head of a
/// sequence; the gradient of the bias is summed in the order of the sequences.
#[must_use]
pub fn attention_biased_backward(
    ctx: &Context,
    d_o: &Tensor,
    (q, k, v): (&Tensor, &Tensor, &Tensor),
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
    let inputs = [(q, head_dim), (d_o, value_dim), (k, head_dim), (v, value_dim)].map(Heads::of);
    ctx.threads().run(batch * num_kv_heads, |task| {
        let task = KeyHead { shape, rule, batch: task / num_kv_heads, kv_head: task % num_kv_heads };
        task.backward(ctx, inputs, &outputs);
    });
    let of_sequences = || bias.f32s().chunks_exact(distances.max(1));
    let bias = rule.bias.map(|_| (0..distances).map(|i| of_sequences().map(|bias| bias[i]).sum()).collect());
    BiasedGrads { qkv, bias }
}

/// Where gradients go; those of the bias `[batch, H, seq_len + kv_len - 1]`.
struct Outputs<'a> {
    dq: Lent<'a, f32>,
    dk: Lent<'a, f32>,
    dv: Lent<'a, f32>,
    bias: Lent<'a, f32>,
}

/// A key head of a sequence, with all queries that look at it.
struct KeyHead<'a> {
    shape: &'a AttentionShape,
    rule: &'a ScoreRule<'a>,
    batch: usize,
    kv_head: usize,
}

impl KeyHead<'_> {
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
                let block = Block::new((shape, self.rule), (self.batch, head), index);
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

    /// Writes `scale` times the rows of `from` to those of the keys in `to`, which has `dim` elements a head.
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
    fn of((tensor, dim): (&'a Tensor, usize)) -> Self {
        Self { values: tensor.into(), dim }
    }

    /// Elements of a copied row, which is filled up with zeros.
    fn width(&self) -> usize {
        self.dim.next_multiple_of(COL_UNIT)
    }
}

/// The rows of a block's queries, `[ROWS, width]`, and their transpose.
struct BlockRows {
    rows: Tensor,
    transposed: Tensor,
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
    fn new(
        (shape, rule): (&'a AttentionShape, &'a ScoreRule<'a>),
        (batch, head): (usize, usize),
        index: usize,
    ) -> Self {
        Self { shape, rule, batch, head, queries: piece_range(index, ROWS, shape.seq_len) }
    }

    /// Where query i is in a tensor with `dim` elements a head.
    fn elements(&self, i: usize, dim: usize) -> Range<usize> {
        let row = (self.batch * self.shape.seq_len + self.queries.start + i) * self.shape.num_heads + self.head;
        row * dim..(row + 1) * dim
    }

    fn rows_of(&self, ctx: &Context, of: Heads<'_>) -> BlockRows {
        let (isa, len) = (ctx.isa(), self.queries.len());
        let starts: [usize; ROWS] = std::array::from_fn(|i| self.elements(i.min(len - 1), of.dim).start);
        let mut rows = ctx.empty(&[ROWS, of.width()], DType::F32);
        let mut transposed = ctx.empty(&[of.width(), ROWS], DType::F32);
        of.values.copy_rows(isa, Rows { starts: &starts[..len], cols: of.dim, width: of.width() }, rows.f32s_mut());
        transpose(isa, rows.f32s(), (len, of.width()), of.dim, transposed.f32s_mut());
        BlockRows { rows, transposed }
    }

    /// The softmax of all keys for the queries `q`, `[kv_len, ROWS]`.
    fn weights(&self, ctx: &Context, q: &BlockRows, k: Heads<'_>) -> Tensor {
        let mut scores = self.products(ctx, k, q);
        let rule = (self.bias(), self.shape.scale * LOG2_E);
        softmax(ctx.isa(), rule, self.visible(), &mut scores.f32s_mut()[..self.shape.kv_len * ROWS]);
        scores
    }

    /// The products of all keys (or values) with the block's rows, `[kv_len, ROWS]`; what is beyond the last query means nothing.
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

    /// The sums of keys (or values) times `weights [kv_len, ROWS]`, a row for each query.
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

    /// Adds to the rows of keys `to [kv_len, width]` what the block's rows give them, by `weights [kv_len, ROWS]`.
    fn add_to_keys(&self, ctx: &Context, weights: &Tensor, rows: &BlockRows, to: &mut Tensor) {
        let width = to.cols();
        let size = Size { rows: to.rows(), cols: width, inner: self.queries.len(), format: FORMAT };
        let right = Right { values: rows.rows.f32s(), stride: width };
        product(ctx.isa(), size, Left::rows(weights.f32s(), ROWS), right, true, to.f32s_mut(), width);
    }

    /// Adds the gradients of the scores to those of a head's bias.
    fn add_to_bias(&self, d_scores: &Tensor, to: &mut [f32]) {
        let len = self.queries.len();
        let first = self.shape.seq_len - self.queries.end;
        for (key, d_scores) in d_scores.f32s().chunks_exact(ROWS).take(self.shape.kv_len).enumerate() {
            // The last query has the first of these.
            let to = &mut to[first + key..][..len];
            to.iter_mut().rev().zip(d_scores).for_each(|(to, d)| *to += d);
        }
    }

    fn store_dq(&self, sums: &Tensor, to: &Lent<'_, f32>) {
        for (i, row) in sums.f32s().chunks_exact(sums.cols()).take(self.queries.len()).enumerate() {
            // SAFETY: each row of a head belongs to one block, and all blocks of a head to one task.
            let to = unsafe { to.range(self.elements(i, self.shape.head_dim)) };
            to.iter_mut().zip(row).for_each(|(to, x)| *to = self.shape.scale * x);
        }
    }

    /// Shows `look` the keys (or values), block by block, with their rows.
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

    /// What is added to the scores of the first query, key by key, and how many elements before that the last query's begin:
    /// each query's begin one before its predecessor's.
    fn bias(&self) -> Option<(&[f32], usize)> {
        let AttentionShape { seq_len, kv_len, .. } = *self.shape;
        let of_head = self.rule.bias?.chunks_exact(seq_len + kv_len - 1).nth(self.head)?;
        let last = seq_len - self.queries.end;
        Some((&of_head[last..], self.queries.len() - 1))
    }

    /// How many keys each query sees.
    fn visible(&self) -> [usize; ROWS] {
        let AttentionShape { seq_len, kv_len, .. } = *self.shape;
        let position = |i: usize| self.queries.start + i.min(self.queries.len() - 1) + kv_len - seq_len;
        if self.rule.is_causal { std::array::from_fn(|i| position(i) + 1) } else { [kv_len; ROWS] }
    }
}

kernel! {
    /// Turns `scores [keys, ROWS]` into weights that add up to 1 down each column; what a query does not see becomes 0. `rule` is
    /// the bias and the factor that makes scores, which come without bias, exponents of 2.
    fn softmax<S: Level>(rule: (Option<(&[f32], usize)>, f32), visible: [usize; ROWS], scores: &mut [f32]) {
        let (bias, scale) = rule;
        let mut max = [f32::NEG_INFINITY; ROWS];
        for (key, scores) in scores.as_chunks_mut::<ROWS>().0.iter_mut().enumerate() {
            scores.iter_mut().for_each(|score| *score *= scale);
            if let Some((bias, count)) = bias {
                // The last of the queries has the first of these.
                let bias = &bias[key..=key + count];
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
    /// Makes of `grads [keys, ROWS]`, the gradients of the softmax's `weights`, those of the scores.
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
