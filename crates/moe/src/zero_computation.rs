//! Zero-computation experts: zero, copy and constant experts (Jin et al., "MoE++", 2410.07348) and null experts (Zeng
//! et al., "AdaMoE", 2406.13233).
//!
//! Zero and null experts output nothing, copy experts the token itself. A constant expert outputs `a_1 x + a_2 v`
//! with `(a_1, a_2) = softmax(M x)`, where `v [D]` and `M [2, D]` are learned. They come after the computing experts
//! in the order zero, copy, constant, null.

use moeworks_ops::Context;
use moeworks_ops::linear::Write;
use moeworks_tensor::{DType, Tensor};

use crate::router::store;
use crate::{Dispatch, MoeConfig, MoeWeights, NO_EXPERT, Routing};

/// `[constant experts, D]`: the vectors v.
pub(crate) const CONSTANT: &str = "constant.weight";
/// `[2 constant experts, D]`: the matrices M, two rows per expert.
pub(crate) const CONSTANT_MIX: &str = "constant_mix.weight";

/// The output of a zero-computation expert.
enum Output {
    Nothing,
    Copy,
    Constant(usize),
}

/// The choices of zero-computation experts in a pass.
pub(crate) struct ZeroComputationChoices<'a> {
    pub(crate) config: &'a MoeConfig,
    pub(crate) weights: &'a MoeWeights,
    pub(crate) routing: &'a Routing,
    pub(crate) dispatch: &'a Dispatch,
    /// `[T, D]` f32: the input.
    pub(crate) x: &'a Tensor,
}

/// A token's choice of a constant expert.
#[derive(Clone, Copy)]
struct ConstantChoice<'a> {
    /// `[D]`: the token.
    x: &'a [f32],
    /// `[D]`: the gradient of the layer's output.
    dy: &'a [f32],
    /// The choice's weight.
    weight: f32,
}

/// The gradients of the constant experts' weights.
pub(crate) struct ZeroComputationGrads {
    constant: Vec<f32>,
    mix: Vec<f32>,
}

impl ZeroComputationChoices<'_> {
    fn output(&self, index: u32) -> Output {
        let router = &self.config.router;
        let index = index as usize;
        let (zero, copy) = (router.zero_experts, router.zero_experts + router.copy_experts);
        if index >= zero && index < copy {
            Output::Copy
        } else if index >= copy && index < copy + router.constant_experts {
            Output::Constant(index - copy)
        } else {
            Output::Nothing
        }
    }

    /// Returns the choices of zero-computation experts with their indices in `[T, K]`, in order.
    fn choices(&self) -> impl Iterator<Item = (usize, Output)> + '_ {
        let indices = self.dispatch.zero_computation_choices().unwrap_or(&[]);
        indices.iter().enumerate().filter(|(_, id)| **id != NO_EXPERT).map(|(i, &id)| (i, self.output(id)))
    }

    /// Adds the outputs of the zero-computation experts to `y [T, D]`.
    pub(crate) fn forward(&self, y: &mut Tensor) {
        let d = self.x.cols();
        let k = self.routing.top_k();
        // Reading `x` copies it from the device, so it is not read for experts that output nothing.
        for (choice, kind) in self.choices().filter(|(_, kind)| !matches!(kind, Output::Nothing)) {
            let range = choice / k * d..(choice / k + 1) * d;
            let (x, weight) = (&self.x.f32s()[range.clone()], self.routing.expert_weights()[choice]);
            let y = &mut y.f32s_mut()[range];
            match kind {
                Output::Nothing => {}
                Output::Copy => y.iter_mut().zip(x).for_each(|(y, x)| *y += weight * x),
                Output::Constant(expert) => {
                    let (a, v) = (self.mixture(expert, x), self.constant(expert));
                    y.iter_mut().zip(x).zip(v).for_each(|((y, x), v)| *y += weight * (a[0] * x + a[1] * v));
                }
            }
        }
    }

    /// Adds the gradient of x to `dx` and writes those of the choices' weights to `dweights [T, K]`. Returns the
    /// gradients of the experts' own weights.
    pub(crate) fn backward(&self, dy: &Tensor, dx: &mut Tensor, dweights: &mut Tensor) -> ZeroComputationGrads {
        let (d, k) = (self.x.cols(), self.routing.top_k());
        let count = self.config.router.constant_experts;
        let mut grads = ZeroComputationGrads { constant: vec![0.0; count * d], mix: vec![0.0; 2 * count * d] };
        for (choice, kind) in self.choices() {
            let range = choice / k * d..(choice / k + 1) * d;
            let (x, dy) = (&self.x.f32s()[range.clone()], &dy.f32s()[range.clone()]);
            let (dx, weight) = (&mut dx.f32s_mut()[range], self.routing.expert_weights()[choice]);
            dweights.f32s_mut()[choice] = match kind {
                Output::Nothing => 0.0,
                Output::Copy => {
                    dx.iter_mut().zip(dy).for_each(|(dx, dy)| *dx += weight * dy);
                    dot(dy, x)
                }
                Output::Constant(expert) => {
                    self.constant_backward(expert, ConstantChoice { x, dy, weight }, dx, &mut grads)
                }
            };
        }
        grads
    }

    /// Adds the gradients of one choice of a constant expert. Returns the gradient of the choice's weight.
    fn constant_backward(
        &self,
        expert: usize,
        ConstantChoice { x, dy, weight }: ConstantChoice<'_>,
        dx: &mut [f32],
        grads: &mut ZeroComputationGrads,
    ) -> f32 {
        let d = x.len();
        let (a, v) = (self.mixture(expert, x), self.constant(expert));
        let (on_x, on_v) = (dot(dy, x), dot(dy, v));
        // The gradient of the first logit; the second's is its negative.
        let dlogit = weight * a[0] * a[1] * (on_x - on_v);
        let mix = self.mix(expert);
        for i in 0..d {
            dx[i] += weight * a[0] * dy[i] + dlogit * (mix[i] - mix[d + i]);
            grads.constant[expert * d + i] += weight * a[1] * dy[i];
            grads.mix[2 * expert * d + i] += dlogit * x[i];
            grads.mix[(2 * expert + 1) * d + i] -= dlogit * x[i];
        }
        a[0] * on_x + a[1] * on_v
    }

    fn constant(&self, expert: usize) -> &[f32] {
        let d = self.x.cols();
        &self.weights.extra(CONSTANT).f32s()[expert * d..(expert + 1) * d]
    }

    fn mix(&self, expert: usize) -> &[f32] {
        let d = self.x.cols();
        &self.weights.extra(CONSTANT_MIX).f32s()[2 * expert * d..2 * (expert + 1) * d]
    }

    fn mixture(&self, expert: usize, x: &[f32]) -> [f32; 2] {
        let (first, second) = self.mix(expert).split_at(x.len());
        let share = 1.0 / (1.0 + (dot(second, x) - dot(first, x)).exp());
        [share, 1.0 - share]
    }
}

impl ZeroComputationGrads {
    /// Writes or adds the gradients.
    pub(crate) fn run(&self, write: Write, grads: &mut MoeWeights) {
        if !self.constant.is_empty() {
            store(&self.constant, write, grads.extra_mut(CONSTANT));
            store(&self.mix, write, grads.extra_mut(CONSTANT_MIX));
        }
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Returns `x` as f32 if the configuration has zero-computation experts, which compute in f32.
pub(crate) fn exact(ctx: &Context, config: &MoeConfig, x: &Tensor) -> Option<Tensor> {
    (config.router.num_zero_computation() > 0).then(|| match x.dtype() {
        DType::F32 => x.clone(),
        _ => moeworks_ops::elementwise::cast(ctx, x, DType::F32),
    })
}
