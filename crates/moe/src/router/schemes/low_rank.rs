//! The low-rank router: `logits = M n(P x)`. Tokens are projected to a few dimensions and scored there.

use moeworks_ops::Context;
use moeworks_ops::elementwise::{add_rows, sum_rows};
use moeworks_ops::linear::{Write, linear, linear_backward_input, linear_backward_weight};
use moeworks_ops::logits::{logits_backward_input, logits_backward_weight};
use moeworks_ops::rms_norm::{rms_norm, rms_norm_backward};
use moeworks_tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

use crate::router::config::RouterConfig;
use crate::router::logits::{LogitGrads, NoisyInput, PROJECTION, SavedLogits, SchemeLogits, product};
use crate::router::scheme::{Check, FusedOps, RoutingScheme, SchemeDoc, SettingDoc, Sizes, wrong};
use crate::router::score_router::ScoreRouter;
use crate::router::state::{Init, WeightShape};
use crate::{MoeConfig, MoeWeights, Range};

/// Epsilon of the norm of projected tokens.
const EPS: f32 = 1e-6;

static DOC: SchemeDoc = SchemeDoc {
    settings: &[
        SettingDoc {
            name: "low_rank_dim",
            default: "0",
            range: Range::whole(0..=1 << 16),
            values: "",
            comment: "Dimensions to which low_rank projects tokens; 0: half the number of experts, as in X-MoE.",
        },
        SettingDoc {
            name: "low_rank_normalize",
            default: "false",
            range: Range::Any,
            values: "true or false; false with one dimension",
            comment: "Divides low_rank's projected token by its root mean square, so that its length has no effect.",
        },
    ],
    ..SchemeDoc::new(
        "Like `top_k`, but tokens are first projected to `router.low_rank_dim` dimensions and scored there by a vector of each \
         expert: logits `M n(P x)`, with n nothing or a division by the root mean square. The product `M P` has a low rank, so \
         that the experts' vectors spread in a space of their own instead of collapsing into that of tokens, and many experts cost \
         fewer products. The same space with cosines and a learned temperature is `cosine`.",
        "Chi et al., \"On the Representation Collapse of Sparse Mixture of Experts\" (X-MoE), 2204.09179, section 3.1",
    )
};

/// The settings of the low-rank router.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LowRank {
    /// P: the dimensions to which tokens are projected; 0: half the number of experts.
    #[serde(rename = "low_rank_dim")]
    pub dim: usize,
    /// True to divide a projected token by its root mean square.
    #[serde(rename = "low_rank_normalize")]
    pub normalize: bool,
}

impl LowRank {
    /// Returns P, the width of the projection.
    fn width(&self, config: &MoeConfig) -> usize {
        if self.dim == 0 { (config.num_choosable() / 2).clamp(1, config.width.max(1)) } else { self.dim }
    }
}

impl RoutingScheme for LowRank {
    fn doc(&self) -> &'static SchemeDoc {
        &DOC
    }

    fn check_ranges(&self) -> Check {
        DOC.check("router.low_rank_dim", &self.dim)
    }

    fn check(&self, _: &RouterConfig, Sizes { num_experts, .. }: Sizes) -> Check {
        let dim = if self.dim == 0 { num_experts / 2 } else { self.dim };
        if !self.normalize || dim > 1 {
            return Ok(());
        }
        let expected = "must be false where tokens are projected to one dimension: only its sign would be left";
        wrong("router.low_rank_normalize", &true, expected)
    }

    fn matrix_shape(&self, config: &MoeConfig) -> [usize; 2] {
        [config.num_choosable(), self.width(config)]
    }

    /// Initialises the projection so that it preserves the scale of a normalised token's elements.
    fn weights(&self, config: &MoeConfig) -> Vec<WeightShape> {
        let std = 1.0 / (config.width.max(1) as f32).sqrt();
        vec![WeightShape::new(PROJECTION, &[self.width(config), config.width], Init::Deviation(std))]
    }

    /// Counts the projection and the products of its width in products of length D.
    fn num_products(&self, config: &MoeConfig) -> usize {
        let width = self.width(config);
        width + (config.num_choosable() * width).div_ceil(config.width.max(1))
    }

    fn fused_ops(&self) -> FusedOps {
        FusedOps::Softmax
    }

    fn logits(&self, router: &ScoreRouter<'_>, ctx: &Context, x: NoisyInput<'_>) -> SchemeLogits {
        let weights = router.weights;
        let projected = product(ctx, x, weights.extra(PROJECTION));
        let norm = self.normalize.then(|| Norm::forward(ctx, &projected));
        let scored = norm.as_ref().map_or(&projected, |norm| &norm.normed);
        let mut values = linear(ctx, scored, &weights.router, DType::F32);
        if let Some(bias) = &weights.router_bias {
            add_rows(ctx, &mut values, bias);
        }
        let of = x.noise.map_or(x.values.dtype(), |_| DType::F32);
        SchemeLogits { values, saved: Box::new(Projected { projected, norm, of }), noise: None }
    }
}

/// The saved state of low-rank logits.
struct Projected {
    /// `[T, P]`: the projected tokens.
    projected: Tensor,
    norm: Option<Norm>,
    /// The type of the input.
    of: DType,
}

/// Projected tokens divided by their root mean squares.
struct Norm {
    /// `[T, P]`: the normalised tokens.
    normed: Tensor,
    /// `[T]`: the inverse root mean squares.
    inv_rms: Tensor,
}

impl Norm {
    fn forward(ctx: &Context, projected: &Tensor) -> Self {
        let (normed, inv_rms) = rms_norm(ctx, projected, &ones(ctx, projected.cols()), EPS, DType::F32);
        Self { normed, inv_rms }
    }
}

/// Returns a weight of ones, for a norm without weights.
fn ones(ctx: &Context, width: usize) -> Tensor {
    Tensor::from_slice(ctx.pool(), &[width], &vec![1.0_f32; width])
}

impl SavedLogits for Projected {
    /// Returns the gradient of the input, and that of the projected tokens for the weights.
    fn backward_alone(&self, ctx: &Context, weights: &MoeWeights, grads: LogitGrads<'_>) -> (Tensor, Vec<Tensor>) {
        let mut dq = linear_backward_input(ctx, grads.dlogits, &weights.router, DType::F32);
        if let Some(Norm { inv_rms, .. }) = &self.norm {
            let weight = ones(ctx, dq.cols());
            let mut unused = ctx.zeros(weight.shape(), DType::F32);
            dq = rms_norm_backward(ctx, &dq, &self.projected, &weight, inv_rms, Write::Replace, &mut unused);
        }
        (logits_backward_input(ctx, &dq, weights.extra(PROJECTION), self.of), vec![dq])
    }

    fn weight_grads(
        &self,
        ctx: &Context,
        left: &[Tensor],
        dlogits: &Tensor,
        x: &Tensor,
        write: Write,
        grads: &mut MoeWeights,
    ) {
        let scored = self.norm.as_ref().map_or(&self.projected, |norm| &norm.normed);
        linear_backward_weight(ctx, dlogits, scored, DType::F32, write, &mut grads.router);
        for dq in left {
            logits_backward_weight(ctx, dq, x, write, grads.extra_mut(PROJECTION));
        }
        if let Some(bias) = &mut grads.router_bias {
            sum_rows(ctx, dlogits, write, bias);
        }
    }
}
