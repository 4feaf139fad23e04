//! GShard's routing: two experts, the second one used with a probability.

use moeworks_ops::Context;
use moeworks_tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::router::input::Draw;
use crate::router::replay::Replay;
use crate::router::scheme::{Check, FusedOps, RoutingScheme, SchemeDoc, SettingDoc};
use crate::router::score_router::ScoreRouter;
use crate::{NO_EXPERT, Range};

static DOC: SchemeDoc = SchemeDoc {
    settings: &[
        SettingDoc {
            name: "second",
            default: "\"random\"",
            range: Range::Any,
            values: "always, random or threshold",
            comment: "Use of gshard's second expert: always, random (by its weight) or threshold.",
        },
        SettingDoc {
            name: "second_threshold",
            default: "0.5",
            range: Range::POSITIVE_SHARE,
            values: "",
            comment: "Threshold of the second expert's weight: 0.5 in GShard, 0.2 in ST-MoE.",
        },
    ],
    // A capacity of twice the tokens over the experts.
    companions: &[("model.top_k", "2"), ("model.normalize_weights", "true"), ("model.capacity_factor", "1.0")],
    ..SchemeDoc::new(
        "Each token takes its best two experts; K is 2. In training the second one is used with a probability of its normalised \
         weight over a threshold, which saves capacity for tokens that need it.",
        "Lepikhin et al., \"GShard\", 2006.16668, section 2.2; threshold 0.2: ST-MoE, 2202.08906",
    )
};

/// The condition under which a token's second expert is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SecondExpert {
    /// The second expert is always used.
    Always,
    /// In training it is used with a probability of its normalised weight over the threshold, at most 1 (GShard with
    /// 0.5, ST-MoE with 0.2); outside training always.
    #[default]
    Random,
    /// It is used if its normalised weight is above the threshold.
    Threshold,
}

/// The settings of GShard's routing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Gshard {
    /// The condition under which a token's second expert is used.
    pub second: SecondExpert,
    /// The threshold of the second expert's weight, above 0 and at most 1.
    pub second_threshold: f32,
}

impl Default for Gshard {
    fn default() -> Self {
        Self { second: SecondExpert::Random, second_threshold: 0.5 }
    }
}

impl RoutingScheme for Gshard {
    fn doc(&self) -> &'static SchemeDoc {
        &DOC
    }

    fn check_ranges(&self) -> Check {
        DOC.check("router.second_threshold", &self.second_threshold)
    }

    fn fixed_top_k(&self) -> Option<usize> {
        Some(2)
    }

    fn fused_ops(&self) -> FusedOps {
        FusedOps::Softmax
    }

    fn replay(&self) -> Replay {
        match self.second {
            SecondExpert::Always => Replay::TopK,
            _ => Replay::Refused("second experts are left out by their weights, unless router.second = \"always\""),
        }
    }

    fn may_leave_out(&self) -> bool {
        self.second != SecondExpert::Always
    }

    fn counts_left_out(&self) -> bool {
        true
    }

    /// Removes the second experts that are not used in this pass.
    fn used(&self, router: &ScoreRouter<'_>, ctx: &Context, ids: &Tensor, weights: &Tensor) -> Tensor {
        if !self.may_leave_out() {
            return ids.clone();
        }
        let (threshold, random) = (self.second_threshold, router.random());
        let mut used = ids.copied(ctx.pool());
        let tokens = used.u32s_mut().chunks_mut(2).zip(weights.f32s().chunks(2));
        for (t, (ids, weights)) in tokens.enumerate() {
            let share = weights[1] / (weights[0] + weights[1]);
            let is_used = match (self.second, random) {
                (SecondExpert::Random, Some(random)) => {
                    share / threshold > random.uniform(Draw::Second.at(router.input.first_token + t))
                }
                (SecondExpert::Threshold, _) => share > threshold,
                _ => true,
            };
            // A non-finite weight keeps its expert, so that it shows in the output.
            if !is_used && share.is_finite() {
                ids[1] = NO_EXPERT;
            }
        }
        used
    }
}
