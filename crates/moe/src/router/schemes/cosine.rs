//! The cosine router: `logit_e = <q, m_e> / (|q| |m_e|) s` with `q = P x`, a vector `m_e` for each expert, and the
//! scale `s = exp(min(t, ln 100))`, the inverse of the temperature, with t learned.

use moeworks_ops::Context;
use moeworks_ops::elementwise::cast;
use moeworks_ops::linear::{Write, linear, linear_backward_input, linear_backward_weight};
use moeworks_tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

use crate::router::blocks;
use crate::router::logits::{LogitGrads, NoisyInput, PROJECTION, SavedLogits, SchemeLogits, store};
use crate::router::scheme::{Check, FusedOps, RoutingScheme, SchemeDoc, SettingDoc};
use crate::router::score_router::ScoreRouter;
use crate::router::state::{Init, WeightShape};
use crate::{MoeConfig, MoeWeights, Range};

/// `[1]`: t, the logarithm of the inverse temperature.
const LOG_SCALE: &str = "log_scale";
/// ln 100: the bound on t, so that the temperature is at least 1/100.
const MAX_LOG_SCALE: f32 = 4.605_170_2;
/// The smallest norm to divide by.
const MIN_NORM: f32 = 1e-12;

static DOC: SchemeDoc = SchemeDoc {
    settings: &[
        SettingDoc {
            name: "cosine_dim",
            default: "0",
            range: Range::whole(0..=1 << 16),
            values: "",
            comment: "Width of the cosine router's projection; 0: 256, or the width of the model if that is less.",
        },
        SettingDoc {
            name: "cosine_temperature",
            default: "0.5",
            range: Range::POSITIVE,
            values: "",
            comment: "Initial value of the cosine router's learned temperature.",
        },
    ],
    ..SchemeDoc::new(
        "Like `top_k`, but a logit is the cosine between a projection of the token and a vector of the expert, divided by a learned \
         temperature: a token's length has no effect, and the experts' vectors do not collapse. With `router.cosine_dim` of \
         half the experts and a temperature of 0.3 it is the router of X-MoE.",
        "Hwang et al., \"Tutel\", 2206.03382; Liu et al., \"Swin V2\", 2111.09883; Chi et al., \"X-MoE\", 2204.09179, \
         section 3",
    )
};

/// The settings of the cosine router.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Cosine {
    /// Width of the projection; 0: 256 as in Tutel, or D if that is less.
    #[serde(rename = "cosine_dim")]
    pub dim: usize,
    /// The initial value of the learned temperature, which never falls below 0.01.
    #[serde(rename = "cosine_temperature")]
    pub temperature: f32,
}

impl Default for Cosine {
    fn default() -> Self {
        Self { dim: 0, temperature: 0.5 }
    }
}

impl Cosine {
    /// Returns the width of the projection.
    fn width(&self, config: &MoeConfig) -> usize {
        if self.dim == 0 { config.width.min(256) } else { self.dim }
    }
}

impl RoutingScheme for Cosine {
    fn doc(&self) -> &'static SchemeDoc {
        &DOC
    }

    fn check_ranges(&self) -> Check {
        DOC.check("router.cosine_temperature", &self.temperature)?;
        DOC.check("router.cosine_dim", &self.dim)
    }

    fn matrix_shape(&self, config: &MoeConfig) -> [usize; 2] {
        [config.num_choosable(), self.width(config)]
    }

    fn weights(&self, config: &MoeConfig) -> Vec<WeightShape> {
        vec![
            WeightShape::new(PROJECTION, &[self.width(config), config.width], Init::Normal),
            WeightShape::new(LOG_SCALE, &[1], Init::Constant(-self.temperature.ln())),
        ]
    }

    /// Counts the projection and the cosines in products of length D.
    fn num_products(&self, config: &MoeConfig) -> usize {
        let width = self.width(config);
        width + (config.num_choosable() * width).div_ceil(config.width.max(1))
    }

    fn fused_ops(&self) -> FusedOps {
        FusedOps::Softmax
    }

    fn logits(&self, router: &ScoreRouter<'_>, ctx: &Context, x: NoisyInput<'_>) -> SchemeLogits {
        let (values, saved) = Cosines::forward(ctx, router.weights, &x.noisy(ctx));
        SchemeLogits { values, saved: Box::new(saved), noise: None }
    }
}

/// The saved state of cosine logits.
struct Cosines {
    /// `[T, P]`: the projected tokens.
    projected: Tensor,
    experts: Directions,
    cosines: Tensor,
}

/// Rows divided by their norms, and the norms.
struct Directions {
    /// `[n, P]`: the unit vectors.
    units: Tensor,
    /// `[n]`: the norms.
    norms: Vec<f32>,
}

impl Cosines {
    /// Computes the logits of `x [T, D]` and the state of backward.
    ///
    /// With a bf16 input the projection is a bf16 GEMM, at half the time: it gives only the norm that all cosines of
    /// a token are divided by, and the direction for backward. The products that decide between experts, `<P x, m> =
    /// <x, P^T m>`, are in f32, with E vectors of length D.
    fn forward(ctx: &Context, weights: &MoeWeights, x: &Tensor) -> (Tensor, Self) {
        let projection = weights.extra(PROJECTION);
        let experts = Directions::new(ctx, weights.router.copied(ctx.pool()));
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
        let outputs = blocks::split_mut(cosines.f32s_mut(), e).zip(blocks::split_mut(logits.f32s_mut(), e));
        blocks::for_each(ctx, outputs.zip(blocks::split(projected.f32s(), width)), |_, ((cosines, logits), rows)| {
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

impl SavedLogits for Cosines {
    /// Returns the gradient of `x`, and those of `q`, of the experts' vectors and of the logarithm of the scale.
    fn backward_alone(&self, ctx: &Context, weights: &MoeWeights, grads: LogitGrads<'_>) -> (Tensor, Vec<Tensor>) {
        let Self { projected, experts, cosines } = self;
        let dlogits = grads.dlogits;
        let tokens = Directions::new(ctx, projected.copied(ctx.pool()));
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
        (dx, vec![dq, dexperts, Tensor::from_slice(ctx.pool(), &[1], &[log_scale])])
    }

    fn weight_grads(
        &self,
        ctx: &Context,
        left: &[Tensor],
        _: &Tensor,
        x: &Tensor,
        write: Write,
        grads: &mut MoeWeights,
    ) {
        let [dq, experts, log_scale] = left else { unreachable!("backward leaves three tensors") };
        linear_backward_weight(ctx, dq, x, DType::F32, write, grads.extra_mut(PROJECTION));
        store(experts.f32s(), write, &mut grads.router);
        store(log_scale.f32s(), write, grads.extra_mut(LOG_SCALE));
    }
}

/// Returns the scale, and whether it is below its bound and thus has a gradient.
fn scale(weights: &MoeWeights) -> (f32, bool) {
    let log_scale = weights.extra(LOG_SCALE).f32s()[0];
    // `min` would drop a NaN.
    if log_scale > MAX_LOG_SCALE { (MAX_LOG_SCALE.exp(), false) } else { (log_scale.exp(), true) }
}

/// Computes the norm with 16 partial sums, which vectorise; at least [`MIN_NORM`].
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
    fn new(ctx: &Context, mut rows: Tensor) -> Self {
        let width = rows.cols();
        let mut norms = vec![0.0; rows.rows()];
        let blocks = blocks::split_mut(rows.f32s_mut(), width).zip(blocks::split_mut(&mut norms, 1));
        blocks::for_each(ctx, blocks, |_, (rows, norms)| {
            for (row, of_row) in rows.chunks_mut(width).zip(norms) {
                *of_row = norm(row);
                let scale = 1.0 / *of_row;
                row.iter_mut().for_each(|x| *x *= scale);
            }
        });
        Self { units: rows, norms }
    }

    /// Converts the gradients of the unit vectors to those of the rows.
    fn backward(&self, ctx: &Context, grads: &mut Tensor) {
        let width = grads.cols();
        let units = blocks::split(self.units.f32s(), width).zip(blocks::split(&self.norms, 1));
        blocks::for_each(ctx, blocks::split_mut(grads.f32s_mut(), width).zip(units), |_, (grads, (units, norms))| {
            for ((grad, unit), norm) in grads.chunks_mut(width).zip(units.chunks(width)).zip(norms) {
                let along: f32 = grad.iter().zip(unit).map(|(g, u)| g * u).sum();
                grad.iter_mut().zip(unit).for_each(|(g, u)| *g = (*g - u * along) / norm);
            }
        });
    }
}
