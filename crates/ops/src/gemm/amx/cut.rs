//! How products are cut into tasks of tiles.
//!
//! Tiles multiply so fast that packing is what counts: an operand is packed as few times as the second-level cache, which has 2 MiB
//! wherever there are tiles, allows.

use super::{BLOCK, ROWS};
use crate::gemm::kernel::{Kernels, MAX_ROWS, TILE_STRIDE, Tile};
use crate::gemm::tasks::{Panels, Plan, Task, push_tasks};
use crate::gemm::turned::Lanes;
use crate::gemm::{Form, Group, Product};

/// Units of packed B that a task keeps in the second-level cache: half of 2 MiB.
const B_UNITS: usize = 256 << 10;
/// Units of the depth that are summed at once where rows of A are packed: 32 of them are 32 KiB of the first-level cache.
pub(super) const PART_UNITS: usize = 256;
/// Rows of a task whose sums wait.
const WAITING_ROWS: usize = 256;
/// Fewest rows of a task.
const MIN_ROWS: usize = 128;
/// How much larger tasks of tiles are.
const BUDGET: usize = 2;
/// Units of packed rows that a task keeps in the second-level cache where the product is turned round.
const STAY_UNITS: usize = 256 << 10;
/// Fewest rows that are kept if the group has them: with fewer the weights would pass by too often.
const MIN_STAYING: usize = 96;
/// Most of them: their sums with what passes by lie in the same cache.
const MAX_STAYING: usize = 256;
/// Columns of such a task, paired ones counted twice, from which on packing the rows that stay is cheap.
const MIN_COLUMNS: usize = 480;
/// Sums that wait while the depth is cut for the rows that stay, at most.
const WAITING: usize = 160 << 10;
/// Units of a tile of sums.
const TILE_UNITS: usize = size_of::<Tile>() / 4;
/// Tiles of sums of sixteen rows and a panel.
pub(super) const TILES: usize = 2;

/// Panels of columns whose rows of weights pass by together, where the product is turned round: six blocks of sixteen rows.
pub(super) fn panels_of_slab(num_tiles: usize) -> usize {
    2 / num_tiles
}

/// Cuts a group into tasks.
pub(in crate::gemm) fn cut_group(
    product: &Product<'_>,
    group: (usize, &Group<'_>),
    kernels: &Kernels,
    budget: usize,
    plan: &mut Plan,
) {
    if product.form == Form::Nt {
        cut_turned(product, group, kernels, budget, plan);
    } else {
        cut_straight(product, group, kernels, budget, plan);
    }
}

/// Tasks of some rows, which stay, and some panels of columns.
fn cut_turned(
    product: &Product<'_>,
    (index, group): (usize, &Group<'_>),
    kernels: &Kernels,
    budget: usize,
    plan: &mut Plan,
) {
    let format = kernels.format(product.compute);
    let num_tiles = product.num_tiles();
    let panels = Panels::of(group.columns, BLOCK);
    let units = format.units_of(group.depth);

    let num_stretches = (units * MIN_STAYING.min(group.rows)).div_ceil(STAY_UNITS).max(1);
    let stretch = units.div_ceil(num_stretches).next_multiple_of(if num_stretches > 1 { PART_UNITS } else { BLOCK });
    let num_stretches = units.div_ceil(stretch.max(1)).max(1);
    let most = (STAY_UNITS / stretch.max(1)).clamp(MIN_STAYING, MAX_STAYING);
    let rows = group.rows.div_ceil(group.rows.div_ceil(most)).next_multiple_of(ROWS).min(group.rows);

    let panel_width = TILE_STRIDE * num_tiles;
    let least = MIN_COLUMNS.div_ceil(panel_width);
    let mut chunk = (budget / (rows * panel_width * group.depth).max(1)).max(least);
    let lanes = Lanes::whole(rows);
    let tiles_of_panel = num_tiles * lanes.count() * 3 * TILES;
    if num_stretches > 1 {
        chunk = chunk.min(WAITING / (tiles_of_panel * TILE_UNITS));
    }
    chunk = chunk.clamp(1, panels.count);
    let at_once = panels_of_slab(num_tiles);
    chunk = panels.count.div_ceil(panels.count.div_ceil(chunk)).next_multiple_of(at_once).min(panels.count);
    let held = if num_stretches > 1 { chunk.next_multiple_of(at_once) } else { at_once };

    let (a_units, b_units) = (2 * BLOCK * stretch.min(PART_UNITS), stretch * lanes.width());
    let tile_units = (2 * num_tiles + tiles_of_panel * held) * TILE_UNITS;
    plan.scratch_units = plan.scratch_units.max(a_units + b_units + tile_units);
    let part = format.elements_of(stretch).max(2 * BLOCK);
    // Tasks with the same rows follow each other, so that a thread finds them packed.
    for first_row in (0..group.rows).step_by(rows) {
        for first_panel in (0..panels.count).step_by(chunk) {
            let rows = (first_row, rows.min(group.rows - first_row));
            let panels = (first_panel, chunk.min(panels.count - first_panel));
            plan.tasks.push(Task { group: index, rows, panels, part, b_units, a_units, is_turned: true });
        }
    }
}

/// Rows are cut before columns, since A is packed once for each chunk of them.
fn cut_straight(
    product: &Product<'_>,
    (index, group): (usize, &Group<'_>),
    kernels: &Kernels,
    budget: usize,
    plan: &mut Plan,
) {
    let format = kernels.format(product.compute);
    let num_tiles = product.num_tiles();
    let panels = Panels::of(group.columns, kernels.lanes);
    let is_a_packed_whole = product.form == Form::Tn;
    let num_parts = group.depth.div_ceil(format.elements_of(PART_UNITS)).max(1);
    let part = group.depth.div_ceil(num_parts).next_multiple_of(2 * format.multiple);
    let part_units = format.units_of(part.min(group.depth));
    let panel_width = TILE_STRIDE * num_tiles;

    let mut chunk = (B_UNITS / (part_units * panel_width).max(1)).clamp(1, panels.count);
    chunk = panels.count.div_ceil(panels.count.div_ceil(chunk));
    let width = (chunk * panel_width).min(group.columns * num_tiles);
    let max_rows = if num_parts > 1 || is_a_packed_whole { WAITING_ROWS } else { usize::MAX };
    let rows_in_budget = BUDGET * budget.min(usize::MAX / BUDGET) / (width * group.depth).max(1);
    let mut rows = group.rows.min(max_rows).min(rows_in_budget.max(MIN_ROWS));
    rows = group.rows.div_ceil(group.rows.div_ceil(rows)).next_multiple_of(kernels.rows);

    let b_units = (part_units * panel_width * chunk).next_multiple_of(BLOCK);
    let a_units = (part_units * if is_a_packed_whole { rows } else { kernels.rows }).next_multiple_of(BLOCK);
    let waiting = if num_parts > 1 { rows / kernels.rows * chunk } else { 1 };
    let tile_units = waiting * kernels.rows.div_ceil(MAX_ROWS) * num_tiles * size_of::<Tile>() / 4;
    plan.scratch_units = plan.scratch_units.max(b_units + a_units + tile_units);
    let part = part.max(2 * format.multiple);
    let (rows, chunk) = ((0, rows), (0, chunk));
    let size = Task { group: index, rows, panels: chunk, part, b_units, a_units, is_turned: false };
    push_tasks(plan, group, &panels, size);
}
