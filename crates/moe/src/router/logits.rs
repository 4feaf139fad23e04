//! Logits from tokens, and backward. This file has the linear map; schemes with other logits have them in their
//! files.

use moeworks_ops::Context;
use moeworks_ops::deferred::Deferred;
use moeworks_ops::elementwise::{self, add_assign, add_rows, sum_rows};
use moeworks_ops::linear::{Write, linear};
use moeworks_ops::logits::{logits, logits_backward_input, logits_backward_input_add, logits_backward_weight};
use moeworks_ops::router_rows::softplus;
use moeworks_tensor::{DType, Tensor};

use super::blocks;
use super::noise::{InputNoise, LogitNoise};
use crate::MoeWeights;

/// `[E, D]`: the weight of the learned noise's deviations. Names of extra weights are appended to the router's own
/// name in files.
pub(crate) const NOISE: &str = "noise.weight";
/// `[P, D]`: a projection of tokens to P dimensions.
pub(crate) const PROJECTION: &str = "projection.weight";

/// A router's input: `values [T, D]`, multiplied by `noise` if there is any.
#[derive(Clone, Copy)]
pub(crate) struct NoisyInput<'a> {
    pub(crate) values: &'a Tensor,
    pub(crate) noise: Option<&'a InputNoise>,
}

impl NoisyInput<'_> {
    /// Returns the input multiplied by the noise.
    pub(crate) fn noisy(&self, ctx: &Context) -> Tensor {
        self.noise.map_or_else(|| self.values.clone(), |noise| noise.apply(ctx, self.values))
    }
}

/// The logits of a scheme and the state of their backward.
pub(crate) struct SchemeLogits {
    /// `[T, E]`, before noise.
    pub(crate) values: Tensor,
    pub(crate) saved: Box<dyn SavedLogits>,
    /// The scheme's own noise; if none, the noise of `router.noise_std` applies.
    pub(crate) noise: Option<LogitNoise>,
}

impl SchemeLogits {
    /// Computes logits by the router's matrix and bias.
    pub(crate) fn linear(ctx: &Context, weights: &MoeWeights, x: NoisyInput<'_>) -> Self {
        let mut values = product(ctx, x, &weights.router);
        add_bias(ctx, weights, &mut values);
        let saved = Linear { of: x.noise.map_or(x.values.dtype(), |_| DType::F32) };
        Self { values, saved: Box::new(saved), noise: None }
    }

    /// Wraps logits that have no learned weights.
    pub(crate) fn unlearned(values: Tensor) -> Self {
        Self { values, saved: Box::new(Unlearned), noise: Some(LogitNoise::None) }
    }
}

/// The gradients of a pass's logits.
#[derive(Clone, Copy)]
pub(crate) struct LogitGrads<'a> {
    /// `[T, E]`: the gradient of the logits.
    pub(crate) dlogits: &'a Tensor,
    /// The gradient of each squared log-sum-exp beyond that of the logits (of [`SavedLogits::lower_lse_squared`]).
    pub(crate) z: f32,
}

/// The saved state of forward that the logits' backward needs.
pub(crate) trait SavedLogits: Send + Sync {
    /// Returns whether the logits have learned weights.
    fn is_learned(&self) -> bool {
        true
    }

    /// Sums the squares of the `logits [T, E]`.
    fn squared_logits(&self, ctx: &Context, logits: &Tensor) -> Deferred<Vec<f64>> {
        elementwise::sums_of_squares(ctx, &[logits])
    }

    /// Returns the sum over the tokens of squared log-sum-exps besides those of the logits, such as those of a tree's
    /// inner nodes.
    fn lower_lse_squared(&self) -> f64 {
        0.0
    }

    /// Returns whether a token can choose only some of the experts; see [`close`](Self::close).
    fn has_closed_parts(&self) -> bool {
        false
    }

    /// Sets the experts that a token cannot choose to negative infinity in `ranking [T, E]`.
    fn close(&self, _ctx: &Context, _ranking: &mut Tensor) {}

    /// Returns the gradient of the input, and the tensors that [`weight_grads`](Self::weight_grads) needs besides the
    /// gradient of the logits.
    fn backward_alone(&self, ctx: &Context, weights: &MoeWeights, grads: LogitGrads<'_>) -> (Tensor, Vec<Tensor>);

    /// Runs [`backward_alone`](Self::backward_alone) and adds the gradient of the input to `dx`.
    fn backward(&self, ctx: &Context, weights: &MoeWeights, grads: LogitGrads<'_>, dx: &mut Tensor) -> Vec<Tensor> {
        let (alone, left) = self.backward_alone(ctx, weights, grads);
        add_assign(ctx, dx, &alone);
        left
    }

    /// Writes or adds the gradients of the weights. `left` are the tensors that backward returned, `x` is the input.
    fn weight_grads(
        &self,
        ctx: &Context,
        left: &[Tensor],
        dlogits: &Tensor,
        x: &Tensor,
        write: Write,
        grads: &mut MoeWeights,
    );
}

/// The saved state of linear logits.
pub(crate) struct Linear {
    /// The type of the input.
    pub(crate) of: DType,
}

impl SavedLogits for Linear {
    fn backward_alone(&self, ctx: &Context, weights: &MoeWeights, grads: LogitGrads<'_>) -> (Tensor, Vec<Tensor>) {
        (logits_backward_input(ctx, grads.dlogits, &weights.router, self.of), Vec::new())
    }

    fn backward(&self, ctx: &Context, weights: &MoeWeights, grads: LogitGrads<'_>, dx: &mut Tensor) -> Vec<Tensor> {
        logits_backward_input_add(ctx, grads.dlogits, &weights.router, self.of, dx);
        Vec::new()
    }

    fn weight_grads(
        &self,
        ctx: &Context,
        _: &[Tensor],
        dlogits: &Tensor,
        x: &Tensor,
        write: Write,
        grads: &mut MoeWeights,
    ) {
        logits_backward_weight(ctx, dlogits, x, write, &mut grads.router);
        if let Some(bias) = &mut grads.router_bias {
            sum_rows(ctx, dlogits, write, bias);
        }
    }
}

/// The saved state of logits without weights, which have no backward.
struct Unlearned;

impl SavedLogits for Unlearned {
    fn is_learned(&self) -> bool {
        false
    }

    fn backward_alone(&self, ctx: &Context, weights: &MoeWeights, grads: LogitGrads<'_>) -> (Tensor, Vec<Tensor>) {
        (ctx.zeros(&[grads.dlogits.rows(), weights.router.cols()], DType::F32), Vec::new())
    }

    fn weight_grads(&self, _: &Context, _: &[Tensor], _: &Tensor, _: &Tensor, _: Write, _: &mut MoeWeights) {}
}

/// Returns the product of the input and `w [E, D]`, in f32.
pub(crate) fn product(ctx: &Context, x: NoisyInput<'_>, w: &Tensor) -> Tensor {
    x.noise.map_or_else(|| logits(ctx, x.values, w), |noise| noise.linear(ctx, x.values, w))
}

fn add_bias(ctx: &Context, weights: &MoeWeights, logits: &mut Tensor) {
    if let Some(bias) = &weights.router_bias {
        add_rows(ctx, logits, bias);
    }
}

/// Returns the linear logits of the input and the deviations of learned noise, `[T, E]` each.
pub(crate) fn with_deviations(ctx: &Context, weights: &MoeWeights, x: NoisyInput<'_>) -> (Tensor, Tensor) {
    let x = x.noisy(ctx);
    let mut values = logits(ctx, &x, &weights.router);
    add_bias(ctx, weights, &mut values);
    let mut deviations = linear(ctx, &x, weights.extra(NOISE), DType::F32);
    let e = deviations.cols();
    blocks::for_each(ctx, blocks::split_mut(deviations.f32s_mut(), e), |_, deviations| {
        let raw = deviations.to_vec();
        softplus(ctx.isa(), &raw, deviations);
    });
    (values, deviations)
}

/// Writes or adds `values` to `to`.
pub(crate) fn store(values: &[f32], write: Write, to: &mut Tensor) {
    for (to, value) in to.f32s_mut().iter_mut().zip(values) {
        *to = if write == Write::Add { *to + value } else { *value };
    }
}
