//! Attention backward: a task owns a range of keys and passes over all query rows that see them.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use moeworks_tensor::{DType, Tensor};

use super::blocks::{COL_UNIT, KEYS, ROWS, RowBlock, SCORE_COLS, lanes_of, lanes_of_mut, seen_by_all};
use super::products::{Left, Products, Right, Size};
use super::sequences::{AttentionHeads, OwnedTask, Sequence, TaskList};
use super::softmax::powers;
use super::words::{Rows, Values, Words, store_scaled, transpose};
use crate::parallel::{Lent, PIECE, piece_range};
use crate::simd::{Level, kernel};
use crate::{Context, Isa};

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

/// The parts that the keys of a sequence are cut into. Each has its own share of `dq`, and these are added up in the order of the keys at
/// the end; that of the first part goes to `dq` itself.
#[derive(Clone, Copy)]
struct Cut {
    part_len: usize,
    num_parts: usize,
    /// The first element of the shares of its later parts, one part's after the other's.
    first_share: usize,
}

impl Cut {
    /// The cut of a sequence whose pass has `num_pairs` pairs of a sequence and a key head: by sizes alone.
    fn new(sequence: &Sequence<'_>, num_pairs: usize, first_share: usize) -> Self {
        if sequence.num_queries == 0 || sequence.heads.head_dim == 0 {
            return Self { part_len: 0, num_parts: 0, first_share };
        }
        let num_blocks = sequence.num_keys.div_ceil(KEYS);
        let part_len = num_blocks.div_ceil(MIN_TASKS.div_ceil(num_pairs).min(num_blocks)) * KEYS;
        Self { part_len, num_parts: sequence.num_keys.div_ceil(part_len), first_share }
    }

    /// The cuts of all sequences, and the number of elements of all shares.
    fn all(sequences: &[Sequence<'_>], num_pairs: usize) -> (Vec<Self>, usize) {
        let mut num_elements = 0;
        let cut = |sequence: &Sequence<'_>| {
            let cut = Self::new(sequence, num_pairs, num_elements);
            num_elements += cut.num_parts.saturating_sub(1) * sequence.query_elements().len();
            cut
        };
        (sequences.iter().map(cut).collect(), num_elements)
    }
}

/// Computes the three gradients. Rows of `dk` and `dv` of no sequence are left as they are, and those of sequences without queries.
///
/// Keys are cut into parts as is best for `num_pairs` pairs of a sequence and a key head, whatever other sequences there are.
pub(super) fn run(ctx: &Context, inputs: &Inputs<'_>, sequences: &[Sequence<'_>], num_pairs: usize, grads: &mut Grads) {
    let (cuts, num_shared) = Cut::all(sequences, num_pairs);
    let mut shares = ctx.zeros(&[num_shared], DType::F32);
    let outputs = Outputs {
        dq: Lent::new(grads.dq.f32s_mut()),
        shares: Lent::new(shares.f32s_mut()),
        dk: Lent::new(grads.dk.f32s_mut()),
        dv: Lent::new(grads.dv.f32s_mut()),
    };
    let num_tasks = |(sequence, cut): (&Sequence<'_>, &Cut)| sequence.heads.num_kv_heads * cut.num_parts;
    let tasks = TaskList::new(sequences.iter().zip(&cuts).map(num_tasks));
    ctx.threads().run(tasks.len(), |task| {
        let OwnedTask { owner, index } = tasks.find(task);
        let (sequence, cut) = (&sequences[owner], cuts[owner]);
        let (kv_head, part) = (index / cut.num_parts, index % cut.num_parts);
        let keys = piece_range(part, cut.part_len, sequence.num_keys);
        Task { sequence, kv_head, cut, part, keys }.run(ctx, inputs, &outputs);
    });
    add_shares(ctx, sequences, &cuts, shares.f32s(), grads.dq.f32s_mut());
}

/// Adds the shares of later parts to `dq`, in the order of the parts.
fn add_shares(ctx: &Context, sequences: &[Sequence<'_>], cuts: &[Cut], shares: &[f32], dq: &mut [f32]) {
    let num_pieces = |(sequence, cut): (&Sequence<'_>, &Cut)| match cut.num_parts {
        0 | 1 => 0,
        _ => sequence.query_elements().len().div_ceil(PIECE),
    };
    let tasks = TaskList::new(sequences.iter().zip(cuts).map(num_pieces));
    let dq = Lent::new(dq);
    ctx.threads().run(tasks.len(), |task| {
        let OwnedTask { owner, index } = tasks.find(task);
        let (elements, Cut { num_parts, first_share, .. }) = (sequences[owner].query_elements(), cuts[owner]);
        let piece = piece_range(index, PIECE, elements.len());
        // SAFETY: the pieces of a sequence do not overlap, and its queries are its own.
        let dq = unsafe { dq.range(elements.start + piece.start..elements.start + piece.end) };
        let shares = &shares[first_share..][..(num_parts - 1) * elements.len()];
        for share in shares.chunks_exact(elements.len()) {
            dq.iter_mut().zip(&share[piece.clone()]).for_each(|(sum, x)| *sum += x);
        }
    });
}

struct Outputs<'a> {
    dq: Lent<'a, f32>,
    shares: Lent<'a, f32>,
    dk: Lent<'a, f32>,
    dv: Lent<'a, f32>,
}

/// The keys of one sequence and key head that a task answers for.
struct Task<'a> {
    sequence: &'a Sequence<'a>,
    kv_head: usize,
    cut: Cut,
    part: usize,
    keys: Range<usize>,
}

/// Gradients of keys or values, a row of `width` elements each, of which those behind a head's are padding.
#[derive(Clone, Copy)]
struct PaddedRows<'a> {
    values: &'a [f32],
    width: usize,
}

impl<'a> PaddedRows<'a> {
    /// The first `len` elements of a row.
    fn row(&self, row: usize, len: usize) -> &'a [f32] {
        &self.values[row * self.width..][..len]
    }
}

impl Task<'_> {
    fn run(&self, ctx: &Context, inputs: &Inputs<'_>, outputs: &Outputs<'_>) {
        let (isa, heads, words) = (ctx.isa(), &self.sequence.heads, inputs.words);
        let [width, value_width] = [heads.head_dim, heads.value_dim].map(|dim| words.width(dim));
        let padded_keys = self.keys.len().next_multiple_of(words.key_unit());
        let mut sums = ctx.zeros(&[padded_keys, width + value_width], DType::F32);
        let (dk, dv) = sums.f32s_mut().split_at_mut(padded_keys * width);
        let mut scratch = Scratch::new(ctx, width, value_width);
        let mut state = scratch.split(Products::new(isa, words), width, value_width);
        let mut copies = ctx.empty(&[self.keys.len().div_ceil(KEYS), KEYS * (width + value_width)], DType::F32);
        for (keys, copy) in self.blocks().zip(copies.f32s_mut().chunks_exact_mut(KEYS * (width + value_width))) {
            self.load_keys(&state.products, inputs, &keys, copy, state.copy);
        }
        for block in 0..RowBlock::count(self.sequence) {
            let rows = RowBlock::new(self.sequence, self.kv_head, block);
            if !rows.sees_any(&self.keys) {
                self.clear_share(rows, outputs);
                continue;
            }
            state.load_rows(heads, inputs, rows);
            self.prefetch(block, inputs, outputs);
            for (keys, copy) in self.blocks().zip(copies.f32s().chunks_exact(KEYS * (width + value_width))) {
                if rows.sees_any(&keys) {
                    let row = keys.start - self.keys.start;
                    let (dk, dv) = (&mut dk[row * width..], &mut dv[row * value_width..]);
                    let block = Keys::new(words, width, &keys, copy);
                    state.add_block(heads, rows, block, (dk, dv));
                }
            }
            self.store_dq(rows, &mut state, outputs);
        }
        self.store_keys(isa, PaddedRows { values: dk, width }, PaddedRows { values: dv, width: value_width }, outputs);
    }

    /// Writes the gradients of the keys and of their values.
    fn store_keys(&self, isa: Isa, dk: PaddedRows<'_>, dv: PaddedRows<'_>, outputs: &Outputs<'_>) {
        let AttentionHeads { head_dim, value_dim, scale, .. } = self.sequence.heads;
        for keys in self.blocks() {
            let [starts, value_starts] = self.key_elements(&keys);
            for (&start, &value_start) in starts.iter().zip(&value_starts).take(keys.len()) {
                outputs.dk.prefetch_far(start, head_dim);
                outputs.dv.prefetch_far(value_start, value_dim);
            }
            for (key, (start, value_start)) in keys.clone().zip(starts.into_iter().zip(value_starts)) {
                let row = key - self.keys.start;
                // SAFETY: each key of a sequence and head belongs to one task, and sequences share no rows.
                let (to_dk, to_dv) = unsafe {
                    let dk = outputs.dk.range(start..start + head_dim);
                    (dk, outputs.dv.range(value_start..value_start + value_dim))
                };
                store_scaled(isa, dk.row(row, head_dim), scale, to_dk);
                store_scaled(isa, dv.row(row, value_dim), 1.0, to_dv);
            }
        }
    }

    /// The starts of the rows of some keys and of their values.
    fn key_elements(&self, keys: &Range<usize>) -> [[usize; KEYS]; 2] {
        let AttentionHeads { head_dim, value_dim, .. } = self.sequence.heads;
        [head_dim, value_dim].map(|dim| self.sequence.key_starts(self.kv_head, keys, dim))
    }

    /// Asks for what a block of rows writes and for what the next one reads: short rows, far apart.
    fn prefetch(&self, block: usize, inputs: &Inputs<'_>, outputs: &Outputs<'_>) {
        let AttentionHeads { head_dim, value_dim, .. } = self.sequence.heads;
        let rows_of = |block| RowBlock::new(self.sequence, self.kv_head, block);
        if self.part == 0 {
            let rows = rows_of(block);
            let starts = &rows.elements()[..rows.len];
            starts.iter().for_each(|&start| outputs.dq.prefetch_far(start, head_dim));
        }
        if block + 1 < RowBlock::count(self.sequence) {
            let next = rows_of(block + 1);
            let (elements, value_elements) = (next.elements(), next.value_elements());
            inputs.q.prefetch(&elements[..next.len], head_dim);
            inputs.o.prefetch(&value_elements[..next.len], value_dim);
            inputs.d_o.prefetch(&value_elements[..next.len], value_dim);
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
        let AttentionHeads { head_dim, value_dim, .. } = self.sequence.heads;
        let &Products { isa, words, .. } = products;
        let [starts, value_starts] = self.key_elements(keys);
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
                    let elements = self.sequence.query_elements();
                    let start = self.cut.first_share + (part - 1) * elements.len();
                    let at = |element: usize| start + element - elements.start;
                    outputs.shares.range(at(range.start)..at(range.end))
                }
            }
        }
    }

    /// The first part is seen by all rows; shares of later ones start as zeros.
    fn clear_share(&self, rows: RowBlock<'_>, outputs: &Outputs<'_>) {
        if self.part == 0 {
            let row = |element| element..element + self.sequence.heads.head_dim;
            rows.elements()[..rows.len].iter().for_each(|&element| self.share(row(element), outputs).fill(0.0));
        }
    }

    fn store_dq(&self, rows: RowBlock<'_>, state: &mut State<'_>, outputs: &Outputs<'_>) {
        let State { products, dq, copy, .. } = state;
        let elements = rows.elements();
        products.each_row(dq, (rows.len, self.sequence.heads.head_dim), copy, |row, first, dq| {
            let start = elements[row] + first;
            store_scaled(products.isa, dq, self.sequence.heads.scale, self.share(start..start + dq.len(), outputs));
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
    fn load_rows(&mut self, heads: &AttentionHeads, inputs: &Inputs<'_>, rows: RowBlock<'_>) {
        let Products { isa, words, .. } = self.products;
        let (width, value_width) = (self.width, self.value_width);
        let (elements, value_elements) = (&rows.elements()[..rows.len], &rows.value_elements()[..rows.len]);
        let copied = Rows { starts: elements, cols: heads.head_dim, width };
        inputs.q.copy_words(isa, words, copied, self.copy);
        let size = (rows.len, words.count(width));
        transpose(isa, self.copy, size, words.count(heads.head_dim), self.q_transposed);
        inputs.q.copy_words_down(isa, words, copied, self.q);
        let copied = Rows { starts: value_elements, cols: heads.value_dim, width: value_width };
        // Rounded alike, so is what cancels in `d_o v^T - rowsum(d_o o)`.
        inputs.d_o.copy_both_ways(isa, words, copied, self.copy, self.d_o);
        let size = (rows.len, words.count(value_width));
        transpose(isa, self.copy, size, words.count(heads.value_dim), self.d_o_transposed);
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
        heads: &AttentionHeads,
        rows: RowBlock<'_>,
        block: Keys<'_>,
        (dk, dv): (&mut [f32], &mut [f32]),
    ) {
        self.compute_scores(heads, rows, &block);
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
    fn compute_scores(&mut self, heads: &AttentionHeads, rows: RowBlock<'_>, block: &Keys<'_>) {
        let (isa, words, keys) = (self.products.isa, self.products.words, block.keys);
        let (width, value_width) = (words.count(self.width), words.count(self.value_width));
        for col in (0..rows.padded_len(words)).step_by(SCORE_COLS) {
            // As pairs they go elsewhere, and what they are made from should stay in the nearest cache.
            let (at, stride) = if words.are_pairs() { (0, SCORE_COLS) } else { (col, ROWS) };
            for part in rows.score_parts(words, col, keys) {
                let size =
                    Size { rows: part.keys.len(), cols: part.cols.len(), inner: words.count(heads.head_dim), words };
                let to = part.keys.start * stride + at + part.cols.start - col;
                let left = Left::rows(&block.k[part.keys.start * width..], width);
                let right = Right { values: &self.q_transposed[part.cols.start..], stride: ROWS };
                self.products.run(size, left, right, false, &mut self.scores.p[to..], stride);
                let size = Size { inner: words.count(heads.value_dim), ..size };
                let left = Left::rows(&block.v[part.keys.start * value_width..], value_width);
                let right = Right { values: &self.d_o_transposed[part.cols.start..], stride: ROWS };
                self.products.run(size, left, right, false, &mut self.scores.ds[to..], stride);
            }
            for first_col in (col..rows.padded_len(words).min(col + SCORE_COLS)).step_by(COL_UNIT) {
                let num_keys = rows.num_scored(words, first_col, keys).next_multiple_of(words.key_unit());
                let at = at + first_col - col;
                let columns = Columns { first_col, at, stride, first_key: keys.start, num_keys, words };
                score_grads(isa, columns, heads.scale * LOG2_E, &mut self.scores, &self.statistics);
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
