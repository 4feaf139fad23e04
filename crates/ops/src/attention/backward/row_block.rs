//! A block of query rows in attention backward: its scores with a block of keys, and what it adds to the three
//! gradients.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use moeworks_tensor::{DType, Tensor};

use super::Inputs;
use super::scores::{Columns, Scores, Statistics, score_grads};
use crate::Context;
use crate::attention::blocks::{COL_UNIT, KEYS, ROWS, RowBlock, SCORE_COLS};
use crate::attention::operands::{OperandFormat, Rows, transpose};
use crate::attention::products::{Left, Products, Right, ScoreBlock, Size};
use crate::attention::sequences::AttentionHeads;

/// A block of keys and values, packed as operands.
pub(super) struct Keys<'a> {
    keys: &'a Range<usize>,
    /// `[KEYS, width]` elements, packed along `h`.
    k: &'a [f32],
    /// `[KEYS, width]` elements, packed along the keys, as [`Products::pack_keys`] does.
    k_right: &'a [f32],
    /// `[KEYS, value_width]` elements, packed along the values' elements.
    v: &'a [f32],
}

impl<'a> Keys<'a> {
    /// Splits a copy that [`Task::run`](super::task::Task::run) has packed into its operands.
    pub(super) fn new(format: OperandFormat, width: usize, keys: &'a Range<usize>, copy: &'a [f32]) -> Self {
        let (k, v) = copy.split_at(KEYS * width);
        let (k, k_right) = match format {
            OperandFormat::F32 => (k, k),
            OperandFormat::Bf16Pairs | OperandFormat::AmxTiles => k.split_at(KEYS * width / 2),
        };
        Self { keys, k, k_right, v }
    }
}

/// The memory of a [`State`].
pub(super) struct Scratch {
    memory: Tensor,
}

impl Scratch {
    pub(super) fn new(ctx: &Context, width: usize, value_width: usize) -> Self {
        let elements =
            ROWS * (3 * width + 2 * value_width) + KEYS * width.max(value_width) + (2 * KEYS + 3 * KEYS / 2) * ROWS;
        Self { memory: ctx.empty(&[elements], DType::F32) }
    }

    /// Elements of a head of keys, rounded up to whole vectors.
    pub(super) fn split(&mut self, products: Products, width: usize, value_width: usize) -> State<'_> {
        let (q, memory) = self.memory.f32s_mut().split_at_mut(ROWS * width);
        let (q_transposed, memory) = memory.split_at_mut(ROWS * width);
        let (dq, memory) = memory.split_at_mut(ROWS * width);
        let (d_o, memory) = memory.split_at_mut(ROWS * value_width);
        let (d_o_transposed, memory) = memory.split_at_mut(ROWS * value_width);
        let (copy, memory) = memory.split_at_mut(KEYS * width.max(value_width));
        let (p, memory) = memory.split_at_mut(KEYS * ROWS);
        let (ds, memory) = memory.split_at_mut(KEYS * ROWS);
        let (p_words, memory) = memory.split_at_mut(KEYS / 2 * ROWS);
        let (ds_words, ds_pairs) = memory.split_at_mut(KEYS / 2 * ROWS);
        let (lse, delta, seen_from, visible) = ([0.0; ROWS], [0.0; ROWS], [0; ROWS], [0; ROWS]);
        let statistics = Statistics { lse, delta, seen_from, visible };
        let scores = Scores { p, ds, p_words, ds_words, ds_pairs };
        State { products, width, value_width, q, q_transposed, dq, d_o, d_o_transposed, copy, scores, statistics }
    }
}

/// A block of query rows, and buffers for its products with a block of keys.
pub(super) struct State<'a> {
    pub(super) products: Products,
    /// Head elements, rounded up to whole vectors.
    width: usize,
    /// Elements of a head of values, rounded up to whole vectors.
    value_width: usize,
    /// `[ROWS, width]` elements, packed along the query rows.
    q: &'a mut [f32],
    /// `[h, ROWS]` elements, packed along `h`.
    q_transposed: &'a mut [f32],
    /// `[ROWS, width]`, with AMX tiles `[width, ROWS]`: the gradient of the rows before it is multiplied by the
    /// scale.
    pub(super) dq: &'a mut [f32],
    /// `[ROWS, value_width]` elements, packed along the query rows.
    d_o: &'a mut [f32],
    /// `[value_dim, ROWS]` elements, packed along `value_dim`.
    d_o_transposed: &'a mut [f32],
    /// Scratch for rows that are packed or transposed.
    pub(super) copy: &'a mut [f32],
    scores: Scores<'a>,
    statistics: Statistics,
}

impl State<'_> {
    /// Packs the rows of `q` and `d_o` and computes each row's `delta = rowsum(d_o o)`.
    pub(super) fn load_rows(&mut self, heads: &AttentionHeads, inputs: &Inputs<'_>, rows: RowBlock<'_>) {
        let Products { isa, format, .. } = self.products;
        let (width, value_width) = (self.width, self.value_width);
        let (elements, value_elements) = (&rows.elements()[..rows.len], &rows.value_elements()[..rows.len]);
        let copied = Rows { starts: elements, cols: heads.head_dim, width };
        inputs.q.pack_along_cols(isa, format, copied, self.copy);
        let row = format.count(width);
        transpose(isa, self.copy, rows.len, row, format.count(heads.head_dim), self.q_transposed);
        inputs.q.pack_along_rows(isa, format, copied, self.q);
        let copied = Rows { starts: value_elements, cols: heads.value_dim, width: value_width };
        // `d_o` is rounded once for both operands, so that rounding cancels in `d_o v^T - rowsum(d_o o)`.
        inputs.d_o.pack_both_ways(isa, format, copied, self.copy, self.d_o);
        let row = format.count(value_width);
        transpose(isa, self.copy, rows.len, row, format.count(heads.value_dim), self.d_o_transposed);
        let statistics = &mut self.statistics;
        statistics.delta.fill(0.0);
        inputs.o.row_dots(isa, format, copied, self.copy, &mut statistics.delta);
        self.dq.fill(0.0);
        (statistics.seen_from, statistics.visible) = (rows.first_visible_counts(), rows.visible_counts());
        let at = rows.statistics();
        statistics.lse = std::array::from_fn(|row| if row < rows.len { inputs.lse[at[row]] * LOG2_E } else { 0.0 });
    }

    /// Adds the products of the rows with a block of keys to the three gradients. `dk` and `dv` begin at the block's
    /// first key.
    pub(super) fn add_block(
        &mut self,
        heads: &AttentionHeads,
        rows: RowBlock<'_>,
        block: Keys<'_>,
        dk: &mut [f32],
        dv: &mut [f32],
    ) {
        self.compute_scores(heads, rows, &block);
        let (products, width, value_width, keys) = (&self.products, self.width, self.value_width, block.keys);
        let format = products.format;
        let [p, ds, ds_along_keys] = self.scores.left_operands(format);
        for key in (0..keys.len()).step_by(format.key_unit()) {
            // Rows before the first that sees the panel contribute nothing, and their scores were not computed.
            let first = rows.first_that_sees(keys.start + key);
            if first == rows.len {
                break;
            }
            // Products begin at a whole word (or tile) that holds this row; the scores of the rows before it there
            // are zero.
            let first = format.start(first);
            let inner = format.count(rows.len) - first;
            let size = Size { rows: format.key_unit(), cols: value_width, inner, format };
            let at = key * format.count(ROWS) + first;
            let right = Right { values: &self.d_o[first * value_width..], stride: value_width };
            let left = |values| Left::rows(values, format.count(ROWS));
            products.run(size, left(&p[at..]), right, true, &mut dv[key * value_width..], value_width);
            let size = Size { cols: width, ..size };
            let right = Right { values: &self.q[first * width..], stride: width };
            products.run(size, left(&ds[at..]), right, true, &mut dk[key * width..], width);
        }
        for col in (0..rows.padded_len(format)).step_by(SCORE_COLS) {
            let weights = Right { values: &ds_along_keys[col..], stride: ROWS };
            products.sum_of_keys(ScoreBlock { rows, col, keys }, weights, block.k_right, width, true, self.dq);
        }
    }

    /// Computes the softmax of the rows and a block of keys, and the gradient of their scores.
    fn compute_scores(&mut self, heads: &AttentionHeads, rows: RowBlock<'_>, block: &Keys<'_>) {
        let (isa, format, keys) = (self.products.isa, self.products.format, block.keys);
        let (width, value_width) = (format.count(self.width), format.count(self.value_width));
        for col in (0..rows.padded_len(format)).step_by(SCORE_COLS) {
            // Pairs are written elsewhere; the scores that they are made of should stay in the nearest cache.
            let (at, stride) = if format.are_pairs() { (0, SCORE_COLS) } else { (col, ROWS) };
            for part in rows.score_parts(format, col, keys) {
                let size =
                    Size { rows: part.keys.len(), cols: part.cols.len(), inner: format.count(heads.head_dim), format };
                let to = part.keys.start * stride + at + part.cols.start - col;
                let left = Left::rows(&block.k[part.keys.start * width..], width);
                let right = Right { values: &self.q_transposed[part.cols.start..], stride: ROWS };
                self.products.run(size, left, right, false, &mut self.scores.p[to..], stride);
                let size = Size { inner: format.count(heads.value_dim), ..size };
                let left = Left::rows(&block.v[part.keys.start * value_width..], value_width);
                let right = Right { values: &self.d_o_transposed[part.cols.start..], stride: ROWS };
                self.products.run(size, left, right, false, &mut self.scores.ds[to..], stride);
            }
            for first_col in (col..rows.padded_len(format).min(col + SCORE_COLS)).step_by(COL_UNIT) {
                let num_keys = rows.num_scored(format, first_col, keys).next_multiple_of(format.key_unit());
                let at = at + first_col - col;
                let columns = Columns { first_col, at, stride, first_key: keys.start, num_keys, format };
                score_grads(isa, columns, heads.scale * LOG2_E, &mut self.scores, &self.statistics);
            }
        }
    }
}
