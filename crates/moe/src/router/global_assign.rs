//! Routing decisions that depend on other tokens: expert choice, balanced assignment and rerouting. If tokens are on
//! several ranks, these decisions are taken over all of them.

use std::borrow::Cow;
use std::ops::Range;

use moeworks_tensor::Tensor;

use super::score_router::ScoreRouter;
use crate::ep::CrossRank;
use crate::overflow::{self, Overflow, RemainingCapacity};

impl ScoreRouter<'_> {
    /// Returns whether a token's routing depends on the tokens of other ranks, so that all ranks must take part in
    /// the pass.
    pub(crate) fn decides_across_ranks(&self) -> bool {
        let rule = self.rule(None);
        let has_choices = !self.input.is_inference && self.scheme().is_global() && self.input.expert_ids.is_none();
        has_choices || rule.is_shared() || self.input.has_gshard_loss
    }

    /// Gathers the rows of all ranks' tokens, `[T, E]`, from those of this rank.
    pub(super) fn gather_all<'r>(&self, rows: &'r [f32], num_experts: usize) -> Cow<'r, [f32]> {
        match self.cross_rank {
            Some(cross_rank) => cross_rank.gather(rows, num_experts).into(),
            None => rows.into(),
        }
    }

    /// Returns the range of this rank's `num_tokens` tokens among those of all ranks.
    pub(super) fn own_tokens(&self, num_tokens: usize) -> Range<usize> {
        self.cross_rank.map_or(0..num_tokens, CrossRank::own)
    }

    /// Returns whether choices beyond the capacity are rerouted.
    pub(super) fn reroutes(&self) -> bool {
        self.router().overflow == Overflow::Reroute && self.config.capacity_factor != 0.0 && !self.input.is_inference
    }

    /// Reroutes choices `ids [T, K]` to experts with capacity left, if the configuration says so. Returns the number
    /// of moved choices.
    pub(super) fn reroute(&self, ids: &mut Tensor, ranking: &Tensor) -> usize {
        if !self.reroutes() {
            return 0;
        }
        let (top_k, e, rule) = (ids.cols(), ranking.cols(), self.rule(None));
        let num_tokens = self.cross_rank.map_or(ids.rows(), CrossRank::num_tokens);
        let capacity = rule.capacities(num_tokens, e);
        let remaining =
            RemainingCapacity { capacity: &capacity, group_tokens: rule.group_size(num_tokens), before: None };
        let Some(cross_rank) = self.cross_rank else {
            return overflow::reroute(ids.u32s_mut(), top_k, remaining, ranking.f32s());
        };
        let (mut all, width) = cross_rank.choices(ids.u32s(), top_k);
        overflow::reroute(&mut all, width, remaining, &cross_rank.gather(ranking.f32s(), e));
        let mut num_rerouted = 0;
        for (ids, new) in ids.u32s_mut().chunks_mut(top_k).zip(cross_rank.own_rows(&all, width).chunks(width)) {
            num_rerouted += ids.iter().zip(new).filter(|(old, new)| old != new).count();
            ids.copy_from_slice(&new[..top_k]);
        }
        num_rerouted
    }
}
