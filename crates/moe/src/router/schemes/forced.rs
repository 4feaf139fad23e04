//! Forced routing for benchmarks: a token's position decides its experts, not its scores.

use moeworks_ops::Context;
use moeworks_ops::random::fill_gumbels;
use moeworks_tensor::{DType, Purpose, Random, Tensor};
use serde::{Deserialize, Serialize};

use crate::Range;
use crate::router::config::RouterConfig;
use crate::router::input::Draw;
use crate::router::scheme::{Check, RouterOption, RoutingScheme, SchemeDoc, SettingDoc, Sizes, wrong};
use crate::router::score_router::ScoreRouter;
use crate::router::scores::Scores;
use crate::router::{blocks, choice};

/// The key of the random draws of a skewed load, equal in every layer, step and run.
const SEED: u64 = 0x6c6f_6164;

/// The least probability of an expert, so that a token always has K experts.
const MIN_PROBABILITY: f64 = 1e-30;

static DOC: SchemeDoc = SchemeDoc {
    settings: &[
        SettingDoc {
            name: "forced_load",
            default: "\"balanced\"",
            range: Range::Any,
            values: "balanced, zipf or hot",
            comment: "Load of the experts under forced: balanced (equal), zipf or hot (some get more).",
        },
        SettingDoc {
            name: "forced_zipf",
            default: "1.0",
            range: Range::number(0.0..=16.0),
            values: "",
            comment: "With zipf: expert i, from 1, is drawn with a probability of 1 over i to the power of this.",
        },
        SettingDoc {
            name: "forced_hot_experts",
            default: "1",
            range: Range::whole(1..=1 << 20),
            values: "from 1 to num_experts",
            comment: "With hot: the number of hot experts, which come first.",
        },
        SettingDoc {
            name: "forced_hot_share",
            default: "0.5",
            range: Range::SHARE,
            values: "",
            comment: "With hot: the probability that a choice is a hot expert.",
        },
    ],
    companions: &[("train.balance", "'none'")],
    is_synthetic: true,
    ..SchemeDoc::new(
        "The load is given, for benchmarks: a token's experts follow from its position alone, perfectly balanced, by a Zipf \
         distribution or with some hot experts (drawn without replacement, so that with K above 1 the load is flatter than the \
         probabilities). Weights are those of `top_k`, from the softmax of live logits, so that all gradients flow and a step has \
         its usual cost.",
        "",
    )
};

/// The load of the experts under forced routing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ForcedLoad {
    /// Equal numbers of tokens.
    #[default]
    Balanced,
    /// A Zipf distribution.
    Zipf,
    /// A few hot experts with more tokens.
    Hot,
}

/// The settings of forced routing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Forced {
    /// The load.
    #[serde(rename = "forced_load")]
    pub load: ForcedLoad,
    /// The exponent of a Zipf distribution.
    #[serde(rename = "forced_zipf")]
    pub zipf: f64,
    /// The number of hot experts.
    #[serde(rename = "forced_hot_experts")]
    pub hot_experts: usize,
    /// The probability that a choice is a hot expert.
    #[serde(rename = "forced_hot_share")]
    pub hot_share: f64,
}

impl Default for Forced {
    fn default() -> Self {
        Self { load: ForcedLoad::Balanced, zipf: 1.0, hot_experts: 1, hot_share: 0.5 }
    }
}

impl Forced {
    /// Returns `[E]`: the unnormalised probability of each expert; none for an even load.
    fn probabilities(&self, num_experts: usize) -> Option<Vec<f64>> {
        match self.load {
            ForcedLoad::Balanced => None,
            ForcedLoad::Zipf => Some((1..=num_experts).map(|i| (i as f64).powf(-self.zipf)).collect()),
            ForcedLoad::Hot => {
                let hot = self.hot_experts.min(num_experts);
                let (of_hot, of_others) = (self.hot_share / hot as f64, 1.0 - self.hot_share);
                let of_others = of_others / (num_experts - hot).max(1) as f64;
                Some((0..num_experts).map(|e| if e < hot { of_hot } else { of_others }).collect())
            }
        }
    }
}

impl RoutingScheme for Forced {
    fn doc(&self) -> &'static SchemeDoc {
        &DOC
    }

    fn check_ranges(&self) -> Check {
        DOC.check("router.forced_zipf", &self.zipf)?;
        DOC.check("router.forced_hot_share", &self.hot_share)?;
        DOC.check("router.forced_hot_experts", &self.hot_experts)
    }

    fn check(&self, _: &RouterConfig, Sizes { num_experts, .. }: Sizes) -> Check {
        if self.hot_experts <= num_experts {
            return Ok(());
        }
        let expected = format!("must be at most the number of experts, {num_experts}");
        wrong("router.forced_hot_experts", &self.hot_experts, expected)
    }

    fn allows(&self, option: RouterOption) -> bool {
        matches!(option, RouterOption::GateResidual | RouterOption::Reroute)
    }

    fn choose(&self, router: &ScoreRouter<'_>, ctx: &Context, _: &Scores, ranking: &Tensor) -> Tensor {
        let (e, k, first) = (ranking.cols(), router.top_k(), router.input.first_token);
        let mut ids = ctx.empty(&[ranking.rows(), k], DType::U32);
        let Some(probabilities) = self.probabilities(e) else {
            ids.u32s_mut().iter_mut().zip(first * k..).for_each(|(id, place)| *id = (place % e) as u32);
            return ids;
        };
        // The K highest logarithms with Gumbel noise are a draw of K experts without replacement (Gumbel top-k).
        let logs: Vec<f32> = probabilities.iter().map(|p| p.max(MIN_PROBABILITY).ln() as f32).collect();
        let random = Random::new(SEED, Purpose::Router, 0);
        blocks::for_each(ctx, blocks::split_mut(ids.u32s_mut(), k), |block, ids| {
            let mut draws = vec![0.0; ids.len() / k * e];
            fill_gumbels(ctx.isa(), &random, Draw::Ranking.at((first + block * blocks::ROWS) * e), &mut draws);
            for (ids, draws) in ids.chunks_mut(k).zip(draws.chunks_mut(e)) {
                draws.iter_mut().zip(&logs).for_each(|(draw, log)| *draw += log);
                choice::top_k(draws, ids);
            }
        });
        ids
    }
}
