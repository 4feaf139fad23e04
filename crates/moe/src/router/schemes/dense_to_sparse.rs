//! Dense-to-sparse gating: a run starts with every expert, and K falls to its final value.

use moeworks_ops::Context;
use serde::{Deserialize, Serialize};

use crate::router::config::RouterConfig;
use crate::router::input::RouterInput;
use crate::router::logits::{NoisyInput, SchemeLogits};
use crate::router::noise::LogitNoise;
use crate::router::replay::Replay;
use crate::router::scheme::{Check, FusedOps, RouterOption, RoutingScheme, SchemeDoc, SettingDoc, Sizes, wrong};
use crate::router::score_router::ScoreRouter;
use crate::{MoeConfig, Ramp, RampShape, Range};

static DOC: SchemeDoc = SchemeDoc {
    settings: &[
        SettingDoc {
            name: "dense_start",
            default: "0",
            range: Range::whole(0..=1 << 20),
            values: "0, or from top_k to num_experts",
            comment: "Experts per token at the start of dense_to_sparse; 0: all.",
        },
        SettingDoc {
            name: "dense_share",
            default: "0.25",
            range: Range::POSITIVE_SHARE,
            values: "",
            comment: "Share of the run's steps over which dense_to_sparse falls to top_k experts per token.",
        },
        SettingDoc {
            name: "dense_shape",
            default: "\"linear\"",
            range: Range::Any,
            values: "linear, cosine, exponential or step",
            comment: "Shape of that fall: linear, cosine, exponential (equal factors) or step (all at once).",
        },
    ],
    companions: &[("model.normalize_weights", "false"), ("model.router.temperature", "'linear 2 to 1 over 0.25'")],
    ..SchemeDoc::new(
        "A token starts with all experts (`router.dense_start`), weighted by a Gumbel-softmax whose temperature falls. The number of \
         its experts falls to `top_k` over `router.dense_share` of the run: experts and router learn together before the \
         choice becomes sparse, and nothing is random after that. With K = 1 it ends as `top_k` with one expert, and a trained \
         model is a `top_k` model. The paper drops experts whose weight is below a threshold; here K is equal for all tokens \
         and follows a schedule.",
        "Nie et al., \"EvoMoE\" (dense-to-sparse gate), 2112.14397",
    )
};

/// The settings of dense-to-sparse gating.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DenseToSparse {
    /// Experts per token at the start; 0: all.
    #[serde(rename = "dense_start")]
    pub start: usize,
    /// The share of the run over which they fall to K.
    #[serde(rename = "dense_share")]
    pub share: f64,
    /// The shape of the fall.
    #[serde(rename = "dense_shape")]
    pub shape: RampShape,
}

impl Default for DenseToSparse {
    fn default() -> Self {
        Self { start: 0, share: 0.25, shape: RampShape::Linear }
    }
}

impl DenseToSparse {
    /// Returns the number of experts per token at the start.
    fn first(&self, config: &MoeConfig) -> usize {
        if self.start == 0 { config.num_choosable() } else { self.start }
    }
}

impl RoutingScheme for DenseToSparse {
    fn doc(&self) -> &'static SchemeDoc {
        &DOC
    }

    fn check_ranges(&self) -> Check {
        DOC.check("router.dense_start", &self.start)?;
        DOC.check("router.dense_share", &self.share)
    }

    fn check(&self, _: &RouterConfig, Sizes { num_experts, top_k }: Sizes) -> Check {
        if self.start == 0 || (top_k..=num_experts).contains(&self.start) {
            return Ok(());
        }
        let expected = format!("must be 0 for all experts, or from top_k, {top_k}, to their number, {num_experts}");
        wrong("router.dense_start", &self.start, expected)
    }

    fn allows(&self, option: RouterOption) -> bool {
        !matches!(option, RouterOption::Groups | RouterOption::Sparsemixer)
    }

    /// Returns K at this pass's progress, rounded up, or the K of given expert ids.
    fn top_k(&self, config: &MoeConfig, input: &RouterInput<'_>) -> usize {
        if let Some(given) = input.expert_ids {
            return given.top_k();
        }
        if input.is_inference || input.progress >= self.share {
            return config.top_k;
        }
        let (start, end) = (self.first(config) as f64, config.top_k as f64);
        let ramp = Ramp { start, end, share: self.share, shape: self.shape };
        // The margin keeps rounding errors from adding one to a whole number.
        ((ramp.at(input.progress) - 1e-9).ceil() as usize).clamp(config.top_k, self.first(config))
    }

    fn replay(&self) -> Replay {
        Replay::AnyNumber
    }

    fn largest_top_k(&self, config: &MoeConfig) -> usize {
        self.first(config)
    }

    fn is_plain_when_trained(&self) -> bool {
        true
    }

    fn fused_ops(&self) -> FusedOps {
        FusedOps::Softmax
    }

    /// Computes linear logits, with Gumbel noise in training while K falls.
    fn logits(&self, router: &ScoreRouter<'_>, ctx: &Context, x: NoisyInput<'_>) -> SchemeLogits {
        let is_dense = router.input.progress < self.share;
        let noise = router.logit_draws().filter(|_| is_dense).map(LogitNoise::Gumbel);
        SchemeLogits { noise, ..SchemeLogits::linear(ctx, router.weights, x) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ks(scheme: &DenseToSparse, top_k: usize) -> Vec<usize> {
        let config = MoeConfig::plain(4, 4, 8, top_k);
        let at = |i: u32| RouterInput { progress: f64::from(i) / 10.0, ..RouterInput::default() };
        (0..=10).map(|i| scheme.top_k(&config, &at(i))).collect()
    }

    #[test]
    fn k_falls_to_its_final_value_as_the_shape_says() {
        let with = |shape| DenseToSparse { start: 0, share: 0.5, shape };
        assert_eq!(ks(&with(RampShape::Linear), 3), [8, 7, 6, 5, 4, 3, 3, 3, 3, 3, 3]);
        assert_eq!(ks(&with(RampShape::Step), 1), [8, 8, 8, 8, 8, 1, 1, 1, 1, 1, 1]);
        assert_eq!(ks(&with(RampShape::Exponential), 1), [8, 6, 4, 3, 2, 1, 1, 1, 1, 1, 1]);
        let some = DenseToSparse { start: 4, share: 1.0, shape: RampShape::Cosine };
        assert_eq!(ks(&some, 2), [4, 4, 4, 4, 4, 3, 3, 3, 3, 3, 2]);
    }

    #[test]
    fn k_is_final_in_use_at_any_time_of_the_run() {
        let config = MoeConfig::plain(4, 4, 8, 2);
        let input = RouterInput { progress: 0.0, is_inference: true, ..RouterInput::default() };
        assert_eq!(DenseToSparse::default().top_k(&config, &input), 2);
    }
}
