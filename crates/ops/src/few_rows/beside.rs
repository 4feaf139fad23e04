//! Gradients of matrices, written where a product `A B` of few rows reads them.
//!
//! The gradient of B is `A^T X`: it has the shape of B, and its factors are those of the product. So a strip of the product, some rows
//! and a block of columns of B at a time, writes the same rows and columns of the gradient as it goes. Memory takes what is written
//! while it gives what is read: line by line both together take little more time than the longer one, and task by task much of the sum.

use std::ops::Range;

use super::Gradients;
use super::axpy::{self, Strip};
use super::outer::{Operands, Put, Sums, tile_rows, weight_gradients_beside};
use crate::Context;
use crate::gemm::kernel::Kernels;
use crate::gemm::plan::{Chooser, GemmKernel};
use crate::gemm::source::{Elements, Source, with_elements};
use crate::gemm::{self, Finish, Form, Group, Product};
use crate::linear::Write;
use crate::parallel::{LINE, Lent};
use crate::simd::{Float, Level};

/// Gradients of fewer bytes may still be in a cache when they are read next. What is written here goes past the caches: stores that first
/// fetch the lines that they overwrite are slower one by one in many rows than along a row.
const MIN_BYTES: usize = 2 << 20;

/// Computes `product`, of the form `A B`, and the gradients of matrices `A^T X`, of the form `A^T B`. Groups of these that have rows are
/// those of `product`, in its order and with its A; others are zeros.
pub(crate) fn product_with_gradients<G: Float>(
    ctx: &Context,
    (product, epilogue): (&Product<'_>, &dyn Finish),
    matrices: &Product<'_>,
    gradients: Gradients<'_, G>,
) {
    // Batch invariance is of forward passes alone.
    let plans = Chooser::new(ctx.isa(), product.compute, false).choose_all(product);
    let Gradients { to, offsets, stride, write } = gradients;
    let is_taken = |index: usize, group: &Group<'_>, offset: usize| {
        let are_lines = to.is_line(offset) && (stride * size_of::<G>()).is_multiple_of(LINE);
        let is_skinny = plans[index].kernel == GemmKernel::Skinny;
        are_lines && group.columns == stride && product.form == Form::Nn && is_skinny
    };
    let mut groups = product.groups.iter();
    let (mut rest, mut rest_offsets) = (Vec::new(), Vec::new());
    let mut taken = vec![None; product.groups.len()];
    for (matrix, &offset) in matrices.groups.iter().zip(offsets) {
        let index = product.groups.len() - groups.len();
        let group = if matrix.depth > 0 { groups.next() } else { None };
        if group.is_some_and(|group| is_taken(index, group, offset)) {
            taken[index] = Some((matrix.b, offset));
        } else {
            rest.push(*matrix);
            rest_offsets.push(offset);
        }
    }
    let of_taken = product.groups.iter().zip(&taken).filter(|(_, taken)| taken.is_some());
    let bytes: usize = of_taken.map(|(group, _)| size_of::<G>() * group.depth * group.columns).sum();
    let is_beside = write == Write::Replace && bytes >= MIN_BYTES;
    let beside = Beside { taken: &taken, to, stride };
    let beside: Option<&dyn StripGradients> = if is_beside { Some(&beside) } else { None };
    gemm::with_tasks(ctx, product, epilogue, beside, |tasks| {
        let (groups, offsets) = if is_beside { (&*rest, &*rest_offsets) } else { (matrices.groups, offsets) };
        let matrices = Product { groups, ..*matrices };
        weight_gradients_beside(ctx, &matrices, Gradients { to, offsets, stride, write }, Some(tasks));
    });
}

/// The rows of X of each group whose gradient is written here, and where it begins.
struct Beside<'a, G> {
    taken: &'a [Option<(Source<'a>, usize)>],
    to: Lent<'a, G>,
    stride: usize,
}

/// [`Beside`] of any type of gradients.
pub(crate) trait StripGradients: Sync {
    /// Whether the gradient of a group is written here.
    fn has(&self, group: usize) -> bool;

    /// Sums up some columns of a group's product into `sums`, whose rows are `to_stride` long, from factors `a`, and writes the gradient
    /// of those columns of B. `room` has [`room_words`].
    fn sum_strip(&self, kernels: &Kernels, of: StripOf<'_>, a: &mut [f32], sums: (&mut [f32], usize), room: &mut [u32]);
}

/// Which columns of a group of a product.
pub(crate) struct StripOf<'a> {
    pub(crate) isa: crate::Isa,
    pub(crate) product: &'a Product<'a>,
    pub(crate) group: usize,
    pub(crate) columns: Range<usize>,
}

/// Words of room that [`StripGradients::sum_strip`] needs.
pub(super) fn room_words(product: &Product<'_>, group: &Group<'_>, columns: usize, kernels: &Kernels) -> usize {
    let operands = Operands::of(kernels, product.compute, group.rows);
    (operands.words_of_a(group.depth) + operands.words_of_b(columns)).next_multiple_of(LINE / 4)
}

impl<G: Float> StripGradients for Beside<'_, G> {
    fn has(&self, group: usize) -> bool {
        self.taken[group].is_some()
    }

    fn sum_strip(
        &self,
        kernels: &Kernels,
        of: StripOf<'_>,
        a: &mut [f32],
        sums: (&mut [f32], usize),
        room: &mut [u32],
    ) {
        let StripOf { isa, product, group: index, columns } = of;
        let group = &product.groups[index];
        let (x, offset) = self.taken[index].expect("a group whose gradient is written here");
        // Both have the product's rows as their depth.
        let operands = Operands::of(kernels, product.compute, group.rows);
        let (of_a, of_x) = room.split_at_mut(operands.words_of_a(group.depth));
        let of_x = &mut of_x[..operands.words_of_b(columns.len())];
        operands.lay_out_a(isa, &group.a, (0, group.depth), of_a);
        operands.lay_out_b(isa, &x, (columns.start, columns.len()), of_x);
        let range = offset..offset + group.depth * self.stride;
        assert!(columns.end <= self.stride, "columns of a gradient");
        let to = self.to.start_of(&range).wrapping_add(columns.start);
        // SAFETY: the matrix is inside the slice that was lent, and no other task writes to these columns of it.
        let gradient =
            unsafe { Gradient::new(operands.sums(of_a, of_x), (to, self.stride), (group.depth, columns.len())) };
        let (sums, to_stride) = sums;
        with_elements!(group.b.elements, weights => {
            axpy::run_beside(isa, Strip::of(group, weights, columns, a.len()), a, sums, to_stride, gradient);
        });
    }
}

/// The gradient of a strip of a matrix.
#[derive(Clone, Copy)]
pub(super) struct Gradient<'a, G> {
    operands: Sums<'a>,
    /// Its first element.
    to: *mut G,
    /// Elements from one row to the next.
    stride: usize,
    /// Rows and columns.
    size: (usize, usize),
}

impl<'a, G: Float> Gradient<'a, G> {
    /// # Safety
    /// While this lives so many rows and columns must be writable there, rows `stride` apart, and nobody else may write to them.
    unsafe fn new(operands: Sums<'a>, (to, stride): (*mut G, usize), size: (usize, usize)) -> Self {
        Self { operands, to, stride, size }
    }

    /// Writes a block of two vectors of columns of some rows. False where these are not whole tiles, which are then left.
    #[inline(always)]
    pub(super) fn write<S: Level>(&self, rows: Range<usize>, column: usize) -> bool {
        let tile = tile_rows(S::WIDTH);
        if !rows.len().is_multiple_of(tile) {
            return false;
        }
        for row in rows.step_by(tile) {
            self.write_tile::<S>(row, column);
        }
        true
    }

    /// As [`write`](Self::write) for all rows from one on that a tile begins with.
    #[inline(always)]
    pub(super) fn write_from<S: Level>(&self, row: usize, column: usize) {
        for row in (row..self.size.0).step_by(tile_rows(S::WIDTH)) {
            self.write_tile::<S>(row, column);
        }
    }

    #[inline(always)]
    fn write_tile<S: Level>(&self, row: usize, column: usize) {
        let (rows, columns) = self.size;
        assert!(row < rows && column < columns, "a tile of a gradient");
        let at = (row / tile_rows(S::WIDTH), column);
        let put = Put::Stream.where_aligned::<S, G>(self.to, self.stride);
        // SAFETY: `new`'s caller promised the rows and columns from these on; blocks of columns of aligned rows are aligned.
        unsafe {
            let to = self.to.add(row * self.stride + column);
            self.operands.put::<S, G>(at, (rows - row, columns - column), put, to, self.stride);
        }
    }
}
