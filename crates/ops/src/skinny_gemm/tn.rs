//! The skinny kernel for `A^T B`, the weight gradient of few rows: a few outer products, whose cost is that of
//! writing the result.
//!
//! A gradient that replaces its buffer is written with stores that bypass the caches, because a store that first
//! fetches its line moves twice the bytes. A group without rows has a gradient of zeros then; with `Write::Add` it
//! costs nothing.

use std::borrow::Cow;
use std::ops::Range;

use moeworks_tensor::DType;

use crate::Context;
use crate::gemm::kernel::Kernels;
use crate::gemm::plan::{Chooser, GemmKernel, GemmProblem};
use crate::gemm::scratch::ScratchPool;
use crate::gemm::source::{Format, Source, pack_straight};
use crate::gemm::store::{Store, Stream};
use crate::gemm::{Compute, Group, Panels, Product, Span, Tasks};
use crate::linear::Write;
use crate::parallel::{Lent, piece_range};
use crate::simd::{Float, Level, fence, kernel};

/// Bytes that a task writes: at most, and at least. In between, each thread gets [`TASKS_OF_THREAD`] tasks.
const TASK_BYTES: (usize, usize) = (512 << 10, 16 << 10);
const TASKS_OF_THREAD: usize = 4;

/// Below so many bytes gradients are written through the caches, because they may still be there when they are read
/// next.
const STREAM_BYTES: usize = 8 << 20;

/// Lanes of the widest vector.
const LANES: usize = 16;

/// Vectors of columns computed together; with the rows of a tile their sums fill the registers.
const VECTORS: usize = 2;

/// Bytes of the operands of all columns up to which they stay in the L1 cache.
const CLOSE_BYTES: usize = 16 << 10;

/// Blocks of rows that meet a panel's columns before the next panel, if all operands take more than [`CLOSE_BYTES`].
/// Loads from the L2 cache and stores that bypass the caches compete for the same line buffers, so a panel is used
/// several times.
const BLOCKS: usize = 8;

pub(super) const fn tile_rows(lanes: usize) -> usize {
    if lanes >= LANES { 8 } else { 4 }
}

/// The buffer that gradients are written to: each group's matrix begins at its offset, rows `stride` apart. Gradients
/// in bf16 are sums in f32, rounded once.
pub(crate) struct Gradients<'a, T> {
    pub(crate) to: Lent<'a, T>,
    pub(crate) offsets: &'a [usize],
    pub(crate) stride: usize,
    pub(crate) write: Write,
}

/// Computes products of the form `A^T B`, of any number of rows.
pub(crate) fn weight_gradients<T: Float>(ctx: &Context, product: &Product<'_>, gradients: Gradients<'_, T>) {
    weight_gradients_with_tasks(ctx, product, gradients, None);
}

/// Computes products of the form `A^T B`, interleaved with the tasks `others` as far as skinny kernels take the
/// products.
pub(crate) fn weight_gradients_with_tasks<T: Float>(
    ctx: &Context,
    product: &Product<'_>,
    gradients: Gradients<'_, T>,
    others: Option<Tasks<'_>>,
) {
    let chooser = Chooser::new(ctx.isa(), product.compute, ctx.is_batch_invariant());
    let kernels = &chooser.kernels;
    let is_few = |group: &Group<'_>| {
        let problem = GemmProblem::from_group(product, group, group.rows);
        let problem = GemmProblem { is_gradient: group.columns == gradients.stride, ..problem };
        chooser.choose(&problem).kernel == GemmKernel::SkinnyGradient
    };
    let few = || product.groups.iter().enumerate().filter(|(_, group)| is_few(group));
    let bytes: usize = few().map(|(_, group)| size_of::<T>() * group.rows * group.columns).sum();
    let bytes_of_task = (bytes / (TASKS_OF_THREAD * ctx.threads().count())).clamp(TASK_BYTES.1, TASK_BYTES.0);
    let mut tasks = Vec::new();
    for (index, group) in few() {
        if group.depth == 0 && gradients.write == Write::Add {
            continue;
        }
        let rows = (bytes_of_task / (size_of::<T>() * group.columns).max(1)).max(1).next_multiple_of(tile_rows(LANES));
        let num_tasks = if group.columns == 0 { 0 } else { group.rows.div_ceil(rows) };
        tasks.extend((0..num_tasks).map(|task| Task { group: index, rows: piece_range(task, rows, group.rows) }));
    }
    run_tasks(ctx, product, &gradients, &tasks, others);

    let many: Vec<usize> = (0..product.groups.len()).filter(|&index| !is_few(&product.groups[index])).collect();
    if many.is_empty() {
        return;
    }
    let (groups, offsets): (Cow<'_, [Group<'_>]>, Cow<'_, [usize]>) = if many.len() == product.groups.len() {
        (product.groups.into(), gradients.offsets.into())
    } else {
        let pick = many.iter();
        (pick.clone().map(|&i| product.groups[i]).collect(), pick.map(|&i| gradients.offsets[i]).collect())
    };
    let Gradients { to, stride, write, .. } = gradients;
    let bytes: usize = groups.iter().map(|group| size_of::<T>() * group.rows * stride).sum();
    let product = Product { groups: &groups, ..*product };
    // Where vectors are half a line (32 bytes), a tile's row of bf16 ends with a partial vector, which cannot be
    // streamed.
    if is_streamed(write, bytes) && (T::DTYPE == DType::F32 || kernels.lanes == LANES) {
        crate::gemm::run(ctx, &product, &Stream { to, offsets: &offsets, stride });
    } else {
        crate::gemm::run(ctx, &product, &Store { to, offsets: &offsets, stride, write });
    }
}

/// Returns whether gradients bypass the caches.
fn is_streamed(write: Write, bytes: usize) -> bool {
    write == Write::Replace && bytes >= STREAM_BYTES
}

/// Some rows of a group's gradient.
struct Task {
    group: usize,
    rows: Range<usize>,
}

fn run_tasks<T: Float>(
    ctx: &Context,
    product: &Product<'_>,
    gradients: &Gradients<'_, T>,
    tasks: &[Task],
    others: Option<Tasks<'_>>,
) {
    let bytes: usize = tasks.iter().map(|task| size_of::<T>() * task.rows.len() * gradients.stride).sum();
    let is_streamed = is_streamed(gradients.write, bytes);
    let mode = match gradients.write {
        Write::Add => StoreMode::Add,
        Write::Replace if is_streamed => StoreMode::Stream,
        Write::Replace => StoreMode::Store,
    };
    let kernels = Kernels::select(ctx.isa(), product.compute);
    let operands_of = |task: &Task| Operands::new(&kernels, product.compute, product.groups[task.group].depth);
    let words_of = |task: &Task| {
        let operands = operands_of(task);
        [operands.words_of_b(product.groups[task.group].columns), operands.words_of_a(task.rows.len())]
    };
    let scratch_units = tasks.iter().map(|task| words_of(task).iter().sum()).max().unwrap_or(0);
    let num_threads = ctx.threads().count().min(tasks.len()).max(1);
    let mut scratch = ctx.empty(&[num_threads, scratch_units], DType::U32);
    let scratch = ScratchPool::new(&mut scratch, num_threads);
    let run = |index: usize, _: usize| {
        let task = &tasks[index];
        let group = &product.groups[task.group];
        scratch.with(|scratch, held| {
            let (operands, [b_words, a_words]) = (operands_of(task), words_of(task));
            let (b, a) = scratch.split_at_mut(b_words);
            let a = &mut a[..a_words];
            // The thread's last task may have left the columns of this group there.
            if held.rows_of.replace((task.group, 0)) != Some((task.group, 0)) {
                operands.lay_out_b(ctx.isa(), &group.b, 0..group.columns, b);
            }
            operands.lay_out_a(ctx.isa(), &group.a, task.rows.clone(), a);
            let start = gradients.offsets[task.group] + task.rows.start * gradients.stride;
            // SAFETY: the tasks' rows do not overlap, nor do the groups' matrices.
            let to = unsafe { gradients.to.range(start..start + task.rows.len() * gradients.stride) };
            outer_kernel(ctx.isa(), operands.sums(a, b), mode, group.columns, to);
        });
        if is_streamed {
            fence();
        }
    };
    let tasks = Tasks { count: tasks.len(), run: &run };
    match others {
        Some(others) => others.run_interleaved(ctx, tasks),
        None => tasks.run(ctx),
    }
}

/// The layout of a gradient's operands: panels as wide as a tile's rows or columns, over the depth.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    format: Format,
    lanes: usize,
    depth: usize,
}

impl Operands {
    pub(super) fn new(kernels: &Kernels, compute: Compute, depth: usize) -> Self {
        let format = kernels.format(compute);
        // CPUs with AMX begin one bf16 pair product every second cycle but two f32 multiply-adds every cycle, so f32
        // is as fast per element and needs half as many instructions of the slow kind.
        let units = if kernels.are_tiles { Compute::F32 } else { format.units };
        Self { format: Format { multiple: 1, units, ..format }, lanes: kernels.lanes, depth }
    }

    /// Returns the words that so many rows of the gradient take.
    pub(super) fn words_of_a(self, rows: usize) -> usize {
        self.format.units_of(self.depth) * rows.next_multiple_of(tile_rows(self.lanes))
    }

    /// Returns the words that so many columns of the gradient take.
    pub(super) fn words_of_b(self, columns: usize) -> usize {
        self.format.units_of(self.depth) * columns.next_multiple_of(VECTORS * self.lanes)
    }

    /// Lays out the operand of some rows of the gradient.
    pub(super) fn lay_out_a(self, isa: crate::Isa, source: &Source<'_>, rows: Range<usize>, to: &mut [u32]) {
        lay_out(isa, source, self.depth, rows, tile_rows(self.lanes), self.format, to);
    }

    /// Lays out the operand of some columns of the gradient.
    pub(super) fn lay_out_b(self, isa: crate::Isa, source: &Source<'_>, columns: Range<usize>, to: &mut [u32]) {
        lay_out(isa, source, self.depth, columns, VECTORS * self.lanes, self.format, to);
    }

    /// Returns operands that have been laid out.
    pub(super) fn sums<'a>(self, a: &'a [u32], b: &'a [u32]) -> Sums<'a> {
        let (num_units, are_pairs) = (self.format.units_of(self.depth), self.format.units == Compute::Bf16);
        Sums { a: bytemuck::cast_slice(a), b: bytemuck::cast_slice(b), num_units, are_pairs }
    }
}

kernel! {
    bf16
    /// Converts `columns` of a source's first `depth` rows to units, in panels `[unit][width]` with zeros beyond the
    /// last column.
    fn lay_out<S: Level>(
        source: &Source<'_>,
        depth: usize,
        columns: Range<usize>,
        width: usize,
        format: Format,
        to: &mut [u32],
    ) {
        let source = Source { offset: source.offset + columns.start, ..*source };
        let panels = Panels::equal(columns.len(), width);
        pack_straight::<S>(&source, Span::new(0, depth), &panels, 0..panels.count, format, to);
    }
}

/// The way in which sums are written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum StoreMode {
    Store,
    /// Bypasses the caches; rows must be aligned to vectors.
    Stream,
    Add,
}

/// The operands of a gradient, of f32 or of bf16 pairs: panels `[unit][tile_rows]` and `[unit][VECTORS * lanes]`.
#[derive(Clone, Copy)]
pub(super) struct Sums<'a> {
    a: &'a [f32],
    b: &'a [f32],
    num_units: usize,
    are_pairs: bool,
}
/// A tile of a gradient, or the part of one that exists.
#[derive(Clone, Copy)]
pub(super) struct GradientTile {
    /// The panel of rows.
    pub(super) block: usize,
    /// The first column, with which a panel of columns begins.
    pub(super) column: usize,
    /// Rows and columns that exist from there on, perhaps more than a tile has.
    pub(super) num_rows: usize,
    pub(super) num_columns: usize,
}
kernel! {
    bf16
    fn outer_kernel<S: Level, T: Float>(sums: Sums<'_>, mode: StoreMode, columns: usize, to: &mut [T]) {
        let mode = mode.where_aligned::<S, T>(to.as_ptr(), columns);
        let (tile, blocks) = (tile_rows(S::WIDTH), if size_of_val(sums.b) > CLOSE_BYTES { BLOCKS } else { 1 });
        for (index, to) in to.chunks_mut(blocks * tile * columns).enumerate() {
            for column in (0..columns).step_by(VECTORS * S::WIDTH) {
                for (block, to) in to.chunks_mut(tile * columns).enumerate() {
                    let (num_rows, num_columns) = (to.len() / columns, columns - column);
                    let tile = GradientTile { block: index * blocks + block, column, num_rows, num_columns };
                    // SAFETY: `to` has so many rows from the column on.
                    unsafe { sums.write::<S, T>(tile, mode, to.as_mut_ptr().add(column), columns) };
                }
            }
        }
    }
}

impl StoreMode {
    /// Replaces [`StoreMode::Stream`] by [`StoreMode::Store`] unless all vectors of rows `stride` apart are aligned.
    #[inline(always)]
    pub(super) fn where_aligned<S: Level, T>(self, to: *const T, stride: usize) -> Self {
        let is_whole = |bytes: usize| bytes.is_multiple_of(4 * S::WIDTH);
        let is_aligned = is_whole(to.addr()) && is_whole(stride * size_of::<T>());
        if self == Self::Stream && !is_aligned { Self::Store } else { self }
    }
}

impl Sums<'_> {
    /// Computes a tile of the gradient and writes the rows and columns of it that exist.
    ///
    /// # Safety
    /// The rows and columns of `tile` must be writable at `to`, rows `stride` apart, and whole vectors of them
    /// aligned if they are streamed.
    #[inline(always)]
    pub(super) unsafe fn write<S: Level, T: Float>(
        &self,
        tile: GradientTile,
        mode: StoreMode,
        to: *mut T,
        stride: usize,
    ) {
        // SAFETY: the caller's promise is handed on.
        unsafe {
            if S::WIDTH >= LANES {
                self.write_rows::<S, T, 8>(tile, mode, to, stride);
            } else {
                self.write_rows::<S, T, 4>(tile, mode, to, stride);
            }
        }
    }

    /// Computes and writes a tile of `N` rows.
    ///
    /// # Safety
    /// As for [`write`](Self::write).
    #[inline(always)]
    unsafe fn write_rows<S: Level, T: Float, const N: usize>(
        &self,
        tile: GradientTile,
        mode: StoreMode,
        to: *mut T,
        stride: usize,
    ) {
        let GradientTile { block, column, num_rows, num_columns } = tile;
        let (panel, width) = (column / (VECTORS * S::WIDTH), VECTORS * S::WIDTH);
        let a = &self.a[block * self.num_units * N..][..self.num_units * N];
        let b = &self.b[panel * self.num_units * width..][..self.num_units * width];
        // SAFETY: the caller's promise.
        unsafe {
            if num_rows >= N && num_columns >= width {
                return write_tile::<S, T, N>(&self.tile::<S, N>(a, b), mode, to, stride);
            }
            // Computed separately: sums indexed by a loop variable would not stay in registers, and those above have
            // to.
            let sums = self.tile::<S, N>(a, b);
            for (row, sums) in sums.iter().enumerate().take(num_rows) {
                let to = std::slice::from_raw_parts_mut(to.add(row * stride), num_columns.min(width));
                write_row::<S, T>(sums, mode, to);
            }
        }
    }

    #[inline(always)]
    fn tile<S: Level, const N: usize>(&self, a: &[f32], b: &[f32]) -> [[S::Vector; VECTORS]; N] {
        if S::HAS_PAIR_DOT && self.are_pairs { tile::<S, true, N>(a, b) } else { tile::<S, false, N>(a, b) }
    }
}

/// Computes the sums of `N` rows and [`VECTORS`] vectors of columns from a panel of each operand.
#[inline(always)]
fn tile<S: Level, const PAIRS: bool, const N: usize>(a: &[f32], b: &[f32]) -> [[S::Vector; VECTORS]; N] {
    let mut sums = [[S::splat(0.0); VECTORS]; N];
    for (a, b) in a.chunks_exact(N).zip(b.chunks_exact(VECTORS * S::WIDTH)) {
        // SAFETY: `a` has `N` elements and `b` so many vectors.
        unsafe {
            let vectors: [_; VECTORS] = [S::load(b.as_ptr()), S::load(b.as_ptr().add(S::WIDTH))];
            for (n, sums) in sums.iter_mut().enumerate() {
                let factor = S::splat_at(a.as_ptr(), n);
                for (sum, &vector) in sums.iter_mut().zip(&vectors) {
                    *sum = if PAIRS {
                        S::dot_pairs(factor, vector, *sum)
                    } else {
                        S::vector_mul_add(factor, vector, *sum)
                    };
                }
            }
        }
    }
    sums
}

/// Repeats an expression for each row of a tile, unrolled: sums indexed by a loop variable are spilled to memory.
macro_rules! each_row {
    ($rows:ident, $n:ident => $work:expr) => {
        each_row!(@ $rows, $n => $work, 0 1 2 3 4 5 6 7)
    };
    (@ $rows:ident, $n:ident => $work:expr, $($row:literal)*) => {{
        $(if $row < $rows {
            let $n = $row;
            $work;
        })*
    }};
}

/// Writes a tile of sums to `to`, whose rows are `stride` apart.
///
/// # Safety
/// The rows must be writable, and aligned if they are streamed.
#[inline(always)]
unsafe fn write_tile<S: Level, T: Float, const N: usize>(
    sums: &[[S::Vector; VECTORS]; N],
    mode: StoreMode,
    to: *mut T,
    stride: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match mode {
            StoreMode::Store => each_row!(N, n => write_vectors::<S, T>(to.add(n * stride), sums[n], false)),
            StoreMode::Stream => each_row!(N, n => write_vectors::<S, T>(to.add(n * stride), sums[n], true)),
            StoreMode::Add => each_row!(N, n => {
                let to = to.add(n * stride);
                let old = load_vectors::<S, T>(to);
                write_vectors::<S, T>(to, [S::vector_add(sums[n][0], old[0]), S::vector_add(sums[n][1], old[1])], false);
            }),
        }
    }
}

/// Writes [`VECTORS`] vectors of a row: as many of f32, or one of bf16.
///
/// # Safety
/// They must be writable at `to`, and aligned if they are streamed.
#[inline(always)]
unsafe fn write_vectors<S: Level, T: Float>(to: *mut T, sums: [S::Vector; VECTORS], is_streamed: bool) {
    let (of_bf16, to) = (T::DTYPE == DType::BF16, to.cast::<f32>());
    let vectors = if of_bf16 { &[S::round(sums)][..] } else { &sums };
    for (v, &vector) in vectors.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            if is_streamed {
                S::stream(to.add(v * S::WIDTH), vector);
            } else {
                S::store(to.add(v * S::WIDTH), vector);
            }
        }
    }
}

/// Loads [`VECTORS`] vectors of a row as f32.
///
/// # Safety
/// They must be readable at `from`.
#[inline(always)]
unsafe fn load_vectors<S: Level, T: Float>(from: *const T) -> [S::Vector; VECTORS] {
    let mut wide = [0.0; VECTORS * LANES];
    // SAFETY: the caller's promise; a level has at most as many lanes.
    unsafe {
        for (i, wide) in wide.iter_mut().enumerate().take(VECTORS * S::WIDTH) {
            *wide = from.add(i).read().load();
        }
        std::array::from_fn(|v| S::load(wide.as_ptr().add(v * S::WIDTH)))
    }
}

/// Writes the sums of a row to `to`, which may be shorter.
#[inline(always)]
fn write_row<S: Level, T: Float>(sums: &[S::Vector; VECTORS], mode: StoreMode, to: &mut [T]) {
    for (&sum, to) in sums.iter().zip(to.chunks_mut(S::WIDTH)) {
        let mut last = [0.0; LANES];
        // SAFETY: the array holds a vector.
        unsafe { S::store(last.as_mut_ptr(), sum) };
        let is_added = mode == StoreMode::Add;
        to.iter_mut().zip(last).for_each(|(to, sum)| *to = T::store(if is_added { to.load() + sum } else { sum }));
    }
}
