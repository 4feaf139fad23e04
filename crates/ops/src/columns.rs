//! Blocks of columns of matrices: copied, repeated, and summed.
//!
//! Latent attention splits a projection into parts and joins parts to heads; the gradient of a repetition is a sum.

use moeworks_tensor::{DType, Tensor};

use crate::Context;
use crate::cuda::{self, On};
use crate::parallel::{PIECE, piece_range};
use crate::simd::{Float, with_float};

/// Equally wide blocks of a matrix's columns: the first begins at column `start`, each next one `step` further. With
/// a step of 0 all are the same block.
#[derive(Clone, Copy, Debug)]
pub struct Columns {
    /// The first block's first column.
    pub start: usize,
    /// Columns from one block to the next.
    pub step: usize,
}

/// The number of blocks, and their width.
#[derive(Clone, Copy, Debug)]
pub struct Blocks {
    /// Number of blocks.
    pub count: usize,
    /// Columns of each block.
    pub width: usize,
}

/// Copies blocks of columns of `from` `[T, ..]` (f32 or bf16) to those of `to` `[T, ..]`, which has the same type.
/// Other columns of `to` stay as they are.
pub fn copy_columns(ctx: &Context, blocks: Blocks, from: &Tensor, from_at: Columns, to: &mut Tensor, to_at: Columns) {
    assert_eq!(from.dtype(), to.dtype(), "copy_columns: types");
    check(blocks, from, from_at, to, to_at);
    // If target blocks overlap the last one wins, an order that threads of a GPU do not keep.
    let are_apart = blocks.count < 2 || to_at.step >= blocks.width;
    if let Some(on) = On::taking(ctx, &[to.dtype()]).filter(|_| are_apart) {
        return cuda::elementwise::copy_columns(on, blocks, from, from_at, to, to_at);
    }
    with_float!(to.dtype(), T => {
        let values = from.slice::<T>();
        for_rows::<T>(ctx, blocks, to, to_at, |row, block, to| {
            let start = from_at.start + block * from_at.step;
            to.copy_from_slice(&values[row * from.cols() + start..][..to.len()]);
        });
    });
}

/// Adds blocks of columns of `from` to those of `to`, both f32.
pub fn add_columns(ctx: &Context, blocks: Blocks, from: &Tensor, from_at: Columns, to: &mut Tensor, to_at: Columns) {
    assert_eq!((from.dtype(), to.dtype()), (DType::F32, DType::F32), "add_columns: types");
    check(blocks, from, from_at, to, to_at);
    if let Some(on) = On::of(ctx) {
        return cuda::elementwise::add_columns(on, blocks, from, from_at, to, to_at);
    }
    let values = from.f32s();
    for_rows::<f32>(ctx, blocks, to, to_at, |row, block, to| {
        let start = from_at.start + block * from_at.step;
        to.iter_mut().zip(&values[row * from.cols() + start..]).for_each(|(to, from)| *to += from);
    });
}

fn check(blocks: Blocks, from: &Tensor, from_at: Columns, to: &Tensor, to_at: Columns) {
    let Blocks { count, width } = blocks;
    let (from_cols, cols) = (from.cols(), to.cols());
    let fits = |at: Columns, cols: usize| count == 0 || at.start + (count - 1) * at.step + width <= cols;
    let are_there = from.rows() == to.rows() && fits(from_at, from_cols) && fits(to_at, cols);
    assert!(are_there, "columns out of range: {from_at:?} of {from_cols}, {to_at:?} of {cols}");
}

/// Calls `f` with the row, the number of the block and the block of `to`, for every block of every row.
fn for_rows<T: Float>(
    ctx: &Context,
    blocks: Blocks,
    to: &mut Tensor,
    to_at: Columns,
    f: impl Fn(usize, usize, &mut [T]) + Sync,
) {
    let (Blocks { count, width }, cols, rows) = (blocks, to.cols(), to.rows());
    if to.is_empty() {
        return;
    }
    let rows_per_task = (PIECE / cols).max(1);
    ctx.threads().run_pieces(to.slice_mut::<T>(), rows_per_task * cols, |task, to| {
        for (row, to) in piece_range(task, rows_per_task, rows).zip(to.chunks_exact_mut(cols)) {
            for block in 0..count {
                let start = to_at.start + block * to_at.step;
                f(row, block, &mut to[start..start + width]);
            }
        }
    });
}
