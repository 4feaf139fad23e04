//! Attention whose scores get something added that depends on the distance of query and key, over the keys up to the
//! query's own or over all of them: what T5 needs (Raffel et al., 1910.10683, section 2.1). Forward only.
//!
//! A task takes 64 queries of one head and holds their scores over all keys at once, so that there is no running maximum.
//! Scores stand keys by queries, as in the pass over blocks, whose products are used here.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use moeworks_tensor::{DType, Tensor};

use super::AttentionShape;
use super::blocks::{COL_UNIT, KEYS, Left, ROW_UNIT, ROWS, Right, Size, key_elements, product};
use super::words::{Rows, Values, Words, transpose};
use crate::parallel::{Lent, piece_range};
use crate::simd::{Float, kernel, with_float};
use crate::{Context, vmath};

/// What is added to scores, and which keys there are for a query. Query i stands at position `i + kv_len - seq_len`.
#[derive(Clone, Copy, Debug)]
pub struct ScoreRule<'a> {
    /// `[H, seq_len + kv_len - 1]`: what is added to a head's score of key j for the query at position p, after scaling, is
    /// at `j - p + kv_len - 1`. None: nothing.
    pub bias: Option<&'a [f32]>,
    /// Whether a query sees keys up to its own position only, or all.
    pub is_causal: bool,
}

/// `softmax(scale q k^T + bias) v` over the keys that `rule` says; arguments as in [`attention`](super::attention), no
/// window. Without causality there may be fewer keys than queries, at least one. Returns `o` in the type of `q`.
#[must_use]
pub fn attention_biased(
    ctx: &Context,
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    rule: &ScoreRule<'_>,
    shape: &AttentionShape,
) -> Tensor {
    shape.check_sizes(q, k, v);
    let AttentionShape { batch, seq_len, kv_len, num_heads, value_dim, .. } = *shape;
    assert!(shape.window.is_none() && kv_len > 0 && (!rule.is_causal || seq_len <= kv_len), "{rule:?}, {shape:?}");
    assert!(rule.bias.is_none_or(|bias| bias.len() == num_heads * (seq_len + kv_len - 1)), "bias, {shape:?}");
    let mut o = ctx.empty(&[batch * seq_len, num_heads * value_dim], q.dtype());
    let blocks = seq_len.div_ceil(ROWS);
    let inputs = (Values::from(q), Values::from(k), Values::from(v));
    with_float!(q.dtype(), T => {
        let o = Lent::new(o.slice_mut::<T>());
        ctx.threads().run(batch * num_heads * blocks, |task| {
            let (pair, queries) = (task / blocks, piece_range(task % blocks, ROWS, seq_len));
            let block = Block { shape, rule, batch: pair / num_heads, head: pair % num_heads, queries };
            let (sums, width) = block.attend(ctx, inputs);
            for (i, row) in sums.f32s().chunks_exact(width).take(block.queries.len()).enumerate() {
                let start = block.row(i) * value_dim;
                // SAFETY: each row of a head belongs to one block, and each block to one task.
                let o = unsafe { o.range(start..start + value_dim) };
                o.iter_mut().zip(row).for_each(|(o, &x)| *o = T::store(x));
            }
        });
    });
    o
}

/// At most [`ROWS`] queries of one head of a sequence.
struct Block<'a> {
    shape: &'a AttentionShape,
    rule: &'a ScoreRule<'a>,
    batch: usize,
    head: usize,
    queries: Range<usize>,
}

impl Block<'_> {
    /// The number of query i's row among all rows of all heads.
    fn row(&self, i: usize) -> usize {
        (self.batch * self.shape.seq_len + self.queries.start + i) * self.shape.num_heads + self.head
    }

    /// The weighted sums of values, a row for each query, and the width of a row.
    fn attend(&self, ctx: &Context, (q, k, v): (Values<'_>, Values<'_>, Values<'_>)) -> (Tensor, usize) {
        let (isa, shape, rows) = (ctx.isa(), self.shape, self.queries.len());
        let words = Words::Singles;
        let [width, value_width] = [shape.head_dim, shape.value_dim].map(|dim| dim.next_multiple_of(COL_UNIT));
        let mut q_rows = ctx.empty(&[ROWS, width], DType::F32);
        let mut q_transposed = ctx.empty(&[width, ROWS], DType::F32);
        let starts: [usize; ROWS] = std::array::from_fn(|i| self.row(i.min(rows - 1)) * shape.head_dim);
        q.copy_rows(isa, Rows { starts: &starts[..rows], cols: shape.head_dim }, q_rows.f32s_mut());
        transpose(isa, q_rows.f32s(), (rows, width), shape.head_dim, q_transposed.f32s_mut());
        let mut scores = ctx.empty(&[shape.kv_len.next_multiple_of(KEYS), ROWS], DType::F32);
        let mut copy = ctx.empty(&[KEYS, width.max(value_width)], DType::F32);
        for (keys, scores) in self.key_blocks().zip(scores.f32s_mut().chunks_mut(KEYS * ROWS)) {
            let (starts, _) = self.key_starts(&keys);
            k.copy_rows(isa, Rows { starts: &starts[..keys.len()], cols: shape.head_dim }, copy.f32s_mut());
            let cols = rows.next_multiple_of(COL_UNIT);
            let size = Size { rows: keys.len().next_multiple_of(ROW_UNIT), cols, inner: shape.head_dim, words };
            let right = Right { values: q_transposed.f32s(), stride: ROWS };
            product(isa, size, Left::rows(copy.f32s(), width), right, false, scores, ROWS);
        }
        softmax(
            isa,
            (self.bias(), shape.scale * LOG2_E),
            self.visible(),
            &mut scores.f32s_mut()[..shape.kv_len * ROWS],
        );
        let mut o = ctx.zeros(&[ROWS, value_width], DType::F32);
        for (keys, scores) in self.key_blocks().zip(scores.f32s().chunks(KEYS * ROWS)) {
            let (_, starts) = self.key_starts(&keys);
            v.copy_rows(isa, Rows { starts: &starts[..keys.len()], cols: shape.value_dim }, copy.f32s_mut());
            let size = Size { rows: rows.next_multiple_of(ROW_UNIT), cols: value_width, inner: keys.len(), words };
            let right = Right { values: copy.f32s(), stride: value_width };
            let left = Left::columns(scores, ROWS);
            product(isa, size, left, right, true, o.f32s_mut(), value_width);
        }
        (o, value_width)
    }

    fn key_blocks(&self) -> impl Iterator<Item = Range<usize>> {
        let len = self.shape.kv_len;
        (0..len.div_ceil(KEYS)).map(move |block| piece_range(block, KEYS, len))
    }

    fn key_starts(&self, keys: &Range<usize>) -> ([usize; KEYS], [usize; KEYS]) {
        let group = self.shape.num_heads / self.shape.num_kv_heads;
        key_elements(self.shape, self.batch, self.head / group, keys)
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
