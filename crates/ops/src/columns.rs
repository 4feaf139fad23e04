//! Blocks of columns of matrices: taken apart, put together, repeated, and added up again.
//!
//! Latent attention splits a projection into parts and joins parts to heads; the gradient of a repetition is a sum.

use moeworks_tensor::{DType, Tensor};

use crate::Context;
use crate::cuda::{self, On};
use crate::parallel::{PIECE, piece_range};
use crate::simd::{Float, with_float};

/// Equally wide blocks of a matrix's columns: the first begins at column `start`, each next one `step` further. A step of 0
/// names one block again and again.
#[derive(Clone, Copy, Debug)]
pub struct Columns {
    /// The first block's first column.
    pub start: usize,
    /// Columns from one block to the next.
    pub step: usize,
}

/// How many blocks there are, and how wide they are.
#[derive(Clone, Copy, Debug)]
pub struct Blocks {
    /// Blocks.
    pub count: usize,
    /// Columns of each.
    pub width: usize,
}

/// Copies blocks of columns of `from` `[T, ..]` (f32 or bf16) to those of `to` `[T, ..]`, which is of the same type and
/// otherwise stays as it is.
pub fn copy_columns(
    ctx: &Context,
    blocks: Blocks,
    (from, at): (&Tensor, Columns),
    (to, to_at): (&mut Tensor, Columns),
) {
    assert_eq!(from.dtype(), to.dtype(), "copy_columns: types");
    check(blocks, (from, at), (to, to_at));
    // Where a block is named again the last counts, which threads of a GPU do not know of each other.
    let are_apart = blocks.count < 2 || to_at.step >= blocks.width;
    if let Some(on) = On::taking(ctx, &[to.dtype()]).filter(|_| are_apart) {
        return cuda::elementwise::copy_columns(on, blocks, (from, at), (to, to_at));
    }
    with_float!(to.dtype(), T => {
        let values = from.slice::<T>();
        for_rows::<T>(ctx, blocks, (from, at), (to, to_at), |row, from, to| {
            to.copy_from_slice(&values[row * from.1 + from.0..][..to.len()]);
        });
    });
}

/// Adds blocks of columns of `from` to those of `to`, both f32.
pub fn add_columns(ctx: &Context, blocks: Blocks, (from, at): (&Tensor, Columns), (to, to_at): (&mut Tensor, Columns)) {
    assert_eq!((from.dtype(), to.dtype()), (DType::F32, DType::F32), "add_columns: types");
    check(blocks, (from, at), (to, to_at));
    if let Some(on) = On::of(ctx) {
        return cuda::elementwise::add_columns(on, blocks, (from, at), (to, to_at));
    }
    let values = from.f32s();
    for_rows::<f32>(ctx, blocks, (from, at), (to, to_at), |row, from, to| {
        to.iter_mut().zip(&values[row * from.1 + from.0..]).for_each(|(to, from)| *to += from);
    });
}

fn check(Blocks { count, width }: Blocks, (from, at): (&Tensor, Columns), (to, to_at): (&Tensor, Columns)) {
    let (from_cols, cols) = (from.cols(), to.cols());
    let fits = |at: Columns, cols: usize| count == 0 || at.start + (count - 1) * at.step + width <= cols;
    let are_there = from.rows() == to.rows() && fits(at, from_cols) && fits(to_at, cols);
    assert!(are_there, "columns {at:?} to {to_at:?} of {cols}");
}

/// Calls `f` with the row, the first column and the number of columns of `from`, and the block of `to`, for every block.
fn for_rows<T: Float>(
    ctx: &Context,
    Blocks { count, width }: Blocks,
    (from, at): (&Tensor, Columns),
    (to, to_at): (&mut Tensor, Columns),
    f: impl Fn(usize, (usize, usize), &mut [T]) + Sync,
) {
    let (from_cols, cols, rows) = (from.cols(), to.cols(), to.rows());
    if to.is_empty() {
        return;
    }
    let rows_per_task = (PIECE / cols).max(1);
    ctx.threads().run_pieces(to.slice_mut::<T>(), rows_per_task * cols, |task, to| {
        for (row, to) in piece_range(task, rows_per_task, rows).zip(to.chunks_exact_mut(cols)) {
            for block in 0..count {
                let start = to_at.start + block * to_at.step;
                f(row, (at.start + block * at.step, from_cols), &mut to[start..start + width]);
            }
        }
    });
}
