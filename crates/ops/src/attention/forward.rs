//! Attention forward: for each block of query rows a pass over the keys with a running maximum and sum.
//!
//! Scores are kept times log2(e), so that the softmax needs powers of two only.

use std::f32::consts::{LN_2, LOG2_E};

use moeworks_tensor::{DType, Tensor};

use super::AttentionShape;
use super::blocks::{COL_UNIT, KEYS, Left, ROW_UNIT, ROWS, Right, RowBlock, Size, Values, product, transpose};
use crate::parallel::{Lent, piece_range};
use crate::simd::{Float, kernel, with_float};
use crate::{Context, vmath};

/// Computes `o` and `lse`. A task takes several blocks of query rows in a row where there are many, so that the keys and
/// values that they share stay in its core's cache.
pub(super) fn run(
    ctx: &Context,
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    (sinks, shape): (Option<&[f32]>, &AttentionShape),
    o: &mut Tensor,
    lse: &mut Tensor,
) {
    let num_blocks = shape.batch * shape.num_kv_heads * RowBlock::count(shape);
    let blocks_per_task = (num_blocks / (8 * ctx.threads().count())).clamp(1, RowBlock::count(shape).max(1));
    let inputs: (Values<'_>, Values<'_>, Values<'_>) = (q.into(), k.into(), v.into());
    let lse = Lent::new(lse.f32s_mut());
    with_float!(o.dtype(), T => {
        let o = Lent::new(o.slice_mut::<T>());
        ctx.threads().run(num_blocks.div_ceil(blocks_per_task), |task| {
            let mut scratch = Scratch::new(ctx, shape);
            for block in piece_range(task, blocks_per_task, num_blocks) {
                let rows = RowBlock::nth(shape, block);
                let mut state = scratch.split(rows, sinks);
                state.attend(ctx, shape, rows, inputs);
                for (row, start) in rows.value_elements().into_iter().take(rows.len).enumerate() {
                    let statistic = rows.statistic(row);
                    // SAFETY: each row belongs to one block, and each block to one task.
                    let (o, lse) =
                        unsafe { (o.range(start..start + shape.value_dim), lse.range(statistic..statistic + 1)) };
                    let sum = state.sum[row];
                    scale_kernel::<T>(ctx.isa(), &state.o[row * state.value_width..][..shape.value_dim], 1.0 / sum, o);
                    lse[0] = state.max[row] * LN_2 + sum.ln();
                }
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

/// The maximum of no score. Finite, so that a block of keys of which a row sees none leaves no NaN.
const LEAST: f32 = -f32::MAX;

/// The memory of a task.
struct Scratch {
    memory: Tensor,
    width: usize,
    value_width: usize,
}

impl Scratch {
    fn new(ctx: &Context, shape: &AttentionShape) -> Self {
        let [width, value_width] = [shape.head_dim, shape.value_dim].map(|dim| dim.next_multiple_of(COL_UNIT));
        let elements = 2 * ROWS * width + ROWS * value_width + KEYS * (width + value_width) + KEYS * ROWS;
        Self { memory: ctx.empty(&[elements], DType::F32), width, value_width }
    }

    fn split(&mut self, rows: RowBlock<'_>, sinks: Option<&[f32]>) -> State<'_> {
        let (width, value_width) = (self.width, self.value_width);
        let memory = self.memory.f32s_mut();
        let (q, memory) = memory.split_at_mut(ROWS * width);
        let (q_transposed, memory) = memory.split_at_mut(ROWS * width);
        let (o, memory) = memory.split_at_mut(ROWS * value_width);
        let (k, memory) = memory.split_at_mut(KEYS * width);
        let (v, scores) = memory.split_at_mut(KEYS * value_width);
        // A sink is a key that was already seen and has no value.
        let (max, sum) = match sinks {
            Some(sinks) => (std::array::from_fn(|row| sinks[rows.head(row)] * LOG2_E), [1.0; ROWS]),
            None => ([LEAST; ROWS], [0.0; ROWS]),
        };
        State { width, value_width, q, q_transposed, o, k, v, scores, max, sum }
    }
}

/// A block of rows under way.
struct State<'a> {
    /// Head elements, rounded up to whole vectors.
    width: usize,
    /// Elements of a head of values, rounded up likewise.
    value_width: usize,
    /// `[ROWS, width]`
    q: &'a mut [f32],
    /// `[h, ROWS]`
    q_transposed: &'a mut [f32],
    /// `[ROWS, value_width]`: sum over keys of `2^(score - max) v`.
    o: &'a mut [f32],
    /// `[KEYS, width]`
    k: &'a mut [f32],
    /// `[KEYS, value_width]`
    v: &'a mut [f32],
    /// `[KEYS, ROWS]`
    scores: &'a mut [f32],
    /// Largest score of each row so far.
    max: [f32; ROWS],
    /// Sum over keys of `2^(score - max)`.
    sum: [f32; ROWS],
}

impl State<'_> {
    /// Passes over all keys that the rows see.
    fn attend(
        &mut self,
        ctx: &Context,
        shape: &AttentionShape,
        rows: RowBlock<'_>,
        (q, k, v): (Values<'_>, Values<'_>, Values<'_>),
    ) {
        let (isa, head_dim, width) = (ctx.isa(), shape.head_dim, self.width);
        let value_width = self.value_width;
        q.copy_rows(isa, &rows.elements()[..rows.len], head_dim, shape.scale * LOG2_E, self.q, width);
        transpose(isa, self.q, rows.len, width, head_dim, self.q_transposed);
        self.o.fill(0.0);
        let visible = (rows.first_visible_counts(), rows.visible_counts());
        let end = rows.visible(rows.len - 1);
        for first in (rows.first_visible(0)..end).step_by(KEYS) {
            let keys = first..(first + KEYS).min(end);
            let (key_elements, value_elements) = rows.key_elements(&keys);
            k.copy_rows(isa, &key_elements[..keys.len()], head_dim, 1.0, self.k, width);
            v.copy_rows(isa, &value_elements[..keys.len()], shape.value_dim, 1.0, self.v, value_width);
            for col in (0..rows.padded_len()).step_by(2 * COL_UNIT) {
                let cols = (2 * COL_UNIT).min(rows.padded_len() - col);
                let num_keys = rows.visible_in(col + cols - 1, &keys).next_multiple_of(ROW_UNIT);
                let size = Size { rows: num_keys, cols, inner: head_dim };
                let left = Left::Rows { values: self.k, stride: width };
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
                let size = Size { rows: ROW_UNIT, cols: value_width, inner };
                let left = Left::Columns { values: &self.scores[row..], stride: ROWS };
                let right = Right { values: self.v, stride: value_width };
                product(isa, size, left, right, true, &mut self.o[row * value_width..], value_width);
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
    /// Turns scores into `2^(score - max)`, zero where a row does not see the key, after raising the rows' maxima; scales what the
    /// rows have summed up so far accordingly.
    fn softmax<S: Level>(
        columns: Columns,
        scores: &mut [f32],
        visible: &([i32; ROWS], [i32; ROWS]),
        max: &mut [f32; ROWS],
        sum: &mut [f32; ROWS],
        o: &mut [f32],
    ) {
        let Columns { first_col, first_key, num_keys } = columns;
        if num_keys == 0 {
            return;
        }
        let (seen_from, visible) = (lanes_of(&visible.0, first_col), lanes_of(&visible.1, first_col));
        let (max, sum) = (lanes_of_mut(max, first_col), lanes_of_mut(sum, first_col));
        let mut new_max = *max;
        for (key, scores) in scores.chunks_exact_mut(ROWS).take(num_keys).enumerate() {
            let key = (first_key + key) as i32;
            let scores = lanes_of_mut(scores, first_col);
            let mut masked = *scores;
            for i in 0..COL_UNIT {
                masked[i] = if key < visible[i] && key >= seen_from[i] { masked[i] } else { f32::NEG_INFINITY };
            }
            for i in 0..COL_UNIT {
                new_max[i] = if masked[i] > new_max[i] { masked[i] } else { new_max[i] };
            }
            *scores = masked;
        }
        let mut new_sum = [0.0_f32; COL_UNIT];
        for scores in scores.chunks_exact_mut(ROWS).take(num_keys) {
            let scores = lanes_of_mut(scores, first_col);
            let mut weights = *scores;
            for i in 0..COL_UNIT {
                weights[i] = vmath::exp2_falling::<S>(weights[i] - new_max[i]);
            }
            for i in 0..COL_UNIT {
                new_sum[i] += weights[i];
            }
            *scores = weights;
        }
        let mut factors = [0.0_f32; COL_UNIT];
        for i in 0..COL_UNIT {
            factors[i] = vmath::exp2_falling::<S>(max[i] - new_max[i]);
            sum[i] = S::mul_add(sum[i], factors[i], new_sum[i]);
        }
        *max = new_max;
        let width = o.len() / ROWS;
        for (row, factor) in o.chunks_exact_mut(width).skip(first_col).zip(factors) {
            // A later block rarely raises the maximum.
            if factor != 1.0 {
                row.iter_mut().for_each(|o| *o *= factor);
            }
        }
    }
}

/// [`COL_UNIT`] elements of a row of statistics or scores.
#[inline(always)]
fn lanes_of<T>(row: &[T], first: usize) -> &[T; COL_UNIT] {
    row[first..].first_chunk().expect("rows are whole vectors")
}

/// [`lanes_of`] for writing.
#[inline(always)]
fn lanes_of_mut<T>(row: &mut [T], first: usize) -> &mut [T; COL_UNIT] {
    row[first..].first_chunk_mut().expect("rows are whole vectors")
}
