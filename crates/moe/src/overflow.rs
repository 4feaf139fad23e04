//! Capacity overflow: the choices that exceed an expert's capacity, and rerouting them.
//!
//! The first choices of all tokens are served before any second one (GShard, 2006.16668, algorithm 1). Among choices
//! of equal rank the tokens are served in their order or, with batch-prioritised routing (Riquelme et al.,
//! 2106.05974), in the order of their best score. A counter advances even when its expert is full, so an expert keeps
//! the first choices that name it.

use serde::{Deserialize, Serialize};

use crate::NO_EXPERT;

/// The fate of a choice whose expert has no remaining capacity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Overflow {
    /// Drops the choice; tokens are served in their order.
    #[default]
    Drop,
    /// Drops the choice; tokens are served in the order of their best score (batch-prioritised routing).
    Priority,
    /// Reroutes the choice to the token's best-scored expert with capacity left, if there is one; tokens are served
    /// in their order.
    Reroute,
}

/// The capacity that the experts have left.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RemainingCapacity<'a> {
    /// `[E]`: rows that each expert may take of one group of tokens.
    pub(crate) capacity: &'a [u32],
    /// Tokens per group. Each group has its own counters; the last one may be smaller.
    pub(crate) group_tokens: usize,
    /// `[K, E]`: initial counters for the choices of each rank (first, second ..), which include the tokens of ranks
    /// before this one; none to start from 0 and count on.
    pub(crate) before: Option<&'a [u32]>,
}

/// The choices of one rank's tokens that are within a capacity shared by all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WithinCapacity {
    /// `[T, K]`: true for a choice within the capacity.
    pub(crate) is_within: Vec<bool>,
    /// The number of tokens of all ranks.
    pub(crate) num_tokens: usize,
}

impl RemainingCapacity<'_> {
    /// Splits `num_tokens` tokens into groups.
    fn groups(&self, num_tokens: usize) -> impl Iterator<Item = std::ops::Range<usize>> + use<> {
        let size = self.group_tokens.max(1);
        (0..num_tokens.div_ceil(size)).map(move |group| group * size..((group + 1) * size).min(num_tokens))
    }
}

/// Returns for each of the choices `ids [T, K]` whether it is within the capacity. `priority [T]`, if given, orders
/// the tokens: highest first, the lower index at a tie.
pub(crate) fn within_capacity(
    ids: &[u32],
    top_k: usize,
    remaining: RemainingCapacity<'_>,
    priority: Option<&[f32]>,
) -> Vec<bool> {
    let mut is_kept = vec![false; ids.len()];
    let mut taken = vec![0_u32; remaining.capacity.len()];
    for group in remaining.groups(ids.len() / top_k) {
        taken.fill(0);
        let mut order: Vec<usize> = group.collect();
        if let Some(priority) = priority {
            order.sort_by(|&a, &b| priority[b].total_cmp(&priority[a]));
        }
        for rank in 0..top_k {
            if let Some(before) = remaining.before {
                taken.copy_from_slice(&before[rank * remaining.capacity.len()..][..remaining.capacity.len()]);
            }
            for &token in &order {
                let choice = token * top_k + rank;
                let expert = ids[choice] as usize;
                if ids[choice] != NO_EXPERT {
                    is_kept[choice] = taken[expert] < remaining.capacity[expert];
                    taken[expert] += 1;
                }
            }
        }
    }
    is_kept
}

/// Moves the choices `ids [T, K]` that are beyond the capacity to the token's best-scored expert that has capacity
/// left and that the token does not have yet. `scores [T, E]` ranks the experts, the lower index first at a tie;
/// negative infinity is never taken. A choice without such an expert stays, to be dropped. Returns the number of
/// moved choices.
pub(crate) fn reroute(ids: &mut [u32], top_k: usize, remaining: RemainingCapacity<'_>, scores: &[f32]) -> usize {
    let num_experts = remaining.capacity.len();
    let mut taken = vec![0_u32; num_experts];
    let mut num_rerouted = 0;
    for group in remaining.groups(ids.len() / top_k) {
        taken.fill(0);
        for rank in 0..top_k {
            for token in group.clone() {
                let ids = &mut ids[token * top_k..(token + 1) * top_k];
                if ids[rank] == NO_EXPERT {
                    continue;
                }
                let has_room = |expert: usize| taken[expert] < remaining.capacity[expert];
                if !has_room(ids[rank] as usize) {
                    let scores = &scores[token * num_experts..(token + 1) * num_experts];
                    if let Some(expert) = best(scores, |e| has_room(e) && !ids.contains(&(e as u32))) {
                        ids[rank] = expert as u32;
                        num_rerouted += 1;
                    }
                }
                taken[ids[rank] as usize] += 1;
            }
        }
    }
    num_rerouted
}

/// Returns the best-scored of the experts for which `is_free` is true.
fn best(scores: &[f32], is_free: impl Fn(usize) -> bool) -> Option<usize> {
    let mut best = None;
    for (expert, &score) in scores.iter().enumerate() {
        if score > best.map_or(f32::NEG_INFINITY, |(_, top)| top) && is_free(expert) {
            best = Some((expert, score));
        }
    }
    best.map(|(expert, _)| expert)
}
