//! Attention forward: for each block of query rows a pass over the keys with a running maximum and sum.
//!
//! Scores are kept times log2(e), so that the softmax needs powers of two only.

use std::f32::consts::{LN_2, LOG2_E};
use std::ops::Range;

use moeworks_tensor::{DType, Tensor};

use super::AttentionShape;
use super::blocks::{COL_UNIT, ROWS, RowBlock, SCORE_COLS, keys_forward};
use super::products::{Left, Products, Right, Size};
use super::softmax::{Columns, softmax};
use super::words::{Rows, Values, Words, store_scaled, transpose};
use crate::Context;
use crate::parallel::{Lent, piece_range};
use crate::simd::{kernel, with_float};
use crate::vmath;

/// Blocks of rows that a task takes at most: they share its copies of keys and values, and what it holds of them should
/// stay in a core's cache.
const MAX_BLOCKS: usize = 8;

/// Computes `o` and `lse`. A task takes several blocks of query rows of one sequence and key head where there are many.
pub(super) fn run(
    ctx: &Context,
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    (sinks, shape): (Option<&[f32]>, &AttentionShape),
    o: &mut Tensor,
    lse: &mut Tensor,
) {
    let (num_blocks, pairs) = (RowBlock::count(shape), shape.batch * shape.num_kv_heads);
    let blocks_per_task = (pairs * num_blocks / (8 * ctx.threads().count())).clamp(1, MAX_BLOCKS);
    let tasks_per_pair = num_blocks.div_ceil(blocks_per_task);
    let words = Words::of(ctx.isa(), &[q.dtype(), k.dtype(), v.dtype()]);
    let inputs: (Values<'_>, Values<'_>, Values<'_>) = (q.into(), k.into(), v.into());
    let lse = Lent::new(lse.f32s_mut());
    with_float!(o.dtype(), T => {
        let o = Lent::new(o.slice_mut::<T>());
        ctx.threads().run(pairs * tasks_per_pair, |task| {
            let blocks = piece_range(task % tasks_per_pair, blocks_per_task, num_blocks);
            let products = Products::new(ctx.isa(), words);
            let task = Task { products, shape, sinks, pair: task / tasks_per_pair, blocks };
            let mut scratch = Scratch::new(ctx, words, shape, task.blocks.len());
            task.attend(&mut scratch, inputs);
            let (shared, states) = scratch.split();
            for (rows, state) in task.rows().zip(states) {
                let starts = rows.value_elements();
                starts[..rows.len].iter().for_each(|&start| o.prefetch_far(start, shape.value_dim));
                let (factors, logs) = totals(ctx.isa(), state.max, state.sum);
                task.products.each_row(state.o, (rows.len, shape.value_dim), shared.scores, |row, first, from| {
                    let start = starts[row] + first;
                    // SAFETY: each row belongs to one block, and each block to one task.
                    let o = unsafe { o.range(start..start + from.len()) };
                    store_scaled::<T>(ctx.isa(), from, factors[row], o);
                });
                for (&log, &statistic) in logs.iter().zip(&rows.statistics()[..rows.len]) {
                    // SAFETY: as above.
                    let lse = unsafe { lse.range(statistic..statistic + 1) };
                    lse[0] = log;
                }
            }
        });
    });
}

kernel! {
    /// What rows' values are to be multiplied by, and the log of each softmax's sum.
    fn totals<S: Level>(max: &[f32; ROWS], sum: &[f32; ROWS]) -> ([f32; ROWS], [f32; ROWS]) {
        let (mut factors, mut logs) = ([0.0; ROWS], [0.0; ROWS]);
        for row in 0..ROWS {
            factors[row] = 1.0 / sum[row];
            logs[row] = max[row] * LN_2 + vmath::ln::<S>(sum[row]);
        }
        (factors, logs)
    }
}

/// The maximum of no score. Finite, so that a block of keys of which a row sees none leaves no NaN.
const LEAST: f32 = -f32::MAX;

/// The memory of a task.
struct Scratch {
    shared: Tensor,
    states: Tensor,
    /// Keys of a block.
    num_keys: usize,
    width: usize,
    value_width: usize,
}

impl Scratch {
    fn new(ctx: &Context, words: Words, shape: &AttentionShape, num_blocks: usize) -> Self {
        let [width, value_width] = [shape.head_dim, shape.value_dim].map(|dim| words.width(dim));
        let num_keys = keys_forward(words);
        let shared = num_keys * (width + value_width + SCORE_COLS + SCORE_COLS / 2);
        Self {
            shared: ctx.empty(&[shared], DType::F32),
            states: ctx.empty(&[num_blocks, ROWS * (width + value_width + 2)], DType::F32),
            num_keys,
            width,
            value_width,
        }
    }

    /// What all blocks use, and what is known of each.
    fn split(&mut self) -> (Shared<'_>, impl Iterator<Item = State<'_>>) {
        let Self { num_keys, width, value_width, .. } = *self;
        let (k, memory) = self.shared.f32s_mut().split_at_mut(num_keys * width);
        let (v, memory) = memory.split_at_mut(num_keys * value_width);
        let (scores, weights) = memory.split_at_mut(num_keys * SCORE_COLS);
        let states = self.states.f32s_mut().chunks_exact_mut(ROWS * (width + value_width + 2)).map(move |memory| {
            let (q_transposed, memory) = memory.split_at_mut(ROWS * width);
            let (o, memory) = memory.split_at_mut(ROWS * value_width);
            let (max, sum) = memory.split_at_mut(ROWS);
            let row = |memory| <&mut [f32; ROWS]>::try_from(memory).expect("a number for each row");
            State { q_transposed, o, max: row(max), sum: row(sum) }
        });
        (Shared { width, value_width, k, v, scores, weights }, states)
    }
}

/// Memory that the blocks of a task use in turn.
struct Shared<'a> {
    /// Head elements, rounded up to whole vectors.
    width: usize,
    /// Elements of a head of values, rounded up likewise.
    value_width: usize,
    /// `[num_keys, width]` elements in words: the keys at hand.
    k: &'a mut [f32],
    /// `[num_keys, value_width]` elements in words along the keys: their values. For tiles `[value_width, num_keys / 2]` words, and room
    /// for as many.
    v: &'a mut [f32],
    /// `[num_keys, SCORE_COLS]`
    scores: &'a mut [f32],
    /// `[num_keys / 2, SCORE_COLS]`: what scores become, as pairs.
    weights: &'a mut [f32],
}

/// A block of rows under way.
struct State<'a> {
    /// `[h, ROWS]` elements in words.
    q_transposed: &'a mut [f32],
    /// `[ROWS, value_width]`, with tiles `[value_width, ROWS]`: sum over keys of `2^(score - max) v`; anything before the first keys.
    o: &'a mut [f32],
    /// Largest score of each row so far.
    max: &'a mut [f32; ROWS],
    /// Sum over keys of `2^(score - max)`.
    sum: &'a mut [f32; ROWS],
}

/// Some blocks of the rows of one sequence and key head.
struct Task<'a> {
    products: Products,
    shape: &'a AttentionShape,
    sinks: Option<&'a [f32]>,
    /// Sequence and key head.
    pair: usize,
    blocks: Range<usize>,
}

impl<'a> Task<'a> {
    fn rows(&self) -> impl Iterator<Item = RowBlock<'a>> + use<'a> {
        let (shape, pair) = (self.shape, self.pair);
        let (batch, kv_head) = (pair / shape.num_kv_heads, pair % shape.num_kv_heads);
        self.blocks.clone().map(move |block| RowBlock::new(shape, batch, kv_head, block))
    }

    /// Passes over all keys that the rows see.
    fn attend(&self, scratch: &mut Scratch, (q, k, v): (Values<'_>, Values<'_>, Values<'_>)) {
        let (mut shared, states) = scratch.split();
        for (rows, state) in self.rows().zip(states) {
            self.begin(rows, q, &mut shared, state);
        }
        let (Some(first), Some(last)) = (self.rows().next(), self.rows().last()) else { return };
        // Blocks of keys lie where they lie for all tasks, so that sums do not depend on how blocks of rows are dealt out.
        let num_keys = keys_forward(self.products.words);
        let start = first.first_visible(0) / num_keys * num_keys;
        let end = last.visible(last.len - 1);
        for start in (start..end).step_by(num_keys) {
            let keys = start..(start + num_keys).min(end);
            let (mut shared, states) = scratch.split();
            self.load_keys(first, &keys, (k, v), &mut shared);
            for (rows, state) in self.rows().zip(states) {
                if rows.sees_any(&keys) {
                    self.add_keys(rows, &keys, &mut shared, state);
                }
            }
        }
    }

    fn begin(&self, rows: RowBlock<'_>, q: Values<'_>, shared: &mut Shared<'_>, state: State<'_>) {
        let (isa, words, dim) = (self.products.isa, self.products.words, self.shape.head_dim);
        // There are no keys yet.
        let copied = Rows { starts: &rows.elements()[..rows.len], cols: dim, width: shared.width };
        q.copy_words(isa, words, copied, shared.k);
        transpose(isa, shared.k, (rows.len, words.count(shared.width)), words.count(dim), state.q_transposed);
        // A sink is a key that was already seen and has no value.
        (*state.max, *state.sum) = match self.sinks {
            Some(sinks) => (std::array::from_fn(|row| sinks[rows.head(row)] * LOG2_E), [1.0; ROWS]),
            None => ([LEAST; ROWS], [0.0; ROWS]),
        };
    }

    fn load_keys(
        &self,
        rows: RowBlock<'_>,
        keys: &Range<usize>,
        (k, v): (Values<'_>, Values<'_>),
        shared: &mut Shared<'_>,
    ) {
        let (isa, words) = (self.products.isa, self.products.words);
        let (starts, value_starts) = rows.key_elements(keys);
        let key_rows = Rows { starts: &starts[..keys.len()], cols: self.shape.head_dim, width: shared.width };
        k.copy_words(isa, words, key_rows, shared.k);
        let values =
            Rows { starts: &value_starts[..keys.len()], cols: self.shape.value_dim, width: shared.value_width };
        let (to, room) = of_keys(words, shared.v);
        self.products.copy_of_keys(v, values, to, room);
    }

    /// Takes the keys at hand into the sums of a block of rows: some rows at a time, so that their scores stay in the nearest cache.
    fn add_keys(&self, rows: RowBlock<'_>, keys: &Range<usize>, shared: &mut Shared<'_>, state: State<'_>) {
        let (isa, words) = (self.products.isa, self.products.words);
        let width = words.count(shared.width);
        let visible = (rows.first_visible_counts(), rows.visible_counts());
        let are_first = rows.begins_with(keys);
        let (v, _) = of_keys(words, shared.v);
        for col in (0..rows.padded_len(words)).step_by(SCORE_COLS) {
            for part in rows.score_parts(words, col, keys) {
                let (rows, cols) = (part.keys.len(), part.cols.len());
                let size = Size { rows, cols, inner: words.count(self.shape.head_dim), words };
                let left = Left::rows(&shared.k[part.keys.start * width..], width);
                let right = Right { values: &state.q_transposed[part.cols.start..], stride: ROWS };
                let to = &mut shared.scores[part.keys.start * SCORE_COLS + part.cols.start - col..];
                self.products.run(size, left, right, false, to, SCORE_COLS);
            }
            for first_col in (col..rows.padded_len(words).min(col + SCORE_COLS)).step_by(COL_UNIT) {
                let num_keys = rows.num_scored(words, first_col, keys);
                let scale = self.shape.scale * LOG2_E;
                let columns = Columns { first_col, first_key: keys.start, num_keys, scale, words };
                let o = (!are_first).then_some(&mut *state.o);
                softmax(isa, columns, shared.scores, shared.weights, &visible, (state.max, state.sum), o);
            }
            let weights = if words.are_pairs() { &*shared.weights } else { &*shared.scores };
            let weights = Right { values: weights, stride: SCORE_COLS };
            self.products.sum_of_keys((rows, col, keys), weights, (v, shared.value_width), !are_first, state.o);
        }
    }
}

/// The memory of keys' rows as [`Products::copy_of_keys`] takes it: where they go, and room for tiles.
fn of_keys(words: Words, memory: &mut [f32]) -> (&mut [f32], &mut [f32]) {
    let len = memory.len();
    memory.split_at_mut(if words == Words::Tiles { len / 2 } else { len })
}
