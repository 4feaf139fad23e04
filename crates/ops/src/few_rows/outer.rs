//! `A^T B` of few rows, the gradient of a matrix of weights: a few outer products, which costs what writing costs.
//!
//! A gradient that replaces what is in its buffer is written past the caches: a store that first fetches the line that it
//! overwrites would move twice the bytes. A group without rows is zeros then; one whose gradient is added costs nothing.

use std::borrow::Cow;

use crate::Context;
use crate::gemm::kernel::Kernels;
use crate::gemm::source::{Format, Source, pack_straight};
use crate::gemm::store::{Store, Stream};
use crate::gemm::{Compute, Group, Panels, Product, Slots};
use crate::linear::Write;
use crate::parallel::{Lent, piece_range};
use crate::simd::{Level, fence, kernel};

/// The most rows that are taken as outer products.
const MAX_FEW: usize = 16;

/// The same where vectors are wide and there are no tiles of AMX: sums then go from registers to where they belong, which the products
/// of so few rows do not make up for elsewhere.
const MAX_FEW_WIDE: usize = 64;

/// Bytes that a task writes, about.
const TASK_BYTES: usize = 512 << 10;

/// Gradients of fewer bytes may still be in a cache when they are read next, and are written the usual way.
const STREAM_BYTES: usize = 8 << 20;

/// Lanes of the widest vector.
const LANES: usize = 16;

/// Vectors of columns that are computed together, and rows: as many as there are registers for their sums.
const VECTORS: usize = 2;

const fn tile_rows(lanes: usize) -> usize {
    if lanes >= LANES { 8 } else { 4 }
}

/// Where the gradients go: matrices of one buffer, rows `stride` apart, the first of each group at its offset.
pub(crate) struct Gradients<'a> {
    pub(crate) to: Lent<'a, f32>,
    pub(crate) offsets: &'a [usize],
    pub(crate) stride: usize,
    pub(crate) write: Write,
}

/// Computes products of the form `A^T B`, whatever the number of rows.
pub(crate) fn weight_gradients(ctx: &Context, product: &Product<'_>, gradients: Gradients<'_>) {
    let kernels = Kernels::select(ctx.isa(), product.compute);
    let most = if kernels.lanes == LANES && !kernels.are_tiles { MAX_FEW_WIDE } else { MAX_FEW };
    let is_few = |group: &Group<'_>| group.depth <= most && group.columns == gradients.stride;
    let mut tasks = Vec::new();
    for (index, group) in product.groups.iter().enumerate().filter(|(_, group)| is_few(group)) {
        if group.depth == 0 && gradients.write == Write::Add {
            continue;
        }
        let rows = (TASK_BYTES / (4 * group.columns).max(1)).next_multiple_of(tile_rows(LANES));
        let num_tasks = if group.columns == 0 { 0 } else { group.rows.div_ceil(rows) };
        tasks.extend((0..num_tasks).map(|task| Task { group: index, rows: piece_range(task, rows, group.rows) }));
    }
    run_tasks(ctx, product, &gradients, &tasks);

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
    let bytes: usize = groups.iter().map(|group| 4 * group.rows * stride).sum();
    let product = Product { groups: &groups, ..*product };
    if is_streamed(write, bytes) {
        crate::gemm::run(ctx, &product, &Stream { to, offsets: &offsets, stride });
    } else {
        crate::gemm::run(ctx, &product, &Store { to, offsets: &offsets, stride, write });
    }
}

/// Whether gradients are written past the caches.
fn is_streamed(write: Write, bytes: usize) -> bool {
    write == Write::Replace && bytes >= STREAM_BYTES
}

/// Some rows of a group's gradient.
struct Task {
    group: usize,
    rows: std::ops::Range<usize>,
}

fn run_tasks(ctx: &Context, product: &Product<'_>, gradients: &Gradients<'_>, tasks: &[Task]) {
    if tasks.is_empty() {
        return;
    }
    let bytes: usize = tasks.iter().map(|task| 4 * task.rows.len() * gradients.stride).sum();
    let is_streamed = is_streamed(gradients.write, bytes);
    let put = match gradients.write {
        Write::Add => Put::Add,
        Write::Replace if is_streamed => Put::Stream,
        Write::Replace => Put::Store,
    };
    let kernels = Kernels::select(ctx.isa(), product.compute);
    let format = Format { multiple: 1, ..kernels.format(product.compute) };
    let layout = |task: &Task| {
        let group = &product.groups[task.group];
        let units = format.units_of(group.depth);
        let [b, a] = [(group.columns, VECTORS * kernels.lanes), (task.rows.len(), tile_rows(kernels.lanes))];
        [b, a].map(|(len, width)| units * len.next_multiple_of(width))
    };
    let scratch_units = tasks.iter().map(|task| layout(task).iter().sum()).max().unwrap_or(0);
    let num_threads = ctx.threads().count().min(tasks.len());
    let mut scratch = ctx.empty(&[num_threads, scratch_units], moeworks_tensor::DType::U32);
    let scratch = Slots::new(&mut scratch, num_threads);
    ctx.threads().run(tasks.len(), |index| {
        let task = &tasks[index];
        let group = &product.groups[task.group];
        scratch.with(|scratch, held| {
            let [b_units, a_units] = layout(task);
            let (b, a) = scratch.split_at_mut(b_units);
            let a = &mut a[..a_units];
            // The thread's last task may have left it.
            if held.rows_of.replace((task.group, 0)) != Some((task.group, 0)) {
                let columns = (0, group.columns);
                lay_out(ctx.isa(), &group.b, group.depth, columns, VECTORS * kernels.lanes, format, b);
            }
            let rows = (task.rows.start, task.rows.len());
            lay_out(ctx.isa(), &group.a, group.depth, rows, tile_rows(kernels.lanes), format, a);
            let start = gradients.offsets[task.group] + task.rows.start * gradients.stride;
            // SAFETY: the tasks' rows do not overlap, nor do the groups' matrices.
            let to = unsafe { gradients.to.range(start..start + task.rows.len() * gradients.stride) };
            let (a, b) = (bytemuck::cast_slice(a), bytemuck::cast_slice(b));
            let num_units = format.units_of(group.depth);
            let sums = Sums { a, b, num_units, are_pairs: format.units == Compute::Bf16 };
            outer_kernel(ctx.isa(), sums, put, group.columns, to);
        });
        if is_streamed {
            fence();
        }
    });
}

kernel! {
    bf16
    /// Brings some columns of a source's first rows, their first and how many, into units: panels `[unit][width]`, with zeros beyond.
    fn lay_out<S: Level>(
        source: &Source<'_>,
        depth: usize,
        columns: (usize, usize),
        width: usize,
        format: Format,
        to: &mut [u32],
    ) {
        let (first, len) = columns;
        let source = Source { offset: source.offset + first, ..*source };
        let panels = Panels::equal(len, width);
        pack_straight::<S>(&source, (0, depth), &panels, 0..panels.count, format, to);
    }
}

/// How sums come to where they belong.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Put {
    Store,
    /// Past the caches, where vectors are aligned.
    Stream,
    Add,
}

/// The operands of some rows of the gradient, of f32 or of pairs of bf16: panels `[unit][tile_rows]` and `[unit][VECTORS * lanes]`.
#[derive(Clone, Copy)]
struct Sums<'a> {
    a: &'a [f32],
    b: &'a [f32],
    num_units: usize,
    are_pairs: bool,
}

kernel! {
    bf16
    fn outer_kernel<S: Level>(sums: Sums<'_>, put: Put, columns: usize, to: &mut [f32]) {
        let is_aligned = to.as_ptr().addr().is_multiple_of(4 * S::WIDTH) && columns.is_multiple_of(S::WIDTH);
        let put = if put == Put::Stream && !is_aligned { Put::Store } else { put };
        for (block, to) in to.chunks_mut(tile_rows(S::WIDTH) * columns).enumerate() {
            if S::WIDTH >= 16 {
                sums.rows::<S, 8>(block, put, columns, to);
            } else {
                sums.rows::<S, 4>(block, put, columns, to);
            }
        }
    }
}

impl Sums<'_> {
    /// Up to `N` rows of the gradient, which `to` has, with panel `block` of `a`.
    #[inline(always)]
    fn rows<S: Level, const N: usize>(&self, block: usize, put: Put, columns: usize, to: &mut [f32]) {
        let (width, len) = (VECTORS * S::WIDTH, to.len() / columns);
        let a = &self.a[block * self.num_units * N..][..self.num_units * N];
        for (panel, column) in (0..columns).step_by(width).enumerate() {
            let b = &self.b[panel * self.num_units * width..][..self.num_units * width];
            let sums =
                if S::HAS_PAIR_DOT && self.are_pairs { tile::<S, true, N>(a, b) } else { tile::<S, false, N>(a, b) };
            if len == N && column + width <= columns {
                assert!(to.len() >= (N - 1) * columns + column + width, "a tile inside the result");
                // SAFETY: as asserted; rows are whole aligned vectors where they are streamed.
                unsafe { put_tile::<S, N>(&sums, put, to.as_mut_ptr().add(column), columns) };
                continue;
            }
            let columns_here = width.min(columns - column);
            for (sums, to) in sums.iter().take(len).zip(to[column..].chunks_mut(columns)) {
                put_row::<S>(sums, put, &mut to[..columns_here]);
            }
        }
    }
}

/// The sums of `N` rows and [`VECTORS`] vectors of columns: of the products of a panel's rows with each other.
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

/// Brings a tile of sums to `to`, whose rows are `stride` apart.
///
/// # Safety
/// They must be writable there, and be aligned where they are streamed.
#[inline(always)]
unsafe fn put_tile<S: Level, const N: usize>(sums: &[[S::Vector; VECTORS]; N], put: Put, to: *mut f32, stride: usize) {
    // Each way has a loop of its own, so that the sums stay in registers.
    let places = |n: usize, v: usize| to.wrapping_add(n * stride + v * S::WIDTH);
    // SAFETY: the caller's promise.
    unsafe {
        match put {
            Put::Store => each(sums, |n, v, sum| S::store(places(n, v), sum)),
            Put::Stream => each(sums, |n, v, sum| S::stream(places(n, v), sum)),
            Put::Add => {
                each(sums, |n, v, sum| {
                    S::store(places(n, v), S::vector_mul_add(sum, S::splat(1.0), S::load(places(n, v))));
                });
            }
        }
    }
}

/// Calls `put` with each vector of a tile and where it is.
#[inline(always)]
fn each<V: Copy, const N: usize>(sums: &[[V; VECTORS]; N], mut put: impl FnMut(usize, usize, V)) {
    for (n, sums) in sums.iter().enumerate() {
        for (v, &sum) in sums.iter().enumerate() {
            put(n, v, sum);
        }
    }
}

/// Brings the sums of a row to `to`, which may be shorter.
#[inline(always)]
fn put_row<S: Level>(sums: &[S::Vector; VECTORS], put: Put, to: &mut [f32]) {
    for (&sum, to) in sums.iter().zip(to.chunks_mut(S::WIDTH)) {
        let mut last = [0.0; LANES];
        // SAFETY: there is room for a vector.
        unsafe { S::store(last.as_mut_ptr(), sum) };
        let is_added = put == Put::Add;
        to.iter_mut().zip(last).for_each(|(to, sum)| *to = if is_added { *to + sum } else { sum });
    }
}
