//! From a token to its logits, and back: a linear map, cosines over a temperature, or a [tree](super::tree).
//!
//! The cosine router (Hwang et al., "Tutel", 2206.03382, as its code): `logit_e = <q, m_e> / (|q| |m_e|) s` with `q = P x`,
//! `m_e` a vector of each expert, and the scale `s = exp(min(t, ln 100))`, one over the temperature, with t learned.

use moeworks_ops::Context;
use moeworks_ops::elementwise::{self, add_assign, add_rows, cast, sum_rows};
use moeworks_ops::late::Late;
use moeworks_ops::linear::{Write, linear, linear_backward_input, linear_backward_weight};
use moeworks_ops::logits::{logits, logits_backward_input, logits_backward_input_add, logits_backward_weight};
use moeworks_ops::router_rows::softplus;
use moeworks_tensor::{DType, Tensor};

use super::blocks;
use super::config::RouterKind;
use super::noise::InputNoise;
use super::tree::{TreeGrads, TreeScores};
use crate::{MoeConfig, MoeWeights};

/// Names of weights that only some routers have, as in files behind the router's own.
///
/// `[E, D]`: what the deviations of learned noise are taken of.
pub(crate) const NOISE: &str = "noise.weight";
pub(crate) const PROJECTION: &str = "projection.weight";
/// `[1]`: the logarithm of one over the temperature.
pub(crate) const LOG_SCALE: &str = "log_scale";

/// The temperature never falls below 1 / 100.
const MAX_LOG_SCALE: f32 = 4.605_170_2;
/// The norm of a vector counts as at least this.
const MIN_NORM: f32 = 1e-12;

/// What the backward of logits needs.
pub(crate) enum Scorer {
    /// There are no logits to learn.
    None,
    /// Of activations of this type.
    Linear(DType),
    Cosine(Box<Cosine>),
    Tree(Box<TreeScores>),
}

/// The parts of cosines.
pub(crate) struct Cosine {
    /// `[T, P]`: the projection of the tokens.
    projected: Tensor,
    experts: Directions,
    cosines: Tensor,
}

/// Rows divided by their norms.
pub(crate) struct Directions {
    /// `[n, P]`.
    units: Tensor,
    /// `[n]`.
    norms: Vec<f32>,
}

/// The gradients of a scorer's weights, to be computed when it suits.
pub(crate) enum ScorerGrads {
    Linear,
    /// Gradients of `q`, of the experts' vectors and of the logarithm of the scale.
    Cosine {
        dq: Tensor,
        experts: Tensor,
        log_scale: f32,
    },
    Tree(TreeGrads),
}

impl Scorer {
    /// The logits `[T, E]` of `x [T, D]` times `noise`.
    pub(crate) fn forward(
        ctx: &Context,
        config: &MoeConfig,
        weights: &MoeWeights,
        (x, noise): (&Tensor, Option<&InputNoise>),
    ) -> (Tensor, Self) {
        let noisy = || noise.map_or_else(|| x.clone(), |noise| noise.apply(ctx, x));
        match config.router.kind {
            RouterKind::Hierarchical => {
                let (logits, scores) = TreeScores::forward(ctx, config, weights, &noisy());
                (logits, Self::Tree(Box::new(scores)))
            }
            RouterKind::Cosine => {
                let (logits, cosine) = Cosine::forward(ctx, weights, &noisy());
                (logits, Self::Cosine(Box::new(cosine)))
            }
            _ => {
                let mut logits = product(ctx, (x, noise), &weights.router);
                add_bias(ctx, weights, &mut logits);
                (logits, Self::Linear(noise.map_or(x.dtype(), |_| DType::F32)))
            }
        }
    }

    /// The sum of the squares of its `logits [T, E]`.
    pub(crate) fn squared_logits(&self, ctx: &Context, logits: &Tensor) -> Late<Vec<f64>> {
        match self {
            Self::Tree(tree) => Late::now(vec![tree.squared_logits()]),
            _ => elementwise::sums_of_squares(ctx, &[logits]),
        }
    }

    /// The sum over the tokens of squared log-sum-exps that are not those of its logits.
    pub(crate) fn lower_lse_squared(&self) -> f64 {
        if let Self::Tree(tree) = self { tree.lower_lse_squared() } else { 0.0 }
    }

    /// Adds the gradient of `x` to `dx`; those of the weights as far as they are due now. `z` is the gradient of each squared
    /// log-sum-exp that is not that of the logits.
    pub(crate) fn backward(
        &self,
        ctx: &Context,
        weights: &MoeWeights,
        dlogits: &Tensor,
        z: f32,
        dx: &mut Tensor,
    ) -> ScorerGrads {
        if let &Self::Linear(of) = self {
            logits_backward_input_add(ctx, dlogits, &weights.router, of, dx);
            return ScorerGrads::Linear;
        }
        let (alone, grads) = self.backward_alone(ctx, weights, dlogits, z);
        add_assign(ctx, dx, &alone);
        grads
    }

    /// The gradient of `x`, and those of the weights.
    pub(crate) fn backward_alone(
        &self,
        ctx: &Context,
        weights: &MoeWeights,
        dlogits: &Tensor,
        z: f32,
    ) -> (Tensor, ScorerGrads) {
        let cosine = match self {
            Self::Cosine(cosine) => cosine,
            Self::Tree(tree) => {
                let (dx, grads) = tree.backward(ctx, weights, dlogits, 2.0 * z);
                return (dx, ScorerGrads::Tree(grads));
            }
            &Self::Linear(of) => {
                return (logits_backward_input(ctx, dlogits, &weights.router, of), ScorerGrads::Linear);
            }
            Self::None => {
                return (linear_backward_input(ctx, dlogits, &weights.router, DType::F32), ScorerGrads::Linear);
            }
        };
        let Cosine { projected, experts, cosines } = &**cosine;
        let tokens = Directions::of(ctx, projected.copied(ctx.pool()));
        let (scale, is_free) = scale(weights);
        let products = dlogits.f32s().iter().zip(cosines.f32s()).map(|(&d, &c)| f64::from(d) * f64::from(c));
        let dscale = products.sum::<f64>();
        let mut dcosines = dlogits.copied(ctx.pool());
        dcosines.f32s_mut().iter_mut().for_each(|d| *d *= scale);
        let mut dq = linear_backward_input(ctx, &dcosines, &experts.units, DType::F32);
        tokens.backward(ctx, &mut dq);
        let mut dexperts = ctx.empty(experts.units.shape(), DType::F32);
        linear_backward_weight(ctx, &dcosines, &tokens.units, DType::F32, Write::Replace, &mut dexperts);
        experts.backward(ctx, &mut dexperts);
        let dx = linear_backward_input(ctx, &dq, weights.extra(PROJECTION), DType::F32);
        let log_scale = if is_free { (dscale * f64::from(scale)) as f32 } else { 0.0 };
        (dx, ScorerGrads::Cosine { dq, experts: dexperts, log_scale })
    }
}

/// The product of `x [T, D]` times `noise` and `w [E, D]`, in f32.
fn product(ctx: &Context, (x, noise): (&Tensor, Option<&InputNoise>), w: &Tensor) -> Tensor {
    noise.map_or_else(|| logits(ctx, x, w), |noise| noise.linear(ctx, x, w))
}

fn add_bias(ctx: &Context, weights: &MoeWeights, logits: &mut Tensor) {
    if let Some(bias) = &weights.router_bias {
        add_rows(ctx, logits, bias);
    }
}

/// The linear logits of `x [T, D]` times `noise` and the deviations of learned noise, `[T, E]` each.
pub(crate) fn with_deviations(
    ctx: &Context,
    weights: &MoeWeights,
    (x, noise): (&Tensor, Option<&InputNoise>),
) -> (Tensor, Tensor) {
    let noisy = noise.map(|noise| noise.apply(ctx, x));
    let x = noisy.as_ref().unwrap_or(x);
    let mut logits = logits(ctx, x, &weights.router);
    add_bias(ctx, weights, &mut logits);
    let mut deviations = linear(ctx, x, weights.extra(NOISE), DType::F32);
    let e = deviations.cols();
    blocks::for_each(ctx, blocks::of_mut(deviations.f32s_mut(), e), |_, deviations| {
        let raw = deviations.to_vec();
        softplus(ctx.isa(), &raw, deviations);
    });
    (logits, deviations)
}

impl Cosine {
    /// The logits of `x [T, D]` and their parts. Of a bf16 input the projection, which gives the length that all cosines of a
    /// token are divided by and the direction for backward, is a product of bf16 numbers, at half the time; what decides between
    /// experts, `<P x, m> = <x, P^T m>`, is one of f32 numbers with E vectors of length D.
    fn forward(ctx: &Context, weights: &MoeWeights, x: &Tensor) -> (Tensor, Self) {
        let projection = weights.extra(PROJECTION);
        let experts = Directions::of(ctx, weights.router.copied(ctx.pool()));
        let (projected, mut cosines) = if x.dtype() == DType::BF16 {
            let back = linear_backward_input(ctx, &experts.units, projection, DType::F32);
            (linear(ctx, x, &cast(ctx, projection, DType::BF16), DType::F32), linear(ctx, x, &back, DType::F32))
        } else {
            let projected = linear(ctx, x, projection, DType::F32);
            let products = linear(ctx, &projected, &experts.units, DType::F32);
            (projected, products)
        };
        let mut logits = ctx.empty(cosines.shape(), DType::F32);
        let (e, width, scale) = (cosines.cols(), projected.cols(), scale(weights).0);
        let outputs = blocks::of_mut(cosines.f32s_mut(), e).zip(blocks::of_mut(logits.f32s_mut(), e));
        blocks::for_each(ctx, outputs.zip(blocks::of(projected.f32s(), width)), |_, ((cosines, logits), rows)| {
            let rows = cosines.chunks_mut(e).zip(logits.chunks_mut(e)).zip(rows.chunks(width));
            for ((cosines, logits), row) in rows {
                let share = 1.0 / norm(row);
                for (cosine, logit) in cosines.iter_mut().zip(logits) {
                    *cosine *= share;
                    *logit = *cosine * scale;
                }
            }
        });
        (logits, Self { projected, experts, cosines })
    }
}

impl ScorerGrads {
    /// Writes or adds the gradients of the weights; `x` is what `scorer` saw, `dlogits` the gradient of its logits.
    pub(crate) fn run(
        self,
        ctx: &Context,
        (scorer, dlogits): (&Scorer, &Tensor),
        x: &Tensor,
        write: Write,
        grads: &mut MoeWeights,
    ) {
        match self {
            Self::Tree(tree_grads) => {
                if let Scorer::Tree(tree) = scorer {
                    tree.run(ctx, tree_grads, x, write, grads);
                }
            }
            Self::Linear => {
                logits_backward_weight(ctx, dlogits, x, write, &mut grads.router);
                if let Some(bias) = &mut grads.router_bias {
                    sum_rows(ctx, dlogits, write, bias);
                }
            }
            Self::Cosine { dq, experts, log_scale } => {
                linear_backward_weight(ctx, &dq, x, DType::F32, write, grads.extra_mut(PROJECTION));
                put(experts.f32s(), write, &mut grads.router);
                put(&[log_scale], write, grads.extra_mut(LOG_SCALE));
            }
        }
    }
}

/// Writes or adds `values`.
pub(crate) fn put(values: &[f32], write: Write, to: &mut Tensor) {
    for (to, value) in to.f32s_mut().iter_mut().zip(values) {
        *to = if write == Write::Add { *to + value } else { *value };
    }
}

/// The scale, and whether its logarithm still moves it.
fn scale(weights: &MoeWeights) -> (f32, bool) {
    let log_scale = weights.extra(LOG_SCALE).f32s()[0];
    // Not `min`, which would lose a NaN.
    if log_scale > MAX_LOG_SCALE { (MAX_LOG_SCALE.exp(), false) } else { (log_scale.exp(), true) }
}

/// The norm, by lanes that vectors can hold; at least [`MIN_NORM`].
fn norm(row: &[f32]) -> f32 {
    let mut lanes = [0.0; 16];
    let (groups, rest) = row.as_chunks::<16>();
    for group in groups {
        lanes.iter_mut().zip(group).for_each(|(lane, x)| *lane += x * x);
    }
    let squares = lanes.iter().sum::<f32>() + rest.iter().map(|x| x * x).sum::<f32>();
    if squares == f32::INFINITY {
        return row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt() as f32;
    }
    squares.sqrt().max(MIN_NORM)
}

impl Directions {
    fn of(ctx: &Context, mut rows: Tensor) -> Self {
        let width = rows.cols();
        let mut norms = vec![0.0; rows.rows()];
        let blocks = blocks::of_mut(rows.f32s_mut(), width).zip(blocks::of_mut(&mut norms, 1));
        blocks::for_each(ctx, blocks, |_, (rows, norms)| {
            for (row, of_row) in rows.chunks_mut(width).zip(norms) {
                *of_row = norm(row);
                let scale = 1.0 / *of_row;
                row.iter_mut().for_each(|x| *x *= scale);
            }
        });
        Self { units: rows, norms }
    }

    /// Makes the gradients of the units those of the rows.
    fn backward(&self, ctx: &Context, grads: &mut Tensor) {
        let width = grads.cols();
        let units = blocks::of(self.units.f32s(), width).zip(blocks::of(&self.norms, 1));
        blocks::for_each(ctx, blocks::of_mut(grads.f32s_mut(), width).zip(units), |_, (grads, (units, norms))| {
            for ((grad, unit), norm) in grads.chunks_mut(width).zip(units.chunks(width)).zip(norms) {
                let along: f32 = grad.iter().zip(unit).map(|(g, u)| g * u).sum();
                grad.iter_mut().zip(unit).for_each(|(g, u)| *g = (*g - u * along) / norm);
            }
        });
    }
}
