//! ReLU routing: a token takes all experts whose logit is positive.

use moeworks_ops::Context;
use moeworks_tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::router::choice;
use crate::router::config::RouterConfig;
use crate::router::replay::Replay;
use crate::router::scheme::{Check, RouterOption, RoutingScheme, SchemeDoc, SettingDoc, Weighing};
use crate::router::score_router::ScoreRouter;
use crate::router::scores::{Gate, Scores};
use crate::router::state::{Init, StepStats, WeightShape, sign};
use crate::weights::NamedTensor;
use crate::{LayerStats, MoeConfig, MoeWeights, Range};

/// `[1]`: the state with the coefficient of the L1 loss.
const L1_WEIGHT: &str = "l1_weight";

static DOC: SchemeDoc = SchemeDoc {
    settings: &[
        SettingDoc {
            name: "l1_start",
            default: "1e-8",
            range: Range::POSITIVE,
            values: "",
            comment: "Initial coefficient of relu's L1 loss.",
        },
        SettingDoc {
            name: "l1_rate",
            default: "1.2",
            range: Range::at_least(1.0),
            values: "",
            comment: "Factor by which the L1 coefficient changes per step, to hold the mean number of experts at top_k.",
        },
        SettingDoc {
            name: "l1_balanced",
            default: "true",
            range: Range::Any,
            values: "true or false",
            comment: "Weighs an expert's gates in relu's L1 loss by its load, which balances the load.",
        },
    ],
    companions: &[("train.balance", "'none'"), ("train.z_coef", "0.0")],
    ..SchemeDoc::new(
        "Each token takes all experts whose logit is positive and weighs them by it, so that the router has a gradient \
         everywhere. An L1 loss on the gates, whose weight adapts, holds the mean number of experts at K.",
        "Wang et al., \"ReMoE\", 2412.14711, section 3, equations 7 to 11",
    )
};

/// The settings of ReLU routing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Relu {
    /// The initial coefficient of the L1 loss.
    pub l1_start: f32,
    /// The factor by which the coefficient changes per step.
    pub l1_rate: f32,
    /// True if the L1 loss weighs an expert's gates by its load, which balances the load (ReMoE, section 3.4,
    /// equations 10 and 11): [`l1_loads`](crate::l1_loads).
    pub l1_balanced: bool,
}

impl Default for Relu {
    fn default() -> Self {
        Self { l1_start: 1e-8, l1_rate: 1.2, l1_balanced: true }
    }
}

impl RoutingScheme for Relu {
    fn doc(&self) -> &'static SchemeDoc {
        &DOC
    }

    fn check_ranges(&self) -> Check {
        DOC.check("router.l1_start", &self.l1_start)?;
        DOC.check("router.l1_rate", &self.l1_rate)
    }

    /// Excludes options that need other experts to choose from: a token has all experts with a positive gate already.
    fn allows(&self, option: RouterOption) -> bool {
        use RouterOption::{GateResidual, ModalityExperts, ZeroComputation};
        matches!(option, GateResidual | ModalityExperts | ZeroComputation)
    }

    fn state(&self, _: &MoeConfig) -> Vec<WeightShape> {
        vec![WeightShape::new(L1_WEIGHT, &[1], Init::Constant(self.l1_start))]
    }

    /// Updates the coefficient of the L1 loss: `lambda *= rate^sign((1 - K/E) - sparsity)`. The sparsity is the share
    /// of experts that a token does not have, averaged over all layers, so that they share one coefficient (equations
    /// 7 and 8).
    fn next_state(&self, state: &mut NamedTensor, step: &StepStats<'_>) {
        if state.name != L1_WEIGHT || step.own().num_tokens == 0 {
            return;
        }
        let sum = |count: fn(&LayerStats) -> usize| step.layers.iter().map(count).sum::<usize>() as f64;
        let mean_active = sum(|layer| layer.num_choices) / sum(|layer| layer.num_tokens);
        let weight = &mut state.tensor.f32s_mut()[0];
        // More experts than K mean too little sparsity, so the coefficient rises.
        *weight *= self.l1_rate.powf(sign(mean_active - step.config.top_k as f64));
        *weight = weight.clamp(f32::MIN_POSITIVE, f32::MAX);
    }

    fn gate(&self, _: &RouterConfig, _: usize) -> Gate {
        Gate::Relu
    }

    fn weighing(&self) -> Weighing {
        Weighing::GatesAsTheyAre
    }

    fn replay(&self) -> Replay {
        Replay::AnyNumber
    }

    fn choose(&self, router: &ScoreRouter<'_>, ctx: &Context, scores: &Scores, _: &Tensor) -> Tensor {
        let gates = scores.gates();
        let ids = router.rows(ctx, gates.cols(), gates, choice::positive);
        let (ids, k) = choice::compact(ids.u32s(), gates.cols());
        Tensor::from_slice(ctx.pool(), &[gates.rows(), k], &ids)
    }

    fn l1_is_balanced(&self) -> Option<bool> {
        Some(self.l1_balanced)
    }

    fn l1_weight(&self, weights: &MoeWeights) -> f32 {
        weights.state(L1_WEIGHT).f32s()[0]
    }
}
