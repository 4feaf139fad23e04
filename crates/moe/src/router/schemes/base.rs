//! BASE layers: a balanced assignment of tokens to experts with the highest total score.

use moeworks_ops::Context;
use moeworks_tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::router::assign;
use crate::router::config::RouterConfig;
use crate::router::scheme::{FusedOps, RouterOption, RoutingScheme, SchemeDoc, Weighing};
use crate::router::score_router::ScoreRouter;
use crate::router::scores::{Gate, Scores};

static DOC: SchemeDoc = SchemeDoc {
    companions: &[("model.top_k", "1"), ("train.balance", "'none'")],
    ..SchemeDoc::new(
        "In training tokens are assigned to experts so that each gets equally many and the total score is the highest (an \
         auction), and weighed by the sigmoid of the logit; K is 1. Outside training each token takes its best expert.",
        "Lewis et al., \"BASE Layers\", 2103.16716, section 3",
    )
};

/// No settings of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Base {}

impl RoutingScheme for Base {
    fn doc(&self) -> &'static SchemeDoc {
        &DOC
    }

    fn fixed_top_k(&self) -> Option<usize> {
        Some(1)
    }

    fn allows(&self, option: RouterOption) -> bool {
        matches!(option, RouterOption::GateResidual | RouterOption::RandomChoices)
    }

    fn is_global(&self) -> bool {
        true
    }

    fn keeps_to_capacity(&self) -> bool {
        true
    }

    fn fused_ops(&self) -> FusedOps {
        FusedOps::Scores
    }

    fn gate(&self, _: &RouterConfig, _: usize) -> Gate {
        Gate::Sigmoid
    }

    fn weighing(&self) -> Weighing {
        Weighing::GatesAsTheyAre
    }

    fn choose(&self, router: &ScoreRouter<'_>, ctx: &Context, _: &Scores, ranking: &Tensor) -> Tensor {
        let e = ranking.cols();
        let all = assign::auction(ctx, &router.gather_all(ranking.f32s(), e), e);
        let own = router.cross_rank.map_or(&all[..], |cross_rank| cross_rank.own_rows(&all, 1));
        Tensor::from_slice(ctx.pool(), &[ranking.rows(), 1], own)
    }
}
