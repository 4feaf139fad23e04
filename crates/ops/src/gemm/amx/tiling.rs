//! The cut of products into tasks for tiles.
//!
//! Tiles multiply so fast that packing dominates: an operand is packed as few times as the L2 cache, which has 2 MiB
//! on all CPUs with tiles, allows.

use super::{BLOCK, ROWS};
use crate::gemm::kernel::{Kernels, MAX_ROWS, TILE_STRIDE, Tile};
use crate::gemm::plan::FEW_TILE_ROWS;
use crate::gemm::source::Format;
use crate::gemm::swap_ab::Lanes;
use crate::gemm::tasks::{Cut, CutOf, Panels, Task, push_tasks};
use crate::gemm::{Form, Group, Product, Span};

/// Units of packed B that a task keeps in the L2 cache, somewhat more than half of 2 MiB: for widths that are powers
/// of two, as many panels as give an even number of chunks.
const B_UNITS: usize = 272 << 10;
/// Units of the depth summed at once if rows of A are packed: 32 rows of them are 32 KiB of the L1 cache.
const PART_UNITS: usize = 256;
/// The shortest part of the depth that B is cut into, in units.
const MIN_PART_UNITS: usize = 64;
/// Units of the depth up to which B and A are packed at once, if both have to be.
const LONG_UNITS: usize = 640;
/// Units of A that are packed at once there, and the most rows.
const A_UNITS: usize = 64 << 10;
const MAX_PACKED_ROWS: usize = 256;
/// Panels from which on rows of B are long enough to be fetched quickly.
const MIN_FEW_PANELS: usize = 11;
/// The fewest rows of a task.
const MIN_ROWS: usize = 128;
/// The factor by which tasks of tiles are larger than others.
const BUDGET: usize = 2;
/// Units of packed rows of A that a task keeps in the L2 cache if A and B are swapped.
const STAY_UNITS: usize = 256 << 10;
/// The fewest rows kept there, if the group has them: with fewer the weights would be streamed too often.
const MIN_STAYING: usize = 96;
/// The most rows kept there, because their sums and the weights share the cache.
const MAX_STAYING: usize = 256;
/// Columns of such a task, paired ones counted twice, from which on packing its rows of A is cheap.
const MIN_COLUMNS: usize = 480;
/// Units of packed B as bf16x3, half a MiB, and the most rows with them: splitting either operand takes time, and
/// with their sums they fill the L2 cache.
const B_UNITS_BF16X3: usize = 128 << 10;
const MAX_ROWS_BF16X3: usize = 512;
/// The most partial sums while the depth is cut for swapped products.
const WAITING_SWAPPED: usize = 160 << 10;
/// The most partial sums while B is cut along the depth.
const WAITING: usize = 272 << 10;
/// Units of a tile of sums.
const TILE_UNITS: usize = size_of::<Tile>() / 4;
/// Tiles of sums of sixteen rows and a panel.
pub(super) const TILES: usize = 2;

/// Returns how many panels of columns are taken together in swapped products: six blocks of sixteen weight rows.
pub(super) fn panels_of_slab(num_tiles: usize) -> usize {
    2 / num_tiles
}

/// Returns the units of a block of the depth, with all parts of its elements.
fn block_units(format: Format) -> usize {
    BLOCK * format.parts
}

/// Returns [`PART_UNITS`] rounded down to whole blocks.
pub(super) fn part_units(format: Format) -> usize {
    PART_UNITS / block_units(format) * block_units(format)
}

/// Cuts a group for swapped products: tasks of some rows, which stay in the cache, and some panels of columns.
pub(in crate::gemm) fn cut_swapped(
    CutOf { product, index, group, kernel, kernels }: CutOf<'_>,
    budget: usize,
    cut: &mut Cut,
) {
    let format = kernels.format(product.compute);
    let num_tiles = product.num_tiles();
    let panels = Panels::new(group.columns, BLOCK);
    let units = format.units_of(group.depth);
    let (block, longest) = (block_units(format), part_units(format));

    let num_stretches = (units * MIN_STAYING.min(group.rows)).div_ceil(STAY_UNITS).max(1);
    let stretch = units.div_ceil(num_stretches).next_multiple_of(if num_stretches > 1 { longest } else { block });
    let num_stretches = units.div_ceil(stretch.max(1)).max(1);
    let most = (STAY_UNITS / stretch.max(1)).clamp(MIN_STAYING, MAX_STAYING);
    // A few rows more than that are better kept together than halved.
    let num_shares = if 3 * group.rows <= 4 * most { 1 } else { group.rows.div_ceil(most) };
    let rows = group.rows.div_ceil(num_shares).next_multiple_of(ROWS).min(group.rows);

    let panel_width = TILE_STRIDE * num_tiles;
    let least = MIN_COLUMNS.div_ceil(panel_width);
    let mut chunk = (budget / (rows * panel_width * group.depth).max(1)).max(least);
    let lanes = Lanes::whole(rows);
    let tiles_of_panel = num_tiles * lanes.count() * 3 * TILES;
    if num_stretches > 1 {
        chunk = chunk.min(WAITING_SWAPPED / (tiles_of_panel * TILE_UNITS));
    }
    chunk = chunk.clamp(1, panels.count);
    let at_once = panels_of_slab(num_tiles);
    chunk = panels.count.div_ceil(panels.count.div_ceil(chunk)).next_multiple_of(at_once).min(panels.count);
    let held = if num_stretches > 1 { chunk.next_multiple_of(at_once) } else { at_once };

    let (a_units, b_units) = (2 * BLOCK * stretch.min(longest), stretch * lanes.width());
    let tile_units = (2 * num_tiles + tiles_of_panel * held) * TILE_UNITS;
    cut.scratch_units = cut.scratch_units.max(a_units + b_units + tile_units);
    let part = format.elements_of(stretch).max(2 * BLOCK);
    // Tasks with the same rows are consecutive, so that a thread finds them packed.
    for first_row in (0..group.rows).step_by(rows) {
        for first_panel in (0..panels.count).step_by(chunk) {
            let rows = Span::new(first_row, rows.min(group.rows - first_row));
            let panels = Span::new(first_panel, chunk.min(panels.count - first_panel));
            cut.tasks.push(Task { group: index, rows, panels, part, b_units, a_units, kernel });
        }
    }
}

/// Cuts a group into tasks of some rows and some panels of columns, whose B is packed part by part along the depth.
pub(in crate::gemm) fn cut_direct(
    CutOf { product, index, group, kernel, kernels }: CutOf<'_>,
    budget: usize,
    cut: &mut Cut,
) {
    let num_tiles = product.num_tiles();
    let panels = Panels::new(group.columns, kernels.lanes);
    let budget = budget.saturating_mul(BUDGET);
    let is_a_packed_whole = product.form == Form::Tn;
    let Shares { part_units, chunk, max_rows } = Shares::new(product, group, kernels, &panels, budget);
    let format = kernels.format(product.compute);
    let longest = self::part_units(format);
    let num_parts = format.units_of(group.depth).div_ceil(part_units).max(1);
    let part = format.elements_of(part_units);
    let panel_width = TILE_STRIDE * num_tiles;

    let width = (chunk * panel_width).min(group.columns * num_tiles);
    let rows_in_budget = budget / (width * group.depth).max(1);
    let mut rows = group.rows.min(max_rows).min(rows_in_budget.max(MIN_ROWS));
    rows = group.rows.div_ceil(group.rows.div_ceil(rows)).next_multiple_of(kernels.rows);

    let b_units = (part_units * panel_width * chunk).next_multiple_of(BLOCK);
    let a_units = (part_units * if is_a_packed_whole { rows } else { kernels.rows }).next_multiple_of(BLOCK);
    let waiting = match (num_parts, part_units > longest) {
        (1, false) => 1,
        (1, true) => chunk,
        _ => rows / kernels.rows * chunk,
    };
    let tile_units = waiting * kernels.rows.div_ceil(MAX_ROWS) * num_tiles * TILE_UNITS;
    cut.scratch_units = cut.scratch_units.max(b_units + a_units + tile_units);
    let (rows, chunk) = (Span::new(0, rows), Span::new(0, chunk));
    let size = Task { group: index, rows, panels: chunk, part, b_units, a_units, kernel };
    push_tasks(cut, group, &panels, size);
}

/// The share of the L2 cache that a task of the forms `A B` and `A^T B` uses.
struct Shares {
    /// Units of the depth of which B is packed at once.
    part_units: usize,
    /// Panels of B.
    chunk: usize,
    /// The most rows, whose partial sums are kept if the depth is cut.
    max_rows: usize,
}

impl Shares {
    fn new(product: &Product<'_>, group: &Group<'_>, kernels: &Kernels, panels: &Panels, budget: usize) -> Self {
        let panel_width = TILE_STRIDE * product.num_tiles();
        let format = kernels.format(product.compute);
        let (block, longest) = (block_units(format), part_units(format));
        let units = format.units_of(group.depth).max(block);
        let even = |longest: usize| units.div_ceil(units.div_ceil(longest)).next_multiple_of(block);
        // Even shares of all panels, at most `most` each.
        let chunk_of = |most: usize| panels.count.div_ceil(panels.count.div_ceil(most.clamp(1, panels.count)));
        let bf16x3 = |part_units: usize| {
            let chunk = chunk_of(B_UNITS_BF16X3 / (longest * panel_width));
            Self { part_units, chunk, max_rows: MAX_ROWS_BF16X3 }
        };
        if product.form == Form::Tn {
            // B is packed over the whole depth once for all consecutive tasks of a thread, A for each task. As
            // bf16x3, B is packed again for each task as well.
            let part_units = if units <= LONG_UNITS { units } else { even(longest) };
            if format.parts > 1 {
                return bf16x3(part_units);
            }
            let max_rows = (A_UNITS / part_units).clamp(MIN_ROWS, MAX_PACKED_ROWS);
            return Self { part_units, chunk: chunk_of(B_UNITS / (part_units * panel_width)), max_rows };
        }
        if group.rows <= FEW_TILE_ROWS {
            // Memory bandwidth sets the time: rows of B are read from end to end, except in a single group, which all
            // threads share.
            let of_panel = group.rows.next_multiple_of(ROWS) * panel_width;
            let in_budget = (budget / (of_panel * group.depth).max(1)).max(MIN_FEW_PANELS);
            let chunk = chunk_of(in_budget.min(WAITING / of_panel));
            let part_units = even((B_UNITS / 2 / (chunk * panel_width)).clamp(MIN_PART_UNITS, longest));
            return Self { part_units, chunk, max_rows: FEW_TILE_ROWS };
        }
        let part_units = even(longest);
        if format.parts > 1 {
            return bf16x3(part_units);
        }
        let chunk = chunk_of(B_UNITS / 2 / (part_units * panel_width));
        let max_rows = if part_units == units { usize::MAX } else { WAITING / (chunk * panel_width) / ROWS * ROWS };
        Self { part_units, chunk, max_rows: max_rows.max(MIN_ROWS) }
    }
}
