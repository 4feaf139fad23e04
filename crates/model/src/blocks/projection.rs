//! A linear map with an optional bias.

use moeworks_ops::linear::{Write, linear, linear_backward_weight};
use moeworks_ops::{Context, elementwise};
use moeworks_tensor::{DType, Tensor};

use crate::weights::LinearWeights;

/// `x w^T + b` as `out`.
pub(crate) fn project(ctx: &Context, x: &Tensor, w: &LinearWeights, out: DType) -> Tensor {
    let mut y = linear(ctx, x, &w.weight, out);
    if let Some(bias) = &w.bias {
        elementwise::add_rows(ctx, &mut y, bias);
    }
    y
}

/// Writes the gradients of matrix and bias; products are taken in `compute`.
pub(crate) fn project_grads(
    ctx: &Context,
    (dy, x): (&Tensor, &Tensor),
    compute: DType,
    write: Write,
    grads: &mut LinearWeights,
) {
    linear_backward_weight(ctx, dy, x, compute, write, &mut grads.weight);
    if let Some(bias) = &mut grads.bias {
        elementwise::sum_rows(ctx, dy, write, bias);
    }
}
