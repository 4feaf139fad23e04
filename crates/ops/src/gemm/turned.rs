//! `A B^T` with a few to some hundred rows, turned round: rows of B, which are weights, are read where they lie (narrower ones than units,
//! and those in blocks, become units eight at a time), and rows of A are packed, so that lanes are rows of A.
//!
//! Packing B takes as long as multiplying it with a few dozen rows. A is small then: a task packs all its rows once, keeps
//! them in the second-level cache, and streams its rows of B past them, eight at a time. The sums, columns by rows, are turned
//! back in blocks of 16 by 16 on their way to the epilogue. Each is taken in the same order as elsewhere: the same bits.

use core::arch::x86_64::_mm512_storeu_ps;

use super::kernel::{MAX_ROWS, TILE_STRIDE, Tile, TileArgs, widest};
use super::source::Source;
use super::store::Room;
use super::tasks::{Cut, CutOf, Panels, Task, push_tasks};
use super::transpose::{transpose, words};
use super::{Finish, Part, Place, Work, convert_row, tile_slice};
use crate::parallel::piece_range;
use crate::simd::kernel;

/// Units of packed rows of A that a task keeps in the second-level cache.
const A_UNITS: usize = 96 << 10;
/// Sums that wait there between parts of the depth, at most.
const WAITING: usize = 64 << 10;
/// Columns of a task, paired ones counted twice, from which on packing its rows of A is cheap.
const MIN_COLUMNS: usize = 384;
/// Lanes of a vector, and of half of one.
const LANES: usize = 16;
const HALF: usize = LANES / 2;
/// Tiles of sums, of [`MAX_ROWS`] columns each, that make the widest panel.
const TILES: usize = TILE_STRIDE / MAX_ROWS;
const TILE_UNITS: usize = size_of::<Tile>() / 4;

/// Rows as lanes: panels of some vectors, and at the end, where half a vector is enough, one of half a vector, alone or beside one or
/// two whole ones.
#[derive(Clone, Copy)]
pub(super) struct Lanes {
    panels: Panels,
    /// Rows in the panels of whole vectors.
    whole: usize,
    /// Lanes of the panel that ends in half a vector, or 0.
    last: usize,
}

impl Lanes {
    fn of(rows: usize) -> Self {
        if !(1..=HALF).contains(&(rows % LANES)) {
            return Self::whole(rows);
        }
        let vectors = rows / LANES;
        // So many beside the half that panels of whole vectors need not be of a single one.
        let beside = if vectors % widest(LANES) == 2 { 2 } else { vectors.min(1) };
        let whole = (vectors - beside) * LANES;
        Self { panels: Panels::of(whole, LANES), whole, last: beside * LANES + HALF }
    }

    /// In whole vectors alone.
    pub(super) fn whole(rows: usize) -> Self {
        Self { panels: Panels::of(rows, LANES), whole: rows, last: 0 }
    }

    #[inline(always)]
    pub(super) fn count(&self) -> usize {
        self.panels.count + usize::from(self.last > 0)
    }

    /// First row and width of a panel.
    #[inline(always)]
    pub(super) fn panel(&self, index: usize) -> (usize, usize) {
        if index == self.panels.count {
            return (self.whole, self.last);
        }
        let (first, _, width) = self.panels.panel(index);
        (first, width)
    }

    pub(super) fn width(&self) -> usize {
        let (first, width) = self.panel(self.count() - 1);
        first + width
    }
}

/// Cuts a group into tasks of all rows and some panels of columns.
pub(super) fn cut_group(CutOf { product, index, group, kernel, kernels }: CutOf<'_>, budget: usize, cut: &mut Cut) {
    let format = kernels.format(product.compute);
    let num_tiles = product.num_tiles();
    let panels = Panels::of(group.columns, kernels.lanes);
    let lanes = Lanes::of(group.rows);
    let units = format.units_of(group.depth);
    let num_parts = (units * lanes.width()).div_ceil(A_UNITS);
    // Parts are whole blocks, if rows of B are in blocks.
    let step = LANES.max(group.b.blocks.map_or(0, |blocks| format.units_of(blocks.block_len())));
    let part = units.div_ceil(num_parts).next_multiple_of(step);
    let num_parts = units.div_ceil(part);

    let panel_width = widest(kernels.lanes) * kernels.lanes * num_tiles;
    let tiles_of_panel = lanes.count() * TILES * num_tiles;
    let mut chunk = (budget / (group.rows * group.depth * panel_width)).max(MIN_COLUMNS / panel_width);
    if num_parts > 1 {
        chunk = chunk.min(WAITING / (tiles_of_panel * TILE_UNITS));
    }
    chunk = chunk.clamp(1, panels.count);
    chunk = panels.count.div_ceil(panels.count.div_ceil(chunk));

    let (a_units, b_units) = (LANES * part, lanes.width() * part);
    let held = if num_parts > 1 { chunk } else { 1 };
    // Before the sums come the tiles of sixteen rows for the epilogue.
    let tile_units = (2 * num_tiles + tiles_of_panel * held) * TILE_UNITS;
    cut.scratch_units = cut.scratch_units.max(a_units + b_units + tile_units);
    let (rows, chunk, part) = ((0, group.rows), (0, chunk), format.elements_of(part));
    let size = Task { group: index, rows, panels: chunk, part, b_units, a_units, kernel };
    push_tasks(cut, group, &panels, size);
}

/// Some rows of B: their panel, which of the pair, and which [`MAX_ROWS`] columns of the panel.
#[derive(Clone, Copy)]
struct Rows {
    panel: usize,
    pair: usize,
    block: usize,
}

impl Work<'_> {
    /// Computes a task that [`cut_group`] made.
    pub(super) fn run_turned(&self, scratch: &mut [u32], epilogue: &dyn Finish) {
        let Self { product, group, task, .. } = *self;
        let lanes = Lanes::of(group.rows);
        let num_tiles = product.num_tiles();
        let tiles_of_panel = lanes.count() * TILES * num_tiles;
        let (packed, rest) = scratch.split_at_mut(task.b_units);
        let (a_room, rest) = rest.split_at_mut(task.a_units);
        let (out, sums) = tile_slice(rest).split_at_mut(2 * num_tiles);
        let mut room = Room::new();
        let num_parts = group.depth.div_ceil(task.part);
        for index in 0..num_parts {
            let part = self.part(index, num_parts);
            pack_lanes(self.isa, self, &lanes, part, a_room, packed);
            for offset in 0..task.panels.1 {
                let held = if num_parts > 1 { offset } else { 0 };
                let sums = &mut sums[held * tiles_of_panel..][..tiles_of_panel];
                let panel = task.panels.0 + offset;
                for (pair, sums) in sums.chunks_exact_mut(lanes.count() * TILES).enumerate() {
                    let asked = part.is_last.then_some(epilogue);
                    self.sum_panel((panel, pair), &lanes, part, (packed, &mut *a_room), sums, asked);
                }
                if part.is_last {
                    self.turn_back(panel, &lanes, sums, (out, &mut room), epilogue);
                }
            }
        }
    }
}

kernel! {
    bf16
    /// Packs the rows of A: a panel of lanes after the other, each `[unit][width]`.
    fn pack_lanes<S: Level>(work: &Work<'_>, lanes: &Lanes, part: Part, room: &mut [u32], packed: &mut [u32]) {
        let Part { start, depth, num_units, .. } = part;
        let (low_room, high_room) = room.split_at_mut(room.len() / 2);
        for panel in 0..lanes.count() {
            let (first, width) = lanes.panel(panel);
            let to = &mut packed[first * num_units..][..width * num_units];
            for lane in (0..width).step_by(LANES) {
                let count = (work.group.rows - first).saturating_sub(lane);
                let rows_of = |half: usize, room| {
                    let count = count.saturating_sub(half * MAX_ROWS).min(MAX_ROWS);
                    work.rows_of_a(first + lane + half * MAX_ROWS, count, (start, depth), room)
                };
                let halves = [rows_of(0, &mut *low_room), rows_of(1, &mut *high_room)];
                let rows = std::array::from_fn(|row| halves[row / MAX_ROWS][row % MAX_ROWS]);
                // SAFETY: these tasks are made on machines with AVX-512 alone; `num_units` units of each row are readable:
                // those without a row point at room for one.
                unsafe { words(&rows, num_units, (width, LANES.min(width - lane)), &mut to[lane..]) };
            }
        }
    }
}

impl Work<'_> {
    /// The sums of a panel's columns with all rows: to a tile for each eight columns, and after those of one panel of
    /// lanes those of the next. Rows of B in blocks, and those narrower than units, become units in `room`.
    fn sum_panel(
        &self,
        (panel, pair): (usize, usize),
        lanes: &Lanes,
        part: Part,
        (packed, room): (&[u32], &mut [u32]),
        sums: &mut [Tile],
        asked: Option<&dyn Finish>,
    ) {
        let Self { group, ref kernels, .. } = *self;
        let (column, columns, _) = self.panels().panel(panel);
        let first = column + pair * group.columns;
        let num_blocks = columns.div_ceil(MAX_ROWS);
        let is_made = group.b.blocks.is_some() || group.b.is_widened(self.format());
        let mut later = Later::new(&group.b, part, lanes.count());
        for block in 0..num_blocks {
            if let Some(epilogue) = asked {
                let share = pair * num_blocks + block;
                self.ask_for_rows(panel, (share, num_blocks * self.product.num_tiles()), epilogue);
            }
            let first = first + block * MAX_ROWS;
            let count = (columns - block * MAX_ROWS).min(MAX_ROWS);
            let a = if is_made {
                let rooms = room.chunks_exact_mut(part.num_units).take(count);
                rooms.zip(first..).for_each(|(to, row)| self.make_row(row, part, to));
                std::array::from_fn(|row| room[row.min(count - 1) * part.num_units..][..part.num_units].as_ptr())
            } else {
                self.rows_in_place(first, count, part)
            };
            later.begin(self.rows_after(Rows { panel, pair, block }, part.start));
            for lane in 0..lanes.count() {
                let (first, width) = lanes.panel(lane);
                let b = &packed[first * part.num_units..][..width * part.num_units];
                let tile = sums[lane * TILES + block].0.as_mut_ptr();
                for (at, len) in later.stretches(part.num_units) {
                    let args = TileArgs {
                        depth: len,
                        a: a.map(|row: *const u32| row.wrapping_add(at)),
                        a_step: 1,
                        b: b[at * width..].as_ptr(),
                        packing: (0, std::ptr::null_mut()),
                        tile,
                        is_continued: !part.is_first || at > 0,
                        ahead: later.next(),
                    };
                    // SAFETY: the kernels fit the context's instruction set; `a` points at rows of `num_units` units, as
                    // checked where the pointers were made, and `b` is a packed panel.
                    unsafe { kernels.run_lanes(count, width, &args) };
                }
            }
        }
    }

    /// The units of `count` rows of B from `first` on where they lie, and of the last one for the rows beyond.
    #[inline(always)]
    fn rows_in_place(&self, first: usize, count: usize, part: Part) -> [*const u32; MAX_ROWS] {
        let (b, format) = (&self.group.b, self.format());
        let row = |row: usize| b.direct(first + row, part.start, part.depth, format).expect("rows of weights in place");
        // Without a gap between them all rows lie between the first and the last.
        let ([head, last], step) = ([row(0), row(count - 1)], format.units_of(b.stride));
        if last == head.wrapping_add((count - 1) * step) {
            return std::array::from_fn(|row| head.wrapping_add(row.min(count - 1) * step));
        }
        std::array::from_fn(|at| row(at.min(count - 1)))
    }

    /// Asks for a share of what the epilogue will write: all at once would hold up the loads of the kernels.
    pub(super) fn ask_for_rows(&self, panel: usize, (share, num_shares): (usize, usize), epilogue: &dyn Finish) {
        let (first, rows) = self.task.rows;
        let share = piece_range(share, rows.div_ceil(num_shares), rows);
        let (column, columns, _) = self.panels().panel(panel);
        let rows = (first + share.start, share.len());
        epilogue.ask_ahead(Place { group: self.task.group, rows, columns: (column, columns), panel });
    }

    /// Brings a row of B into units where it cannot be read as it lies.
    fn make_row(&self, row: usize, part: Part, to: &mut [u32]) {
        match &self.group.b.blocks {
            Some(blocks) => blocks.to_units(row, part.start, self.format().units, to),
            None => convert_row(self.isa, &self.group.b, (row, part.start, part.depth), self.format(), to),
        }
    }

    #[inline(always)]
    fn panels(&self) -> Panels {
        Panels::of(self.group.columns, self.kernels.lanes)
    }

    /// The first of some rows of B.
    #[inline(always)]
    fn column_of(&self, rows: Rows) -> usize {
        self.panels().panel(rows.panel).0 + rows.pair * self.group.columns + rows.block * MAX_ROWS
    }

    /// Where the rows of B lie that come after some.
    #[inline(always)]
    fn rows_after(&self, rows: Rows, start: usize) -> *const u8 {
        let Rows { panel, pair, block } = rows;
        let b = &self.group.b;
        let (_, columns, _) = self.panels().panel(panel);
        if (block + 1) * MAX_ROWS < columns {
            b.address(self.column_of(Rows { block: block + 1, ..rows }), start)
        } else if self.product.is_paired && pair == 0 {
            b.address(self.column_of(Rows { panel, pair: 1, block: 0 }), start)
        } else if panel + 1 < self.task.panels.0 + self.task.panels.1 {
            b.address(self.column_of(Rows { panel: panel + 1, pair: 0, block: 0 }), start)
        } else if start + self.task.part < self.group.depth {
            let first = Rows { panel: self.task.panels.0, pair: 0, block: 0 };
            b.address(self.column_of(first), start + self.task.part)
        } else {
            let Some(next) = self.next else { return b.address(0, 0) };
            let group = &self.product.groups[next.group];
            group.b.address(Panels::of(group.columns, self.kernels.lanes).panel(next.panels.0).0, 0)
        }
    }

    /// Turns the sums of a panel, of `[pair][panel of lanes][columns / 8]` tiles, and hands them to the epilogue.
    pub(super) fn turn_back(
        &self,
        panel: usize,
        lanes: &Lanes,
        sums: &[Tile],
        (out, room): (&mut [Tile], &mut Room),
        epilogue: &dyn Finish,
    ) {
        let (first_row, rows) = self.task.rows;
        let (column, columns, _) = self.panels().panel(panel);
        for lane_panel in 0..lanes.count() {
            let (first, width) = lanes.panel(lane_panel);
            for lane in (0..width.min(rows - first)).step_by(LANES) {
                let (low, high) = out.split_at_mut(out.len() / 2);
                for (pair, sums) in sums.chunks_exact(lanes.count() * TILES).enumerate() {
                    let tiles = &sums[lane_panel * TILES..][..columns.div_ceil(MAX_ROWS)];
                    // SAFETY: these tasks are made on machines with AVX-512 alone.
                    unsafe { turn(tiles, lane, &mut low[pair], &mut high[pair]) };
                }
                let first = first + lane;
                for (row, tiles) in [(first, low), (first + MAX_ROWS, high)] {
                    let count = rows.saturating_sub(row).min(MAX_ROWS);
                    if count > 0 {
                        let rows = (first_row + row, count);
                        let at = Place { group: self.task.group, rows, columns: (column, columns), panel };
                        let (tile, second) = tiles.split_at_mut(1);
                        epilogue.finish(self.isa, at, &mut tile[0], second.first_mut(), room);
                    }
                }
            }
        }
    }
}

/// The rows of B that come next, asked for while some are multiplied.
struct Later {
    at: *const u8,
    /// Units of a kernel call: all, or a stretch of them.
    stretch: usize,
    /// Bytes from what one call asks for first to what the next does, how often it goes on by that, and bytes to go on by with each unit.
    share: usize,
    most: usize,
    step: usize,
    call: usize,
}

impl Later {
    /// For rows of a part of the depth and so many panels of lanes.
    #[inline(always)]
    fn new(b: &Source<'_>, part: Part, num_panels: usize) -> Self {
        let (len, stride) = (b.bytes_of(part.depth), b.row_step());
        // Rows that lie end to end are one run. Of others each call asks for one.
        let are_one = len == stride;
        let calls_of_panel = if are_one { 1 } else { MAX_ROWS.div_ceil(num_panels) };
        let stretch = part.num_units.div_ceil(calls_of_panel);
        let share = if are_one { (MAX_ROWS * len).div_ceil(num_panels) } else { len };
        let step = share.div_ceil(stretch).min(64);
        let (share, most) = if are_one { (share, usize::MAX) } else { (stride, MAX_ROWS - 1) };
        Self { at: std::ptr::null(), stretch, share, most, step, call: 0 }
    }

    /// Some rows are multiplied that are followed by those at an address.
    #[inline(always)]
    fn begin(&mut self, next: *const u8) {
        (self.at, self.call) = (next, 0);
    }

    /// First unit and number of units of each call of a panel of lanes.
    #[inline(always)]
    fn stretches(&self, num_units: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let len = self.stretch;
        (0..num_units.div_ceil(len)).map(move |call| (call * len, len.min(num_units - call * len)))
    }

    /// What the next call asks for: an address and the bytes to go on by with each unit.
    #[inline(always)]
    fn next(&mut self) -> (*const u8, usize) {
        let at = self.at.wrapping_add(self.call.min(self.most) * self.share);
        self.call += 1;
        (at, self.step)
    }
}

/// Turns up to 48 columns of 16 lanes from `lane` on: the first eight lanes become the rows of `low`, the others of `high`.
///
/// # Safety
/// The machine must have AVX-512 F, BW, DQ and VL.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")]
unsafe fn turn(tiles: &[Tile], lane: usize, low: &mut Tile, high: &mut Tile) {
    for (block, pair) in tiles.chunks(2).enumerate() {
        let from: [*const f32; LANES] = std::array::from_fn(|column| {
            let tile = &pair[(column / MAX_ROWS).min(pair.len() - 1)];
            tile.0[column % MAX_ROWS * TILE_STRIDE + lane..][..LANES].as_ptr()
        });
        // SAFETY: sixteen lanes are readable from each pointer.
        let rows = unsafe { transpose(&from) };
        for (row, values) in rows.into_iter().enumerate() {
            let tile = if row < MAX_ROWS { &mut *low } else { &mut *high };
            let to = &mut tile.0[row % MAX_ROWS * TILE_STRIDE + block * LANES..][..LANES];
            // SAFETY: sixteen elements are writable there.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), values) };
        }
    }
}

#[cfg(test)]
#[path = "turned_tests.rs"]
mod tests;
