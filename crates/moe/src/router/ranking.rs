//! The ranking by which experts are chosen: scores, biases, groups, reserved experts, and random choices early in a
//! run.

use moeworks_ops::Context;
use moeworks_tensor::{DType, Tensor};

use super::config::num_modalities;
use super::input::Draw;
use super::logits::SavedLogits;
use super::score_router::ScoreRouter;
use super::scores::Scores;
use super::state::EXPERT_BIAS;
use super::{blocks, choice};

impl ScoreRouter<'_> {
    /// Returns the modality of each token; empty if there is one modality.
    pub(super) fn modalities(&self) -> Vec<u32> {
        let (boundaries, reserved) = self.router().modalities().unwrap_or_default();
        if !self.input.modalities.is_empty() {
            let count = num_modalities(&boundaries, &reserved);
            let is_known = |&modality: &u32| reserved.is_empty() || (modality as usize) < count;
            assert!(self.input.modalities.iter().all(is_known), "a modality of a token that is not below {count}");
            return self.input.modalities.to_vec();
        }
        if boundaries.is_empty() {
            return Vec::new();
        }
        let modality = |id: &u32| boundaries.partition_point(|boundary| boundary <= id) as u32;
        self.input.token_ids.iter().map(modality).collect()
    }

    /// Returns `[M][E]`: whether a modality may use an expert; empty if all may.
    pub(super) fn reach(&self) -> Vec<Vec<bool>> {
        let (boundaries, reserved) = self.router().modalities().unwrap_or_default();
        if reserved.is_empty() {
            return Vec::new();
        }
        let owner: Vec<usize> = reserved.iter().enumerate().flat_map(|(m, &count)| vec![m; count]).collect();
        let is_near = |m: usize, expert: usize| owner.get(expert).is_none_or(|&owner| owner == m);
        (0..num_modalities(&boundaries, &reserved))
            .map(|m| (0..self.config.num_choosable()).map(|e| is_near(m, e)).collect())
            .collect()
    }

    /// Returns `[T, E]`: the values by which experts are chosen, negative infinity for those that a token cannot use.
    pub(super) fn ranking(&self, ctx: &Context, scores: &Scores, saved: &dyn SavedLogits) -> Tensor {
        let (router, e) = (self.router(), scores.probs.cols());
        let logits = scores.logits.as_ref().expect("only the fused operation keeps no logits");
        let is_limited = router.top_groups < router.num_groups;
        let mut ranking = if router.expert_bias || is_limited {
            let bias = router.expert_bias.then(|| self.weights.state(EXPERT_BIAS).f32s());
            let gates = scores.gates();
            let mut ranking = ctx.empty(&[gates.rows(), e], DType::F32);
            let inputs = blocks::split_mut(ranking.f32s_mut(), e).zip(blocks::split(gates.f32s(), e));
            blocks::for_each(ctx, inputs.zip(blocks::split(logits.f32s(), e)), |_, ((ranking, gates), logits)| {
                let rows = ranking.chunks_mut(e).zip(gates.chunks(e)).zip(logits.chunks(e));
                for ((ranking, gates), logits) in rows {
                    rank_row(ranking, gates, logits, bias);
                    choice::limit_groups(ranking, router.num_groups, router.top_groups, router.group_score);
                }
            });
            ranking
        } else {
            // Logits order experts as scores do, without ties from rounding.
            logits.clone()
        };
        if saved.has_closed_parts() {
            ranking = ranking.copied(ctx.pool());
            saved.close(ctx, &mut ranking);
        }
        self.randomize(ctx, &mut ranking, saved.has_closed_parts());
        ranking
    }

    /// Gives some tokens a random ranking of the experts, early in a run.
    fn randomize(&self, ctx: &Context, ranking: &mut Tensor, has_closed_parts: bool) {
        let probability = self.router().random_probability(self.input.progress) as f32;
        let Some(random) = self.random().filter(|_| probability > 0.0) else { return };
        let (e, first) = (ranking.cols(), self.input.first_token);
        let mut own = ranking.copied(ctx.pool());
        blocks::for_each(ctx, blocks::split_mut(own.f32s_mut(), e), |block, rows| {
            for (t, row) in (block * blocks::ROWS..).zip(rows.chunks_mut(e)) {
                if random.uniform(Draw::IsRandom.at(first + t)) < probability {
                    // A closed part of the experts may be drawn as well.
                    let reachable =
                        row.iter_mut().enumerate().filter(|(_, rank)| has_closed_parts || **rank > f32::NEG_INFINITY);
                    reachable.for_each(|(i, rank)| *rank = random.uniform(Draw::Ranking.at((first + t) * e + i)));
                }
            }
        });
        *ranking = own;
    }
}

/// Ranks the experts of one token by gates and bias; experts at negative infinity stay there.
fn rank_row(ranking: &mut [f32], gates: &[f32], logits: &[f32], bias: Option<&[f32]>) {
    for (i, ((rank, &gate), &logit)) in ranking.iter_mut().zip(gates).zip(logits).enumerate() {
        let gate = if gate.is_nan() { 0.0 } else { gate };
        *rank = if logit == f32::NEG_INFINITY { logit } else { gate + bias.map_or(0.0, |bias| bias[i]) };
    }
}
