//! `A B^T` of a few to some hundred rows with A and B swapped: rows of B (the weights) are used in place, and A is
//! packed, so that lanes are rows of A. Weights narrower than units and quantized ones become units eight rows at a
//! time.
//!
//! Packing B takes as long as multiplying it with a few dozen rows, and A is small. A task packs all its rows of A
//! once, keeps them in the L2 cache and streams its rows of B past them, eight at a time. The sums, columns by rows,
//! are transposed back in blocks of 16 by 16 on their way to the epilogue. Each sum is taken in the same order as by
//! the other packed kernels, so the bits are the same.

use core::arch::x86_64::_mm512_storeu_ps;

use super::kernel::{MAX_ROWS, Prefetch, TILE_STRIDE, Tile, TileArgs, widest};
use super::source::Source;
use super::store::Scratch;
use super::tasks::{Cut, CutOf, Panels, Task, push_tasks};
use super::transpose::{transpose, words};
use super::{Finish, Part, Place, Span, Work, convert_row, tile_slice};
use crate::parallel::piece_range;
use crate::simd::kernel;

/// Units of packed rows of A that a task keeps in the L2 cache.
const A_UNITS: usize = 96 << 10;
/// The most partial sums kept there between parts of the depth.
const WAITING: usize = 64 << 10;
/// Columns of a task, paired ones counted twice, from which on packing its rows of A is cheap.
const MIN_COLUMNS: usize = 384;
/// Lanes of a vector, and of half of one.
const LANES: usize = 16;
const HALF: usize = LANES / 2;
/// Tiles of [`MAX_ROWS`] columns each that hold the sums of the widest panel.
const TILES: usize = TILE_STRIDE / MAX_ROWS;
const TILE_UNITS: usize = size_of::<Tile>() / 4;

/// Rows of A as lanes: panels of some vectors. If half a vector is enough at the end, the last panel is half a
/// vector, alone or after one or two whole ones.
#[derive(Clone, Copy)]
pub(super) struct Lanes {
    panels: Panels,
    /// Rows in the panels of whole vectors.
    whole: usize,
    /// Lanes of the panel that ends in half a vector, or 0.
    last: usize,
}

impl Lanes {
    fn new(rows: usize) -> Self {
        if !(1..=HALF).contains(&(rows % LANES)) {
            return Self::whole(rows);
        }
        let vectors = rows / LANES;
        // As many whole vectors before the half that no other panel is a single vector.
        let beside = if vectors % widest(LANES) == 2 { 2 } else { vectors.min(1) };
        let whole = (vectors - beside) * LANES;
        Self { panels: Panels::new(whole, LANES), whole, last: beside * LANES + HALF }
    }

    /// Cuts rows into panels of whole vectors only.
    pub(super) fn whole(rows: usize) -> Self {
        Self { panels: Panels::new(rows, LANES), whole: rows, last: 0 }
    }

    #[inline(always)]
    pub(super) fn count(&self) -> usize {
        self.panels.count + usize::from(self.last > 0)
    }

    /// Returns first row and width of a panel.
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
    let panels = Panels::new(group.columns, kernels.lanes);
    let lanes = Lanes::new(group.rows);
    let units = format.units_of(group.depth);
    let num_parts = (units * lanes.width()).div_ceil(A_UNITS);
    // Parts are whole blocks of quantized weights.
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
    // The tiles of sixteen rows for the epilogue come before the sums.
    let tile_units = (2 * num_tiles + tiles_of_panel * held) * TILE_UNITS;
    cut.scratch_units = cut.scratch_units.max(a_units + b_units + tile_units);
    let (rows, chunk, part) = (Span::new(0, group.rows), Span::new(0, chunk), format.elements_of(part));
    let size = Task { group: index, rows, panels: chunk, part, b_units, a_units, kernel };
    push_tasks(cut, group, &panels, size);
}

/// Some rows of B: their panel, the half of paired columns, and the block of [`MAX_ROWS`] columns in the panel.
#[derive(Clone, Copy)]
struct Rows {
    panel: usize,
    pair: usize,
    block: usize,
}

/// Rows of A packed as lanes: a panel after the other, each `[unit][width]`.
#[derive(Clone, Copy)]
pub(super) struct PackedLanes<'a> {
    pub(super) lanes: &'a Lanes,
    pub(super) units: &'a [u32],
}

impl Work<'_> {
    /// Computes a task that [`cut_group`] made.
    pub(super) fn run_swap_ab(&self, scratch: &mut [u32], epilogue: &dyn Finish) {
        let Self { product, group, task, .. } = *self;
        let lanes = Lanes::new(group.rows);
        let num_tiles = product.num_tiles();
        let tiles_of_panel = lanes.count() * TILES * num_tiles;
        let (packed, rest) = scratch.split_at_mut(task.b_units);
        let (a_buffer, rest) = rest.split_at_mut(task.a_units);
        let (out, sums) = tile_slice(rest).split_at_mut(2 * num_tiles);
        let mut tile_scratch = Scratch::new();
        let num_parts = group.depth.div_ceil(task.part);
        for index in 0..num_parts {
            let part = self.part(index, num_parts);
            pack_lanes(self.isa, self, &lanes, part, a_buffer, packed);
            for offset in 0..task.panels.len {
                let held = if num_parts > 1 { offset } else { 0 };
                let sums = &mut sums[held * tiles_of_panel..][..tiles_of_panel];
                let panel = task.panels.first + offset;
                for (pair, sums) in sums.chunks_exact_mut(lanes.count() * TILES).enumerate() {
                    let asked = part.is_last.then_some(epilogue);
                    let packed = PackedLanes { lanes: &lanes, units: packed };
                    self.sum_panel(Rows { panel, pair, block: 0 }, part, packed, &mut *a_buffer, sums, asked);
                }
                if part.is_last {
                    self.transpose_back(panel, &lanes, sums, out, &mut tile_scratch, epilogue);
                }
            }
        }
    }
}

kernel! {
    bf16
    /// Packs the rows of A: a panel of lanes after the other, each `[unit][width]`.
    fn pack_lanes<S: Level>(work: &Work<'_>, lanes: &Lanes, part: Part, buffer: &mut [u32], packed: &mut [u32]) {
        let Part { start, depth, num_units, .. } = part;
        let (low_buffer, high_buffer) = buffer.split_at_mut(buffer.len() / 2);
        for panel in 0..lanes.count() {
            let (first, width) = lanes.panel(panel);
            let to = &mut packed[first * num_units..][..width * num_units];
            for lane in (0..width).step_by(LANES) {
                let count = (work.group.rows - first).saturating_sub(lane);
                let rows_of = |half: usize, buffer| {
                    let count = count.saturating_sub(half * MAX_ROWS).min(MAX_ROWS);
                    work.rows_of_a(Span::new(first + lane + half * MAX_ROWS, count), Span::new(start, depth), buffer)
                };
                let halves = [rows_of(0, &mut *low_buffer), rows_of(1, &mut *high_buffer)];
                let rows = std::array::from_fn(|row| halves[row / MAX_ROWS][row % MAX_ROWS]);
                // SAFETY: these tasks exist only on machines with AVX-512; `num_units` units of each row are
                // readable, because lanes without a row point at scratch of that length.
                unsafe { words(&rows, num_units, width, LANES.min(width - lane), &mut to[lane..]) };
            }
        }
    }
}

impl Work<'_> {
    /// Sums the columns of a panel, or of one half of paired columns, with all rows: eight columns to a tile, the
    /// tiles of one panel of lanes before those of the next. Quantized weights and those narrower than units become
    /// units in `buffer`. The epilogue `asked`, if any, gets prefetches.
    fn sum_panel(
        &self,
        rows: Rows,
        part: Part,
        packed: PackedLanes<'_>,
        buffer: &mut [u32],
        sums: &mut [Tile],
        asked: Option<&dyn Finish>,
    ) {
        let Self { group, ref kernels, .. } = *self;
        let (Rows { panel, pair, .. }, PackedLanes { lanes, units: packed }) = (rows, packed);
        let (column, columns, _) = self.panels().panel(panel);
        let first = column + pair * group.columns;
        let num_blocks = columns.div_ceil(MAX_ROWS);
        let is_made = group.b.blocks.is_some() || group.b.is_widened(self.format());
        let mut later = Later::new(&group.b, part, lanes.count());
        for block in 0..num_blocks {
            if let Some(epilogue) = asked {
                let share = pair * num_blocks + block;
                self.prefetch_rows(panel, share, num_blocks * self.product.num_tiles(), epilogue);
            }
            let first = first + block * MAX_ROWS;
            let count = (columns - block * MAX_ROWS).min(MAX_ROWS);
            let a = if is_made {
                let buffers = buffer.chunks_exact_mut(part.num_units).take(count);
                buffers.zip(first..).for_each(|(to, row)| self.make_row(row, part, to));
                std::array::from_fn(|row| buffer[row.min(count - 1) * part.num_units..][..part.num_units].as_ptr())
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
                    // SAFETY: the kernels fit the context's instruction set; `a` points at rows of `num_units` units,
                    // as checked where the pointers were made, and `b` is a packed panel.
                    unsafe { kernels.run_lanes(count, width, &args) };
                }
            }
        }
    }

    /// Returns pointers to `count` rows of B from `first` on, in place; further pointers repeat the last row.
    #[inline(always)]
    fn rows_in_place(&self, first: usize, count: usize, part: Part) -> [*const u32; MAX_ROWS] {
        let (b, format) = (&self.group.b, self.format());
        let row = |row: usize| b.direct(first + row, part.start, part.depth, format).expect("rows of weights in place");
        // Without a gap all rows lie at equal distances between the first and the last.
        let ([head, last], step) = ([row(0), row(count - 1)], format.units_of(b.stride));
        if last == head.wrapping_add((count - 1) * step) {
            return std::array::from_fn(|row| head.wrapping_add(row.min(count - 1) * step));
        }
        std::array::from_fn(|at| row(at.min(count - 1)))
    }

    /// Prefetches a share of the rows that the epilogue will write; all at once would delay the kernels' loads.
    pub(super) fn prefetch_rows(&self, panel: usize, share: usize, num_shares: usize, epilogue: &dyn Finish) {
        let Span { first, len: rows } = self.task.rows;
        let share = piece_range(share, rows.div_ceil(num_shares), rows);
        let (column, columns, _) = self.panels().panel(panel);
        let (rows, columns) = (Span::new(first + share.start, share.len()), Span::new(column, columns));
        epilogue.prefetch(Place { group: self.task.group, rows, columns, panel });
    }

    /// Converts a row of B to units.
    fn make_row(&self, row: usize, part: Part, to: &mut [u32]) {
        match &self.group.b.blocks {
            Some(blocks) => blocks.to_units(row, part.start, self.format().units, to),
            None => {
                convert_row(self.isa, &self.group.b, row, Span::new(part.start, part.depth), self.format(), to);
            }
        }
    }

    #[inline(always)]
    fn panels(&self) -> Panels {
        Panels::new(self.group.columns, self.kernels.lanes)
    }

    /// Returns the first column of some rows of B.
    #[inline(always)]
    fn column_of(&self, rows: Rows) -> usize {
        self.panels().panel(rows.panel).0 + rows.pair * self.group.columns + rows.block * MAX_ROWS
    }

    /// Returns the address of the rows of B that come after `rows`, for prefetches.
    #[inline(always)]
    fn rows_after(&self, rows: Rows, start: usize) -> *const u8 {
        let Rows { panel, pair, block } = rows;
        let b = &self.group.b;
        let (_, columns, _) = self.panels().panel(panel);
        if (block + 1) * MAX_ROWS < columns {
            b.address(self.column_of(Rows { block: block + 1, ..rows }), start)
        } else if self.product.is_paired && pair == 0 {
            b.address(self.column_of(Rows { panel, pair: 1, block: 0 }), start)
        } else if panel + 1 < self.task.panels.end() {
            b.address(self.column_of(Rows { panel: panel + 1, pair: 0, block: 0 }), start)
        } else if start + self.task.part < self.group.depth {
            let first = Rows { panel: self.task.panels.first, pair: 0, block: 0 };
            b.address(self.column_of(first), start + self.task.part)
        } else {
            let Some(next) = self.next else { return b.address(0, 0) };
            let group = &self.product.groups[next.group];
            group.b.address(Panels::new(group.columns, self.kernels.lanes).panel(next.panels.first).0, 0)
        }
    }

    /// Transposes the sums of a panel, `[pair][panel of lanes][columns / 8]` tiles, and hands them to the epilogue.
    pub(super) fn transpose_back(
        &self,
        panel: usize,
        lanes: &Lanes,
        sums: &[Tile],
        out: &mut [Tile],
        scratch: &mut Scratch,
        epilogue: &dyn Finish,
    ) {
        let Span { first: first_row, len: rows } = self.task.rows;
        let (column, columns, _) = self.panels().panel(panel);
        for lane_panel in 0..lanes.count() {
            let (first, width) = lanes.panel(lane_panel);
            for lane in (0..width.min(rows - first)).step_by(LANES) {
                let (low, high) = out.split_at_mut(out.len() / 2);
                for (pair, sums) in sums.chunks_exact(lanes.count() * TILES).enumerate() {
                    let tiles = &sums[lane_panel * TILES..][..columns.div_ceil(MAX_ROWS)];
                    // SAFETY: these tasks are made on machines with AVX-512 alone.
                    unsafe { transpose_block(tiles, lane, &mut low[pair], &mut high[pair]) };
                }
                let first = first + lane;
                for (row, tiles) in [(first, low), (first + MAX_ROWS, high)] {
                    let count = rows.saturating_sub(row).min(MAX_ROWS);
                    if count > 0 {
                        let (rows, columns) = (Span::new(first_row + row, count), Span::new(column, columns));
                        let at = Place { group: self.task.group, rows, columns, panel };
                        let (tile, second) = tiles.split_at_mut(1);
                        epilogue.finish(self.isa, at, &mut tile[0], second.first_mut(), scratch);
                    }
                }
            }
        }
    }
}

/// Prefetches of the rows of B that come next, while some are multiplied.
struct Later {
    at: *const u8,
    /// Units of a kernel call: all, or a stretch of them.
    stretch: usize,
    /// Bytes from the first prefetch of one call to that of the next.
    share: usize,
    /// The number of calls that advance by `share`; later ones repeat the last.
    most: usize,
    /// Bytes between the prefetches of consecutive units.
    step: usize,
    call: usize,
}

impl Later {
    /// Plans the prefetches for rows of a part of the depth and so many panels of lanes.
    #[inline(always)]
    fn new(b: &Source<'_>, part: Part, num_panels: usize) -> Self {
        let (len, stride) = (b.bytes_of(part.depth), b.row_step());
        // Rows that are consecutive in memory are one run. Of others each call prefetches one.
        let are_one = len == stride;
        let calls_of_panel = if are_one { 1 } else { MAX_ROWS.div_ceil(num_panels) };
        let stretch = part.num_units.div_ceil(calls_of_panel);
        let share = if are_one { (MAX_ROWS * len).div_ceil(num_panels) } else { len };
        let step = share.div_ceil(stretch).min(64);
        let (share, most) = if are_one { (share, usize::MAX) } else { (stride, MAX_ROWS - 1) };
        Self { at: std::ptr::null(), stretch, share, most, step, call: 0 }
    }

    /// Begins with rows of B that are followed by those at `next`.
    #[inline(always)]
    fn begin(&mut self, next: *const u8) {
        (self.at, self.call) = (next, 0);
    }

    /// Lists first unit and number of units of each call of a panel of lanes.
    #[inline(always)]
    fn stretches(&self, num_units: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let len = self.stretch;
        (0..num_units.div_ceil(len)).map(move |call| (call * len, len.min(num_units - call * len)))
    }

    /// Returns the prefetches of the next call.
    #[inline(always)]
    fn next(&mut self) -> Prefetch {
        let at = self.at.wrapping_add(self.call.min(self.most) * self.share);
        self.call += 1;
        Prefetch { at, step: self.step }
    }
}

/// Transposes up to 48 columns of 16 lanes from `lane` on: the first eight lanes become the rows of `low`, the others
/// of `high`.
///
/// # Safety
/// The machine must have AVX-512 F, BW, DQ and VL.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")]
unsafe fn transpose_block(tiles: &[Tile], lane: usize, low: &mut Tile, high: &mut Tile) {
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
#[path = "swap_ab_tests.rs"]
mod tests;
