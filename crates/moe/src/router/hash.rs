//! Hash routing (Roller et al., "Hash layers for large sparse models", 2106.04426): a token's experts by its id alone.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use moeworks_ops::Context;
use moeworks_tensor::{Purpose, Random, Tensor};

use super::config::HashTable;
use super::flat::FlatRouter;
use super::state::HASH_TABLE;
use crate::MoeWeights;

/// The key of the hash of token ids: the same in every layer and run.
const HASH_SEED: u64 = 0x4d6f_6577_6f72_6b73;

/// `[ids, K]`: the experts of each id so that each of `num_experts` gets about as many of the tokens that are counted by id
/// in `counts` (Roller et al., section 3.1, "balanced assignment"): the most frequent id first, the lower one at a tie, each
/// to the `top_k` experts that have fewest tokens so far, again the lower ones at a tie.
///
/// Panics if `top_k` is more than `num_experts`.
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

impl FlatRouter<'_> {
    /// `[T, K]`: the experts of each token by its id.
    pub(super) fn hashed(&self, ctx: &Context, num_tokens: usize) -> Tensor {
        let (e, k) = (self.config.num_experts, self.config.top_k);
        let table = match self.router().hash {
            HashTable::Random => &[],
            HashTable::Balanced | HashTable::Clustered => self.weights.state(HASH_TABLE).f32s(),
        };
        let mut ids = Vec::with_capacity(num_tokens * k);
        let mut order: Vec<u32> = Vec::new();
        for t in 0..num_tokens {
            let id = self.input.token_ids.get(t).copied().unwrap_or(0);
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

/// Whether a row of a table, which may come from a file, names different experts.
fn is_entry(row: &[f32], num_experts: usize) -> bool {
    let is_expert = |&expert: &f32| expert >= 0.0 && expert < num_experts as f32 && expert.fract() == 0.0;
    !row.is_empty() && row.iter().all(is_expert) && (1..row.len()).all(|i| !row[..i].contains(&row[i]))
}

impl MoeWeights {
    /// Takes `table [ids, K]` as what ids of tokens go to, where the router is one that has a table; see
    /// [`balanced_hash`] and [`clustered_hash`](super::clustered_hash).
    pub fn set_hash_table(&mut self, table: &[u32]) {
        for state in self.state.iter_mut().filter(|state| state.name == HASH_TABLE) {
            state.tensor.f32s_mut().iter_mut().zip(table).for_each(|(to, &expert)| *to = expert as f32);
        }
    }
}
