//! `A B` and `A^T B` in tiles: a task packs its panels of B, whose rows are interleaved, and multiplies rows of A, 32
//! at a time, with all panels.

use super::kernel::{Call, Later, Prefetch, Rows};
use super::tiling::part_units;
use super::{BLOCK, ROWS, Registers, pack};
use crate::gemm::kernel::{MAX_ROWS, Tile};
use crate::gemm::scratch::ScratchSlot;
use crate::gemm::store::Scratch;
use crate::gemm::tasks::Panels;
use crate::gemm::{Finish, Form, Part, Place, Span, Work, tile_slice};

/// Tiles of the epilogue that a kernel's rows fill.
const TILES: usize = ROWS / MAX_ROWS;

/// The rows of A that are packed after those being multiplied.
#[derive(Clone, Copy)]
struct RowsAfter {
    /// The address of their part of the depth; none if they are packed already or not evenly spaced.
    at: Option<*const u8>,
    row_step: usize,
}

impl RowsAfter {
    fn new(work: &Work<'_>, row: usize, start: usize) -> Self {
        let a = &work.group.a;
        let is_even = work.product.form != Form::Tn && a.indices.is_none();
        let at = is_even.then(|| a.address_later(work.task.rows.first + row, ROWS, start));
        Self { at, row_step: a.row_step() }
    }

    /// Returns the prefetches of the call with panel `panel` of `count`: one line per block of the depth of some of
    /// the rows, and the sums of the next call, which follow those of this one.
    fn at_panel(&self, panel: usize, count: usize) -> (Option<Prefetch>, Option<Later>) {
        let rows = ROWS.div_ceil(count);
        let first = (panel * rows).min(ROWS - rows);
        let ahead = self.at.map(|at| Prefetch { at: at.wrapping_add(first * self.row_step), count: rows });
        (ahead, Some(Later { sums: [TILES, TILES + 2], row_step: self.row_step }))
    }
}

/// The packed operands of a part of the depth.
#[derive(Clone, Copy)]
struct Operands<'a> {
    a: &'a [u32],
    b: &'a [u32],
}

impl Work<'_> {
    /// Computes a task of the forms `A B` and `A^T B`.
    pub(super) fn run_direct_tiles(&self, scratch: &mut [u32], held: &mut ScratchSlot, epilogue: &dyn Finish) {
        let Self { product, group, task, .. } = *self;
        // SAFETY: these kernels are selected only where the machine has tiles.
        let registers = unsafe { Registers::set_up() };
        let tiles_of_rows = task.panels.len * product.num_tiles() * TILES;
        let (b_buffer, rest) = scratch.split_at_mut(task.b_units);
        let (a_buffer, rest) = rest.split_at_mut(task.a_units);
        // The sums of the two halves of paired columns are consecutive, four tiles of the epilogue each.
        let tiles = tile_slice(rest);
        let num_parts = group.depth.div_ceil(task.part).max(1);
        let mut tile_scratch = Scratch::new();
        for part in 0..num_parts {
            let start = part * task.part;
            let depth = (group.depth - start).min(task.part);
            let num_units = self.format().units_of(depth);
            // The thread's last task may have left the same panels.
            let columns = (task.group, task.panels.first);
            let span = Span::new(start, depth);
            if held.rows_of.replace(columns) != Some(columns) || num_parts > 1 {
                crate::gemm::pack_b(self.isa, self, span, task.panels, b_buffer);
            }
            if product.form == Form::Tn {
                pack::transposed_rows(&group.a, task.rows, span, self.format(), a_buffer);
            }
            let part = Part { start, depth, num_units, is_first: part == 0, is_last: part + 1 == num_parts };
            for row in (0..task.rows.len).step_by(ROWS) {
                let rows = (task.rows.len - row).min(ROWS);
                let a = if product.form == Form::Tn {
                    &a_buffer[row * num_units..]
                } else {
                    pack::rows(&group.a, Span::new(task.rows.first + row, rows), span, self.format(), a_buffer);
                    &*a_buffer
                };
                let first = if num_parts > 1 { row / ROWS * tiles_of_rows } else { 0 };
                let (rows, operands) = (Span::new(row, rows), Operands { a, b: b_buffer });
                self.multiply_rows_in_tiles(rows, part, operands, &mut tiles[first..], &mut tile_scratch, epilogue);
            }
        }
        if num_parts > 1 {
            held.rows_of = None;
        }
        drop(registers);
    }

    /// Multiplies up to 32 rows with all packed panels, as much of the depth at a time as the L1 cache holds of the
    /// rows. Partial sums have tiles of their own.
    fn multiply_rows_in_tiles(
        &self,
        rows: Span,
        part: Part,
        operands: Operands<'_>,
        tiles: &mut [Tile],
        scratch: &mut Scratch,
        epilogue: &dyn Finish,
    ) {
        let Self { product, group, task, .. } = *self;
        let (Span { first: row, len: rows }, Operands { a, b }) = (rows, operands);
        let (panels, tiles_of_panel) = (Panels::new(group.columns, BLOCK), TILES * product.num_tiles());
        let Part { num_units, is_first, is_last, .. } = part;
        let last = &a[(rows.div_ceil(BLOCK) - 1) * BLOCK * num_units..];
        let longest = part_units(self.format());
        let num_stretches = num_units.div_ceil(longest).max(1);
        let is_cut = !(is_first && is_last);
        let are_kept = is_cut || num_stretches > 1;
        let rows_after = RowsAfter::new(self, row, part.start);
        for stretch in 0..num_stretches {
            let done = stretch * longest;
            let units = (num_units - done).min(longest);
            let a = &[Rows::packed(&a[BLOCK * done..], units), Rows::packed(&last[BLOCK * done..], units)]
                [..rows.div_ceil(BLOCK)];
            let mut b = b;
            for (offset, panel) in task.panels.range().enumerate() {
                let (column, columns, width) = panels.panel(panel);
                let (place_rows, columns) = (Span::new(task.rows.first + row, rows), Span::new(column, columns));
                let at = Place { group: task.group, rows: place_rows, columns, panel };
                let is_end = is_last && stretch + 1 == num_stretches;
                if is_end {
                    epilogue.prefetch(at);
                }
                let first = if are_kept { offset * tiles_of_panel } else { 0 };
                let tiles = &mut tiles[first..first + tiles_of_panel];
                for tiles in tiles.chunks_exact_mut(TILES) {
                    let (now, later) = b.split_at(num_units * width);
                    b = later;
                    let b = &now[done * width..];
                    let (ahead, later) =
                        if is_cut { rows_after.at_panel(offset, task.panels.len) } else { (None, None) };
                    let (is_continued, parts) = (!is_first || stretch > 0, self.kernels.parts);
                    let call = Call { a, b, width, is_continued, parts, ahead, later };
                    // SAFETY: the task has set the registers up.
                    unsafe { call.run(tiles, &[0, 2][..a.len()]) };
                }
                if is_end {
                    self.finish_rows(epilogue, at, tiles, scratch);
                }
            }
        }
    }

    /// Gives the sums to the epilogue, eight rows at a time.
    fn finish_rows(&self, epilogue: &dyn Finish, at: Place, tiles: &mut [Tile], scratch: &mut Scratch) {
        let (first, second) = tiles.split_at_mut(TILES);
        for (i, tile) in first.iter_mut().enumerate().take(at.rows.len.div_ceil(MAX_ROWS)) {
            let done = i * MAX_ROWS;
            let rows = Span::new(at.rows.first + done, (at.rows.len - done).min(MAX_ROWS));
            epilogue.finish(self.isa, Place { rows, ..at }, tile, second.get_mut(i), scratch);
        }
    }
}
