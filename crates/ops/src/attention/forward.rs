//! Attention forward: for each block of query rows a pass over the keys with a running maximum and sum.
//!
//! Scores are kept times log2(e), so that the softmax needs powers of two only.

use std::f32::consts::{LN_2, LOG2_E};
use std::ops::Range;

use moeworks_tensor::{DType, Tensor};

use super::blocks::{COL_UNIT, ROWS, RowBlock, SCORE_COLS, keys_forward};
use super::operands::{OperandFormat, Rows, Values, store_scaled, transpose};
use super::products::{Left, Products, Right, ScoreBlock, Size};
use super::sequences::{AttentionHeads, Sequence, TaskList};
use super::softmax::{Columns, RowState, SeenKeys, softmax};
use super::{AttentionInputs, Outputs};
use crate::Context;
use crate::parallel::piece_range;
use crate::simd::{Float, kernel};
use crate::vmath;

/// Blocks of rows of a task, at most. They share its copies of keys and values, and their state should stay in a
/// core's cache.
const MAX_BLOCKS: usize = 8;

/// The tasks of sequences: each takes several blocks of query rows of one sequence and key head where there are many.
pub(super) struct BlockTasks<'a> {
    ctx: &'a Context,
    operands: Operands<'a>,
    sinks: Option<&'a [f32]>,
    sequences: &'a [Sequence<'a>],
    blocks_per_task: usize,
    tasks: TaskList,
    format: OperandFormat,
}

#[derive(Clone, Copy)]
struct Operands<'a> {
    q: Values<'a>,
    k: Values<'a>,
    v: Values<'a>,
}

impl<'a> BlockTasks<'a> {
    pub(super) fn new(ctx: &'a Context, inputs: &AttentionInputs<'a>, sequences: &'a [Sequence<'a>]) -> Self {
        let AttentionInputs { q, k, v, sinks } = *inputs;
        let num_blocks = |sequence: &Sequence<'_>| sequence.heads.num_kv_heads * RowBlock::count(sequence);
        let num_blocks = sequences.iter().map(num_blocks).sum::<usize>();
        let blocks_per_task = (num_blocks / (8 * ctx.threads().count())).clamp(1, MAX_BLOCKS);
        let num_tasks =
            |sequence: &Sequence<'_>| sequence.heads.num_kv_heads * RowBlock::count(sequence).div_ceil(blocks_per_task);
        Self {
            ctx,
            operands: Operands { q: q.into(), k: k.into(), v: v.into() },
            sinks: sinks.map(Tensor::f32s),
            sequences,
            blocks_per_task,
            tasks: TaskList::new(sequences.iter().map(num_tasks)),
            format: OperandFormat::new(ctx.isa(), &[q.dtype(), k.dtype(), v.dtype()]),
        }
    }

    /// Returns the number of tasks.
    pub(super) fn len(&self) -> usize {
        self.tasks.len()
    }

    /// Writes `o` and `lse` of the rows of task `task`.
    pub(super) fn run<T: Float>(&self, task: usize, outputs: Outputs<'_, T>) {
        let found = self.tasks.find(task);
        let sequence = &self.sequences[found.owner];
        let num_blocks = RowBlock::count(sequence);
        let tasks_of_head = num_blocks.div_ceil(self.blocks_per_task);
        let task = Task {
            products: Products::new(self.ctx.isa(), self.format),
            sequence,
            sinks: self.sinks,
            kv_head: found.index / tasks_of_head,
            blocks: piece_range(found.index % tasks_of_head, self.blocks_per_task, num_blocks),
        };
        let mut scratch = Scratch::new(self.ctx, self.format, &sequence.heads, task.blocks.len());
        task.attend(&mut scratch, self.operands);
        task.store(&mut scratch, outputs);
    }
}

kernel! {
    /// Returns the reciprocals of the softmaxes' sums, which rows are multiplied by, and the logs of the sums.
    fn totals<S: Level>(max: &[f32; ROWS], sum: &[f32; ROWS]) -> ([f32; ROWS], [f32; ROWS]) {
        let (mut factors, mut logs) = ([0.0; ROWS], [0.0; ROWS]);
        for row in 0..ROWS {
            factors[row] = 1.0 / sum[row];
            logs[row] = max[row] * LN_2 + vmath::ln::<S>(sum[row]);
        }
        (factors, logs)
    }
}

/// The maximum of no scores. It is finite, so that a block of keys of which a row sees none leaves no NaN.
const LEAST: f32 = -f32::MAX;

/// The memory of a task.
struct Scratch {
    shared: Tensor,
    states: Tensor,
    /// Keys of a block.
    num_keys: usize,
    width: usize,
    /// Elements of a head of keys, rounded up to whole vectors.
    value_width: usize,
}

impl Scratch {
    fn new(ctx: &Context, format: OperandFormat, heads: &AttentionHeads, num_blocks: usize) -> Self {
        let [width, value_width] = [heads.head_dim, heads.value_dim].map(|dim| format.width(dim));
        let num_keys = keys_forward(format);
        let shared = num_keys * (width + value_width + SCORE_COLS + SCORE_COLS / 2);
        Self {
            shared: ctx.empty(&[shared], DType::F32),
            states: ctx.empty(&[num_blocks, ROWS * (width + value_width + 2)], DType::F32),
            num_keys,
            width,
            value_width,
        }
    }

    /// Splits the memory into the part that all blocks of rows share and the state of each.
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

/// Memory that the blocks of rows of a task use in turn.
struct Shared<'a> {
    /// Head elements, rounded up to whole vectors.
    width: usize,
    /// Elements of a head of values, rounded up to whole vectors.
    value_width: usize,
    /// `[num_keys, width]` elements: a block of keys, packed along their elements.
    k: &'a mut [f32],
    /// `[num_keys, value_width]` elements: the values of a block of keys, packed along the keys. With AMX tiles
    /// `[value_width, num_keys / 2]` words, and scratch of the same size.
    v: &'a mut [f32],
    /// `[num_keys, SCORE_COLS]`
    scores: &'a mut [f32],
    /// `[num_keys / 2, SCORE_COLS]`: the softmax's weights as pairs along the keys.
    weights: &'a mut [f32],
}

/// The running state of a block of rows.
struct State<'a> {
    /// `[h, ROWS]` elements, packed along `h`.
    q_transposed: &'a mut [f32],
    /// `[ROWS, value_width]`, with AMX tiles `[value_width, ROWS]`: sum over keys of `2^(score - max) v`. Unspecified
    /// before the first keys.
    o: &'a mut [f32],
    /// The largest score of each row so far.
    max: &'a mut [f32; ROWS],
    /// The sum over keys of `2^(score - max)` of each row.
    sum: &'a mut [f32; ROWS],
}

/// Some blocks of the rows of one sequence and key head.
struct Task<'a> {
    products: Products,
    sequence: &'a Sequence<'a>,
    sinks: Option<&'a [f32]>,
    kv_head: usize,
    blocks: Range<usize>,
}

impl<'a> Task<'a> {
    /// Returns the blocks of rows.
    fn rows(&self) -> impl Iterator<Item = RowBlock<'a>> + use<'a> {
        let (sequence, kv_head) = (self.sequence, self.kv_head);
        self.blocks.clone().map(move |block| RowBlock::new(sequence, kv_head, block))
    }

    /// Passes over all keys that the rows see.
    fn attend(&self, scratch: &mut Scratch, Operands { q, k, v }: Operands<'_>) {
        let (mut shared, states) = scratch.split();
        for (rows, state) in self.rows().zip(states) {
            self.begin(rows, q, &mut shared, state);
        }
        let (Some(first), Some(last)) = (self.rows().next(), self.rows().last()) else { return };
        // Blocks of keys begin at the same keys in all tasks, so that sums do not depend on how blocks of rows are
        // divided among tasks.
        let num_keys = keys_forward(self.products.format);
        let start = first.first_visible(0) / num_keys * num_keys;
        let end = last.visible(last.len - 1);
        for start in (start..end).step_by(num_keys) {
            let keys = start..(start + num_keys).min(end);
            let (mut shared, states) = scratch.split();
            self.load_keys(first, &keys, [k, v], &mut shared);
            for (rows, state) in self.rows().zip(states) {
                if rows.sees_any(&keys) {
                    self.add_keys(rows, &keys, &mut shared, state);
                }
            }
        }
    }

    /// Packs the queries of a block of rows and initialises its state.
    fn begin(&self, rows: RowBlock<'_>, q: Values<'_>, shared: &mut Shared<'_>, state: State<'_>) {
        let (isa, format, dim) = (self.products.isa, self.products.format, self.sequence.heads.head_dim);
        // The memory of keys is free until the first keys are loaded.
        let copied = Rows { starts: &rows.elements()[..rows.len], cols: dim, width: shared.width };
        q.pack_along_cols(isa, format, copied, shared.k);
        transpose(isa, shared.k, rows.len, format.count(shared.width), format.count(dim), state.q_transposed);
        // A sink counts as a key that was already seen and has no value.
        (*state.max, *state.sum) = match self.sinks {
            Some(sinks) => (std::array::from_fn(|row| sinks[rows.head(row)] * LOG2_E), [1.0; ROWS]),
            None => ([LEAST; ROWS], [0.0; ROWS]),
        };
    }

    /// Packs a block of keys and their values.
    fn load_keys(&self, rows: RowBlock<'_>, keys: &Range<usize>, [k, v]: [Values<'_>; 2], shared: &mut Shared<'_>) {
        let (isa, format) = (self.products.isa, self.products.format);
        let AttentionHeads { head_dim, value_dim, .. } = self.sequence.heads;
        let (starts, value_starts) = (rows.key_elements(keys), rows.key_value_elements(keys));
        let key_rows = Rows { starts: &starts[..keys.len()], cols: head_dim, width: shared.width };
        k.pack_along_cols(isa, format, key_rows, shared.k);
        let values = Rows { starts: &value_starts[..keys.len()], cols: value_dim, width: shared.value_width };
        let (to, room) = of_keys(format, shared.v);
        self.products.pack_keys(v, values, to, room);
    }

    /// Adds a block of keys to the state of a block of rows, some rows at a time, so that their scores stay in the
    /// nearest cache.
    fn add_keys(&self, rows: RowBlock<'_>, keys: &Range<usize>, shared: &mut Shared<'_>, state: State<'_>) {
        let (isa, format) = (self.products.isa, self.products.format);
        let width = format.count(shared.width);
        let seen = SeenKeys { from: rows.first_visible_counts(), until: rows.visible_counts() };
        let are_first = rows.begins_with(keys);
        let (v, _) = of_keys(format, shared.v);
        for col in (0..rows.padded_len(format)).step_by(SCORE_COLS) {
            for part in rows.score_parts(format, col, keys) {
                let (rows, cols) = (part.keys.len(), part.cols.len());
                let size = Size { rows, cols, inner: format.count(self.sequence.heads.head_dim), format };
                let left = Left::rows(&shared.k[part.keys.start * width..], width);
                let right = Right { values: &state.q_transposed[part.cols.start..], stride: ROWS };
                let to = &mut shared.scores[part.keys.start * SCORE_COLS + part.cols.start - col..];
                self.products.run(size, left, right, false, to, SCORE_COLS);
            }
            for first_col in (col..rows.padded_len(format).min(col + SCORE_COLS)).step_by(COL_UNIT) {
                let num_keys = rows.num_scored(format, first_col, keys);
                let scale = self.sequence.heads.scale * LOG2_E;
                let columns = Columns { first_col, first_key: keys.start, num_keys, scale, format };
                let o = (!are_first).then_some(&mut *state.o);
                softmax(
                    isa,
                    columns,
                    shared.scores,
                    shared.weights,
                    &seen,
                    RowState { max: state.max, sum: state.sum, o },
                );
            }
            let weights = if format.are_pairs() { &*shared.weights } else { &*shared.scores };
            let weights = Right { values: weights, stride: SCORE_COLS };
            self.products.sum_of_keys(
                ScoreBlock { rows, col, keys },
                weights,
                v,
                shared.value_width,
                !are_first,
                state.o,
            );
        }
    }

    /// Writes the outputs and log-sums of the rows.
    fn store<T: Float>(&self, scratch: &mut Scratch, Outputs { o, lse }: Outputs<'_, T>) {
        let (isa, dim) = (self.products.isa, self.sequence.heads.value_dim);
        let (shared, states) = scratch.split();
        for (rows, state) in self.rows().zip(states) {
            let starts = rows.value_elements();
            starts[..rows.len].iter().for_each(|&start| o.prefetch_far(start, dim));
            let (factors, logs) = totals(isa, state.max, state.sum);
            self.products.each_row(state.o, rows.len, dim, shared.scores, |row, first, from| {
                let start = starts[row] + first;
                // SAFETY: each row belongs to one block, and each block to one task.
                let o = unsafe { o.range(start..start + from.len()) };
                store_scaled::<T>(isa, from, factors[row], o);
            });
            for (&log, &statistic) in logs.iter().zip(&rows.statistics()[..rows.len]) {
                // SAFETY: as above.
                let lse = unsafe { lse.range(statistic..statistic + 1) };
                lse[0] = log;
            }
        }
    }
}

/// Splits the memory of packed values as [`Products::pack_keys`] takes it: the operand, and scratch for AMX tiles.
fn of_keys(format: OperandFormat, memory: &mut [f32]) -> (&mut [f32], &mut [f32]) {
    let len = memory.len();
    memory.split_at_mut(if format == OperandFormat::AmxTiles { len / 2 } else { len })
}
