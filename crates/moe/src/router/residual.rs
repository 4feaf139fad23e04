//! Gating residuals (Jin et al., "MoE++", 2410.07348, section 3.2, equation 6): a layer's logits are `W x + R l`,
//! with l the logits of the previous MoE layer and R a learned matrix. The first MoE layer has no l, and its R does
//! not learn.
//!
//! The next layer gets the logits before noise, temperature and masking, so that they are finite and equal in
//! training and inference.

use moeworks_ops::Context;
use moeworks_ops::elementwise::add_assign;
use moeworks_ops::linear::{Write, linear, linear_backward_input, linear_backward_weight};
use moeworks_tensor::{DType, Tensor};

use crate::MoeWeights;

/// `[E, E]`: the matrix R. It starts at zero, which makes a plain router.
pub(crate) const RESIDUAL: &str = "residual.weight";

/// The logits of the previous layer and of this one, `[T, E]` each.
pub(crate) struct Residual {
    previous: Option<Tensor>,
    pub(crate) logits: Tensor,
}

impl Residual {
    /// Adds `R l` to `logits`, with l the logits of the `previous` layer.
    pub(crate) fn forward(ctx: &Context, weights: &MoeWeights, previous: Option<&Tensor>, logits: &mut Tensor) -> Self {
        if let Some(previous) = previous {
            assert_eq!(previous.shape(), logits.shape(), "logits of the MoE layer before");
            add_assign(ctx, logits, &linear(ctx, previous, weights.extra(RESIDUAL), DType::F32));
        }
        Self { previous: previous.cloned(), logits: logits.copied(ctx.pool()) }
    }

    /// Returns the gradient of the previous layer's logits, if there is one.
    pub(crate) fn backward(&self, ctx: &Context, weights: &MoeWeights, dlogits: &Tensor) -> Option<Tensor> {
        self.previous.as_ref()?;
        Some(linear_backward_input(ctx, dlogits, weights.extra(RESIDUAL), DType::F32))
    }

    /// Writes or adds the gradient of R.
    pub(crate) fn run(&self, ctx: &Context, dlogits: &Tensor, write: Write, grads: &mut MoeWeights) {
        let grad = grads.extra_mut(RESIDUAL);
        match &self.previous {
            Some(previous) => linear_backward_weight(ctx, dlogits, previous, DType::F32, write, grad),
            None if write == Write::Replace => grad.f32s_mut().fill(0.0),
            None => {}
        }
    }
}
