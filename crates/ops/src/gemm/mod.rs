//! Grouped GEMMs: one engine for linear layers and for experts, in the three forms `A B^T`, `A B` and `A^T B`.
//!
//! A product is a list of groups, each `C [rows, columns] = A B` with sizes of its own: an expert and its tokens, or
//! the single group of a linear layer. A group is cut into tasks of some rows by some panels of columns. A task packs
//! its panels of B into scratch that the L2 cache holds, then multiplies its rows, eight at a time, with all panels.
//! Each tile of sums goes to the product's [`Epilogue`] at once.
//!
//! Operands are used in place where their type and layout allow:
//!
//! - Rows of A along the depth are never packed, so that rows gathered by token cost nothing extra.
//! - B with rows across the depth (`A B`) is packed by the kernels while they multiply the first rows.
//! - With few rows packing B would take as long as multiplying, so A and B are swapped and A is packed instead
//!   (`swap_ab`).
//! - In `A^T B` rows of both operands run across the depth and both are packed: a task's rows of A once, panels of B
//!   one after the other.
//!
//! Each element is one sum in an order that the depth alone fixes. Results therefore do not depend on the cut into
//! tasks, which may depend on the number of threads.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
pub(crate) mod kernel;
#[cfg(target_arch = "x86_64")]
mod pack;
pub(crate) mod plan;
mod prefetch;
pub(crate) mod row_pieces;
pub(crate) mod scratch;
pub(crate) mod source;
pub(crate) mod store;
#[cfg(target_arch = "x86_64")]
pub(crate) mod swap_ab;
mod tasks;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) mod transpose;

use std::ops::Range;

use moeworks_tensor::DType;

use crate::simd::{Level, fence, kernel as compiled};
use crate::{Context, Isa, skinny_gemm};
use kernel::{Kernels, MAX_ROWS, Prefetch, Tile, TileArgs, widest};
use plan::Chooser;
use row_pieces::with_row_pieces;
pub(crate) use scratch::tile_slice;
use scratch::{ScratchPool, ScratchSlot};
use source::{Block, Format, Source};
use store::Scratch;
pub(crate) use tasks::Panels;
use tasks::Task;

/// The type of the factors of a product; sums are f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compute {
    /// Products of f32.
    F32,
    /// Products of bf16; f32 operands are rounded to it.
    Bf16,
}

impl Compute {
    /// Returns the type for products with weights of this type. An f16 is exact as f32 and would lose three bits as
    /// bf16.
    pub(crate) fn from_dtype(dtype: DType) -> Self {
        match dtype {
            DType::F32 | DType::F16 => Self::F32,
            DType::BF16 => Self::Bf16,
            dtype => panic!("no products with operands of type {dtype:?}"),
        }
    }
}

/// The layout of both operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// `A B^T`: rows of both run along the depth. A linear layer's forward.
    Nt,
    /// `A B`: rows of A run along the depth, rows of B across. The gradient of the input.
    Nn,
    /// `A^T B`: rows of both run across the depth. The gradient of the weight.
    Tn,
}

/// One product of a list.
#[derive(Clone, Copy)]
pub(crate) struct Group<'a> {
    /// Rows of A (columns of A in the form `A^T B`).
    pub(crate) a: Source<'a>,
    /// Rows of B.
    pub(crate) b: Source<'a>,
    /// Rows of C.
    pub(crate) rows: usize,
    /// Columns of C; with paired columns half of them.
    pub(crate) columns: usize,
    /// Terms of each sum.
    pub(crate) depth: usize,
}
/// Consecutive rows, columns, panels or terms of sums: the first and their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) first: usize,
    pub(crate) len: usize,
}

impl Span {
    #[inline(always)]
    pub(crate) const fn new(first: usize, len: usize) -> Self {
        Self { first, len }
    }

    /// Returns the place after the last.
    #[inline(always)]
    pub(crate) const fn end(self) -> usize {
        self.first + self.len
    }

    #[inline(always)]
    pub(crate) const fn range(self) -> Range<usize> {
        self.first..self.end()
    }
}
/// A list of products of one form.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    pub(crate) form: Form,
    pub(crate) compute: Compute,
    pub(crate) groups: &'a [Group<'a>],
    /// True if columns come in pairs, c and `columns + c`, whose two tiles the epilogue gets together.
    pub(crate) is_paired: bool,
}

impl Product<'_> {
    /// Returns how many tiles the epilogue gets at once.
    #[inline(always)]
    pub(crate) fn num_tiles(&self) -> usize {
        if self.is_paired { 2 } else { 1 }
    }
}

/// The place of a tile in the result.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) group: usize,
    pub(crate) rows: Span,
    pub(crate) columns: Span,
    /// The number of the panel that holds the columns, fixed by the group's number of columns.
    pub(crate) panel: usize,
}

impl Place {
    /// Lists the places of the tiles of a panel, for all `rows` rows of a group in order.
    pub(crate) fn tiles_of_panel(
        group: usize,
        rows: usize,
        columns: Span,
        panel: usize,
    ) -> impl Iterator<Item = Self> + Clone {
        let of_tile =
            move |first: usize| Self { group, rows: Span::new(first, (rows - first).min(MAX_ROWS)), columns, panel };
        (0..rows).step_by(MAX_ROWS).map(of_tile)
    }
}

/// The consumer of sums. It is called once for each tile; tiles do not overlap.
pub(crate) trait Epilogue: Sync {
    /// Takes a tile of at most eight rows, and a `second` one for paired columns. Both may be overwritten.
    fn tile<S: Level>(&self, at: Place, tile: &mut Tile, second: Option<&mut Tile>, scratch: &mut Scratch);

    /// Is called before a tile is computed, to prefetch memory that [`tile`](Self::tile) will write to.
    #[inline(always)]
    fn prefetch(&self, at: Place) {
        let _ = at;
    }
}

/// An [`Epilogue`] behind a pointer, so that the code that goes through tiles is compiled once. A tile is thousands
/// of products, so the indirect call costs nothing.
pub(crate) trait Finish: Sync {
    /// Calls [`Epilogue::tile`], compiled for `isa`.
    fn finish(&self, isa: Isa, at: Place, tile: &mut Tile, second: Option<&mut Tile>, scratch: &mut Scratch);

    /// Calls [`Epilogue::prefetch`].
    fn prefetch(&self, at: Place);
}

impl<E: Epilogue> Finish for E {
    fn finish(&self, isa: Isa, at: Place, tile: &mut Tile, second: Option<&mut Tile>, scratch: &mut Scratch) {
        finish(isa, self, at, tile, second, scratch);
    }

    fn prefetch(&self, at: Place) {
        Epilogue::prefetch(self, at);
    }
}

/// Independent tasks, which may run in any order.
#[derive(Clone, Copy)]
pub(crate) struct Tasks<'a> {
    pub(crate) count: usize,
    /// Runs the task of the first number; the thread will probably run the one that is the second number further
    /// next.
    pub(crate) run: &'a (dyn Fn(usize, usize) + Sync),
}

impl Tasks<'_> {
    /// Runs all tasks.
    pub(crate) fn run(self, ctx: &Context) {
        let ahead = ctx.threads().count().min(self.count);
        ctx.threads().run(self.count, |index| (self.run)(index, ahead));
    }

    /// Runs the tasks of both, evenly mixed: if one kind reads memory while the other writes it, the two overlap.
    pub(crate) fn run_interleaved(self, ctx: &Context, other: Self) {
        let (all, num_threads) = (self.count + other.count, ctx.threads().count());
        let ahead = |count: usize| (num_threads * count).div_ceil(all.max(1));
        // Among the first `index` tasks so many are of `self`.
        let own = |index: usize| index * self.count / all;
        ctx.threads().run(all, |index| {
            if own(index + 1) > own(index) {
                (self.run)(own(index), ahead(self.count));
            } else {
                (other.run)(index - own(index), ahead(other.count));
            }
        });
    }
}

/// Computes all products of the list.
pub(crate) fn run(ctx: &Context, product: &Product<'_>, epilogue: &dyn Finish) {
    with_tasks(ctx, product, epilogue, None, |tasks| tasks.run(ctx));
}

/// Calls `work` with the tasks that compute all products of the list and, if given, weight gradients of their
/// matrices.
pub(crate) fn with_tasks(
    ctx: &Context,
    product: &Product<'_>,
    epilogue: &dyn Finish,
    gradients: Option<&dyn skinny_gemm::StripGradients>,
    work: impl FnOnce(Tasks<'_>),
) {
    let chooser = Chooser::new(ctx.isa(), product.compute, ctx.is_batch_invariant() && gradients.is_none());
    let plans = chooser.choose_all(product);
    if let Some(most) = plans.iter().find_map(|plan| plan.row_pieces) {
        return with_row_pieces(ctx, product, most, epilogue, work);
    }
    let kernels = chooser.kernels;
    let plan = tasks::cut(product, &plans, &chooser, ctx.threads().count());
    let skinny = skinny_gemm::Cut::new(product, &plans, &kernels, gradients, ctx.threads().count());
    let count = plan.tasks.len() + skinny.tasks.len();
    let num_threads = ctx.threads().count().min(count).max(1);
    let mut scratch = ctx.empty(&[num_threads, plan.scratch_units.max(skinny.scratch_units)], DType::U32);
    let scratch = ScratchPool::new(&mut scratch, num_threads);
    let run = |index: usize, ahead: usize| {
        if let Some(task) = index.checked_sub(plan.tasks.len()) {
            let next = skinny.tasks.get(task + ahead);
            let work = skinny_gemm::Work {
                isa: ctx.isa(),
                product,
                task: &skinny.tasks[task],
                next,
                kernels: &kernels,
                gradients,
            };
            scratch.with(|scratch, held| skinny_gemm::run_task(work, scratch, held, epilogue));
            if gradients.is_some() {
                fence();
            }
            return;
        }
        // Tasks are handed out in order, so this is probably the thread's next one.
        let next = plan.tasks.get(index + ahead);
        let task = &plan.tasks[index];
        let kernels = chooser.bf16x3.filter(|_| task.kernel.is_bf16x3()).unwrap_or(kernels);
        let work = Work { product, group: &product.groups[task.group], task, next, kernels, isa: ctx.isa() };
        scratch.with(|scratch, held| work.run(scratch, held, epilogue));
        // The epilogue may have stored past the caches.
        fence();
    };
    work(Tasks { count, run: &run });
}

/// Returns the number of panels that so many columns are cut into.
pub(crate) fn num_panels(ctx: &Context, compute: Compute, columns: usize) -> usize {
    Panels::new(columns, Kernels::select(ctx.isa(), compute).lanes).count
}

compiled! {
    bf16
    /// Hands a tile to the epilogue. This and packing are compiled for each instruction set; the code between them
    /// only calls kernels and is compiled once.
    fn finish<S: Level, E: Epilogue>(
        epilogue: &E,
        at: Place,
        tile: &mut Tile,
        second: Option<&mut Tile>,
        scratch: &mut Scratch,
    ) {
        epilogue.tile::<S>(at, tile, second, scratch);
    }
}

/// A task with its product and kernels.
struct Work<'a> {
    product: &'a Product<'a>,
    group: &'a Group<'a>,
    task: &'a Task,
    next: Option<&'a Task>,
    kernels: Kernels,
    isa: Isa,
}

/// A part of the depth that is summed at once.
#[derive(Clone, Copy)]
struct Part {
    /// First element and number of elements.
    start: usize,
    depth: usize,
    num_units: usize,
    is_first: bool,
    is_last: bool,
}

/// Columns of A packed at once: whole panels of 4, 6 and 8 rows. One cache line of each is written at a time, and a
/// cache set has 8 ways.
const A_COLUMNS: usize = 48;

/// Some rows of C of a task: the first (counted from the task's), their number, the panels that they meet, and their
/// rows of A.
struct Rows {
    first: usize,
    count: usize,
    panels: Span,
    a: [*const u32; MAX_ROWS],
    a_step: usize,
    /// False if the panels of B are still to be packed, while these rows are multiplied.
    is_b_packed: bool,
}

/// The state of a task's prefetches, and its epilogue.
struct Progress<'a> {
    stream: prefetch::Stream,
    num_calls: usize,
    scratch: &'a mut Scratch,
    epilogue: &'a dyn Finish,
}

impl Work<'_> {
    fn run(&self, scratch: &mut [u32], held: &mut ScratchSlot, epilogue: &dyn Finish) {
        let Self { product, group, task, ref kernels, .. } = *self;
        #[cfg(target_arch = "x86_64")]
        if kernels.are_tiles {
            return self.run_in_tiles(scratch, held, epilogue);
        }
        held.rows_of = None;
        #[cfg(target_arch = "x86_64")]
        if task.kernel.is_swapped() {
            return self.run_swap_ab(scratch, epilogue);
        }
        let (b_buffer, rest) = scratch.split_at_mut(task.b_units);
        let (a_buffer, rest) = rest.split_at_mut(task.a_units);
        // Partial sums are kept here between parts of the depth. With a single part one place serves all tiles.
        let tiles = tile_slice(rest);
        let num_parts = group.depth.div_ceil(task.part).max(1);
        let held = if num_parts > 1 { product.num_tiles() } else { 0 };
        let mut tile_scratch = Scratch::new();
        for index in 0..num_parts {
            let part = self.part(index, num_parts);
            let stream = self.stream_after(part, b_buffer.as_ptr().cast());
            let mut progress = Progress { stream, num_calls: 0, scratch: &mut tile_scratch, epilogue };
            let at_once = self.panels_at_once(part);
            for first in (0..task.panels.len).step_by(at_once) {
                let panels = Span::new(task.panels.first + first, at_once.min(task.panels.len - first));
                let tiles = &mut tiles[first * held..];
                self.multiply_panels(part, panels, a_buffer, b_buffer, tiles, &mut progress);
            }
        }
    }

    /// Returns how many panels of B are packed at once: as many as the scratch holds.
    fn panels_at_once(&self, part: Part) -> usize {
        let width = widest(self.kernels.lanes) * self.kernels.lanes * self.product.num_tiles();
        (self.task.b_units / (part.num_units * width).max(1)).clamp(1, self.task.panels.len)
    }

    /// Multiplies all rows of a task with some panels of B, which are packed first. Partial sums have a tile each in
    /// `tiles`: eight rows with all panels of the task, then the next eight rows.
    fn multiply_panels(
        &self,
        part: Part,
        panels: Span,
        a_buffer: &mut [u32],
        b_buffer: &mut [u32],
        tiles: &mut [Tile],
        progress: &mut Progress<'_>,
    ) {
        let Self { product, task, ref kernels, .. } = *self;
        let depth = Span::new(part.start, part.depth);
        let held = if part.is_first && part.is_last { 0 } else { task.panels.len * product.num_tiles() };
        let is_packed_in_kernel = self.packs_in_kernel(part);
        if !is_packed_in_kernel {
            pack_b(self.isa, self, depth, panels, b_buffer);
        }
        for (block, first) in (0..task.rows.len).step_by(kernels.rows).enumerate() {
            let count = (task.rows.len - first).min(kernels.rows);
            let (a, a_step) = if product.form == Form::Tn {
                // The first panels find rows of A not packed yet.
                if panels.first == task.panels.first && first % A_COLUMNS == 0 {
                    pack_a(self.isa, self, depth, first, &mut a_buffer[first * part.num_units..]);
                }
                (packed_rows(&a_buffer[first * part.num_units..], count), kernels.rows)
            } else {
                (self.rows_of_a(Span::new(task.rows.first + first, count), depth, a_buffer), 1)
            };
            let rows = Rows { first, count, panels, a, a_step, is_b_packed: !is_packed_in_kernel || block > 0 };
            self.multiply_rows(&rows, part, b_buffer, &mut tiles[block * held..], progress);
        }
    }

    /// Returns part `index` of the depth of a task.
    #[inline(always)]
    fn part(&self, index: usize, num_parts: usize) -> Part {
        let start = index * self.task.part;
        let depth = (self.group.depth - start).min(self.task.part);
        let num_units = self.format().units_of(depth);
        Part { start, depth, num_units, is_first: index == 0, is_last: index + 1 == num_parts }
    }

    /// Multiplies some rows with the packed panels of B. Partial sums have a tile each in `tiles`.
    #[inline(always)]
    fn multiply_rows(
        &self,
        rows: &Rows,
        part: Part,
        mut b: &mut [u32],
        tiles: &mut [Tile],
        progress: &mut Progress<'_>,
    ) {
        let Self { product, group, task, ref kernels, .. } = *self;
        let (panels, num_tiles) = (Panels::new(group.columns, kernels.lanes), product.num_tiles());
        let Part { num_units, is_first, is_last, .. } = part;
        let mut ahead = self.rows_ahead(rows.first, part.start, part.depth);
        let step = progress.stream.step(num_units);
        for offset in 0..rows.panels.len {
            let panel = rows.panels.first + offset;
            let (column, columns, width) = panels.panel(panel);
            let place_rows = Span::new(task.rows.first + rows.first, rows.count);
            let at = Place { group: task.group, rows: place_rows, columns: Span::new(column, columns), panel };
            if is_last {
                progress.epilogue.prefetch(at);
            }
            ahead.advance();
            let first_tile = if is_first && is_last { 0 } else { offset * num_tiles };
            if !is_first && offset + 1 < rows.panels.len {
                tiles[first_tile + num_tiles..][..num_tiles].iter().for_each(|tile| tile.prefetch(rows.count, width));
            }
            let tiles = &mut tiles[first_tile..first_tile + num_tiles];
            for tile in tiles.iter_mut() {
                let (now, later) = b.split_at_mut(num_units * width);
                b = later;
                let ahead = progress.stream.at_call(progress.num_calls, num_units, step);
                progress.num_calls += 1;
                self.multiply_panel(rows, part, Span::new(column, width), now, tile, ahead);
            }
            if is_last {
                let (first, second) = tiles.split_at_mut(1);
                progress.epilogue.finish(self.isa, at, &mut first[0], second.first_mut(), progress.scratch);
            }
        }
    }

    /// Multiplies some rows with one panel of B, whose `columns` are as many as the panel is wide. The panel is
    /// packed on the way if it is not yet.
    #[inline(always)]
    fn multiply_panel(
        &self,
        rows: &Rows,
        part: Part,
        columns: Span,
        panel: &mut [u32],
        tile: &mut Tile,
        ahead: Prefetch,
    ) {
        let (kernels, to, width) = (&self.kernels, panel.as_mut_ptr(), columns.len);
        let in_place = if rows.is_b_packed { None } else { self.across(part, columns) };
        let args = TileArgs {
            depth: part.num_units,
            a: rows.a,
            a_step: rows.a_step,
            b: in_place.unwrap_or(to.cast_const()),
            packing: (self.group.b.stride, to),
            tile: tile.0.as_mut_ptr(),
            is_continued: !part.is_first,
            ahead,
        };
        // SAFETY: the kernels fit the context's instruction set. `a` points at as many rows of units as there are,
        // and so do the pointers to rows of B: both were checked when the pointers were made. `panel` has its width
        // times the units.
        unsafe {
            match in_place {
                Some(_) => kernels.run_packing(rows.count, width / kernels.lanes, &args),
                None => kernels.run(rows.count, width / kernels.lanes, &args),
            }
        }
    }

    /// Returns whether a part of B, whose rows run across the depth, is packed while the task's first rows are
    /// multiplied. Separate packing takes as long as multiplying a dozen rows.
    fn packs_in_kernel(&self, part: Part) -> bool {
        self.kernels.can_pack()
            && self.product.form == Form::Nn
            && self.group.columns.is_multiple_of(self.kernels.lanes)
            && self.across(part, Span::new(0, self.group.columns)).is_some()
    }

    /// Returns the address of some columns of a part of B, whole vectors of them.
    #[inline(always)]
    fn across(&self, part: Part, columns: Span) -> Option<*const u32> {
        self.group.b.across(Span::new(part.start, part.depth), columns, self.format())
    }

    #[inline(always)]
    fn format(&self) -> Format {
        self.kernels.format(self.product.compute)
    }

    /// Returns pointers to rows of A, converted to units in `buffer` if they cannot be used in place.
    #[inline(always)]
    fn rows_of_a(&self, rows: Span, depth: Span, buffer: &mut [u32]) -> [*const u32; MAX_ROWS] {
        let num_units = self.format().units_of(depth.len);
        let mut pointers = [buffer.as_ptr(); MAX_ROWS];
        if num_units == 0 {
            return pointers;
        }
        let mut buffers = buffer.chunks_exact_mut(num_units);
        for (row, pointer) in pointers.iter_mut().enumerate().take(rows.len) {
            let direct = self.group.a.direct(rows.first + row, depth.first, depth.len, self.format());
            *pointer = direct.unwrap_or_else(|| {
                let buffer = buffers.next().expect("buffer for the rows of a tile");
                convert_row(self.isa, &self.group.a, rows.first + row, depth, self.format(), buffer);
                buffer.as_ptr()
            });
        }
        pointers
    }
}

compiled! {
    bf16
    /// Packs some of the task's panels of B, the two of a pair next to each other.
    fn pack_b<S: Level>(work: &Work<'_>, depth: Span, of_panels: Span, to: &mut [u32]) {
        let Work { product, group, .. } = *work;
        let (format, mut to) = (work.format(), to);
        let panels = Panels::new(group.columns, work.kernels.lanes);
        let range = of_panels.range();
        if product.form != Form::Nt {
            return source::pack_straight::<S>(&group.b, depth, &panels, range, format, to);
        }
        for panel in range {
            let (column, columns, width) = panels.panel(panel);
            for pair in 0..product.num_tiles() {
                let (now, later) = to.split_at_mut(format.units_of(depth.len) * width);
                to = later;
                let block = Block { rows: Span::new(column + pair * group.columns, columns), columns: depth };
                #[cfg(target_arch = "x86_64")]
                if format.parts > 1 {
                    amx::pack_columns(&group.b, block, format, width, now);
                    continue;
                }
                source::pack_transposed::<S>(&group.b, block, format, width, now);
            }
        }
    }
}

compiled! {
    bf16
    /// Packs [`A_COLUMNS`] of the task's rows of C from `first` on, which are columns of A, in panels as narrow as a
    /// kernel has rows.
    fn pack_a<S: Level>(work: &Work<'_>, depth: Span, first: usize, to: &mut [u32]) {
        let (rows, width) = (work.task.rows, work.kernels.rows);
        let panels = Panels::equal(rows.first + (first + A_COLUMNS).min(rows.len), width);
        let range = (rows.first + first) / width..panels.count;
        source::pack_straight::<S>(&work.group.a, depth, &panels, range, work.format(), to);
    }
}

compiled! {
    bf16
    fn convert_row<S: Level>(source: &Source<'_>, row: usize, columns: Span, format: Format, to: &mut [u32]) {
        source.load::<S>(row, columns.first, columns.len, format, to);
    }
}

#[inline(always)]
fn packed_rows(panel: &[u32], rows: usize) -> [*const u32; MAX_ROWS] {
    std::array::from_fn(|row| panel.as_ptr().wrapping_add(row.min(rows - 1)))
}
