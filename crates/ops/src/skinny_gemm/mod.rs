//! GEMMs with few rows: each weight is read once, in place, and nothing is packed.
//!
//! With a handful of rows memory bandwidth sets the time, because each weight takes part in a few operations only.
//! Each of the three forms has a kernel:
//!
//! - `A B^T` ([`nt`]): sums run along the weight rows. Several weight rows are streamed at a time, and each loaded
//!   vector meets all rows of A while it is in a register. Pairs of bf16 use the pair dot product where the CPU has
//!   one.
//! - `A B` ([`nn`]): weight rows times factors are summed into a strip of the result that the L1 cache holds.
//!   Several weight rows are taken at a time, so that the strip is seldom loaded and stored.
//! - `A^T B` ([`tn`]): the weight gradient, a sum of a few outer products, whose stores bypass the caches.
//!
//! [`fused_dgrad_wgrad`] fuses the last two for a matrix that needs both.
//!
//! Work is cut by bytes of weights and not by group. The order of each sum depends on the depth and the instruction
//! set alone, so the cut does not change results.
//!
//! [`GemmPlan`] sends groups here by their shape and type alone. A row's result can therefore differ in the last bits
//! between a group of few rows and one of many, as it does between instruction sets.

mod fused_dgrad_wgrad;
pub(crate) mod nn;
pub(crate) mod nt;
pub(crate) mod rows;
mod tn;

use std::ops::Range;

use moeworks_tensor::DType;

use crate::Isa;
use crate::gemm::kernel::{Kernels, MAX_ROWS, TILE_STRIDE, Tile};
use crate::gemm::plan::{GemmKernel, GemmPlan};
use crate::gemm::scratch::ScratchSlot;
use crate::gemm::source::{Elements, with_elements};
use crate::gemm::{Finish, Form, Group, Panels, Place, Product, Span, tile_slice};
use crate::parallel::piece_range;
use crate::simd::kernel;
use rows::Weight;

pub(crate) use fused_dgrad_wgrad::{StripGradients, product_with_gradients};
pub(crate) use tn::{Gradients, weight_gradients};

/// Bytes of weights that a task of the form `A B^T` streams: the least (some ten microseconds), and the limit up to
/// which a task grows while each thread still gets [`TASKS_PER_THREAD`], because long streams are read faster.
const TASK_BYTES: (usize, usize) = (192 << 10, 768 << 10);

/// Tasks per thread that let all threads finish at nearly the same time.
const TASKS_PER_THREAD: usize = 16;

/// Consecutive bytes of a weight row that a task of the form `A B` streams, at least.
const STRETCH_BYTES: usize = 4 << 10;

/// The lower limit in place of [`STRETCH_BYTES`] if there would be fewer than [`MIN_TASKS`] tasks.
const MIN_STRETCH_BYTES: usize = 1 << 10;

/// Tasks of a product of the form `A B` below which strips are made narrower.
const MIN_TASKS: usize = 8;

/// Returns the bytes of a group's matrix.
fn weight_bytes(product: &Product<'_>, group: &Group<'_>) -> usize {
    group.b.bytes_of(group.depth) * group.columns * product.num_tiles()
}

/// Some panels of a group's columns, for all its rows.
pub(crate) struct Task {
    group: usize,
    /// First panel and number of panels.
    panels: Span,
}

/// The tasks of the groups that skinny kernels take.
pub(crate) struct Cut {
    pub(crate) tasks: Vec<Task>,
    /// 32-bit words of scratch that the largest task needs.
    pub(crate) scratch_units: usize,
}

impl Cut {
    /// Cuts the groups that their plans give to skinny kernels. Tasks of some groups also write weight gradients, if
    /// `gradients` has them.
    pub(crate) fn new(
        product: &Product<'_>,
        plans: &[GemmPlan],
        kernels: &Kernels,
        gradients: Option<&dyn StripGradients>,
        num_threads: usize,
    ) -> Self {
        let mut cut = Self { tasks: Vec::new(), scratch_units: 0 };
        let is_skinny = |&(index, _): &(usize, _)| plans[index].kernel == GemmKernel::Skinny;
        let groups = || product.groups.iter().enumerate().filter(is_skinny);
        let all_bytes: usize = groups().map(|(_, group)| weight_bytes(product, group)).sum();
        let task_bytes = (all_bytes / (TASKS_PER_THREAD * num_threads)).clamp(TASK_BYTES.0, TASK_BYTES.1);
        for (index, group) in groups() {
            let panels = Panels::new(group.columns, kernels.lanes);
            let share = panels_per_task(product, group, &panels, task_bytes);
            let num_tasks = panels.count.div_ceil(share);
            let mut share = panels.count.div_ceil(num_tasks);
            if product.form == Form::Nn {
                // Strips begin with whole blocks and lines.
                share = share.next_multiple_of(2).min(panels.count);
            }
            for task in 0..panels.count.div_ceil(share) {
                let range = piece_range(task, share, panels.count);
                cut.tasks.push(Task { group: index, panels: Span::new(range.start, range.len()) });
            }
            let has_gradient = gradients.is_some_and(|gradients| gradients.has(index));
            let layout = Layout::new(product, group, &panels, share, has_gradient.then_some(kernels));
            cut.scratch_units = cut.scratch_units.max(layout.len());
        }
        cut
    }
}

fn panels_per_task(product: &Product<'_>, group: &Group<'_>, panels: &Panels, task_bytes: usize) -> usize {
    let (_, columns, _) = panels.panel(0);
    let columns = columns.max(1);
    let wanted = if product.form == Form::Nt {
        let x_bytes = 4 * group.rows * group.depth;
        let panel_bytes = group.b.bytes_of(group.depth) * columns * product.num_tiles();
        // Each task lays out all rows of A again.
        let all_bytes = panel_bytes * panels.count * product.groups.len();
        task_bytes.max(4 * x_bytes).max((16 * x_bytes).min(all_bytes / MIN_TASKS)).div_ceil(panel_bytes.max(1))
    } else {
        // A product of a single group, for example of one token, is divided as well.
        let num_groups = product.groups.len().clamp(1, MIN_TASKS);
        let even = panels.count * num_groups / MIN_TASKS;
        let least = MIN_STRETCH_BYTES.div_ceil(group.b.bytes_of(columns));
        STRETCH_BYTES.div_ceil(group.b.bytes_of(columns)).min(even.max(least))
    };
    wanted.clamp(1, panels.count)
}

/// The sizes of the areas of a task's scratch, in 32-bit words.
#[derive(Clone, Copy)]
struct Layout {
    /// Rows of A in f32, in the kernel's layout.
    a: usize,
    /// Sums of the form `A B`; for `A B^T` a row of A before it is spread, then partial sums.
    strip: usize,
    /// Tiles for the epilogue.
    tiles: usize,
    /// Operands of weight gradients.
    gradient: usize,
}

impl Layout {
    /// A cache line.
    const LINE: usize = 16;

    /// Returns the areas for a task of `share` panels. `with_gradient` holds the kernels if the task writes the
    /// weight gradient, too.
    fn new(
        product: &Product<'_>,
        group: &Group<'_>,
        panels: &Panels,
        share: usize,
        with_gradient: Option<&Kernels>,
    ) -> Self {
        let depth = group.depth.next_multiple_of(2 * Self::LINE);
        let columns = (share * panels.panel(0).2).next_multiple_of(2 * Self::LINE);
        Self {
            a: group.rows * depth,
            strip: if product.form == Form::Nn {
                group.rows * columns
            } else {
                depth.max(nt::waiting_words(group.rows))
            },
            tiles: share.min(nt::MAX_PANELS)
                * product.num_tiles()
                * group.rows.div_ceil(MAX_ROWS)
                * (size_of::<Tile>() / 4),
            gradient: with_gradient
                .map_or(0, |kernels| fused_dgrad_wgrad::scratch_words(product, group, columns, kernels)),
        }
    }

    fn len(self) -> usize {
        self.a + self.strip + self.tiles + self.gradient
    }
}

/// A task with its product and kernels.
#[derive(Clone, Copy)]
pub(crate) struct Work<'a> {
    pub(crate) isa: Isa,
    pub(crate) product: &'a Product<'a>,
    pub(crate) task: &'a Task,
    /// The task that this thread will probably take next.
    pub(crate) next: Option<&'a Task>,
    /// The kernels whose vector width fixes the panels of columns.
    pub(crate) kernels: &'a Kernels,
    /// Weight gradients that are written as well.
    pub(crate) gradients: Option<&'a dyn StripGradients>,
}

/// Computes a task and hands its tiles to the epilogue.
pub(crate) fn run_task(work: Work<'_>, scratch: &mut [u32], held: &mut ScratchSlot, epilogue: &dyn Finish) {
    let group = &work.product.groups[work.task.group];
    with_elements!(group.b.elements, weights => work.run(weights, scratch, held, epilogue));
}

impl Work<'_> {
    fn run<T: Weight>(&self, weights: &[T], scratch: &mut [u32], held: &mut ScratchSlot, epilogue: &dyn Finish) {
        let Self { isa, product, task, kernels, .. } = *self;
        let group = &product.groups[task.group];
        let panels = Panels::new(group.columns, kernels.lanes);
        let gradients = self.gradients.filter(|gradients| gradients.has(task.group));
        let layout = Layout::new(product, group, &panels, task.panels.len, gradients.map(|_| kernels));
        let (a, rest) = bytemuck::cast_slice_mut::<u32, f32>(&mut scratch[..layout.len()]).split_at_mut(layout.a);
        let (strip, rest) = rest.split_at_mut(layout.strip);
        let (tiles, operands) = rest.split_at_mut(layout.tiles);
        let tiles = tile_slice(bytemuck::cast_slice_mut(tiles));
        let range = task.panels.range();
        let num_tiles = product.num_tiles();
        if product.form == Form::Nt {
            // The thread's last task may have left the rows of this group there.
            if held.rows_of.replace((task.group, 0)) != Some((task.group, 0)) {
                self.spread_rows::<T>(group, strip, a);
            }
        } else {
            self.sum_strip(weights, &panels, range.clone(), a, strip, bytemuck::cast_slice_mut(operands));
        }
        let at_once = self.panels_at_once::<T>(group);
        for first in range.clone().step_by(at_once) {
            let stretch = first..(first + at_once).min(range.end);
            let places = stretch.clone().flat_map(|panel| {
                let (column, columns, _) = panels.panel(panel);
                Place::tiles_of_panel(task.group, group.rows, Span::new(column, columns), panel)
            });
            places.clone().for_each(|at| epilogue.prefetch(at));
            if product.form == Form::Nt {
                self.sum_rows(weights, &panels, stretch, a, strip, tiles);
            } else {
                let (column, columns, _) = panels.panel(first);
                let first = column - panels.panel(range.start).0;
                strip_to_tiles::<T>(isa, strip, group.rows, first..first + columns, tiles);
            }
            for (at, tiles) in places.zip(tiles.chunks_exact_mut(num_tiles)) {
                let (first, second) = tiles.split_at_mut(1);
                epilogue.finish(isa, at, &mut first[0], second.first_mut(), held.scratch());
            }
        }
    }

    /// Returns how many panels are computed before the first of them goes to the epilogue.
    fn panels_at_once<T: Weight>(&self, group: &Group<'_>) -> usize {
        let is_stretch = self.product.form == Form::Nt && nt::is_streamed::<T>(self.isa, group.rows, group.depth);
        if !is_stretch {
            return 1;
        }
        let num_panels = self.task.panels.len;
        num_panels.div_ceil(num_panels.div_ceil(nt::MAX_PANELS))
    }

    /// Computes the sums of the form `A B^T` for the columns of the panels `stretch`.
    fn sum_rows<T: Weight>(
        &self,
        weights: &[T],
        panels: &Panels,
        stretch: Range<usize>,
        a: &[f32],
        waiting: &mut [f32],
        tiles: &mut [Tile],
    ) {
        let group = &self.product.groups[self.task.group];
        let (num_tiles, depth, num_rows) = (self.product.num_tiles(), group.depth, group.rows);
        let column = panels.panel(stretch.start).0;
        let (last, columns, _) = panels.panel(stretch.end - 1);
        let columns = last + columns - column;
        for pair in 0..num_tiles {
            let first = group.b.start(column + pair * group.columns);
            let (weights, next) = (&weights[first..][..columns * depth], self.after(panels, &stretch, pair));
            let panels = (*panels, stretch.start);
            let stretch = nt::Stretch { weights, panels, depth, a, num_rows, tile_step: num_tiles, next };
            nt::run::<T>(self.isa, stretch, waiting, &mut tiles[pair..]);
        }
    }

    /// Returns the address of the weights that are read after the panels `stretch`.
    fn after(&self, panels: &Panels, stretch: &Range<usize>, pair: usize) -> *const u8 {
        let Self { product, task, kernels: &Kernels { lanes, .. }, .. } = *self;
        let first = |group: &Group<'_>, panels: &Panels, panel: usize| group.b.address(panels.panel(panel).0, 0);
        let group = &product.groups[task.group];
        if pair + 1 < product.num_tiles() {
            return group.b.address(panels.panel(stretch.start).0 + group.columns, 0);
        }
        if stretch.end < task.panels.end() {
            return first(group, panels, stretch.end);
        }
        let Some(next) = self.next else { return first(group, panels, stretch.start) };
        let group = &product.groups[next.group];
        first(group, &Panels::new(group.columns, lanes), next.panels.first)
    }

    /// Lays the rows of A out in `a` for the form `A B^T`; `row_scratch` holds one row on its way.
    fn spread_rows<T: Weight>(&self, group: &Group<'_>, row_scratch: &mut [f32], a: &mut [f32]) {
        let len = group.depth.next_multiple_of(rows::block_len(self.isa));
        let row_scratch = &mut row_scratch[..len];
        for row in 0..group.rows {
            rows::load_row(self.isa, &group.a, row, group.depth, self.product.compute, row_scratch);
            rows::spread::<T>(self.isa, row_scratch, row, group.rows, a);
        }
    }

    /// Computes the sums of the form `A B` for the columns of the panels `range`, and the weight gradient of those
    /// columns if it is wanted. `operands` is scratch for the gradient.
    fn sum_strip<T: Weight>(
        &self,
        weights: &[T],
        panels: &Panels,
        range: Range<usize>,
        a: &mut [f32],
        strip: &mut [f32],
        operands: &mut [u32],
    ) {
        let group = &self.product.groups[self.task.group];
        let a_stride = a.len() / group.rows;
        for (row, a) in a.chunks_exact_mut(a_stride.max(1)).enumerate() {
            rows::load_row(self.isa, &group.a, row, group.depth, self.product.compute, a);
        }
        let first = panels.panel(range.start).0;
        let (last, columns, _) = panels.panel(range.end - 1);
        let (columns, stride) = (first..last + columns, strip.len() / group.rows);
        let sums = nn::StripSums { to: strip, stride };
        if let Some(gradients) = self.gradients.filter(|gradients| gradients.has(self.task.group)) {
            let Self { isa, product, task, kernels, .. } = *self;
            let of = fused_dgrad_wgrad::StripOf { isa, product, group: task.group, columns };
            return gradients.sum_strip(kernels, of, a, sums, operands);
        }
        let strip_of = nn::Strip::new(group, weights, columns, a.len());
        nn::run::<T>(self.isa, strip_of, a, sums);
    }
}

kernel! {
    bf16 if matches!(T::DTYPE, DType::BF16);
    /// Copies columns of a strip to tiles, in their natural order.
    fn strip_to_tiles<S: Level, T: Weight>(
        strip: &[f32],
        num_rows: usize,
        columns: Range<usize>,
        tiles: &mut [Tile],
    ) {
        let block = 2 * S::WIDTH;
        for (row, strip) in strip.chunks_exact(strip.len() / num_rows).enumerate() {
            let to = &mut tiles[row / MAX_ROWS].0[row % MAX_ROWS * TILE_STRIDE..][..columns.len()];
            for (column, to) in columns.clone().zip(to) {
                let at = column % block;
                let place =
                    if T::is_dotted::<S>() { nn::place_in_pairs(at, S::WIDTH) } else { T::place(at, S::WIDTH) };
                *to = strip[column / block * block + place];
            }
        }
    }
}

#[cfg(test)]
mod tests;
