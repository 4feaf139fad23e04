//! Attention backward: a task owns a range of keys and passes over all query rows that see them.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use moeworks_tensor::{DType, Tensor};

use super::AttentionShape;
use super::blocks::{COL_UNIT, KEYS, ROWS, RowBlock, SCORE_COLS, key_elements, lanes_of, lanes_of_mut, seen_by_all};
use super::products::{Left, Products, Right, Size};
use super::softmax::powers;
use super::words::{Rows, Values, Words, store_scaled, transpose};
use crate::Context;
use crate::parallel::{Lent, PIECE, piece_range};
use crate::simd::{Level, kernel};

/// Tasks to have at least, where the keys can be cut: few sequences and heads should still keep many threads at work.
const MIN_TASKS: usize = 16;

pub(super) struct Inputs<'a> {
    pub(super) d_o: Values<'a>,
    pub(super) q: Values<'a>,
    pub(super) k: Values<'a>,
    pub(super) v: Values<'a>,
    pub(super) o: Values<'a>,
    pub(super) lse: &'a [f32],
    pub(super) words: Words,
}

pub(super) struct Grads {
    pub(super) dq: Tensor,
    pub(super) dk: Tensor,
    pub(super) dv: Tensor,
}

/// Computes the three gradients. Rows of `dk` and `dv` beyond the keys are left as they are.
///
/// The keys are cut into parts by the shape alone. With several parts each has its own share of `dq`, and these are added up
/// in the order of the keys at the end.
pub(super) fn run(ctx: &Context, inputs: &Inputs<'_>, shape: &AttentionShape, grads: &mut Grads) {
    let pairs = shape.batch * shape.num_kv_heads;
    if pairs == 0 || shape.seq_len == 0 || shape.head_dim == 0 {
        return;
    }
    let num_blocks = shape.kv_len.div_ceil(KEYS);
    let blocks_per_part = num_blocks.div_ceil(MIN_TASKS.div_ceil(pairs).min(num_blocks));
    let part_len = blocks_per_part * KEYS;
    let num_parts = shape.kv_len.div_ceil(part_len);
    let num_elements = grads.dq.len();
    // The first part's share goes to `dq` itself.
    let mut shares = ctx.zeros(&[num_parts - 1, num_elements], DType::F32);
    let outputs = Outputs {
        dq: Lent::new(grads.dq.f32s_mut()),
        shares: Lent::new(shares.f32s_mut()),
        dk: Lent::new(grads.dk.f32s_mut()),
        dv: Lent::new(grads.dv.f32s_mut()),
        num_elements,
    };
    ctx.threads().run(pairs * num_parts, |task| {
        let (pair, part) = (task / num_parts, task % num_parts);
        let keys = part * part_len..((part + 1) * part_len).min(shape.kv_len);
        let task = Task { shape, batch: pair / shape.num_kv_heads, kv_head: pair % shape.num_kv_heads, part, keys };
        task.run(ctx, inputs, &outputs);
    });
    let shares = shares.f32s();
    ctx.threads().run_pieces(grads.dq.f32s_mut(), PIECE, |index, dq| {
        let range = piece_range(index, PIECE, num_elements);
        for share in shares.chunks_exact(num_elements) {
            dq.iter_mut().zip(&share[range.clone()]).for_each(|(sum, x)| *sum += x);
        }
    });
}

struct Outputs<'a> {
    dq: Lent<'a, f32>,
    shares: Lent<'a, f32>,
    dk: Lent<'a, f32>,
    dv: Lent<'a, f32>,
    num_elements: usize,
}

/// The keys of one sequence and key head that a task answers for.
struct Task<'a> {
    shape: &'a AttentionShape,
    batch: usize,
    kv_head: usize,
    part: usize,
    keys: Range<usize>,
}

impl Task<'_> {
    fn run(&self, ctx: &Context, inputs: &Inputs<'_>, outputs: &Outputs<'_>) {
        let (isa, shape) = (ctx.isa(), self.shape);
        let words = inputs.words;
        let [width, value_width] = [shape.head_dim, shape.value_dim].map(|dim| words.width(dim));
        let padded_keys = self.keys.len().next_multiple_of(words.key_unit());
        let mut sums = ctx.zeros(&[padded_keys, width + value_width], DType::F32);
        let (dk, dv) = sums.f32s_mut().split_at_mut(padded_keys * width);
        let mut scratch = Scratch::new(ctx, width, value_width);
        let mut state = scratch.split(Products::new(isa, words), width, value_width);
        let mut copies = ctx.empty(&[self.keys.len().div_ceil(KEYS), KEYS * (width + value_width)], DType::F32);
        for (keys, copy) in self.blocks().zip(copies.f32s_mut().chunks_exact_mut(KEYS * (width + value_width))) {
            self.load_keys(&state.products, inputs, &keys, copy, state.copy);
        }
        for block in 0..RowBlock::count(shape) {
            let rows = RowBlock::new(shape, self.batch, self.kv_head, block);
            if !rows.sees_any(&self.keys) {
                self.clear_share(rows, outputs);
                continue;
            }
            state.load_rows(shape, inputs, rows);
            self.prefetch(block, inputs, outputs);
            for (keys, copy) in self.blocks().zip(copies.f32s().chunks_exact(KEYS * (width + value_width))) {
                if rows.sees_any(&keys) {
                    let row = keys.start - self.keys.start;
                    let (dk, dv) = (&mut dk[row * width..], &mut dv[row * value_width..]);
                    let block = Keys::new(words, width, &keys, copy);
                    state.add_block(shape, rows, block, (dk, dv));
                }
            }
            self.store_dq(rows, &mut state, outputs);
        }
        for keys in self.blocks() {
            let (key_elements, value_elements) = key_elements::<KEYS>(shape, self.batch, self.kv_head, &keys);
            for (&start, &value_start) in key_elements.iter().zip(&value_elements).take(keys.len()) {
                outputs.dk.prefetch_far(start, shape.head_dim);
                outputs.dv.prefetch_far(value_start, shape.value_dim);
            }
            for (key, (start, value_start)) in keys.clone().zip(key_elements.into_iter().zip(value_elements)) {
                let row = key - self.keys.start;
                // SAFETY: each key of a sequence and head belongs to one task.
                let (to_dk, to_dv) = unsafe {
                    let dk = outputs.dk.range(start..start + shape.head_dim);
                    (dk, outputs.dv.range(value_start..value_start + shape.value_dim))
                };
                store_scaled(isa, &dk[row * width..][..shape.head_dim], shape.scale, to_dk);
                store_scaled(isa, &dv[row * value_width..][..shape.value_dim], 1.0, to_dv);
            }
        }
    }

    /// Asks for what a block of rows writes and for what the next one reads: short rows, far apart.
    fn prefetch(&self, block: usize, inputs: &Inputs<'_>, outputs: &Outputs<'_>) {
        let shape = self.shape;
        let rows_of = |block| RowBlock::new(shape, self.batch, self.kv_head, block);
        if self.part == 0 {
            let rows = rows_of(block);
            let starts = &rows.elements()[..rows.len];
            starts.iter().for_each(|&start| outputs.dq.prefetch_far(start, shape.head_dim));
        }
        if block + 1 < RowBlock::count(shape) {
            let next = rows_of(block + 1);
            let (elements, value_elements) = (next.elements(), next.value_elements());
            inputs.q.prefetch(&elements[..next.len], shape.head_dim);
            inputs.o.prefetch(&value_elements[..next.len], shape.value_dim);
            inputs.d_o.prefetch(&value_elements[..next.len], shape.value_dim);
        }
    }

    /// The keys in blocks.
    fn blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let Range { start, end } = self.keys;
        (start..end).step_by(KEYS).map(move |start| start..(start + KEYS).min(end))
    }

    /// Copies a block of keys and values for [`Keys::new`]; `room` is as large as either of the two.
    fn load_keys(
        &self,
        products: &Products,
        inputs: &Inputs<'_>,
        keys: &Range<usize>,
        to: &mut [f32],
        room: &mut [f32],
    ) {
        let (head_dim, value_dim) = (self.shape.head_dim, self.shape.value_dim);
        let &Products { isa, words, .. } = products;
        let (starts, value_starts) = key_elements::<KEYS>(self.shape, self.batch, self.kv_head, keys);
        let rows = Rows { starts: &starts[..keys.len()], cols: head_dim, width: words.width(head_dim) };
        let (k, v) = to.split_at_mut(KEYS * rows.width);
        if words.are_pairs() {
            let (along, down) = k.split_at_mut(KEYS * rows.width / 2);
            inputs.k.copy_words(isa, words, rows, along);
            products.copy_of_keys(inputs.k, rows, down, room);
        } else {
            inputs.k.copy_rows(isa, rows, k);
        }
        let values = Rows { starts: &value_starts[..keys.len()], cols: value_dim, width: words.width(value_dim) };
        inputs.v.copy_words(isa, words, values, v);
    }

    /// The place for this part's share of the gradient of elements of one query row.
    #[allow(clippy::mut_from_ref)] // lent memory
    fn share<'a>(&self, range: Range<usize>, outputs: &'a Outputs<'_>) -> &'a mut [f32] {
        // SAFETY: a row of a part belongs to one task, which asks for each element once.
        unsafe {
            match self.part {
                0 => outputs.dq.range(range),
                part => {
                    let start = (part - 1) * outputs.num_elements;
                    outputs.shares.range(start + range.start..start + range.end)
                }
            }
        }
    }

    /// The first part is seen by all rows; shares of later ones start as zeros.
    fn clear_share(&self, rows: RowBlock<'_>, outputs: &Outputs<'_>) {
        if self.part == 0 {
            let row = |element| element..element + self.shape.head_dim;
            rows.elements()[..rows.len].iter().for_each(|&element| self.share(row(element), outputs).fill(0.0));
        }
    }

    fn store_dq(&self, rows: RowBlock<'_>, state: &mut State<'_>, outputs: &Outputs<'_>) {
        let State { products, dq, copy, .. } = state;
        let elements = rows.elements();
        products.each_row(dq, (rows.len, self.shape.head_dim), copy, |row, first, dq| {
            let start = elements[row] + first;
            store_scaled(products.isa, dq, self.shape.scale, self.share(start..start + dq.len(), outputs));
        });
    }
}

/// A block of keys and values in words.
struct Keys<'a> {
    keys: &'a Range<usize>,
    /// `[KEYS, width]` elements, words along the rows.
    k: &'a [f32],
    /// `[KEYS, width]` elements, words along the keys, as [`Products::copy_of_keys`] makes them.
    k_right: &'a [f32],
    /// `[KEYS, value_width]` elements, words along the rows.
    v: &'a [f32],
}

impl<'a> Keys<'a> {
    fn new(words: Words, width: usize, keys: &'a Range<usize>, copy: &'a [f32]) -> Self {
        let (k, v) = copy.split_at(KEYS * width);
        let (k, k_right) = match words {
            Words::Singles => (k, k),
            Words::Pairs | Words::Tiles => k.split_at(KEYS * width / 2),
        };
        Self { keys, k, k_right, v }
    }
}

struct Scratch {
    memory: Tensor,
}

impl Scratch {
    fn new(ctx: &Context, width: usize, value_width: usize) -> Self {
        let elements =
            ROWS * (3 * width + 2 * value_width) + KEYS * width.max(value_width) + (2 * KEYS + 3 * KEYS / 2) * ROWS;
        Self { memory: ctx.empty(&[elements], DType::F32) }
    }

    fn split(&mut self, products: Products, width: usize, value_width: usize) -> State<'_> {
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

/// A block of query rows, and room for what it makes of a block of keys.
struct State<'a> {
    products: Products,
    /// Head elements, rounded up to whole vectors.
    width: usize,
    /// Elements of a head of values, rounded up likewise.
    value_width: usize,
    /// `[ROWS, width]` elements, words along the rows of queries.
    q: &'a mut [f32],
    /// `[h, ROWS]` elements, words along h.
    q_transposed: &'a mut [f32],
    /// `[ROWS, width]`, with tiles `[width, ROWS]`: the gradient of the rows, without the scale.
    dq: &'a mut [f32],
    /// `[ROWS, value_width]` elements, words along the rows of queries.
    d_o: &'a mut [f32],
    /// `[value_dim, ROWS]` elements, words along `value_dim`.
    d_o_transposed: &'a mut [f32],
    /// Rows on their way to words.
    copy: &'a mut [f32],
    scores: Scores<'a>,
    statistics: Statistics,
}

/// What the rows and a block of keys are to each other.
struct Scores<'a> {
    /// `[KEYS, ROWS]`: scores, then the softmax.
    p: &'a mut [f32],
    /// `[KEYS, ROWS]`: gradient of the softmax, then of the scores.
    ds: &'a mut [f32],
    /// Both as pairs along the rows of queries, and the second as pairs along the keys.
    p_words: &'a mut [f32],
    ds_words: &'a mut [f32],
    ds_pairs: &'a mut [f32],
}

impl Scores<'_> {
    /// The softmax and the gradient of the scores as left operands with the inner dimension along the rows of queries, and
    /// the latter with the inner dimension along the keys.
    fn operands(&self, words: Words) -> [&[f32]; 3] {
        match words {
            Words::Singles => [self.p, self.ds, self.ds],
            Words::Pairs | Words::Tiles => [self.p_words, self.ds_words, self.ds_pairs],
        }
    }
}

/// One number for each query row.
struct Statistics {
    /// Times log2(e).
    lse: [f32; ROWS],
    /// Sum over a row of `d_o o`.
    delta: [f32; ROWS],
    /// The first key that the row sees.
    seen_from: [i32; ROWS],
    /// The first key behind the row.
    visible: [i32; ROWS],
}

/// [`Statistics`] of [`COL_UNIT`] rows, and the keys that they meet.
struct SomeRows {
    lse: [f32; COL_UNIT],
    delta: [f32; COL_UNIT],
    seen_from: [i32; COL_UNIT],
    visible: [i32; COL_UNIT],
    first_key: usize,
    /// Keys at the start that all of the rows see.
    num_open: usize,
}

impl Statistics {
    #[inline(always)]
    fn of(&self, columns: Columns) -> SomeRows {
        let Columns { first_col, first_key, num_keys, .. } = columns;
        let (seen_from, visible) = (*lanes_of(&self.seen_from, first_col), *lanes_of(&self.visible, first_col));
        let num_open = seen_by_all(first_key, num_keys, (&seen_from, &visible));
        let (lse, delta) = (*lanes_of(&self.lse, first_col), *lanes_of(&self.delta, first_col));
        SomeRows { lse, delta, seen_from, visible, first_key, num_open }
    }
}

impl State<'_> {
    fn load_rows(&mut self, shape: &AttentionShape, inputs: &Inputs<'_>, rows: RowBlock<'_>) {
        let Products { isa, words, .. } = self.products;
        let (width, value_width) = (self.width, self.value_width);
        let (elements, value_elements) = (&rows.elements()[..rows.len], &rows.value_elements()[..rows.len]);
        let copied = Rows { starts: elements, cols: shape.head_dim, width };
        inputs.q.copy_words(isa, words, copied, self.copy);
        let size = (rows.len, words.count(width));
        transpose(isa, self.copy, size, words.count(shape.head_dim), self.q_transposed);
        inputs.q.copy_words_down(isa, words, copied, self.q);
        let copied = Rows { starts: value_elements, cols: shape.value_dim, width: value_width };
        // Rounded alike, so is what cancels in `d_o v^T - rowsum(d_o o)`.
        inputs.d_o.copy_both_ways(isa, words, copied, self.copy, self.d_o);
        let size = (rows.len, words.count(value_width));
        transpose(isa, self.copy, size, words.count(shape.value_dim), self.d_o_transposed);
        let statistics = &mut self.statistics;
        statistics.delta.fill(0.0);
        inputs.o.row_dots(isa, words, copied, self.copy, &mut statistics.delta);
        self.dq.fill(0.0);
        (statistics.seen_from, statistics.visible) = (rows.first_visible_counts(), rows.visible_counts());
        let at = rows.statistics();
        statistics.lse = std::array::from_fn(|row| if row < rows.len { inputs.lse[at[row]] * LOG2_E } else { 0.0 });
    }

    /// Adds what the rows and the keys at hand contribute to the three gradients.
    fn add_block(
        &mut self,
        shape: &AttentionShape,
        rows: RowBlock<'_>,
        block: Keys<'_>,
        (dk, dv): (&mut [f32], &mut [f32]),
    ) {
        self.compute_scores(shape, rows, &block);
        let (products, width, value_width, keys) = (&self.products, self.width, self.value_width, block.keys);
        let words = products.words;
        let [p, ds, ds_along_keys] = self.scores.operands(words);
        for key in (0..keys.len()).step_by(words.key_unit()) {
            // Rows before the first that sees the panel contribute nothing; their scores were not computed.
            let first = rows.first_that_sees(keys.start + key);
            if first == rows.len {
                break;
            }
            // The first word of those that this row is in: their other rows have scores, too, which are zero.
            let first = words.start(first);
            let inner = words.count(rows.len) - first;
            let size = Size { rows: words.key_unit(), cols: value_width, inner, words };
            let at = key * words.count(ROWS) + first;
            let right = Right { values: &self.d_o[first * value_width..], stride: value_width };
            let left = |values| Left::rows(values, words.count(ROWS));
            products.run(size, left(&p[at..]), right, true, &mut dv[key * value_width..], value_width);
            let size = Size { cols: width, ..size };
            let right = Right { values: &self.q[first * width..], stride: width };
            products.run(size, left(&ds[at..]), right, true, &mut dk[key * width..], width);
        }
        for col in (0..rows.padded_len(words)).step_by(SCORE_COLS) {
            let weights = Right { values: &ds_along_keys[col..], stride: ROWS };
            products.sum_of_keys((rows, col, keys), weights, (block.k_right, width), true, self.dq);
        }
    }

    /// The softmax of the rows and the keys at hand, and the gradient of their scores.
    fn compute_scores(&mut self, shape: &AttentionShape, rows: RowBlock<'_>, block: &Keys<'_>) {
        let (isa, words, keys) = (self.products.isa, self.products.words, block.keys);
        let (width, value_width) = (words.count(self.width), words.count(self.value_width));
        for col in (0..rows.padded_len(words)).step_by(SCORE_COLS) {
            // As pairs they go elsewhere, and what they are made from should stay in the nearest cache.
            let (at, stride) = if words.are_pairs() { (0, SCORE_COLS) } else { (col, ROWS) };
            for part in rows.score_parts(words, col, keys) {
                let size =
                    Size { rows: part.keys.len(), cols: part.cols.len(), inner: words.count(shape.head_dim), words };
                let to = part.keys.start * stride + at + part.cols.start - col;
                let left = Left::rows(&block.k[part.keys.start * width..], width);
                let right = Right { values: &self.q_transposed[part.cols.start..], stride: ROWS };
                self.products.run(size, left, right, false, &mut self.scores.p[to..], stride);
                let size = Size { inner: words.count(shape.value_dim), ..size };
                let left = Left::rows(&block.v[part.keys.start * value_width..], value_width);
                let right = Right { values: &self.d_o_transposed[part.cols.start..], stride: ROWS };
                self.products.run(size, left, right, false, &mut self.scores.ds[to..], stride);
            }
            for first_col in (col..rows.padded_len(words).min(col + SCORE_COLS)).step_by(COL_UNIT) {
                let num_keys = rows.num_scored(words, first_col, keys).next_multiple_of(words.key_unit());
                let at = at + first_col - col;
                let columns = Columns { first_col, at, stride, first_key: keys.start, num_keys, words };
                score_grads(isa, columns, shape.scale * LOG2_E, &mut self.scores, &self.statistics);
            }
        }
    }
}

/// Which scores [`score_grads`] treats: [`COL_UNIT`] query rows and a number of keys.
#[derive(Clone, Copy)]
struct Columns {
    first_col: usize,
    /// Where the first key's scores are, and what the next one's are from there.
    at: usize,
    stride: usize,
    first_key: usize,
    num_keys: usize,
    /// What the softmax and the gradients are for.
    words: Words,
}

kernel! {
    bf16
    /// Turns scores, to be multiplied by `scale`, into the softmax and its gradient into that of the scores; both zero
    /// where a row does not see the key. They stay in place, or go to `p_words`, `ds_words` and `ds_pairs`.
    fn score_grads<S: Level>(columns: Columns, scale: f32, scores: &mut Scores<'_>, statistics: &Statistics) {
        let Columns { first_col, at, stride, num_keys, words, .. } = columns;
        let rows = statistics.of(columns);
        if words == Words::Singles {
            let keys = scores.p.chunks_exact_mut(stride).zip(scores.ds.chunks_exact_mut(stride)).take(num_keys);
            for (key, (p, ds)) in keys.enumerate() {
                grads_of_key::<S>((&rows, scale, words), key, lanes_of_mut(p, at), lanes_of_mut(ds, at));
            }
            return;
        }
        let pairs = scores.p.chunks_exact(2 * stride).zip(scores.ds.chunks_exact(2 * stride)).take(num_keys / 2);
        let p_words = scores.p_words.chunks_exact_mut(ROWS);
        let ds_words = scores.ds_words.chunks_exact_mut(ROWS).zip(scores.ds_pairs.chunks_exact_mut(ROWS));
        for (pair, ((p, ds), (p_words, (ds_words, ds_pairs)))) in pairs.zip(p_words.zip(ds_words)).enumerate() {
            let (mut low, mut ds_low) = (*lanes_of(p, at), *lanes_of(ds, at));
            grads_of_key::<S>((&rows, scale, words), 2 * pair, &mut low, &mut ds_low);
            let (mut high, mut ds_high) = (*lanes_of(p, stride + at), *lanes_of(ds, stride + at));
            grads_of_key::<S>((&rows, scale, words), 2 * pair + 1, &mut high, &mut ds_high);
            _ = words_of_two::<S>(&low, &high, first_col, p_words);
            *lanes_of_mut(ds_pairs, first_col) = words_of_two::<S>(&ds_low, &ds_high, first_col, ds_words);
        }
    }
}

/// The softmax and the gradient of the scores of key number `key` and some rows, in place.
#[inline(always)]
fn grads_of_key<S: Level>(
    (rows, scale, words): (&SomeRows, f32, Words),
    key: usize,
    p: &mut [f32; COL_UNIT],
    ds: &mut [f32; COL_UNIT],
) {
    for (p, lse) in p.iter_mut().zip(&rows.lse) {
        *p = *p * scale - lse;
    }
    *p = powers::<S>(words, *p);
    for i in 0..COL_UNIT {
        ds[i] = p[i] * (ds[i] - rows.delta[i]);
    }
    if key >= rows.num_open {
        let key = (rows.first_key + key) as i32;
        for i in 0..COL_UNIT {
            let is_seen = (key < rows.visible[i]) & (key >= rows.seen_from[i]);
            p[i] = if is_seen { p[i] } else { 0.0 };
            ds[i] = if is_seen { ds[i] } else { 0.0 };
        }
    }
}

/// Writes what two keys, one after the other, have for some rows as pairs along the rows of queries, at `first_col` of
/// `words` `[2, ROWS / 2]`, and returns it as pairs along the keys.
#[inline(always)]
fn words_of_two<S: Level>(
    low: &[f32; COL_UNIT],
    high: &[f32; COL_UNIT],
    first_col: usize,
    words: &mut [f32],
) -> [f32; COL_UNIT] {
    assert!(S::HAS_PAIR_DOT, "pairs of bf16");
    let (mut rounded, mut pairs) = ([0.0; COL_UNIT], [0.0; COL_UNIT]);
    // SAFETY: vectors have COL_UNIT lanes where pairs are multiplied.
    unsafe {
        let [in_order, in_turn] = S::round_and_pair(S::load(low.as_ptr()), S::load(high.as_ptr()));
        S::store(rounded.as_mut_ptr(), in_order);
        S::store(pairs.as_mut_ptr(), in_turn);
    }
    let (low, high) = rounded.split_at(COL_UNIT / 2);
    let (to_low, to_high) = words.split_at_mut(ROWS / 2);
    to_low[first_col / 2..][..COL_UNIT / 2].copy_from_slice(low);
    to_high[first_col / 2..][..COL_UNIT / 2].copy_from_slice(high);
    pairs
}
