//! Rows of a table by id, and the gradient that adds rows back.

use moeworks_tensor::{DType, Tensor};

use crate::cuda::{self, On};
use crate::deferred::List;
use crate::parallel::{Lent, PIECE, is_far, piece_range, prefetch_elements_far};
use crate::sampling::DrawnTokens;
use crate::simd::{Float, LANES, fence, kernel, stream_lanes, with_float, with_stored};
use crate::{Context, quantized};

/// Returns `y [T, D]`: row `ids[t]` of `table` `[V, D]` (f32, bf16, f16 or quantized) as `out`. Every id must be
/// below V.
#[must_use]
pub fn embedding(ctx: &Context, ids: &[u32], table: &Tensor, out: DType) -> Tensor {
    check_ids(ids, table);
    rows_of_ids(ctx, ids.into(), table, out)
}

/// Returns the rows of drawn tokens as [`embedding`] does. They were drawn from at most V, so that a GPU need not
/// wait for a check.
#[must_use]
pub fn embedding_of_drawn(ctx: &Context, drawn: &DrawnTokens, table: &Tensor, out: DType) -> Tensor {
    let (vocabulary, rows) = (drawn.vocabulary(), table.rows());
    assert!(vocabulary <= rows, "embedding: tokens drawn from {vocabulary} in a table of {rows} rows");
    rows_of_ids(ctx, drawn.ids().into(), table, out)
}

fn rows_of_ids(ctx: &Context, ids: List<'_, u32>, table: &Tensor, out: DType) -> Tensor {
    let cols = table.cols();
    if let Some(on) = On::taking(ctx, &[table.dtype()]) {
        return cuda::elementwise::embedding(on, ids, table, out);
    }
    if let Some(on) = On::of(ctx).filter(|_| table.dtype().is_quantized()) {
        return cuda::blocks::embedding(on, ids, table, out);
    }
    let (ids, mut y) = (&*ids, ctx.empty(&[ids.len(), cols], out));
    if cols == 0 {
        return y;
    }
    if table.dtype().is_quantized() {
        with_float!(out, Y => rows_of_blocks(ids, table, y.slice_mut::<Y>()));
        return y;
    }
    let rows_per_task = (PIECE / cols).max(1);
    let is_far = is_far(&y, cols);
    with_stored!(table.dtype(), X => with_float!(out, Y => {
        let table = table.slice::<X>();
        ctx.threads().run_pieces(y.slice_mut::<Y>(), rows_per_task * cols, |task, y| {
            let ids = &ids[piece_range(task, rows_per_task, ids.len())];
            gather_kernel::<X, Y>(ctx.isa(), ids, table, cols, is_far, y);
        });
    }));
    y
}

/// Decodes rows of a quantized table. Only inference uses it, where this is little of the work.
fn rows_of_blocks<Y: Float>(ids: &[u32], table: &Tensor, y: &mut [Y]) {
    let row_bytes = table.num_bytes() / table.rows();
    let mut row = vec![0.0; table.cols()];
    for (y, &id) in y.chunks_exact_mut(row.len()).zip(ids) {
        quantized::decode(table.dtype(), &table.bytes()[id as usize * row_bytes..][..row_bytes], &mut row);
        y.iter_mut().zip(&row).for_each(|(y, &x)| *y = Y::store(x));
    }
}

kernel! {
    fn gather_kernel<S: Level, X: Float, Y: Float>(ids: &[u32], table: &[X], cols: usize, is_far: bool, y: &mut [Y]) {
        for (t, (y, &id)) in y.chunks_exact_mut(cols).zip(ids).enumerate() {
            if let Some(&next) = ids.get(t + 1) {
                // Rows are anywhere in memory, so the hardware prefetcher cannot predict the next one.
                prefetch_elements_far(table.as_ptr().wrapping_add(next as usize * cols), cols);
            }
            let row = &table[id as usize * cols..][..cols];
            if is_far && Y::DTYPE == DType::F32 {
                let y: &mut [f32] = bytemuck::cast_slice_mut(y);
                for (y, x) in y.as_chunks_mut::<LANES>().0.iter_mut().zip(row.as_chunks::<LANES>().0) {
                    stream_lanes::<S>(&x.map(X::load), y);
                }
                continue;
            }
            for (y, x) in y.iter_mut().zip(row) {
                *y = Y::store(x.load());
            }
        }
        if is_far {
            fence();
        }
    }
}

/// Columns of the table that a task of [`embedding_backward`] owns: four cache lines.
const TASK_COLS: usize = 64;

/// Adds row t of `dy` `[T, D]` (f32 or bf16) to row `ids[t]` of `dtable` `[V, D]` (f32). A task owns some columns of
/// the table and goes through the tokens in order, so the sums do not depend on the number of threads.
pub fn embedding_backward(ctx: &Context, ids: &[u32], dy: &Tensor, dtable: &mut Tensor) {
    let cols = dtable.cols();
    check_ids(ids, dtable);
    assert_eq!((dy.len(), dy.cols()), (ids.len() * cols, cols), "embedding backward: dy {:?}", dy.shape());
    if let Some(on) = On::of(ctx) {
        return cuda::elementwise::embedding_backward(on, ids, dy, dtable);
    }
    with_float!(dy.dtype(), T => {
        let dy = dy.slice::<T>();
        let dtable = Lent::new(dtable.f32s_mut());
        ctx.threads().run(cols.div_ceil(TASK_COLS), |task| {
            scatter_kernel::<T>(ctx.isa(), ids, dy, cols, piece_range(task, TASK_COLS, cols), &dtable);
        });
    });
}

kernel! {
    /// Adds rows to the columns `own` of the table, which are the caller's alone.
    fn scatter_kernel<S: Level, T: Float>(
        ids: &[u32],
        dy: &[T],
        cols: usize,
        own: std::ops::Range<usize>,
        dtable: &Lent<'_, f32>,
    ) {
        for (dy, &id) in dy.chunks_exact(cols).zip(ids) {
            let start = id as usize * cols;
            // SAFETY: no other task has these columns, and this one holds one row at a time.
            let sums = unsafe { dtable.range(start + own.start..start + own.end) };
            for (sum, dy) in sums.iter_mut().zip(&dy[own.clone()]) {
                *sum += dy.load();
            }
        }
    }
}

fn check_ids(ids: &[u32], table: &Tensor) {
    let rows = table.rows();
    if let Some(id) = ids.iter().find(|&&id| id as usize >= rows) {
        panic!("embedding: id {id} in a table of {rows} rows");
    }
}
