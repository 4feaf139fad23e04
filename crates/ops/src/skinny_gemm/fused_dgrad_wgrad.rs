//! The input gradient and the weight gradient of a matrix in one pass, for few rows.
//!
//! The weight gradient `A^T X` has the shape of B and takes its factors from the same A as the input gradient `A B`.
//! So while a strip of `A B` reads some rows and a block of columns of B, it writes the same rows and columns of the
//! gradient. Reads and writes of memory overlap when they alternate line by line; run one after the other they take
//! nearly the sum of both times.

use std::ops::Range;

use super::Gradients;
use super::nn::{self, Strip, StripSums};
use super::tn::{GradientTile, Operands, StoreMode, Sums, tile_rows, weight_gradients_with_tasks};
use crate::Context;
use crate::gemm::kernel::Kernels;
use crate::gemm::plan::{Chooser, GemmKernel};
use crate::gemm::source::{Elements, Source, with_elements};
use crate::gemm::{self, Finish, Form, Group, Product};
use crate::linear::Write;
use crate::parallel::{LINE, Lent};
use crate::simd::{Float, Level};

/// Below so many bytes the weight gradient is computed on its own, because it may still be in a cache when it is read
/// next. Gradients written in this pass bypass the caches.
const MIN_BYTES: usize = 2 << 20;

/// Computes `product`, of the form `A B`, and the weight gradients `matrices`, of the form `A^T B`. The groups of
/// `matrices` with a depth above zero are those of `product`, in its order and with its A; gradients of the others
/// are zeros.
pub(crate) fn product_with_gradients<G: Float>(
    ctx: &Context,
    product: &Product<'_>,
    epilogue: &dyn Finish,
    matrices: &Product<'_>,
    gradients: Gradients<'_, G>,
) {
    // Only forward passes are batch invariant.
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
    let is_fused = write == Write::Replace && bytes >= MIN_BYTES;
    let fused = FusedGradients { taken: &taken, to, stride };
    let fused: Option<&dyn StripGradients> = if is_fused { Some(&fused) } else { None };
    gemm::with_tasks(ctx, product, epilogue, fused, |tasks| {
        let (groups, offsets) = if is_fused { (&*rest, &*rest_offsets) } else { (matrices.groups, offsets) };
        let matrices = Product { groups, ..*matrices };
        weight_gradients_with_tasks(ctx, &matrices, Gradients { to, offsets, stride, write }, Some(tasks));
    });
}

/// The weight gradients written in the pass over `product`: for each group the rows of X and the offset of the
/// gradient.
struct FusedGradients<'a, G> {
    taken: &'a [Option<(Source<'a>, usize)>],
    to: Lent<'a, G>,
    stride: usize,
}

/// Weight gradients written during a product, whatever their element type.
pub(crate) trait StripGradients: Sync {
    /// Returns whether the gradient of a group is written during the product.
    fn has(&self, group: usize) -> bool;

    /// Computes the sums of some columns of a group's product from the factors `a`, and writes the gradient of those
    /// columns of B. `scratch` has [`scratch_words`] words.
    fn sum_strip(&self, kernels: &Kernels, of: StripOf<'_>, a: &mut [f32], sums: StripSums<'_>, scratch: &mut [u32]);
}

/// The columns of a group that a strip covers.
pub(crate) struct StripOf<'a> {
    pub(crate) isa: crate::Isa,
    pub(crate) product: &'a Product<'a>,
    pub(crate) group: usize,
    pub(crate) columns: Range<usize>,
}

/// Returns how many words of scratch [`StripGradients::sum_strip`] needs.
pub(super) fn scratch_words(product: &Product<'_>, group: &Group<'_>, columns: usize, kernels: &Kernels) -> usize {
    let operands = Operands::new(kernels, product.compute, group.rows);
    (operands.words_of_a(group.depth) + operands.words_of_b(columns)).next_multiple_of(LINE / 4)
}

impl<G: Float> StripGradients for FusedGradients<'_, G> {
    fn has(&self, group: usize) -> bool {
        self.taken[group].is_some()
    }

    fn sum_strip(&self, kernels: &Kernels, of: StripOf<'_>, a: &mut [f32], sums: StripSums<'_>, scratch: &mut [u32]) {
        let StripOf { isa, product, group: index, columns } = of;
        let group = &product.groups[index];
        let (x, offset) = self.taken[index].expect("a group whose gradient is written here");
        // The rows of the product are the depth of both operands.
        let operands = Operands::new(kernels, product.compute, group.rows);
        let (of_a, of_x) = scratch.split_at_mut(operands.words_of_a(group.depth));
        let of_x = &mut of_x[..operands.words_of_b(columns.len())];
        operands.lay_out_a(isa, &group.a, 0..group.depth, of_a);
        operands.lay_out_b(isa, &x, columns.clone(), of_x);
        let range = offset..offset + group.depth * self.stride;
        assert!(columns.end <= self.stride, "columns of a gradient");
        let to = self.to.start_of(&range).wrapping_add(columns.start);
        // SAFETY: the matrix is inside the slice that was lent, and no other task writes to these columns of it.
        let gradient = unsafe { Gradient::new(operands.sums(of_a, of_x), to, self.stride, group.depth, columns.len()) };
        with_elements!(group.b.elements, weights => {
            nn::run_with_gradient(isa, Strip::new(group, weights, columns, a.len()), a, sums, gradient);
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
    num_rows: usize,
    num_columns: usize,
}

impl<'a, G: Float> Gradient<'a, G> {
    /// Describes the gradient of a strip.
    ///
    /// # Safety `num_rows` rows of `num_columns` elements, `stride` apart, must be writable at `to`, and nobody else
    /// may write to them while this lives.
    unsafe fn new(operands: Sums<'a>, to: *mut G, stride: usize, num_rows: usize, num_columns: usize) -> Self {
        Self { operands, to, stride, num_rows, num_columns }
    }

    /// Writes a block of two vectors of columns of some rows. Returns false, and writes nothing, if the rows are not
    /// whole tiles.
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

    /// Writes a block of columns of all tiles from `row` on.
    #[inline(always)]
    pub(super) fn write_from<S: Level>(&self, row: usize, column: usize) {
        for row in (row..self.num_rows).step_by(tile_rows(S::WIDTH)) {
            self.write_tile::<S>(row, column);
        }
    }

    #[inline(always)]
    fn write_tile<S: Level>(&self, row: usize, column: usize) {
        let Self { num_rows, num_columns, .. } = *self;
        assert!(row < num_rows && column < num_columns, "a tile of a gradient");
        let block = row / tile_rows(S::WIDTH);
        let tile = GradientTile { block, column, num_rows: num_rows - row, num_columns: num_columns - column };
        let mode = StoreMode::Stream.where_aligned::<S, G>(self.to, self.stride);
        // SAFETY: `new`'s caller promised the rows and columns from these on; blocks of columns of aligned rows are
        // aligned.
        unsafe {
            let to = self.to.add(row * self.stride + column);
            self.operands.write::<S, G>(tile, mode, to, self.stride);
        }
    }
}
