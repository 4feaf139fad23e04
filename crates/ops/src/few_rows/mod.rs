//! Products of few rows with large matrices: each weight is read once, where it lies, and nothing is packed.
//!
//! With a handful of rows a product does a few operations for each weight that it fetches, so memory sets the time.
//! The three forms are three kernels:
//!
//! - `A B^T` ([`dot`]): sums run along the rows of the weights; several rows of weights are streamed at a time and each
//!   fetched vector meets all rows of A while it is in a register, pairs of bf16 by their own product where there is one.
//! - `A B` ([`axpy`]): rows of the weights are added up with factors into a strip of the result that the first-level
//!   cache holds; several rows of weights at a time, so that the strip is read and written seldom.
//! - `A^T B` ([`outer`]): the gradient of the weights, a sum of a few outer products; what is written past the caches.
//!
//! The last two of one matrix go together where both are wanted ([`beside`]).
//!
//! Work is cut by bytes of weights and not by group. Every element is one sum whose order depends on the depth and the instruction set
//! only, so that it does not matter how.
//!
//! Which groups come here depends on their shape and type alone ([`GemmPlan`]). A row's result can therefore differ in the last bits
//! between a group of few rows and one of many, as it does between instruction sets.

pub(crate) mod axpy;
mod beside;
pub(crate) mod dot;
mod outer;
pub(crate) mod rows;

use std::ops::Range;

use moeworks_tensor::DType;

use crate::Isa;
use crate::gemm::kernel::{Kernels, MAX_ROWS, TILE_STRIDE, Tile};
use crate::gemm::plan::{GemmKernel, GemmPlan};
use crate::gemm::scratch::ScratchSlot;
use crate::gemm::source::{Elements, with_elements};
use crate::gemm::{Finish, Form, Group, Panels, Place, Product, tile_slice};
use crate::parallel::piece_range;
use crate::simd::kernel;
use rows::Weight;

pub(crate) use beside::{StripGradients, product_with_gradients};
pub(crate) use outer::{Gradients, weight_gradients};

/// Bytes of weights that a task of the form `A B^T` streams, at least: some ten microseconds; and in place of these as many as leave each
/// thread [`TASKS_PER_THREAD`], up to the second number, as long streams are read faster.
const TASK_BYTES: (usize, usize) = (192 << 10, 768 << 10);

/// Tasks for each thread at which the ends of threads lie close together.
const TASKS_PER_THREAD: usize = 16;

/// Bytes of a row of weights that a task of the form `A B` streams at a stretch, at least.
const STRETCH_BYTES: usize = 4 << 10;

/// The same where there would otherwise be fewer than [`MIN_TASKS`] tasks.
const MIN_STRETCH_BYTES: usize = 1 << 10;

/// Tasks of a product of the form `A B` below which strips get narrower.
const MIN_TASKS: usize = 8;

/// Bytes of a group's matrix.
fn weight_bytes(product: &Product<'_>, group: &Group<'_>) -> usize {
    group.b.bytes_of(group.depth) * group.columns * product.num_tiles()
}

/// Some panels of a group's columns, for all its rows.
pub(crate) struct Task {
    group: usize,
    /// First panel and number of panels.
    panels: (usize, usize),
}

/// The tasks of the groups that skinny kernels take.
pub(crate) struct Cut {
    pub(crate) tasks: Vec<Task>,
    /// 32-bit words of scratch that any of them needs.
    pub(crate) scratch_units: usize,
}

impl Cut {
    /// Cuts the groups by their plans. Some groups' tasks also write gradients, if there are any.
    pub(crate) fn new(
        product: &Product<'_>,
        (plans, kernels): (&[GemmPlan], &Kernels),
        gradients: Option<&dyn StripGradients>,
        num_threads: usize,
    ) -> Self {
        let mut cut = Self { tasks: Vec::new(), scratch_units: 0 };
        let is_skinny = |&(index, _): &(usize, _)| plans[index].kernel == GemmKernel::Skinny;
        let groups = || product.groups.iter().enumerate().filter(is_skinny);
        let all_bytes: usize = groups().map(|(_, group)| weight_bytes(product, group)).sum();
        let task_bytes = (all_bytes / (TASKS_PER_THREAD * num_threads)).clamp(TASK_BYTES.0, TASK_BYTES.1);
        for (index, group) in groups() {
            let panels = Panels::of(group.columns, kernels.lanes);
            let share = panels_per_task(product, group, &panels, task_bytes);
            let num_tasks = panels.count.div_ceil(share);
            let mut share = panels.count.div_ceil(num_tasks);
            if product.form == Form::Nn {
                // Strips begin with whole blocks and lines.
                share = share.next_multiple_of(2).min(panels.count);
            }
            for task in 0..panels.count.div_ceil(share) {
                let range = piece_range(task, share, panels.count);
                cut.tasks.push(Task { group: index, panels: (range.start, range.len()) });
            }
            let has_gradient = gradients.is_some_and(|gradients| gradients.has(index));
            let layout = Layout::of(product, group, (&panels, share), has_gradient.then_some(kernels));
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
        // Each task lays out the rows of A for itself.
        let all_bytes = panel_bytes * panels.count * product.groups.len();
        task_bytes.max(4 * x_bytes).max((16 * x_bytes).min(all_bytes / MIN_TASKS)).div_ceil(panel_bytes.max(1))
    } else {
        // A single group, of one token say, is still to be divided.
        let num_groups = product.groups.len().clamp(1, MIN_TASKS);
        let even = panels.count * num_groups / MIN_TASKS;
        let least = MIN_STRETCH_BYTES.div_ceil(group.b.bytes_of(columns));
        STRETCH_BYTES.div_ceil(group.b.bytes_of(columns)).min(even.max(least))
    };
    wanted.clamp(1, panels.count)
}

/// The parts of a task's scratch, in 32-bit words.
#[derive(Clone, Copy)]
struct Layout {
    /// Rows of A in f32, as the kernel wants them.
    a: usize,
    /// Sums of the form `A B`, or room for a row of A on its way, and then for sums that wait.
    strip: usize,
    /// Tiles for the epilogue.
    tiles: usize,
    /// Operands of gradients.
    gradient: usize,
}

impl Layout {
    /// A cache line.
    const LINE: usize = 16;

    /// `with_gradient` are the kernels if the gradient of the group's matrix is written, too.
    fn of(
        product: &Product<'_>,
        group: &Group<'_>,
        (panels, share): (&Panels, usize),
        with_gradient: Option<&Kernels>,
    ) -> Self {
        let depth = group.depth.next_multiple_of(2 * Self::LINE);
        let columns = (share * panels.panel(0).2).next_multiple_of(2 * Self::LINE);
        Self {
            a: group.rows * depth,
            strip: if product.form == Form::Nn {
                group.rows * columns
            } else {
                depth.max(dot::waiting_words(group.rows))
            },
            tiles: share.min(dot::MAX_PANELS)
                * product.num_tiles()
                * group.rows.div_ceil(MAX_ROWS)
                * (size_of::<Tile>() / 4),
            gradient: with_gradient.map_or(0, |kernels| beside::room_words(product, group, columns, kernels)),
        }
    }

    fn len(self) -> usize {
        self.a + self.strip + self.tiles + self.gradient
    }
}

/// A task and what it belongs to.
#[derive(Clone, Copy)]
pub(crate) struct Work<'a> {
    pub(crate) isa: Isa,
    pub(crate) product: &'a Product<'a>,
    pub(crate) task: &'a Task,
    /// The task that this thread will probably take next.
    pub(crate) next: Option<&'a Task>,
    /// The panels of the group's columns are those of these.
    pub(crate) kernels: &'a Kernels,
    /// Gradients that are written as well.
    pub(crate) gradients: Option<&'a dyn StripGradients>,
}

/// Computes a task and hands its tiles to the epilogue.
pub(crate) fn run_task(work: Work<'_>, scratch: &mut [u32], held: &mut ScratchSlot, epilogue: &dyn Finish) {
    let group = &work.product.groups[work.task.group];
    with_elements!(group.b.elements, weights => work.run(weights, (scratch, held), epilogue));
}

impl Work<'_> {
    fn run<T: Weight>(&self, weights: &[T], memory: (&mut [u32], &mut ScratchSlot), epilogue: &dyn Finish) {
        let (scratch, held) = memory;
        let Self { isa, product, task, kernels, .. } = *self;
        let group = &product.groups[task.group];
        let panels = Panels::of(group.columns, kernels.lanes);
        let gradients = self.gradients.filter(|gradients| gradients.has(task.group));
        let layout = Layout::of(product, group, (&panels, task.panels.1), gradients.map(|_| kernels));
        let (a, rest) = bytemuck::cast_slice_mut::<u32, f32>(&mut scratch[..layout.len()]).split_at_mut(layout.a);
        let (strip, rest) = rest.split_at_mut(layout.strip);
        let (tiles, operands) = rest.split_at_mut(layout.tiles);
        let tiles = tile_slice(bytemuck::cast_slice_mut(tiles));
        let range = task.panels.0..task.panels.0 + task.panels.1;
        let num_tiles = product.num_tiles();
        if product.form == Form::Nt {
            // The thread's last task may have left them.
            if held.rows_of.replace((task.group, 0)) != Some((task.group, 0)) {
                self.spread_rows::<T>(group, strip, a);
            }
        } else {
            let gradients = gradients.map(|gradients| (gradients, bytemuck::cast_slice_mut(operands)));
            self.sum_strip(group, weights, (&panels, range.clone()), (a, strip), gradients);
        }
        let at_once = self.panels_at_once::<T>(group);
        for first in range.clone().step_by(at_once) {
            let stretch = first..(first + at_once).min(range.end);
            let places = stretch.clone().flat_map(|panel| {
                let (column, columns, _) = panels.panel(panel);
                Place::of_panel((task.group, group.rows), (column, columns), panel)
            });
            places.clone().for_each(|at| epilogue.ask_ahead(at));
            if product.form == Form::Nt {
                self.sum_rows(group, weights, (&panels, stretch), (a, strip), tiles);
            } else {
                let (column, columns, _) = panels.panel(first);
                let first = column - panels.panel(range.start).0;
                strip_to_tiles::<T>(isa, strip, group.rows, (first, columns), tiles);
            }
            for (at, tiles) in places.zip(tiles.chunks_exact_mut(num_tiles)) {
                let (first, second) = tiles.split_at_mut(1);
                epilogue.finish(isa, at, &mut first[0], second.first_mut(), held.room());
            }
        }
    }

    /// Panels whose tiles are computed before the first of them goes to the epilogue.
    fn panels_at_once<T: Weight>(&self, group: &Group<'_>) -> usize {
        let is_stretch = self.product.form == Form::Nt && dot::is_streamed::<T>(self.isa, group.rows, group.depth);
        if !is_stretch {
            return 1;
        }
        let num_panels = self.task.panels.1;
        num_panels.div_ceil(num_panels.div_ceil(dot::MAX_PANELS))
    }

    /// The sums of the form `A B^T` for the columns of some panels.
    fn sum_rows<T: Weight>(
        &self,
        group: &Group<'_>,
        weights: &[T],
        (panels, stretch): (&Panels, Range<usize>),
        (a, waiting): (&[f32], &mut [f32]),
        tiles: &mut [Tile],
    ) {
        let (num_tiles, depth, num_rows) = (self.product.num_tiles(), group.depth, group.rows);
        let column = panels.panel(stretch.start).0;
        let (last, columns, _) = panels.panel(stretch.end - 1);
        let columns = last + columns - column;
        for pair in 0..num_tiles {
            let first = group.b.start(column + pair * group.columns);
            let (weights, next) = (&weights[first..][..columns * depth], self.after(panels, &stretch, pair));
            let panels = (*panels, stretch.start);
            let stretch = dot::Stretch { weights, panels, depth, a, num_rows, tile_step: num_tiles, next };
            dot::run::<T>(self.isa, stretch, waiting, &mut tiles[pair..]);
        }
    }

    /// Where the weights are that are read after some panels.
    fn after(&self, panels: &Panels, stretch: &Range<usize>, pair: usize) -> *const u8 {
        let Self { product, task, kernels: &Kernels { lanes, .. }, .. } = *self;
        let first = |group: &Group<'_>, panels: &Panels, panel: usize| group.b.address(panels.panel(panel).0, 0);
        let group = &product.groups[task.group];
        if pair + 1 < product.num_tiles() {
            return group.b.address(panels.panel(stretch.start).0 + group.columns, 0);
        }
        if stretch.end < task.panels.0 + task.panels.1 {
            return first(group, panels, stretch.end);
        }
        let Some(next) = self.next else { return first(group, panels, stretch.start) };
        let group = &product.groups[next.group];
        first(group, &Panels::of(group.columns, lanes), next.panels.0)
    }

    /// Brings the rows of A into `a` as the kernel of the form `A B^T` takes them, one after the other through `room`.
    fn spread_rows<T: Weight>(&self, group: &Group<'_>, room: &mut [f32], a: &mut [f32]) {
        let len = group.depth.next_multiple_of(rows::block_len(self.isa));
        let room = &mut room[..len];
        for row in 0..group.rows {
            rows::load_row(self.isa, &group.a, (row, 0, group.depth), self.product.compute, room);
            rows::spread::<T>(self.isa, room, row, group.rows, a);
        }
    }

    /// The sums of the form `A B` for the columns of some panels, and the gradient of those columns if it is wanted.
    fn sum_strip<T: Weight>(
        &self,
        group: &Group<'_>,
        weights: &[T],
        (panels, range): (&Panels, Range<usize>),
        (a, strip): (&mut [f32], &mut [f32]),
        gradients: Option<(&dyn StripGradients, &mut [u32])>,
    ) {
        let a_stride = a.len() / group.rows;
        for (row, a) in a.chunks_exact_mut(a_stride.max(1)).enumerate() {
            rows::load_row(self.isa, &group.a, (row, 0, group.depth), self.product.compute, a);
        }
        let first = panels.panel(range.start).0;
        let (last, columns, _) = panels.panel(range.end - 1);
        let (columns, to_stride) = (first..last + columns, strip.len() / group.rows);
        if let Some((gradients, room)) = gradients {
            let Self { isa, product, task, kernels, .. } = *self;
            let of = beside::StripOf { isa, product, group: task.group, columns };
            return gradients.sum_strip(kernels, of, a, (strip, to_stride), room);
        }
        let strip_of = axpy::Strip::of(group, weights, columns, a.len());
        axpy::run::<T>(self.isa, strip_of, a, strip, to_stride);
    }
}

kernel! {
    bf16 if matches!(T::DTYPE, DType::BF16);
    /// Copies columns of a strip to tiles, in their own order.
    fn strip_to_tiles<S: Level, T: Weight>(
        strip: &[f32],
        num_rows: usize,
        range: (usize, usize),
        tiles: &mut [Tile],
    ) {
        let (block, (first, columns)) = (2 * S::WIDTH, range);
        for (row, strip) in strip.chunks_exact(strip.len() / num_rows).enumerate() {
            let to = &mut tiles[row / MAX_ROWS].0[row % MAX_ROWS * TILE_STRIDE..][..columns];
            for (column, to) in (first..).zip(to) {
                let at = column % block;
                let place =
                    if T::is_dotted::<S>() { axpy::place_in_pairs(at, S::WIDTH) } else { T::place(at, S::WIDTH) };
                *to = strip[column / block * block + place];
            }
        }
    }
}

#[cfg(test)]
mod tests;
