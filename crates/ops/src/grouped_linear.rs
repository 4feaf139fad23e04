//! Linear maps of groups of rows, each with rows of a weight of its own: `y_r = x_t W_g^T` for every row r, which is
//! token t in group g.
//!
//! The weight `[N, D]` holds the matrices of the groups one after the other, `width` rows each. This is
//! [`experts`](crate::experts) without activation and with one product. The type of the weight, and for its gradient
//! that of `dy`, decides the precision of products. Results are f32, except weight gradients, which have the type of
//! their buffer.

use moeworks_tensor::{DType, Tensor};

use crate::Context;
use crate::cuda::{self, On};
use crate::experts::{ExpertRows, combine};
use crate::gemm::source::Source;
use crate::gemm::store::Store;
use crate::gemm::{self, Compute, Form, Group, Product};
use crate::linear::Write;
use crate::parallel::Lent;
use crate::simd::with_float;
use crate::skinny_gemm::{Gradients, weight_gradients};

/// Rows sorted by group, and the place of the groups' matrices.
#[derive(Clone, Copy)]
pub struct GroupedRows<'a> {
    /// R rows sorted by group, as for experts; their weights are ignored.
    pub rows: ExpertRows<'a>,
    /// The row of the weight at which the first group's matrix begins.
    pub first: usize,
    /// Rows of each group's matrix.
    pub width: usize,
}

impl GroupedRows<'_> {
    fn num_groups(&self) -> usize {
        self.rows.offsets.len() - 1
    }

    fn num_rows(&self) -> usize {
        self.rows.tokens.len()
    }

    /// Lists the rows of each group.
    fn ranges(&self) -> impl Iterator<Item = (usize, std::ops::Range<usize>)> + '_ {
        self.rows.offsets.windows(2).map(|pair| pair[0] as usize..pair[1] as usize).enumerate()
    }

    /// Returns the GPU, if it has kernels for matrices that begin there.
    fn on_gpu<'a>(&self, ctx: &'a Context, dtype: DType) -> Option<On<'a>> {
        On::taking(ctx, &[dtype]).filter(|_| cuda::grouped_linear::takes(*self))
    }

    fn check(&self, w: &Tensor) {
        assert!(self.first + self.num_groups() * self.width <= w.rows(), "grouped linear: w {:?}", w.shape());
    }
}

/// Returns `y [R, width]` (f32) for `x [T, D]` and `w [N, D]`.
#[must_use]
pub fn grouped_linear(ctx: &Context, x: &Tensor, w: &Tensor, groups: GroupedRows<'_>) -> Tensor {
    groups.check(w);
    if let Some(on) = groups.on_gpu(ctx, w.dtype()) {
        return cuda::grouped_linear::forward(on, x, w, groups);
    }
    let group = |(g, range): (usize, std::ops::Range<usize>)| Group {
        a: Source::gathered(x, &groups.rows.tokens[range.clone()]),
        b: Source::rows(w, groups.first + g * groups.width),
        rows: range.len(),
        columns: groups.width,
        depth: x.cols(),
    };
    row_products(ctx, Form::Nt, groups, w.dtype(), groups.width, group)
}

/// Returns `dx [T, D]`: the sum over each token's rows of `dy_r W_g`, in the order of its choices. `dy` is `[R,
/// width]`.
#[must_use]
pub fn grouped_linear_backward_input(ctx: &Context, dy: &Tensor, w: &Tensor, groups: GroupedRows<'_>) -> Tensor {
    groups.check(w);
    assert_eq!(dy.shape(), [groups.num_rows(), groups.width], "gradient of a grouped linear map");
    if let Some(on) = groups.on_gpu(ctx, w.dtype()) {
        return cuda::grouped_linear::backward_input(on, dy, w, groups);
    }
    let group = |(g, range): (usize, std::ops::Range<usize>)| Group {
        a: Source::rows(dy, range.start),
        b: Source::rows(w, groups.first + g * groups.width),
        rows: range.len(),
        columns: w.cols(),
        depth: groups.width,
    };
    let rows = row_products(ctx, Form::Nn, groups, w.dtype(), w.cols(), group);
    let num_tokens = groups.rows.token_rows.len() / groups.rows.num_choices.max(1);
    combine(ctx, &rows, groups.rows, None, &[num_tokens, w.cols()])
}

/// Computes the gradients of the groups' matrices, `dW_g = sum over its rows of dy_r x_t^T`, in their place in `dw
/// [N, D]` (f32 or bf16). With [`Write::Replace`] a group without rows gets zeros.
pub fn grouped_linear_backward_weight(
    ctx: &Context,
    dy: &Tensor,
    x: &Tensor,
    groups: GroupedRows<'_>,
    write: Write,
    dw: &mut Tensor,
) {
    groups.check(dw);
    assert_eq!(dy.shape(), [groups.num_rows(), groups.width], "gradient of a grouped linear map");
    if let Some(on) = groups.on_gpu(ctx, dy.dtype()) {
        return cuda::grouped_linear::backward_weight(on, dy, x, groups, write, dw);
    }
    let columns = x.cols();
    let group = |(_, range): (usize, std::ops::Range<usize>)| Group {
        a: Source::rows(dy, range.start),
        b: Source::gathered(x, &groups.rows.tokens[range.clone()]),
        rows: groups.width,
        columns,
        depth: range.len(),
    };
    let list: Vec<Group<'_>> = groups.ranges().map(group).collect();
    let offsets: Vec<usize> = (0..groups.num_groups()).map(|g| (groups.first + g * groups.width) * columns).collect();
    let product = Product { form: Form::Tn, compute: Compute::from_dtype(dy.dtype()), groups: &list, is_paired: false };
    with_float!(dw.dtype(), T => {
        let to = Lent::new(dw.slice_mut::<T>());
        weight_gradients(ctx, &product, Gradients { to, offsets: &offsets, stride: columns, write });
    });
}

/// Computes one product for each group that has rows, `[R, columns]`, in the type of products for weights of `dtype`.
fn row_products<'a>(
    ctx: &Context,
    form: Form,
    groups: GroupedRows<'_>,
    dtype: DType,
    columns: usize,
    group: impl Fn((usize, std::ops::Range<usize>)) -> Group<'a>,
) -> Tensor {
    let mut y = ctx.empty(&[groups.num_rows(), columns], DType::F32);
    let used: Vec<_> = groups.ranges().filter(|(_, range)| !range.is_empty()).collect();
    let offsets: Vec<usize> = used.iter().map(|(_, range)| range.start * columns).collect();
    let list: Vec<Group<'_>> = used.into_iter().map(group).collect();
    let product = Product { form, compute: Compute::from_dtype(dtype), groups: &list, is_paired: false };
    let to = Lent::new(y.f32s_mut());
    gemm::run(ctx, &product, &Store { to, offsets: &offsets, stride: columns, write: Write::Replace });
    y
}

#[cfg(test)]
#[path = "grouped_linear_tests.rs"]
mod tests;
