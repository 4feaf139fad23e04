//! Attention forward: for each block of query rows a pass over the keys with a running maximum and sum.

use moeworks_tensor::{DType, Tensor};

use super::AttentionShape;
use super::blocks::{
    COL_UNIT, KEYS, Left, ROW_UNIT, ROWS, Right, RowBlock, Size, Values, key_elements, product, transpose,
};
use crate::parallel::Lent;
use crate::simd::{Float, kernel, with_float};
use crate::{Context, vmath};

/// Computes `o` and `lse`; a task a block of query rows.
pub(super) fn run(
    ctx: &Context,
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    shape: &AttentionShape,
    o: &mut Tensor,
    lse: &mut Tensor,
) {
    let num_blocks = RowBlock::count(shape);
    let (q, k, v): (Values<'_>, Values<'_>, Values<'_>) = (q.into(), k.into(), v.into());
    let lse = Lent::new(lse.f32s_mut());
    with_float!(o.dtype(), T => {
        let o = Lent::new(o.slice_mut::<T>());
        ctx.threads().run(shape.batch * shape.num_kv_heads * num_blocks, |task| {
            let (pair, block) = (task / num_blocks, task % num_blocks);
            let (batch, kv_head) = (pair / shape.num_kv_heads, pair % shape.num_kv_heads);
            let rows = RowBlock::new(shape, batch, kv_head, block);
            let mut scratch = Scratch::new(ctx, shape.head_dim);
            let mut state = scratch.split(shape.head_dim);
            state.attend(ctx, shape, (batch, kv_head), rows, (q, k, v));
            for row in 0..rows.len {
                let (start, statistic) = (rows.element(row), rows.statistic(row));
                // SAFETY: each row belongs to one block, and each block to one task.
                let (o, lse) = unsafe { (o.range(start..start + shape.head_dim), lse.range(statistic..statistic + 1)) };
                let sum = state.sum[row];
                scale_kernel::<T>(ctx.isa(), &state.o[row * state.width..][..shape.head_dim], 1.0 / sum, o);
                lse[0] = state.max[row] + sum.ln();
            }
        });
    });
}

kernel! {
    fn scale_kernel<S: Level, T: Float>(from: &[f32], scale: f32, to: &mut [T]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = T::store(from * scale);
        }
    }
}

/// The memory of a task.
struct Scratch {
    memory: Tensor,
}

impl Scratch {
    fn new(ctx: &Context, head_dim: usize) -> Self {
        let width = head_dim.next_multiple_of(COL_UNIT);
        Self { memory: ctx.empty(&[3 * ROWS * width + 2 * KEYS * width + KEYS * ROWS], DType::F32) }
    }

    fn split(&mut self, head_dim: usize) -> State<'_> {
        let width = head_dim.next_multiple_of(COL_UNIT);
        let memory = self.memory.f32s_mut();
        let (q, memory) = memory.split_at_mut(ROWS * width);
        let (q_transposed, memory) = memory.split_at_mut(ROWS * width);
        let (o, memory) = memory.split_at_mut(ROWS * width);
        let (k, memory) = memory.split_at_mut(KEYS * width);
        let (v, scores) = memory.split_at_mut(KEYS * width);
        let (max, sum) = ([f32::NEG_INFINITY; ROWS], [0.0; ROWS]);
        State { width, q, q_transposed, o, k, v, scores, max, sum }
    }
}

/// A block of rows under way.
struct State<'a> {
    /// Head elements, rounded up to whole vectors.
    width: usize,
    /// `[ROWS, width]`
    q: &'a mut [f32],
    /// `[h, ROWS]`
    q_transposed: &'a mut [f32],
    /// `[ROWS, width]`: sum over keys of `e^(score - max) v`.
    o: &'a mut [f32],
    /// `[KEYS, width]`
    k: &'a mut [f32],
    /// `[KEYS, width]`
    v: &'a mut [f32],
    /// `[KEYS, ROWS]`
    scores: &'a mut [f32],
    /// Largest score of each row so far.
    max: [f32; ROWS],
    /// Sum over keys of `e^(score - max)`.
    sum: [f32; ROWS],
}

impl State<'_> {
    /// Passes over all keys that the rows see.
    fn attend(
        &mut self,
        ctx: &Context,
        shape: &AttentionShape,
        (batch, kv_head): (usize, usize),
        rows: RowBlock<'_>,
        (q, k, v): (Values<'_>, Values<'_>, Values<'_>),
    ) {
        let (isa, head_dim, width) = (ctx.isa(), shape.head_dim, self.width);
        q.copy_rows(isa, rows.elements(), head_dim, shape.scale, self.q, width);
        transpose(isa, self.q, rows.len, width, head_dim, self.q_transposed);
        self.o.fill(0.0);
        let visible = rows.visible_counts();
        let end = rows.visible(rows.len - 1);
        for first in (0..end).step_by(KEYS) {
            let keys = first..(first + KEYS).min(end);
            k.copy_rows(isa, key_elements(shape, batch, kv_head, keys.clone()), head_dim, 1.0, self.k, width);
            v.copy_rows(isa, key_elements(shape, batch, kv_head, keys.clone()), head_dim, 1.0, self.v, width);
            for col in (0..rows.padded_len()).step_by(2 * COL_UNIT) {
                let cols = (2 * COL_UNIT).min(rows.padded_len() - col);
                let num_keys = rows.visible_in(col + cols - 1, &keys).next_multiple_of(ROW_UNIT);
                let size = Size { rows: num_keys, cols, inner: head_dim };
                let left = Left { values: self.k, row_stride: width, inner_stride: 1 };
                let right = Right { values: &self.q_transposed[col..], stride: ROWS };
                product(isa, size, left, right, false, &mut self.scores[col..], ROWS);
            }
            for col in (0..rows.padded_len()).step_by(COL_UNIT) {
                let num_keys = rows.visible_in(col + COL_UNIT - 1, &keys);
                let columns = Columns { first_col: col, first_key: first, num_keys };
                softmax(isa, columns, self.scores, &visible, &mut self.max, &mut self.sum, self.o);
            }
            for row in (0..rows.len).step_by(ROW_UNIT) {
                let inner = rows.visible_in(row + ROW_UNIT - 1, &keys);
                let size = Size { rows: ROW_UNIT, cols: width, inner };
                let left = Left { values: &self.scores[row..], row_stride: 1, inner_stride: ROWS };
                let right = Right { values: self.v, stride: width };
                product(isa, size, left, right, true, &mut self.o[row * width..], width);
            }
        }
    }
}

/// Which scores [`softmax`] turns into weights: [`COL_UNIT`] query rows and a number of keys.
#[derive(Clone, Copy)]
struct Columns {
    first_col: usize,
    first_key: usize,
    num_keys: usize,
}

kernel! {
    /// Turns scores into `e^(score - max)`, zero where a row does not see the key, after raising the rows' maxima; scales what the
    /// rows have summed up so far accordingly.
    fn softmax<S: Level>(
        columns: Columns,
        scores: &mut [f32],
        visible: &[i32; ROWS],
        max: &mut [f32; ROWS],
        sum: &mut [f32; ROWS],
        o: &mut [f32],
    ) {
        let Columns { first_col, first_key, num_keys } = columns;
        if num_keys == 0 {
            return;
        }
        let cols = first_col..first_col + COL_UNIT;
        let (mut seen, mut old_max) = ([0_i32; COL_UNIT], [0.0_f32; COL_UNIT]);
        seen.copy_from_slice(&visible[cols.clone()]);
        old_max.copy_from_slice(&max[cols.clone()]);
        let mut new_max = old_max;
        for (key, scores) in scores.chunks_exact_mut(ROWS).take(num_keys).enumerate() {
            let key = (first_key + key) as i32;
            let scores = &mut scores[cols.clone()];
            for i in 0..COL_UNIT {
                scores[i] = if key < seen[i] { scores[i] } else { f32::NEG_INFINITY };
                new_max[i] = if scores[i] > new_max[i] { scores[i] } else { new_max[i] };
            }
        }
        let mut new_sum = [0.0_f32; COL_UNIT];
        for scores in scores.chunks_exact_mut(ROWS).take(num_keys) {
            let scores = &mut scores[cols.clone()];
            for i in 0..COL_UNIT {
                scores[i] = vmath::exp::<S>(scores[i] - new_max[i]);
                new_sum[i] += scores[i];
            }
        }
        let mut factors = [0.0_f32; COL_UNIT];
        for i in 0..COL_UNIT {
            factors[i] = vmath::exp::<S>(old_max[i] - new_max[i]);
            new_sum[i] = S::mul_add(sum[cols.start + i], factors[i], new_sum[i]);
        }
        max[cols.clone()].copy_from_slice(&new_max);
        sum[cols.clone()].copy_from_slice(&new_sum);
        let width = o.len() / ROWS;
        for (row, factor) in o.chunks_exact_mut(width).skip(first_col).zip(factors) {
            // A later block rarely raises the maximum.
            if factor != 1.0 {
                row.iter_mut().for_each(|o| *o *= factor);
            }
        }
    }
}
