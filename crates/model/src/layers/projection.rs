//! A linear map with an optional bias.

use moeworks_moe::is_left_out;
use moeworks_ops::linear::{Write, linear, linear_backward_weight, linear_each};
use moeworks_ops::{Context, elementwise};
use moeworks_tensor::{DType, Tensor};

use crate::tensor_ranks::TensorRanks;
use crate::weights::LinearWeights;

/// The type of what is made with matrices of this type. A GPU attends to bf16 by its tensor cores, also beside blocks of small integers.
pub(super) fn attended_type(ctx: &Context, matrix: DType) -> DType {
    if matrix.is_quantized() && ctx.gpu().is_some() { DType::BF16 } else { matrix.of_activations() }
}

/// `x w^T + b` as `out`.
pub(crate) fn project(ctx: &Context, x: &Tensor, w: &LinearWeights, out: DType) -> Tensor {
    let [y] = project_each(ctx, x, [w], out);
    y
}

/// As [`project`] by several matrices.
pub(crate) fn project_each<const N: usize>(
    ctx: &Context,
    x: &Tensor,
    ws: [&LinearWeights; N],
    out: DType,
) -> [Tensor; N] {
    let mut ys = linear_each(ctx, x, ws.map(|w| &w.weight), out);
    for (y, w) in ys.iter_mut().zip(ws) {
        if let Some(bias) = &w.bias {
            elementwise::add_rows(ctx, y, bias);
        }
    }
    ys
}

/// Projects to f32; where each of `ranks` has some columns of `x` and of the matrix, their results are summed.
pub(crate) fn project_summed(ctx: &Context, ranks: Option<&TensorRanks>, x: &Tensor, w: &LinearWeights) -> Tensor {
    let Some(ranks) = ranks else { return project(ctx, x, w, DType::F32) };
    let mut y = linear(ctx, x, &w.weight, DType::F32);
    ranks.sum_biased(ctx, &mut y, w.bias.as_ref());
    y
}

/// Writes the gradient of a matrix unless it is left out; products are taken in `compute`.
pub(crate) fn matrix_grad(ctx: &Context, (dy, x): (&Tensor, &Tensor), compute: DType, write: Write, grad: &mut Tensor) {
    if !is_left_out(grad) {
        linear_backward_weight(ctx, dy, x, compute, write, grad);
    }
}

/// Writes the gradients of matrix and bias; products are taken in `compute`.
pub(crate) fn project_grads(
    ctx: &Context,
    (dy, x): (&Tensor, &Tensor),
    compute: DType,
    write: Write,
    grads: &mut LinearWeights,
) {
    matrix_grad(ctx, (dy, x), compute, write, &mut grads.weight);
    if let Some(bias) = grads.bias.as_mut().filter(|bias| !is_left_out(bias)) {
        elementwise::sum_rows(ctx, dy, write, bias);
    }
}
