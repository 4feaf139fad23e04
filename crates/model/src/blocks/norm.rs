//! The norms of the residual stream.

use moeworks_ops::Context;
use moeworks_ops::layer_norm::{LayerNormWeights, layer_norm, layer_norm_backward};
use moeworks_ops::linear::Write;
use moeworks_ops::rms_norm::{rms_norm, rms_norm_backward};
use moeworks_tensor::{DType, Tensor};

use crate::weights::NormWeights;

/// An RMS norm, or a layer norm where the weights have a bias.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Norm {
    pub(crate) eps: f32,
}

impl Norm {
    /// `y` of `x [T, D]` as `dtype`, and the statistics of the rows that backward needs.
    pub(crate) fn forward(self, ctx: &Context, w: &NormWeights, x: &Tensor, dtype: DType) -> (Tensor, Tensor) {
        match &w.bias {
            None => rms_norm(ctx, x, &w.weight, self.eps, dtype),
            Some(bias) => layer_norm(ctx, x, LayerNormWeights { weight: &w.weight, bias }, self.eps, dtype),
        }
    }

    /// The gradient of `x`; those of the weights are written to `grads` as `write` says.
    pub(crate) fn backward(
        self,
        ctx: &Context,
        w: &NormWeights,
        (x, statistics): (&Tensor, &Tensor),
        dy: &Tensor,
        write: Write,
        grads: &mut NormWeights,
    ) -> Tensor {
        match &mut grads.bias {
            None => rms_norm_backward(ctx, dy, x, &w.weight, statistics, write, &mut grads.weight),
            Some(bias) => layer_norm_backward(ctx, dy, (x, statistics), &w.weight, write, (&mut grads.weight, bias)),
        }
    }
}
