//! Sinkhorn routing: top-k of logits balanced over the experts.

use moeworks_ops::Context;
use moeworks_tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::router::assign;
use crate::router::config::RouterConfig;
use crate::router::scheme::{FusedOps, RouterOption, RoutingScheme, SchemeDoc};
use crate::router::score_router::ScoreRouter;
use crate::router::scores::{Gate, Scores};

static DOC: SchemeDoc = SchemeDoc {
    companions: &[("model.normalize_weights", "false"), ("train.balance", "'none'")],
    ..SchemeDoc::new(
        "In training each token takes the K best of the logits balanced over the experts by Sinkhorn's iteration, weighted by the \
         softmax of the logits themselves, or with K = 1 by their sigmoid, as in Megatron-LM. Outside training tokens choose \
         by the logits.",
        "Clark et al., \"Unified Scaling Laws for Routed Language Models\", 2202.01169, section 3.1",
    )
};

/// No settings of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sinkhorn {}

impl RoutingScheme for Sinkhorn {
    fn doc(&self) -> &'static SchemeDoc {
        &DOC
    }

    fn allows(&self, option: RouterOption) -> bool {
        matches!(option, RouterOption::GateResidual | RouterOption::RandomChoices)
    }

    fn is_global(&self) -> bool {
        true
    }

    fn fused_ops(&self) -> FusedOps {
        FusedOps::Scores
    }

    fn gate(&self, _: &RouterConfig, top_k: usize) -> Gate {
        if top_k == 1 { Gate::Sigmoid } else { Gate::Softmax }
    }

    /// Chooses the highest logits after adding the experts' balancing factors.
    fn choose(&self, router: &ScoreRouter<'_>, ctx: &Context, _: &Scores, ranking: &Tensor) -> Tensor {
        let e = ranking.cols();
        let factors = assign::sinkhorn(ctx, &router.gather_all(ranking.f32s(), e), e);
        let mut balanced = ranking.copied(ctx.pool());
        for row in balanced.f32s_mut().chunks_mut(e) {
            row.iter_mut().zip(&factors).for_each(|(logit, factor)| *logit += factor);
        }
        router.highest(ctx, &balanced)
    }
}
