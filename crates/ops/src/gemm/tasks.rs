//! How a list of products is cut into tasks.

use super::kernel::{Kernels, Tile, widest};
use super::plan::{Chooser, GemmKernel, GemmPlan};
use super::{Form, Group, Product};

/// Units of packed B that a task keeps in the second-level cache: half of 1 MiB.
const B_UNITS: usize = 128 << 10;
/// Rows of a group up to which packing B takes as long as multiplying with it, about.
const FEW_ROWS: usize = 96;
/// The longest part of the depth that is summed at once where A is used in place, in elements, or where sums that wait are far, in units.
const LONG_PART: usize = 2048;
/// The same, in units, where both operands are packed and sums wait in a cache, and in elements where narrow pieces of rows are far apart.
const SHORT_PART: usize = 256;
/// Rows of a task where sums wait between parts of the depth, or where A is packed.
const MAX_WAITING_ROWS: usize = 512;
/// Fewest rows and columns of a task where both operands are packed.
const PACKED: (usize, usize) = (128, 480);
/// Most columns of such a task where sums wait.
const MAX_WAITING_COLUMNS: usize = 1024;
/// Sums of a task that stay in the second-level cache beside what is packed: 384 KiB.
const NEAR_SUMS: usize = 96 << 10;
/// Fewest rows for which packing B once more is cheap against the products.
const MIN_ROWS: usize = 192;
/// The most rows for which parts are as short as [`Blocking::strip`] says.
const MAX_STRIP_ROWS: usize = 256;
/// Fewest panels of a task where the pieces of B's rows are far apart.
const MIN_FAR_PANELS: usize = 4;
/// Tasks for each thread at which the ends of threads lie close together.
const TASKS_PER_THREAD: usize = 8;
/// Units in a cache line: where parts of the scratch begin.
const LINE: usize = 16;

/// How products are cut where that depends on the processor.
#[derive(Clone, Copy)]
pub(crate) struct Blocking {
    /// The longest part of the depth that is summed at once, in elements.
    part: usize,
    /// Units of packed B of products `A B`, between whose parts sums wait.
    b_units: usize,
    /// Of products `A B` of few rows whose B is far and not converted: the longest part of the depth, and the most sums that wait.
    strip: Option<(usize, usize)>,
}

impl Blocking {
    /// Sums wait for few other parts.
    pub(crate) const LONG: Self = Self { part: LONG_PART, b_units: B_UNITS, strip: None };

    /// Of f32 with vectors of 16 lanes.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn of_f32(isa: crate::Isa) -> Self {
        // On Intel's processors a tile's rows of A are to take no more than half of the first-level cache's 32 KiB: panels after the first
        // then find them there, and several panels fit the second level.
        const NEAR: usize = 512;
        // So many rows of B are one piece of memory each for most of their length, which such processors fetch ahead by themselves; sums
        // come and go for each of their parts.
        const STRIP: (usize, usize) = (64, 36 << 10);
        match isa {
            // Where the second level has 1 MiB, sums and packed panels share it.
            crate::Isa::Avx512 => Self { part: NEAR, b_units: B_UNITS / 2, strip: Some(STRIP) },
            crate::Isa::Amx | crate::Isa::AmxF32 => Self { part: NEAR, ..Self::LONG },
            _ => Self::LONG,
        }
    }
}

/// A rectangle of a group's result.
#[derive(Clone, Copy, Debug)]
pub(super) struct Task {
    pub(super) group: usize,
    /// First row and number of rows.
    pub(super) rows: (usize, usize),
    /// First panel and number of panels.
    pub(super) panels: (usize, usize),
    /// Terms of the depth that are summed at once; even. Of tiles, those of which the rows that stay are packed at once.
    pub(super) part: usize,
    /// Scratch for packed panels of B.
    pub(super) b_units: usize,
    /// Scratch for rows of A.
    pub(super) a_units: usize,
    /// The kernel that was chosen for the group.
    pub(super) kernel: GemmKernel,
}

/// The tasks of a list of products.
pub(super) struct Cut {
    pub(super) tasks: Vec<Task>,
    /// Scratch that any of them needs.
    pub(super) scratch_units: usize,
}

/// The panels that columns are cut into: three vectors wide, the last one or two of two vectors where that avoids one of
/// a single vector, for which kernels are slow.
#[derive(Clone, Copy)]
pub(crate) struct Panels {
    columns: usize,
    wide: usize,
    num_wide: usize,
    /// The width of those after the wide ones.
    narrow: usize,
    pub(crate) count: usize,
}

impl Panels {
    /// The panels of B for vectors of so many lanes.
    #[inline(always)]
    pub(crate) fn of(columns: usize, lanes: usize) -> Self {
        let (vectors, widest) = (columns.div_ceil(lanes), widest(lanes));
        let (num_wide, narrow, num_narrow) = match (vectors / widest, vectors % widest) {
            (num_wide, 0) => (num_wide, 0, 0),
            (0, rest) => (0, rest, 1),
            (num_wide, 1) if widest == 3 => (num_wide - 1, 2, 2),
            (num_wide, rest) => (num_wide, rest, 1),
        };
        Self { columns, wide: widest * lanes, num_wide, narrow: narrow * lanes, count: num_wide + num_narrow }
    }

    /// Panels of one width, the last as wide though columns end inside it.
    #[inline(always)]
    pub(crate) fn equal(columns: usize, width: usize) -> Self {
        let count = columns.div_ceil(width);
        Self { columns, wide: width, num_wide: count, narrow: 0, count }
    }

    /// First column, number of columns and width of a panel.
    #[inline(always)]
    pub(crate) fn panel(&self, index: usize) -> (usize, usize, usize) {
        let start = index.min(self.num_wide) * self.wide + index.saturating_sub(self.num_wide) * self.narrow;
        let width = self.width(index);
        (start, (self.columns - start).min(width), width)
    }

    /// The panel of a column, and the column's place there, of panels for vectors of so many lanes: a constant, so that nothing is divided.
    #[inline(always)]
    pub(crate) fn place(&self, column: usize, lanes: usize) -> (usize, usize) {
        let wide = widest(lanes) * lanes;
        debug_assert_eq!(self.wide, wide, "panels of other vectors");
        match column.checked_sub(self.num_wide * wide) {
            None => (column / wide, column % wide),
            Some(rest) if rest < self.narrow => (self.num_wide, rest),
            // There are two at most.
            Some(rest) => (self.num_wide + 1, rest - self.narrow),
        }
    }

    #[inline(always)]
    pub(crate) fn width(&self, index: usize) -> usize {
        if index < self.num_wide { self.wide } else { self.narrow }
    }
}

/// Cuts the groups that packed kernels, swapped ones and tiles take.
pub(super) fn cut(product: &Product<'_>, plans: &[GemmPlan], chooser: &Chooser, num_threads: usize) -> Cut {
    let num_tiles = product.num_tiles();
    let work = |group: &Group<'_>| group.rows * group.columns * num_tiles * group.depth;
    let total: usize = product.groups.iter().map(work).sum();
    let budget = if num_threads == 1 { usize::MAX } else { total / (num_threads * TASKS_PER_THREAD) + 1 };
    let mut cut = Cut { tasks: Vec::new(), scratch_units: 0 };
    for ((index, group), plan) in product.groups.iter().enumerate().zip(plans) {
        if group.rows > 0 && group.columns > 0 && plan.kernel != GemmKernel::Skinny {
            let bf16x3 = chooser.bf16x3.as_ref().filter(|_| plan.kernel.is_bf16x3());
            let of = CutOf { product, index, group, kernel: plan.kernel, kernels: bf16x3.unwrap_or(&chooser.kernels) };
            of.cut(budget, &mut cut);
        }
    }
    cut
}

/// A group to be cut, and its kernel.
#[derive(Clone, Copy)]
pub(super) struct CutOf<'a> {
    pub(super) product: &'a Product<'a>,
    pub(super) index: usize,
    pub(super) group: &'a Group<'a>,
    pub(super) kernel: GemmKernel,
    pub(super) kernels: &'a Kernels,
}

impl CutOf<'_> {
    /// Cuts the group into tasks that cost no more than `budget`, about.
    fn cut(self, budget: usize, cut: &mut Cut) {
        match self.kernel {
            #[cfg(target_arch = "x86_64")]
            GemmKernel::TilesSwapAb | GemmKernel::Bf16x3SwapAb => super::amx::cut_swapped(self, budget, cut),
            #[cfg(target_arch = "x86_64")]
            GemmKernel::TilesDirect | GemmKernel::Bf16x3Direct => super::amx::cut_direct(self, budget, cut),
            #[cfg(target_arch = "x86_64")]
            GemmKernel::SwapAb => super::turned::cut_group(self, budget, cut),
            GemmKernel::BothPacked => cut_packed(self, budget, cut),
            _ => cut_group(self, budget, cut),
        }
    }
}

fn cut_group(CutOf { product, index, group, kernel, kernels }: CutOf<'_>, budget: usize, cut: &mut Cut) {
    let format = kernels.format(product.compute);
    let num_tiles = product.num_tiles();
    let panels = Panels::of(group.columns, kernels.lanes);
    // Narrow pieces of long rows, far apart, are slow to fetch and fall on few sets of a cache: with few rows to make
    // up for it, take wider ones of a part of the depth.
    let is_far =
        product.form == Form::Nn && group.depth * group.columns > 2 * B_UNITS && group.rows <= MAX_WAITING_ROWS;
    // Rows of A that are converted are converted again for each chunk of columns, so these are better wide, too.
    let is_converted = !group.a.is_direct(format) && group.depth * group.columns > 2 * B_UNITS;
    let strip = kernels.blocking.strip.filter(|_| is_far && group.rows <= MAX_STRIP_ROWS && group.b.is_direct(format));
    let longest = match strip {
        Some((part, _)) => part,
        None if is_far || is_converted => SHORT_PART,
        None => kernels.blocking.part,
    };
    let num_parts = group.depth.div_ceil(longest).max(1);
    let part = group.depth.div_ceil(num_parts).next_multiple_of(2 * format.multiple);
    let part_units = format.units_of(part.min(group.depth));
    let panel_width = widest(kernels.lanes) * kernels.lanes * num_tiles;

    let max_rows = if num_parts > 1 { MAX_WAITING_ROWS } else { usize::MAX };
    let mut rows = group.rows.min(max_rows);
    // The next task's B comes into the same cache meanwhile: with few rows all of it waits there at once.
    let b_units = if product.form == Form::Nn { kernels.blocking.b_units } else { B_UNITS };
    let b_room = if group.rows <= FEW_ROWS { B_UNITS / 2 } else { b_units };
    let mut chunk = (b_room / (part_units * panel_width).max(1)).clamp(1, panels.count);
    if let Some((_, sums)) = strip {
        chunk = (sums / (group.rows * panel_width)).clamp(MIN_FAR_PANELS.min(panels.count), panels.count);
    }
    let cost = |rows: usize, chunk: usize| rows * (chunk * panel_width).min(group.columns * num_tiles) * group.depth;
    (rows, chunk) = within_budget((rows, chunk), cost, is_far, budget);
    // Even shares instead of a small rest.
    chunk = panels.count.div_ceil(panels.count.div_ceil(chunk));
    rows = group.rows.div_ceil(group.rows.div_ceil(rows)).next_multiple_of(kernels.rows);

    let b_units = (part_units * panel_width * chunk).next_multiple_of(LINE);
    let a_units = (part_units * kernels.rows).next_multiple_of(LINE);
    let waiting = if num_parts > 1 { rows / kernels.rows * chunk } else { 1 };
    let tile_units = waiting * num_tiles * size_of::<Tile>() / 4;
    cut.scratch_units = cut.scratch_units.max(b_units + a_units + tile_units);
    let (rows, chunk, part) = ((0, rows), (0, chunk), part.max(2));
    let size = Task { group: index, rows, panels: chunk, part, b_units, a_units, kernel };
    push_tasks(cut, group, &panels, size);
}

/// So many rows and panels of a task, or fewer, that it costs no more than `budget`, about.
fn within_budget(
    (mut rows, mut chunk): (usize, usize),
    cost: impl Fn(usize, usize) -> usize,
    is_far: bool,
    budget: usize,
) -> (usize, usize) {
    // Where pieces are far apart two tasks for each thread are enough, of four panels: of one a whole depth of pieces of a few lines
    // took twice as long, and each block of rows packs them again.
    let least = if is_far { MIN_FAR_PANELS } else { 2 };
    while chunk > least && cost(rows, chunk) > budget {
        chunk -= 1;
    }
    let budget = if is_far { budget.saturating_mul(TASKS_PER_THREAD / 2) } else { budget };
    if cost(rows, chunk) > budget && rows > MIN_ROWS {
        rows = rows.div_ceil(cost(rows, chunk).div_ceil(budget)).max(MIN_ROWS);
    }
    while chunk > 1 && cost(rows, chunk) > budget {
        chunk -= 1;
    }
    (rows, chunk)
}

/// As [`cut_group`] for products `A^T B`. A task packs its rows of A and its columns of B once for each other, so that it is best square.
/// Sums that are too many for the second-level cache would come and go between parts of the depth as slowly as operands: then parts are
/// long, and of B a few panels at a time are packed.
fn cut_packed(CutOf { product, index, group, kernel, kernels }: CutOf<'_>, budget: usize, cut: &mut Cut) {
    let format = kernels.format(product.compute);
    let (panels, width) = (Panels::of(group.columns, kernels.lanes), widest(kernels.lanes) * kernels.lanes);
    let cost = |rows: usize, wide: usize| rows * (wide * width).min(group.columns) * group.depth;
    let (mut rows, mut wide) = (group.rows.min(MAX_WAITING_ROWS), panels.count);
    let least = (PACKED.0, PACKED.1.div_ceil(width));
    while cost(rows, wide) > budget && (rows > least.0 || wide > least.1) {
        if wide > least.1 && (wide * width >= rows || rows <= least.0) {
            wide = wide.div_ceil(2).max(least.1);
        } else {
            rows = rows.div_ceil(2).max(least.0);
        }
    }
    // Tiles of narrower vectors would fetch the rows of a long part three times as often, and wait in three times the memory.
    let is_narrow = kernels.lanes < 16;
    let longest = if rows * wide * width > NEAR_SUMS && !is_narrow { LONG_PART } else { SHORT_PART };
    let num_parts = group.depth.div_ceil(format.elements_of(longest)).max(1);
    if num_parts > 1 {
        let most = if is_narrow { B_UNITS / longest } else { MAX_WAITING_COLUMNS };
        wide = wide.min(most.div_ceil(width));
    }
    wide = panels.count.div_ceil(panels.count.div_ceil(wide));
    rows = group.rows.div_ceil(group.rows.div_ceil(rows)).next_multiple_of(kernels.rows);
    let part = group.depth.div_ceil(num_parts).next_multiple_of(2 * format.multiple);
    let part_units = format.units_of(part.min(group.depth));
    let at_once = (B_UNITS / (part_units * width).max(1)).clamp(1, wide);
    let at_once = wide.div_ceil(wide.div_ceil(at_once));
    let b_units = (part_units * width * at_once).next_multiple_of(LINE);
    let a_units = (part_units * rows).next_multiple_of(LINE);
    let waiting = if num_parts > 1 { rows / kernels.rows * wide } else { 1 };
    cut.scratch_units = cut.scratch_units.max(b_units + a_units + waiting * size_of::<Tile>() / 4);
    let (rows, wide, part) = ((0, rows), (0, wide), part.max(2));
    let size = Task { group: index, rows, panels: wide, part, b_units, a_units, kernel };
    push_tasks(cut, group, &panels, size);
}

/// Tasks of a group as large as `size`, which begins at the first row and panel, but for those at its ends.
pub(super) fn push_tasks(cut: &mut Cut, group: &Group<'_>, panels: &Panels, size: Task) {
    let (rows, chunk) = (size.rows.1, size.panels.1);
    for first_panel in (0..panels.count).step_by(chunk) {
        for first_row in (0..group.rows).step_by(rows) {
            cut.tasks.push(Task {
                rows: (first_row, rows.min(group.rows - first_row)),
                panels: (first_panel, chunk.min(panels.count - first_panel)),
                ..size
            });
        }
    }
}
