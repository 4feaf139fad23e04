//! The task of attention backward: a range of keys of one sequence and key head, and all query rows that see them.

use std::ops::Range;

use moeworks_tensor::DType;

use super::row_block::{Keys, Scratch, State};
use super::{Cut, Inputs, Outputs};
use crate::attention::blocks::{KEYS, RowBlock};
use crate::attention::operands::{Rows, store_scaled};
use crate::attention::products::Products;
use crate::attention::sequences::{AttentionHeads, Sequence};
use crate::{Context, Isa};

/// A task: the keys of one part of a sequence and one key head.
pub(super) struct Task<'a> {
    pub(super) sequence: &'a Sequence<'a>,
    pub(super) kv_head: usize,
    pub(super) cut: Cut,
    pub(super) part: usize,
    pub(super) keys: Range<usize>,
}

/// Gradients of keys or values: rows of `width` elements, padded behind the head's own elements.
#[derive(Clone, Copy)]
struct PaddedRows<'a> {
    values: &'a [f32],
    width: usize,
}

impl<'a> PaddedRows<'a> {
    /// Returns the first `len` elements of a row.
    fn row(&self, row: usize, len: usize) -> &'a [f32] {
        &self.values[row * self.width..][..len]
    }
}

impl Task<'_> {
    /// Computes the task's rows of `dk` and `dv` and its share of `dq`.
    pub(super) fn run(&self, ctx: &Context, inputs: &Inputs<'_>, outputs: &Outputs<'_>) {
        let (isa, heads, format) = (ctx.isa(), &self.sequence.heads, inputs.format);
        let [width, value_width] = [heads.head_dim, heads.value_dim].map(|dim| format.width(dim));
        let padded_keys = self.keys.len().next_multiple_of(format.key_unit());
        let mut sums = ctx.zeros(&[padded_keys, width + value_width], DType::F32);
        let (dk, dv) = sums.f32s_mut().split_at_mut(padded_keys * width);
        let mut scratch = Scratch::new(ctx, width, value_width);
        let mut state = scratch.split(Products::new(isa, format), width, value_width);
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
                    let block = Keys::new(format, width, &keys, copy);
                    state.add_block(heads, rows, block, dk, dv);
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

    /// Returns the offsets of the rows of some keys in `k` and of their values in `v`.
    fn key_elements(&self, keys: &Range<usize>) -> [[usize; KEYS]; 2] {
        let AttentionHeads { head_dim, value_dim, .. } = self.sequence.heads;
        [head_dim, value_dim].map(|dim| self.sequence.key_starts(self.kv_head, keys, dim))
    }

    /// Prefetches the rows of `dq` that a block of rows writes and the rows that the next block reads. They are short
    /// and far apart.
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

    /// Returns the keys in blocks of [`KEYS`].
    fn blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let Range { start, end } = self.keys;
        (start..end).step_by(KEYS).map(move |start| start..(start + KEYS).min(end))
    }

    /// Packs a block of keys and values for [`Keys::new`]. `room` is as large as either of the two.
    fn load_keys(
        &self,
        products: &Products,
        inputs: &Inputs<'_>,
        keys: &Range<usize>,
        to: &mut [f32],
        room: &mut [f32],
    ) {
        let AttentionHeads { head_dim, value_dim, .. } = self.sequence.heads;
        let &Products { isa, format, .. } = products;
        let [starts, value_starts] = self.key_elements(keys);
        let rows = Rows { starts: &starts[..keys.len()], cols: head_dim, width: format.width(head_dim) };
        let (k, v) = to.split_at_mut(KEYS * rows.width);
        if format.are_pairs() {
            let (along, down) = k.split_at_mut(KEYS * rows.width / 2);
            inputs.k.pack_along_cols(isa, format, rows, along);
            products.pack_keys(inputs.k, rows, down, room);
        } else {
            inputs.k.copy_rows(isa, rows, k);
        }
        let values = Rows { starts: &value_starts[..keys.len()], cols: value_dim, width: format.width(value_dim) };
        inputs.v.pack_along_cols(isa, format, values, v);
    }

    /// Lends the elements `range` of `dq`, or of this part's share of it.
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

    /// Zeroes the rows of `dq` if this is the first part. Shares of later parts begin as zeros.
    fn clear_share(&self, rows: RowBlock<'_>, outputs: &Outputs<'_>) {
        if self.part == 0 {
            let row = |element| element..element + self.sequence.heads.head_dim;
            rows.elements()[..rows.len].iter().for_each(|&element| self.share(row(element), outputs).fill(0.0));
        }
    }

    /// Writes the sums of a block's rows to this part's share of `dq`.
    fn store_dq(&self, rows: RowBlock<'_>, state: &mut State<'_>, outputs: &Outputs<'_>) {
        let State { products, dq, copy, .. } = state;
        let elements = rows.elements();
        products.each_row(dq, rows.len, self.sequence.heads.head_dim, copy, |row, first, dq| {
            let start = elements[row] + first;
            store_scaled(products.isa, dq, self.sequence.heads.scale, self.share(start..start + dq.len(), outputs));
        });
    }
}
