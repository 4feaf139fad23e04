//! Choices that are not each token's own: experts choose tokens, both are assigned to each other, or a full expert sends
//! tokens on. Where tokens are on several ranks, all of them decide together.

use std::borrow::Cow;

use moeworks_ops::Context;
use moeworks_tensor::Tensor;

use super::flat::FlatRouter;
use super::scores::Scores;
use super::{assign, choice};
use crate::overflow::{self, Overflow, Room};
use crate::ranks::Together;

impl FlatRouter<'_> {
    /// Whether what is decided for a token depends on the tokens of other ranks, so that all of them take part in the pass.
    pub(crate) fn decides_together(&self) -> bool {
        let rule = self.rule(None);
        let has_choices = !self.input.is_inference && self.router().is_joint();
        has_choices || rule.is_shared() || self.input.has_gshard_loss
    }

    /// `[T, E]` of all ranks' tokens from those of this rank's.
    fn of_all<'r>(&self, rows: &'r [f32], num_experts: usize) -> Cow<'r, [f32]> {
        match self.together {
            Some(together) => together.gather(rows, num_experts).into(),
            None => rows.into(),
        }
    }

    /// `[T, K]`: the experts that chose each token, group by group, and K.
    pub(super) fn expert_choice(&self, ctx: &Context, scores: &Scores) -> (Vec<u32>, usize) {
        let e = scores.probs.cols();
        let own: Vec<f32> = scores.probs.f32s().iter().map(|score| if score.is_nan() { 0.0 } else { *score }).collect();
        let all = self.of_all(&own, e);
        let factor = if self.config.capacity_factor == 0.0 { 1.0 } else { self.config.capacity_factor };
        let size = self.rule(None).group_size(all.len() / e).max(1);
        let range = self.together.map_or(0..own.len() / e, Together::own);
        let mut tokens = vec![Vec::new(); e];
        for (group, scores) in all.chunks(size * e).enumerate() {
            let count = crate::capacity(factor, scores.len() / e, self.config.top_k, e).unwrap_or(0);
            for (of_expert, chosen) in tokens.iter_mut().zip(assign::expert_choice(ctx, scores, e, count)) {
                let chosen = chosen.iter().map(|&token| token as usize + group * size);
                let own = chosen.filter(|token| range.contains(token));
                of_expert.extend(own.map(|token| (token - range.start) as u32));
            }
        }
        choice::invert(&tokens, &own)
    }

    /// `[T]`: the expert that each token is assigned to.
    pub(super) fn auctioned(&self, ctx: &Context, ranking: &Tensor) -> Vec<u32> {
        let all = assign::auction(ctx, &self.of_all(ranking.f32s(), ranking.cols()), ranking.cols());
        self.together.map_or_else(|| all.clone(), |together| together.own_rows(&all, 1).to_vec())
    }

    /// `[T, E]`: the logits with what balances the experts.
    pub(super) fn balanced(&self, ctx: &Context, ranking: &Tensor) -> Tensor {
        let e = ranking.cols();
        let factors = assign::sinkhorn(ctx, &self.of_all(ranking.f32s(), e), e);
        let mut balanced = ranking.copied(ctx.pool());
        for row in balanced.f32s_mut().chunks_mut(e) {
            row.iter_mut().zip(&factors).for_each(|(logit, factor)| *logit += factor);
        }
        balanced
    }

    /// Whether choices move to experts with room.
    pub(super) fn reroutes(&self) -> bool {
        self.router().overflow == Overflow::Reroute && self.config.capacity_factor != 0.0 && !self.input.is_inference
    }

    /// Moves choices to experts with room, if that is the scheme; returns how many of `ids [T, K]`.
    pub(super) fn reroute(&self, ids: &mut Tensor, ranking: &Tensor) -> usize {
        if !self.reroutes() {
            return 0;
        }
        let (top_k, e, rule) = (ids.cols(), ranking.cols(), self.rule(None));
        let num_tokens = self.together.map_or(ids.rows(), Together::num_tokens);
        let capacity = rule.capacities(num_tokens, e);
        let room = Room { capacity: &capacity, group_tokens: rule.group_size(num_tokens), before: None };
        let Some(together) = self.together else {
            return overflow::reroute(ids.u32s_mut(), top_k, room, ranking.f32s());
        };
        let (mut all, width) = together.choices(ids.u32s(), top_k);
        overflow::reroute(&mut all, width, room, &together.gather(ranking.f32s(), e));
        let mut num_rerouted = 0;
        for (ids, new) in ids.u32s_mut().chunks_mut(top_k).zip(together.own_rows(&all, width).chunks(width)) {
            num_rerouted += ids.iter().zip(new).filter(|(old, new)| old != new).count();
            ids.copy_from_slice(&new[..top_k]);
        }
        num_rerouted
    }
}
