//! Linear maps with an optional bias.

use moeworks_moe::is_left_out;
use moeworks_ops::linear::{Write, linear, linear_backward_weight, linear_each};
use moeworks_ops::{Context, elementwise};
use moeworks_tensor::{DType, Tensor};

use crate::tensor_ranks::TensorRanks;
use crate::weights::LinearWeights;

/// Returns the type of queries, keys and values made with matrices of type `matrix`. On a GPU, tensor cores attend to
/// bf16, also with matrices in blocks of small integers.
pub(super) fn attended_type(ctx: &Context, matrix: DType) -> DType {
    if matrix.is_quantized() && ctx.gpu().is_some() { DType::BF16 } else { matrix.of_activations() }
}

/// Computes `x w^T + b` in type `out`.
pub(crate) fn project(ctx: &Context, x: &Tensor, w: &LinearWeights, out: DType) -> Tensor {
    let [y] = project_each(ctx, x, [w], out);
    y
}

/// Projects `x` by several matrices; see [`project`].
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

/// Projects to f32. If `ranks` shard the columns of `x` and of the matrix, their results are summed.
pub(crate) fn project_summed(ctx: &Context, ranks: Option<&TensorRanks>, x: &Tensor, w: &LinearWeights) -> Tensor {
    let Some(ranks) = ranks else { return project(ctx, x, w, DType::F32) };
    let mut y = linear(ctx, x, &w.weight, DType::F32);
    ranks.sum_biased(ctx, &mut y, w.bias.as_ref());
    y
}

/// Computes the gradient of a matrix, unless it is left out; the product is computed in type `compute`.
pub(crate) fn matrix_grad(ctx: &Context, dy: &Tensor, x: &Tensor, compute: DType, write: Write, grad: &mut Tensor) {
    if !is_left_out(grad) {
        linear_backward_weight(ctx, dy, x, compute, write, grad);
    }
}

/// Computes the gradients of matrix and bias; the product is computed in type `compute`.
pub(crate) fn project_grads(
    ctx: &Context,
    dy: &Tensor,
    x: &Tensor,
    compute: DType,
    write: Write,
    grads: &mut LinearWeights,
) {
    matrix_grad(ctx, dy, x, compute, write, &mut grads.weight);
    if let Some(bias) = grads.bias.as_mut().filter(|bias| !is_left_out(bias)) {
        elementwise::sum_rows(ctx, dy, write, bias);
    }
}
