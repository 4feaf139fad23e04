//! `A B^T` in tiles with A and B swapped: rows of B, the weights, are rows of tiles in place, and rows of A are
//! packed as lanes.
//!
//! The sums, columns by rows, are transposed back in blocks of 16 by 16 on their way to the epilogue, as for
//! [vectors](crate::gemm::swap_ab), with which this shares the layout of sums.

use super::kernel::{Call, FAR, Prefetch, Rows};
use super::tiling::{TILES, panels_of_slab, part_units};
use super::{BLOCK, Registers, pack};
use crate::gemm::kernel::Tile;
use crate::gemm::scratch::ScratchSlot;
use crate::gemm::source::Block;
use crate::gemm::store::Scratch;
use crate::gemm::swap_ab::{Lanes, PackedLanes};
use crate::gemm::tasks::{Panels, Task};
use crate::gemm::{Finish, Span, Work, tile_slice};

/// Blocks of sixteen columns in a panel.
const BLOCKS: usize = 3;
/// Blocks in a slab.
const SLAB: usize = 2 * BLOCKS;

/// Panels of lanes from which on rows that are [`FAR`] apart are prefetched: with fewer, memory bandwidth sets the
/// time.
const FAR_LANES: usize = 4;

/// Sixteen columns, which are rows of B: the first, their number, and the place of the block in its slab.
#[derive(Clone, Copy)]
struct Columns {
    first: usize,
    count: usize,
    place: usize,
}

/// The columns of some panels in blocks of sixteen, as many as fit a slab.
struct Slab {
    blocks: [Columns; SLAB],
    count: usize,
}

impl Slab {
    /// Lists the blocks of the slab that begins with panel `panel` of a task.
    fn new(work: &Work<'_>, task: &Task, panel: usize) -> Self {
        let group = &work.product.groups[task.group];
        let (panels, num_tiles) = (Panels::new(group.columns, BLOCK), work.product.num_tiles());
        let end = (panel + panels_of_slab(num_tiles)).min(task.panels.end());
        let mut slab = Self { blocks: [Columns { first: 0, count: 0, place: 0 }; SLAB], count: 0 };
        for set in 0..(end - panel) * num_tiles {
            // Either panels or the two halves of paired columns are consecutive.
            let (panel, pair) = (panel + set / num_tiles, set % num_tiles);
            let (column, columns, _) = panels.panel(panel);
            for block in 0..columns.div_ceil(BLOCK) {
                let first = column + pair * group.columns + block * BLOCK;
                let count = (columns - block * BLOCK).min(BLOCK);
                slab.blocks[slab.count] = Columns { first, count, place: set * BLOCKS + block };
                slab.count += 1;
            }
        }
        slab
    }

    /// Iterates over the blocks, two at a time.
    fn pairs(&self) -> impl Iterator<Item = &[Columns]> {
        self.blocks[..self.count].chunks(2)
    }
}

impl Work<'_> {
    /// Computes a task of the form `A B^T`.
    pub(super) fn run_swap_ab_tiles(&self, scratch: &mut [u32], held: &mut ScratchSlot, epilogue: &dyn Finish) {
        let Self { product, group, task, .. } = *self;
        // SAFETY: these tasks exist only where the machine has tiles.
        let registers = unsafe { Registers::set_up() };
        let lanes = Lanes::whole(task.rows.len);
        let num_tiles = product.num_tiles();
        let tiles_of_slab = panels_of_slab(num_tiles) * num_tiles * lanes.count() * BLOCKS * TILES;
        let (packed, rest) = scratch.split_at_mut(task.b_units);
        let (a_buffer, rest) = rest.split_at_mut(task.a_units);
        let (out, sums) = tile_slice(rest).split_at_mut(2 * num_tiles);
        let mut tile_scratch = Scratch::new();
        let stretch = task.part;
        let num_stretches = group.depth.div_ceil(stretch).max(1);
        for index in 0..num_stretches {
            let (start, is_last) = (index * stretch, index + 1 == num_stretches);
            let depth = (group.depth - start).min(stretch);
            // The thread's last task may have left the same rows.
            let rows = (task.group, task.rows.first);
            let span = Span::new(start, depth);
            if held.rows_of.replace(rows) != Some(rows) || num_stretches > 1 {
                self.pack_lanes_for_tiles(&lanes, span, packed);
            }
            let panels = task.panels.range();
            for (number, panel) in panels.clone().step_by(panels_of_slab(num_tiles)).enumerate() {
                let at = if num_stretches > 1 { number * tiles_of_slab } else { 0 };
                let sums = &mut sums[at..][..tiles_of_slab];
                let asked = is_last.then_some(epilogue);
                let packed = PackedLanes { lanes: &lanes, units: packed };
                self.sum_slab(panel, span, packed, &mut *a_buffer, sums, asked);
                if is_last {
                    let sets = sums.chunks_exact(lanes.count() * BLOCKS * TILES * num_tiles);
                    for (sums, panel) in sets.zip(panel..panels.end) {
                        self.transpose_back(panel, &lanes, sums, &mut *out, &mut tile_scratch, epilogue);
                    }
                }
            }
        }
        if num_stretches > 1 {
            held.rows_of = None;
        }
        drop(registers);
    }

    /// Packs the task's rows of A: a panel of lanes after the other, each `[unit][width]`.
    fn pack_lanes_for_tiles(&self, lanes: &Lanes, depth: Span, packed: &mut [u32]) {
        let num_units = self.format().units_of(depth.len);
        for panel in 0..lanes.count() {
            let (first, width) = lanes.panel(panel);
            let count = (self.task.rows.len - first).min(width);
            let block = Block { rows: Span::new(self.task.rows.first + first, count), columns: depth };
            pack::transposed_columns(&self.group.a, block, self.format(), width, &mut packed[first * num_units..]);
        }
    }

    /// Computes the sums of a slab with all rows of the task: `[panel or pair][panel of lanes][columns / 8]` tiles.
    /// The epilogue `asked`, if any, gets prefetches.
    fn sum_slab(
        &self,
        panel: usize,
        depth: Span,
        packed: PackedLanes<'_>,
        buffer: &mut [u32],
        sums: &mut [Tile],
        asked: Option<&dyn Finish>,
    ) {
        let slab = Slab::new(self, self.task, panel);
        let (PackedLanes { lanes, units: packed }, Span { first: start, len: depth }) = (packed, depth);
        let num_units = self.format().units_of(depth);
        let num_calls = slab.pairs().count() * lanes.count();
        let prefetch_share = |call: usize| {
            let Some(epilogue) = asked else { return };
            let end = self.task.panels.end();
            for panel in panel..(panel + panels_of_slab(self.product.num_tiles())).min(end) {
                self.prefetch_rows(panel, call, num_calls, epilogue);
            }
        };
        for (number, blocks) in slab.pairs().enumerate() {
            let places = |lane: usize| {
                [&blocks[0], &blocks[blocks.len() - 1]].map(|columns| {
                    let (set, block) = (columns.place / BLOCKS, columns.place % BLOCKS);
                    ((set * lanes.count() + lane) * BLOCKS + block) * TILES
                })
            };
            let in_place = |columns: &Columns| match columns.count {
                BLOCK => Rows::in_place(&self.group.b, columns.first, Span::new(start, depth), self.format()),
                _ => None,
            };
            if let (Some(first), Some(last)) = (in_place(&blocks[0]), in_place(&blocks[blocks.len() - 1])) {
                let later = self.columns_after(panel, &slab, number);
                for lane in 0..lanes.count() {
                    let (first_lane, width) = lanes.panel(lane);
                    let b = &packed[first_lane * num_units..][..num_units * width];
                    let ahead = later.at_call(lane, lanes.count(), num_units);
                    prefetch_share(number * lanes.count() + lane);
                    let a = &[first, last][..blocks.len()];
                    let call = Call { a, b, width, is_continued: start > 0, parts: 1, ahead, later: None };
                    // SAFETY: the task has set the registers up.
                    unsafe { call.run(sums, &places(lane)[..blocks.len()]) };
                }
                continue;
            }
            let (format, longest) = (self.format(), part_units(self.format()));
            for done in (0..num_units.max(1)).step_by(longest) {
                let units = (num_units - done).min(longest);
                let elements = format.elements_of(done);
                let from = Span::new(start + elements, (depth - elements).min(format.elements_of(units)));
                let (first, second) = buffer.split_at_mut(BLOCK * units);
                for (columns, buffer) in blocks.iter().zip([&mut *first, &mut *second]) {
                    pack::rows(&self.group.b, Span::new(columns.first, columns.count), from, format, buffer);
                }
                let a = [Rows::packed(first, units), Rows::packed(second, units)];
                for lane in 0..lanes.count() {
                    let (first_lane, width) = lanes.panel(lane);
                    let b = &packed[first_lane * num_units + done * width..][..units * width];
                    let is_continued = start > 0 || done > 0;
                    let (a, parts) = (&a[..blocks.len()], format.parts);
                    let call = Call { a, b, width, is_continued, parts, ahead: None, later: None };
                    // SAFETY: the task has set the registers up.
                    unsafe { call.run(sums, &places(lane)[..blocks.len()]) };
                }
            }
        }
    }

    /// Plans the prefetches of the rows of B that come after pair `number` of a slab.
    fn columns_after(&self, panel: usize, slab: &Slab, number: usize) -> Later {
        let panels_of_slab = panels_of_slab(self.product.num_tiles());
        let next_panel = panel + panels_of_slab;
        let of = |task: &Task, blocks: Option<&[Columns]>| {
            let b = &self.product.groups[task.group].b;
            let Some(blocks) = blocks else { return Later::NOTHING };
            let ends = [&blocks[0], &blocks[blocks.len() - 1]];
            Later {
                runs: ends.map(|block| b.address(block.first, 0)),
                len: BLOCK * b.row_step(),
                least_lanes: if b.row_step().is_multiple_of(FAR) { FAR_LANES } else { 1 },
            }
        };
        if let Some(blocks) = slab.pairs().nth(number + 1) {
            return of(self.task, Some(blocks));
        }
        if next_panel < self.task.panels.end() {
            return of(self.task, Slab::new(self, self.task, next_panel).pairs().next());
        }
        let Some(next) = self.next.filter(|next| next.kernel.is_swapped()) else { return Later::NOTHING };
        of(next, Slab::new(self, next, next.panels.first).pairs().next())
    }
}

/// Two runs of rows of B that come next, to be prefetched.
#[derive(Clone, Copy)]
struct Later {
    runs: [*const u8; 2],
    /// Bytes of each run.
    len: usize,
    /// The fewest panels of lanes that a task must have to prefetch.
    least_lanes: usize,
}

impl Later {
    const NOTHING: Self = Self { runs: [std::ptr::null(); 2], len: 0, least_lanes: 0 };

    /// Returns the prefetches of the call with panel `lane` of `count` panels of lanes.
    fn at_call(&self, lane: usize, count: usize, num_units: usize) -> Option<Prefetch> {
        let lines = self.len / 64;
        // All of both runs, the second after the first.
        let share = (2 * lines).div_ceil(count);
        let from = lane * share;
        let run = self.runs.get(from.checked_div(lines)?).filter(|_| count >= self.least_lanes)?;
        let at = run.wrapping_add(64 * (from % lines));
        Some(Prefetch { at, count: share.div_ceil((num_units / BLOCK).max(1)) })
    }
}
