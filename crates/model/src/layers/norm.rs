//! The norms of the residual stream.

use moeworks_ops::Context;
use moeworks_ops::elementwise;
use moeworks_ops::layer_norm::{LayerNormGrads, LayerNormWeights, layer_norm, layer_norm_backward};
use moeworks_ops::linear::Write;
use moeworks_ops::rms_norm::{RmsNormInputs, rms_norm, rms_norm_backward_onto};
use moeworks_tensor::{DType, Tensor};

use crate::weights::NormWeights;

/// RMSNorm, or layer norm if the weights have a bias.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Norm {
    pub(crate) eps: f32,
}

/// The arguments of a norm's backward.
#[derive(Clone, Copy)]
pub(crate) struct NormBackward<'a> {
    /// `[T, D]`: the input.
    pub(crate) x: &'a Tensor,
    /// The statistics of its rows from forward.
    pub(crate) statistics: &'a Tensor,
    /// `[T, D]`: the gradient of the output.
    pub(crate) dy: &'a Tensor,
    /// `[T, D]`: the gradient of the residual connection around the block, if any.
    pub(crate) base: Option<&'a Tensor>,
}

impl Norm {
    /// Normalises `x [T, D]`; returns the result in type `dtype`, and the statistics that backward needs.
    pub(crate) fn forward(self, ctx: &Context, w: &NormWeights, x: &Tensor, dtype: DType) -> (Tensor, Tensor) {
        match &w.bias {
            None => rms_norm(ctx, x, &w.weight, self.eps, dtype),
            Some(bias) => layer_norm(ctx, x, LayerNormWeights { weight: &w.weight, bias }, self.eps, dtype),
        }
    }

    /// Returns the gradient of the input plus `base`; the gradients of the weights are written to `grads` as `write`
    /// says.
    pub(crate) fn backward(
        self,
        ctx: &Context,
        w: &NormWeights,
        NormBackward { x, statistics, dy, base }: NormBackward<'_>,
        write: Write,
        grads: &mut NormWeights,
    ) -> Tensor {
        match &mut grads.bias {
            None => {
                let of = RmsNormInputs { x, weight: &w.weight, inv_rms: statistics };
                rms_norm_backward_onto(ctx, dy, of, base, write, &mut grads.weight)
            }
            Some(bias) => {
                let grads = LayerNormGrads { weight: &mut grads.weight, bias };
                let mut dx = layer_norm_backward(ctx, dy, x, statistics, &w.weight, write, grads);
                base.into_iter().for_each(|base| elementwise::add_assign(ctx, &mut dx, base));
                dx
            }
        }
    }
}
