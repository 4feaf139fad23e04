//! The cut of a list of products into tasks.

use super::kernel::{Kernels, Tile, widest};
use super::plan::{Chooser, GemmKernel, GemmPlan};
use super::{Form, Group, Product, Span};

/// Units of packed B that a task keeps in the L2 cache: half of 1 MiB.
const B_UNITS: usize = 128 << 10;
/// Rows of a group up to which packing B takes about as long as multiplying with it.
const FEW_ROWS: usize = 96;
/// The longest part of the depth summed at once: in elements where A is used in place, in units where partial sums
/// are not in the L2 cache.
const LONG_PART: usize = 2048;
/// A short part of the depth: in units where both operands are packed and partial sums stay in the L2 cache, in
/// elements where narrow pieces of rows are far apart.
const SHORT_PART: usize = 256;
/// The most rows of a task with partial sums between parts of the depth, or with a packed A.
const MAX_WAITING_ROWS: usize = 512;
/// The fewest rows and columns of a task with both operands packed.
const PACKED: (usize, usize) = (128, 480);
/// The most columns of such a task if it keeps partial sums.
const MAX_WAITING_COLUMNS: usize = 1024;
/// Sums of a task that stay in the L2 cache next to the packed operands: 384 KiB.
const NEAR_SUMS: usize = 96 << 10;
/// The fewest rows for which packing B again is cheap compared with the products.
const MIN_ROWS: usize = 192;
/// The most rows for which parts are as short as [`Blocking::strip`] says.
const MAX_STRIP_ROWS: usize = 256;
/// The fewest panels of a task where the pieces of B's rows are far apart.
const MIN_FAR_PANELS: usize = 4;
/// Tasks per thread that let all threads finish at nearly the same time.
const TASKS_PER_THREAD: usize = 8;
/// Units in a cache line, at which areas of the scratch are aligned.
const LINE: usize = 16;

/// The sizes of tasks that depend on the CPU.
#[derive(Clone, Copy)]
pub(crate) struct Blocking {
    /// The longest part of the depth summed at once, in elements.
    part: usize,
    /// Units of packed B in products `A B`, next to which partial sums are kept.
    b_units: usize,
    /// The longest part of the depth and the most partial sums in products `A B` of few rows, whose B is large and
    /// not converted.
    strip: Option<(usize, usize)>,
}

impl Blocking {
    /// Long parts of the depth, so that partial sums are seldom stored.
    pub(crate) const LONG: Self = Self { part: LONG_PART, b_units: B_UNITS, strip: None };

    /// Returns the sizes for f32 with vectors of 16 lanes.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn for_f32(isa: crate::Isa) -> Self {
        // On Intel CPUs a tile's rows of A should take at most half of the 32 KiB L1 cache: later panels then find
        // them there, and several panels fit the L2 cache.
        const NEAR: usize = 512;
        // With so few rows of B a part is long runs of memory, which these CPUs prefetch by themselves. Partial sums
        // are loaded and stored for each part.
        const STRIP: (usize, usize) = (64, 36 << 10);
        match isa {
            // In an L2 cache of 1 MiB partial sums and packed panels compete.
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
    pub(super) rows: Span,
    pub(super) panels: Span,
    /// Elements of the depth summed at once, an even number. For swapped tiles, those whose rows of A are packed at
    /// once.
    pub(super) part: usize,
    /// Scratch for packed panels of B, in units.
    pub(super) b_units: usize,
    /// Scratch for rows of A, in units.
    pub(super) a_units: usize,
    /// The kernel chosen for the group.
    pub(super) kernel: GemmKernel,
}

/// The tasks of a list of products.
pub(super) struct Cut {
    pub(super) tasks: Vec<Task>,
    /// Scratch that the largest task needs, in units.
    pub(super) scratch_units: usize,
}

/// The panels that columns are cut into: three vectors wide each. The last one or two are two vectors wide where that
/// avoids a panel of a single vector, for which kernels are slow.
#[derive(Clone, Copy)]
pub(crate) struct Panels {
    columns: usize,
    wide: usize,
    num_wide: usize,
    /// The width of the panels after the wide ones.
    narrow: usize,
    pub(crate) count: usize,
}

impl Panels {
    /// Cuts columns into panels of B for vectors of so many lanes.
    #[inline(always)]
    pub(crate) fn new(columns: usize, lanes: usize) -> Self {
        let (vectors, widest) = (columns.div_ceil(lanes), widest(lanes));
        let (num_wide, narrow, num_narrow) = match (vectors / widest, vectors % widest) {
            (num_wide, 0) => (num_wide, 0, 0),
            (0, rest) => (0, rest, 1),
            (num_wide, 1) if widest == 3 => (num_wide - 1, 2, 2),
            (num_wide, rest) => (num_wide, rest, 1),
        };
        Self { columns, wide: widest * lanes, num_wide, narrow: narrow * lanes, count: num_wide + num_narrow }
    }

    /// Cuts columns into panels of one width; the last has that width even if the columns end inside it.
    #[inline(always)]
    pub(crate) fn equal(columns: usize, width: usize) -> Self {
        let count = columns.div_ceil(width);
        Self { columns, wide: width, num_wide: count, narrow: 0, count }
    }

    /// Returns first column, number of columns and width of a panel.
    #[inline(always)]
    pub(crate) fn panel(&self, index: usize) -> (usize, usize, usize) {
        let start = index.min(self.num_wide) * self.wide + index.saturating_sub(self.num_wide) * self.narrow;
        let width = self.width(index);
        (start, (self.columns - start).min(width), width)
    }

    /// Returns the panel of a column and the column's place in it. `lanes` is a constant, so that no division is
    /// compiled.
    #[inline(always)]
    pub(crate) fn place(&self, column: usize, lanes: usize) -> (usize, usize) {
        let wide = widest(lanes) * lanes;
        debug_assert_eq!(self.wide, wide, "panels of other vectors");
        match column.checked_sub(self.num_wide * wide) {
            None => (column / wide, column % wide),
            Some(rest) if rest < self.narrow => (self.num_wide, rest),
            // There are two narrow panels at most.
            Some(rest) => (self.num_wide + 1, rest - self.narrow),
        }
    }

    #[inline(always)]
    pub(crate) fn width(&self, index: usize) -> usize {
        if index < self.num_wide { self.wide } else { self.narrow }
    }
}

/// Cuts the groups of all kernels except the skinny ones.
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
    /// Cuts the group into tasks that each cost about `budget` multiply-adds at most.
    fn cut(self, budget: usize, cut: &mut Cut) {
        match self.kernel {
            #[cfg(target_arch = "x86_64")]
            GemmKernel::TilesSwapAb | GemmKernel::Bf16x3SwapAb => super::amx::cut_swapped(self, budget, cut),
            #[cfg(target_arch = "x86_64")]
            GemmKernel::TilesDirect | GemmKernel::Bf16x3Direct => super::amx::cut_direct(self, budget, cut),
            #[cfg(target_arch = "x86_64")]
            GemmKernel::SwapAb => super::swap_ab::cut_group(self, budget, cut),
            GemmKernel::BothPacked => cut_packed(self, budget, cut),
            _ => cut_group(self, budget, cut),
        }
    }
}

fn cut_group(CutOf { product, index, group, kernel, kernels }: CutOf<'_>, budget: usize, cut: &mut Cut) {
    let format = kernels.format(product.compute);
    let num_tiles = product.num_tiles();
    let panels = Panels::new(group.columns, kernels.lanes);
    // Narrow pieces of long rows are slow to fetch and fall on few sets of a cache. With few rows to make up for
    // that, pieces are wider and cover a part of the depth.
    let is_far =
        product.form == Form::Nn && group.depth * group.columns > 2 * B_UNITS && group.rows <= MAX_WAITING_ROWS;
    // Rows of A that need conversion are converted again for each chunk of columns, so chunks are wide as well.
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
    // The next task's B is fetched into the same cache meanwhile: with few rows all of it is there at once.
    let b_units = if product.form == Form::Nn { kernels.blocking.b_units } else { B_UNITS };
    let b_buffer = if group.rows <= FEW_ROWS { B_UNITS / 2 } else { b_units };
    let mut chunk = (b_buffer / (part_units * panel_width).max(1)).clamp(1, panels.count);
    if let Some((_, sums)) = strip {
        chunk = (sums / (group.rows * panel_width)).clamp(MIN_FAR_PANELS.min(panels.count), panels.count);
    }
    let cost = |rows: usize, chunk: usize| rows * (chunk * panel_width).min(group.columns * num_tiles) * group.depth;
    (rows, chunk) = within_budget(rows, chunk, cost, is_far, budget);
    // Even shares instead of a small rest.
    chunk = panels.count.div_ceil(panels.count.div_ceil(chunk));
    rows = group.rows.div_ceil(group.rows.div_ceil(rows)).next_multiple_of(kernels.rows);

    let b_units = (part_units * panel_width * chunk).next_multiple_of(LINE);
    let a_units = (part_units * kernels.rows).next_multiple_of(LINE);
    let waiting = if num_parts > 1 { rows / kernels.rows * chunk } else { 1 };
    let tile_units = waiting * num_tiles * size_of::<Tile>() / 4;
    cut.scratch_units = cut.scratch_units.max(b_units + a_units + tile_units);
    let (rows, chunk, part) = (Span::new(0, rows), Span::new(0, chunk), part.max(2));
    let size = Task { group: index, rows, panels: chunk, part, b_units, a_units, kernel };
    push_tasks(cut, group, &panels, size);
}

/// Reduces the rows and panels of a task until it costs about `budget` at most.
fn within_budget(
    mut rows: usize,
    mut chunk: usize,
    cost: impl Fn(usize, usize) -> usize,
    is_far: bool,
    budget: usize,
) -> (usize, usize) {
    // Where pieces are far apart, two tasks per thread with four panels each are enough. A single panel over the
    // whole depth, in pieces of a few lines, took twice as long, and each block of rows packs them again.
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

/// Cuts a group of the form `A^T B`. A task packs its rows of A and its columns of B once for each other, so it
/// should be square. If its partial sums exceed the L2 cache, moving them between parts of the depth is as slow as
/// moving operands; then parts are long, and only a few panels of B are packed at a time.
fn cut_packed(CutOf { product, index, group, kernel, kernels }: CutOf<'_>, budget: usize, cut: &mut Cut) {
    let format = kernels.format(product.compute);
    let (panels, width) = (Panels::new(group.columns, kernels.lanes), widest(kernels.lanes) * kernels.lanes);
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
    // Tiles of narrower vectors would fetch the rows of a long part three times as often and keep sums in three times
    // the memory.
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
    let (rows, wide, part) = (Span::new(0, rows), Span::new(0, wide), part.max(2));
    let size = Task { group: index, rows, panels: wide, part, b_units, a_units, kernel };
    push_tasks(cut, group, &panels, size);
}

/// Adds the tasks of a group, each as large as `size` except at the ends. `size` begins at the first row and panel.
pub(super) fn push_tasks(cut: &mut Cut, group: &Group<'_>, panels: &Panels, size: Task) {
    let (rows, chunk) = (size.rows.len, size.panels.len);
    for first_panel in (0..panels.count).step_by(chunk) {
        for first_row in (0..group.rows).step_by(rows) {
            cut.tasks.push(Task {
                rows: Span::new(first_row, rows.min(group.rows - first_row)),
                panels: Span::new(first_panel, chunk.min(panels.count - first_panel)),
                ..size
            });
        }
    }
}
