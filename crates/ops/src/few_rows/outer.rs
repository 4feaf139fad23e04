//! `A^T B` of few rows, the gradient of a matrix of weights: a few outer products, which costs what writing costs.
//!
//! A gradient that replaces what is in its buffer is written past the caches: a store that first fetches the line that it
//! overwrites would move twice the bytes. A group without rows is zeros then; one whose gradient is added costs nothing.

use std::borrow::Cow;

use super::rows::load_row;
use crate::Context;
use crate::gemm::store::Store;
use crate::gemm::{Group, Product, Slots};
use crate::linear::Write;
use crate::parallel::{Lent, piece_range};
use crate::simd::{Level, fence, kernel};

/// The most rows that are taken as outer products.
const MAX_FEW: usize = 16;

/// Bytes that a task writes, about.
const TASK_BYTES: usize = 512 << 10;

/// Gradients of fewer bytes may still be in a cache when they are read next, and are written the usual way.
const STREAM_BYTES: usize = 8 << 20;

/// Rows of the result that are computed together.
const ROWS: usize = 4;

/// Where the gradients go: matrices of one buffer, rows `stride` apart, the first of each group at its offset.
pub(crate) struct Gradients<'a> {
    pub(crate) to: Lent<'a, f32>,
    pub(crate) offsets: &'a [usize],
    pub(crate) stride: usize,
    pub(crate) write: Write,
}

/// Computes products of the form `A^T B`, whatever the number of rows.
pub(crate) fn weight_gradients(ctx: &Context, product: &Product<'_>, gradients: Gradients<'_>) {
    let is_few = |group: &Group<'_>| group.depth <= MAX_FEW && group.columns == gradients.stride;
    let mut tasks = Vec::new();
    for (index, group) in product.groups.iter().enumerate().filter(|(_, group)| is_few(group)) {
        if group.depth == 0 && gradients.write == Write::Add {
            continue;
        }
        let rows = (TASK_BYTES / (4 * group.columns).max(1)).next_multiple_of(ROWS);
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
    crate::gemm::run(ctx, &Product { groups: &groups, ..*product }, &Store { to, offsets: &offsets, stride, write });
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
    let is_streamed = gradients.write == Write::Replace && bytes >= STREAM_BYTES;
    let units = |task: &Task| {
        let group = &product.groups[task.group];
        group.depth * (row_room(group.columns) + row_room(task.rows.len()))
    };
    let scratch_units = tasks.iter().map(units).max().unwrap_or(0);
    let num_threads = ctx.threads().count().min(tasks.len());
    let mut scratch = ctx.empty(&[num_threads, scratch_units], moeworks_tensor::DType::U32);
    let scratch = Slots::new(&mut scratch, num_threads);
    ctx.threads().run(tasks.len(), |index| {
        let task = &tasks[index];
        let group = &product.groups[task.group];
        scratch.with(|scratch, _| {
            let (b, a) = bytemuck::cast_slice_mut(scratch).split_at_mut(group.depth * row_room(group.columns));
            let (b_stride, a_stride) = (row_room(group.columns), row_room(task.rows.len()));
            for row in 0..group.depth {
                let part = (row, 0, group.columns);
                load_row(ctx.isa(), &group.b, part, product.compute, &mut b[row * b_stride..][..b_stride]);
                let part = (row, task.rows.start, task.rows.len());
                load_row(ctx.isa(), &group.a, part, product.compute, &mut a[row * a_stride..][..a_stride]);
            }
            let start = gradients.offsets[task.group] + task.rows.start * gradients.stride;
            // SAFETY: the tasks' rows do not overlap, nor do the groups' matrices.
            let to = unsafe { gradients.to.range(start..start + task.rows.len() * gradients.stride) };
            let sums = Sums { a, a_stride, b, b_stride, depth: group.depth };
            outer_kernel(ctx.isa(), sums, gradients.write, is_streamed, group.columns, to);
        });
        if is_streamed {
            fence();
        }
    });
}

/// Elements of scratch for a row: whole cache lines.
fn row_room(len: usize) -> usize {
    len.next_multiple_of(16)
}

/// The operands of some rows of the gradient: `depth` rows of each.
#[derive(Clone, Copy)]
struct Sums<'a> {
    a: &'a [f32],
    a_stride: usize,
    b: &'a [f32],
    b_stride: usize,
    depth: usize,
}

kernel! {
    fn outer_kernel<S: Level>(sums: Sums<'_>, write: Write, is_streamed: bool, columns: usize, to: &mut [f32]) {
        assert!(sums.b_stride >= columns && sums.b.len() >= sums.depth * sums.b_stride);
        assert!(sums.a_stride * columns >= to.len() && sums.a.len() >= sums.depth * sums.a_stride);
        let whole = columns / S::WIDTH * S::WIDTH;
        let is_aligned = to.as_ptr().addr().is_multiple_of(4 * S::WIDTH) && columns.is_multiple_of(S::WIDTH);
        for (block, to) in to.chunks_mut(ROWS * columns).enumerate() {
            let first = block * ROWS;
            // SAFETY: as asserted, all rows of `a` and `b` have the elements that are read; `to` has the rows that are
            // written, aligned where they are streamed.
            unsafe {
                match (to.len() / columns, write == Write::Add, is_streamed && is_aligned) {
                    (ROWS, false, true) => sums.rows::<S, ROWS, false, true>(first, whole, columns, to),
                    (ROWS, false, false) => sums.rows::<S, ROWS, false, false>(first, whole, columns, to),
                    (ROWS, true, _) => sums.rows::<S, ROWS, true, false>(first, whole, columns, to),
                    (_, is_added, _) => {
                        for (row, to) in to.chunks_mut(columns).enumerate() {
                            if is_added {
                                sums.rows::<S, 1, true, false>(first + row, whole, columns, to);
                            } else {
                                sums.rows::<S, 1, false, false>(first + row, whole, columns, to);
                            }
                        }
                    }
                }
            }
        }
    }
}

impl Sums<'_> {
    /// `N` rows of the gradient from row `first` on, whole vectors up to column `whole`.
    ///
    /// # Safety
    /// The rows must exist in `a`, the columns in `b`, both in `to`; with `STREAM`, rows of `to` are whole aligned vectors.
    #[inline(always)]
    unsafe fn rows<S: Level, const N: usize, const ADD: bool, const STREAM: bool>(
        &self,
        first: usize,
        whole: usize,
        columns: usize,
        to: &mut [f32],
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let (a, b, to) = (self.a.as_ptr().add(first), self.b.as_ptr(), to.as_mut_ptr());
            for column in (0..whole).step_by(S::WIDTH) {
                let mut sums = [S::splat(0.0); N];
                for k in 0..self.depth {
                    let b = S::load(b.add(k * self.b_stride + column));
                    for (n, sum) in sums.iter_mut().enumerate() {
                        *sum = S::vector_mul_add(S::splat(*a.add(k * self.a_stride + n)), b, *sum);
                    }
                }
                for (n, &sum) in sums.iter().enumerate() {
                    let to = to.add(n * columns + column);
                    if STREAM {
                        S::stream(to, sum);
                    } else {
                        S::store(to, if ADD { S::vector_mul_add(sum, S::splat(1.0), S::load(to)) } else { sum });
                    }
                }
            }
            for column in whole..columns {
                for n in 0..N {
                    let terms =
                        (0..self.depth).map(|k| (*a.add(k * self.a_stride + n), *b.add(k * self.b_stride + column)));
                    let sum = terms.fold(0.0, |sum, (a, b)| S::mul_add(a, b, sum));
                    let to = to.add(n * columns + column);
                    *to = if ADD { *to + sum } else { sum };
                }
            }
        }
    }
}
