//! Expert choice: experts choose their tokens.

use moeworks_ops::Context;
use moeworks_tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::router::replay::Replay;
use crate::router::scheme::{FusedOps, RouterOption, RoutingScheme, SchemeDoc};
use crate::router::score_router::ScoreRouter;
use crate::router::scores::Scores;
use crate::router::{assign, choice};

static DOC: SchemeDoc = SchemeDoc {
    companions: &[("model.normalize_weights", "false"), ("train.balance", "'none'")],
    ..SchemeDoc::new(
        "In training each expert takes the K T / E tokens (times the capacity factor, if one is given) that score it highest: load is \
         even and tokens have different numbers of experts. Outside training tokens choose, as in `top_k`, \
         because an expert's choice would depend on future tokens.",
        "Zhou et al., \"Mixture-of-Experts with Expert Choice Routing\", 2202.09368, section 3",
    )
};

/// No settings of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExpertChoice {}

impl RoutingScheme for ExpertChoice {
    fn doc(&self) -> &'static SchemeDoc {
        &DOC
    }

    fn allows(&self, option: RouterOption) -> bool {
        option == RouterOption::GateResidual
    }

    fn is_global(&self) -> bool {
        true
    }

    fn keeps_to_capacity(&self) -> bool {
        true
    }

    fn is_plain_when_trained(&self) -> bool {
        true
    }

    fn fused_ops(&self) -> FusedOps {
        FusedOps::Softmax
    }

    fn replay(&self) -> Replay {
        Replay::Refused("experts choose their tokens")
    }

    /// Chooses `[T, K]`: the experts that chose each token, group by group.
    fn choose(&self, router: &ScoreRouter<'_>, ctx: &Context, scores: &Scores, _: &Tensor) -> Tensor {
        let e = scores.probs.cols();
        let own: Vec<f32> = scores.probs.f32s().iter().map(|score| if score.is_nan() { 0.0 } else { *score }).collect();
        let all = router.gather_all(&own, e);
        let factor = if router.config.capacity_factor == 0.0 { 1.0 } else { router.config.capacity_factor };
        let size = router.rule(None).group_size(all.len() / e).max(1);
        let range = router.own_tokens(own.len() / e);
        let mut tokens = vec![Vec::new(); e];
        for (group, scores) in all.chunks(size * e).enumerate() {
            let count = crate::capacity(factor, scores.len() / e, router.config.top_k, e).unwrap_or(0);
            for (of_expert, chosen) in tokens.iter_mut().zip(assign::expert_choice(ctx, scores, e, count)) {
                let chosen = chosen.iter().map(|&token| token as usize + group * size);
                let own = chosen.filter(|token| range.contains(token));
                of_expert.extend(own.map(|token| (token - range.start) as u32));
            }
        }
        let (ids, k) = choice::invert(&tokens, &own);
        Tensor::from_slice(ctx.pool(), &[scores.probs.rows(), k], &ids)
    }
}
