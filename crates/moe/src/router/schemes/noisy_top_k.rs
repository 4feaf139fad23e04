//! Noisy top-k routing: normal noise with a learned deviation on the logits.

use moeworks_ops::Context;
use moeworks_tensor::DType;
use serde::{Deserialize, Serialize};

use crate::MoeConfig;
use crate::router::logits::{Linear, NOISE, NoisyInput, SchemeLogits, with_deviations};
use crate::router::noise::LogitNoise;
use crate::router::scheme::{FusedOps, RoutingScheme, SchemeDoc};
use crate::router::score_router::ScoreRouter;
use crate::router::state::{Init, WeightShape};

static DOC: SchemeDoc = SchemeDoc {
    // Section 4 and appendix A.
    companions: &[
        ("model.normalize_weights", "true"),
        ("train.balance", "'none'"),
        ("train.importance_coef", "0.1"),
        ("train.load_coef", "0.1"),
    ],
    ..SchemeDoc::new(
        "Like `top_k`, but in training the logits get normal noise whose deviation is `softplus(x W_noise^T)`, learned: tokens \
         try other experts, and the probability that an expert is chosen has a gradient, which the load loss balances.",
        "Shazeer et al., \"Outrageously Large Neural Networks\", 1701.06538, section 2.1 and appendix A",
    )
};

/// No settings of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NoisyTopK {}

impl RoutingScheme for NoisyTopK {
    fn doc(&self) -> &'static SchemeDoc {
        &DOC
    }

    fn weights(&self, config: &MoeConfig) -> Vec<WeightShape> {
        vec![WeightShape::new(NOISE, &[config.num_choosable(), config.width], Init::Constant(0.0))]
    }

    fn num_products(&self, config: &MoeConfig) -> usize {
        2 * config.num_choosable()
    }

    fn fused_ops(&self) -> FusedOps {
        FusedOps::Softmax
    }

    fn has_learned_noise(&self) -> bool {
        true
    }

    fn logits(&self, router: &ScoreRouter<'_>, ctx: &Context, x: NoisyInput<'_>) -> SchemeLogits {
        let Some(draws) = router.logit_draws() else { return SchemeLogits::linear(ctx, router.weights, x) };
        let (values, deviations) = with_deviations(ctx, router.weights, x);
        let saved = Linear { of: x.noise.map_or(x.values.dtype(), |_| DType::F32) };
        SchemeLogits { values, saved: Box::new(saved), noise: Some(LogitNoise::Learned(deviations, draws)) }
    }
}
