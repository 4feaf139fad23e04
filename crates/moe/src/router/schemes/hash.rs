//! Hash routing: a token's id alone decides its experts.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use moeworks_ops::Context;
use moeworks_tensor::{DType, Purpose, Random, Tensor};
use serde::{Deserialize, Serialize};

use crate::router::logits::{NoisyInput, SchemeLogits};
use crate::router::scheme::{RouterOption, RoutingScheme, SchemeDoc, SettingDoc, StudyVariant, TableSource, Weighing};
use crate::router::score_router::ScoreRouter;
use crate::router::scores::Scores;
use crate::router::state::{Init, WeightShape};
use crate::{MoeConfig, MoeWeights, Range};

/// `[ids, K]`: the state with the experts of each token id as numbers, -1 for none.
const HASH_TABLE: &str = "hash_table";

/// The key of the hash of token ids, equal in every layer and run.
const HASH_SEED: u64 = 0x4d6f_6577_6f72_6b73;

static DOC: SchemeDoc = SchemeDoc {
    settings: &[SettingDoc {
        name: "hash",
        default: "\"random\"",
        range: Range::Any,
        values: "random, balanced or clustered",
        comment: "Experts of a token id under hash: random, balanced (by the ids' frequencies in the\n\
                      training text), or clustered (ids with near embeddings, data.hash_embeddings, share experts).",
    }],
    companions: &[("model.top_k", "1"), ("train.balance", "'none'"), ("train.z_coef", "0.0")],
    variants: &[
        StudyVariant { name: "hash-balanced", settings: &["model.router.hash=balanced"] },
        StudyVariant { name: "hash-clustered", settings: &["model.router.hash=clustered"] },
    ],
    ..SchemeDoc::new(
        "A token's experts are a hash of its id, with equal weights; nothing is learned. The hash is random, balanced by the \
         frequencies of ids in the training text, or by clusters of a trained model's embeddings.",
        "Roller et al., \"Hash Layers for Large Sparse Models\", 2106.04426, section 3.1",
    )
};

/// The source of a token id's experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HashTable {
    /// A random hash.
    #[default]
    Random,
    /// A table made from the frequencies of the run's training tokens, so that experts get equally many tokens:
    /// [`balanced_hash`]. Ids missing from it use the random hash.
    Balanced,
    /// A table made from the embeddings of a trained model, so that ids with near embeddings share experts:
    /// [`clustered_hash`](crate::clustered_hash).
    Clustered,
}

/// The settings of hash routing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Hash {
    /// The source of an id's experts.
    #[serde(rename = "hash")]
    pub table: HashTable,
}

impl RoutingScheme for Hash {
    fn doc(&self) -> &'static SchemeDoc {
        &DOC
    }

    fn allows(&self, option: RouterOption) -> bool {
        option == RouterOption::Reroute
    }

    fn matrix_shape(&self, config: &MoeConfig) -> [usize; 2] {
        [0, config.width]
    }

    fn state(&self, config: &MoeConfig) -> Vec<WeightShape> {
        let table = WeightShape::new(HASH_TABLE, &[config.router.num_token_ids, config.top_k], Init::Constant(-1.0));
        self.table_source().map(|_| table).into_iter().collect()
    }

    fn table_source(&self) -> Option<TableSource> {
        match self.table {
            HashTable::Random => None,
            HashTable::Balanced => Some(TableSource::TokenCounts),
            HashTable::Clustered => Some(TableSource::Embeddings),
        }
    }

    fn num_products(&self, _: &MoeConfig) -> usize {
        0
    }

    fn looks_at_ids(&self) -> bool {
        true
    }

    fn weighing(&self) -> Weighing {
        Weighing::Equal
    }

    fn logits(&self, router: &ScoreRouter<'_>, ctx: &Context, x: NoisyInput<'_>) -> SchemeLogits {
        SchemeLogits::unlearned(ctx.zeros(&[x.values.rows(), router.config.num_experts], DType::F32))
    }

    /// Chooses `[T, K]`: the experts of each token by its id.
    fn choose(&self, router: &ScoreRouter<'_>, ctx: &Context, _: &Scores, ranking: &Tensor) -> Tensor {
        let (e, k, num_tokens) = (router.config.num_experts, router.config.top_k, ranking.rows());
        let table = if self.table_source().is_some() { router.weights.state(HASH_TABLE).f32s() } else { &[] };
        let mut ids = Vec::with_capacity(num_tokens * k);
        let mut order: Vec<u32> = Vec::new();
        for t in 0..num_tokens {
            let id = router.input.token_ids.get(t).copied().unwrap_or(0);
            let row = table.get(id as usize * k..(id as usize + 1) * k).unwrap_or(&[]);
            if is_entry(row, e) {
                ids.extend(row.iter().map(|&expert| expert as u32));
                continue;
            }
            let random = Random::new(HASH_SEED, Purpose::Router, u64::from(id));
            order.clear();
            order.extend(0..e as u32);
            for i in 0..k {
                order.swap(i, i + random.below(i as u64, (e - i) as u64) as usize);
            }
            ids.extend_from_slice(&order[..k]);
        }
        Tensor::from_slice(ctx.pool(), &[num_tokens, k], &ids)
    }
}

/// Returns `[ids, K]`: the experts of each id, chosen so that all `num_experts` get about equally many tokens, of
/// which `counts` has the number for each id (Roller et al., section 3.1, "balanced assignment"). Ids are assigned in
/// the order of their frequency, the lower one first at a tie, each to the `top_k` experts with the fewest tokens so
/// far, again the lower ones at a tie.
///
/// Panics if `top_k` exceeds `num_experts`.
#[must_use]
pub fn balanced_hash(counts: &[u64], num_experts: usize, top_k: usize) -> Vec<u32> {
    assert!(top_k <= num_experts, "{top_k} of {num_experts} experts");
    let mut order: Vec<usize> = (0..counts.len()).collect();
    order.sort_by_key(|&id| Reverse(counts[id]));
    let mut loads: BinaryHeap<Reverse<(u64, u32)>> = (0..num_experts as u32).map(|e| Reverse((0, e))).collect();
    let mut table = vec![0; counts.len() * top_k];
    for id in order {
        let chosen: Vec<(u64, u32)> = (0..top_k).filter_map(|_| loads.pop()).map(|Reverse(least)| least).collect();
        for (to, (load, expert)) in table[id * top_k..].iter_mut().zip(chosen) {
            *to = expert;
            loads.push(Reverse((load.saturating_add(counts[id]), expert)));
        }
    }
    table
}

/// Returns whether a row of a table, which may come from a file, names different valid experts.
fn is_entry(row: &[f32], num_experts: usize) -> bool {
    let is_expert = |&expert: &f32| expert >= 0.0 && expert < num_experts as f32 && expert.fract() == 0.0;
    !row.is_empty() && row.iter().all(is_expert) && (1..row.len()).all(|i| !row[..i].contains(&row[i]))
}

impl MoeWeights {
    /// Sets the table of the experts of token ids, `[ids, K]`, if the router has one; see [`balanced_hash`] and
    /// [`clustered_hash`](crate::clustered_hash).
    pub fn set_hash_table(&mut self, table: &[u32]) {
        for state in self.state.iter_mut().filter(|state| state.name == HASH_TABLE) {
            state.tensor.f32s_mut().iter_mut().zip(table).for_each(|(to, &expert)| *to = expert as f32);
        }
    }
}
