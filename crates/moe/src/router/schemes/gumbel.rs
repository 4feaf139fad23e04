//! Gumbel routing: experts drawn by Gumbel noise, with straight-through gradients.

use moeworks_ops::Context;
use serde::{Deserialize, Serialize};

use crate::Ramp;
use crate::router::logits::{NoisyInput, SchemeLogits};
use crate::router::noise::LogitNoise;
use crate::router::scheme::{BenchChange, RoutingScheme, SchemeDoc, Weighing};
use crate::router::score_router::ScoreRouter;

static DOC: SchemeDoc = SchemeDoc {
    // The z-loss of noisy logits over a low temperature would dominate the loss.
    companions: &[("model.router.temperature", "'linear 0.5 to 0.1'"), ("train.z_coef", "0.0")],
    bench: Some(BenchChange { label: "", apply: |config| config.router.temperature = Ramp::constant(0.5) }),
    ..SchemeDoc::new(
        "In training the logits get Gumbel noise, so that experts are drawn with their softmax probabilities. The weights are 1/K in \
         forward and the softmax in backward (straight-through), at a temperature that falls.",
        "Jang et al., \"Categorical Reparameterization with Gumbel-Softmax\", 1611.01144, section 2.2",
    )
};

/// No settings of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Gumbel {}

impl RoutingScheme for Gumbel {
    fn doc(&self) -> &'static SchemeDoc {
        &DOC
    }

    fn weighing(&self) -> Weighing {
        Weighing::Equal
    }

    fn logits(&self, router: &ScoreRouter<'_>, ctx: &Context, x: NoisyInput<'_>) -> SchemeLogits {
        let noise = router.logit_draws().map(LogitNoise::Gumbel);
        SchemeLogits { noise, ..SchemeLogits::linear(ctx, router.weights, x) }
    }
}
