//! Top-p routing: the fewest experts that cover a share of the probability.

use moeworks_ops::Context;
use moeworks_tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::Range;
use crate::router::choice;
use crate::router::replay::Replay;
use crate::router::scheme::{Check, RouterOption, RoutingScheme, SchemeDoc, SettingDoc};
use crate::router::score_router::ScoreRouter;
use crate::router::scores::Scores;

static DOC: SchemeDoc = SchemeDoc {
    settings: &[SettingDoc {
        name: "top_p",
        default: "0.4",
        range: Range::POSITIVE_SHARE,
        values: "",
        comment: "top_p takes the fewest experts whose probabilities add up to this.",
    }],
    companions: &[("model.normalize_weights", "false"), ("train.local_entropy_coef", "1e-4")],
    ..SchemeDoc::new(
        "Each token takes the fewest experts whose probabilities add up to `router.top_p`: tokens that the router is sure of \
         take one, others more. A loss on the entropy of each token's probabilities keeps the number low.",
        "Huang et al., \"Harder Tasks Need More Experts\", 2403.07652, section 3",
    )
};

/// The settings of top-p routing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TopP {
    /// The sum of probabilities to reach.
    #[serde(rename = "top_p")]
    pub p: f32,
}

impl Default for TopP {
    fn default() -> Self {
        Self { p: 0.4 }
    }
}

impl RoutingScheme for TopP {
    fn doc(&self) -> &'static SchemeDoc {
        &DOC
    }

    fn check_ranges(&self) -> Check {
        DOC.check("router.top_p", &self.p)
    }

    fn allows(&self, option: RouterOption) -> bool {
        use RouterOption::{GateResidual, ModalityExperts, Reroute, ZeroComputation};
        matches!(option, GateResidual | ModalityExperts | Reroute | ZeroComputation)
    }

    fn replay(&self) -> Replay {
        Replay::AnyNumber
    }

    fn choose(&self, router: &ScoreRouter<'_>, ctx: &Context, scores: &Scores, _: &Tensor) -> Tensor {
        let e = scores.probs.cols();
        let ids =
            router.rows(ctx, e, &scores.probs, |probs: &[f32], ids: &mut [u32]| choice::top_p(probs, self.p, ids));
        let (ids, k) = choice::compact(ids.u32s(), e);
        Tensor::from_slice(ctx.pool(), &[scores.probs.rows(), k], &ids)
    }
}
