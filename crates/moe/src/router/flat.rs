//! Routers that score every expert for every token: logits, scores, choice, weights, each a step over rows.
//!
//! Softmax over logits and the highest K have one fused operation in `ops`, wherever the logits come from; a GPU has a kernel for
//! other scores, biases and groups; all else is taken step by step.
//! Backward (in `grads`) goes from the weights to the gates they were taken from, adds what the losses say of the
//! distribution and of the logits, and ends at the logits. The choice itself has no gradient.

use moeworks_ops::Context;
use moeworks_ops::counting_sort::SortedChoices;
use moeworks_ops::elementwise::sums_of_rows;
use moeworks_ops::late::Late;
use moeworks_ops::score_top_k::{ScoreRule, Scored, score_top_k};
use moeworks_ops::top_k::{TopK, softmax_top_k_with};
use moeworks_tensor::{DType, Tensor};

use super::blocks;
use super::config::{GroupScore, RouterConfig, RouterKind, ScoreFunction, SecondExpert, num_modalities};
use super::input::{Draw, RouterInput};
use super::noise::{InputNoise, LogitDraws, LogitNoise};
use super::parts::Parts;
use super::residual::Residual;
use super::scorer::{self, Scorer};
use super::scores::{Gate, LogitRule, Scores};
use super::sparsemixer::Sparsemixer;
use super::state::EXPERT_BIAS;
use super::weigh::{WeightRule, is_normalized};
use super::{choice, load};
use crate::overflow::Overflow;
use crate::ranks::Together;
use crate::{DispatchRule, MoeConfig, MoeWeights, NO_EXPERT, Ramp, Routing, RoutingError};

/// A router at work: what it is, its weights and what it looks at.
#[derive(Clone, Copy)]
pub(crate) struct FlatRouter<'a> {
    pub(crate) config: &'a MoeConfig,
    pub(crate) weights: &'a MoeWeights,
    pub(crate) input: &'a RouterInput<'a>,
    /// The tokens of other ranks, where what is decided depends on them.
    pub(crate) together: Option<&'a Together<'a>>,
}

/// What a router decided, and what its backward needs.
pub(crate) struct Decision {
    pub(crate) routing: Routing,
    pub(crate) saved: FlatSaved,
    /// Choices that went to another expert than the token's own, for want of room.
    pub(crate) num_rerouted: usize,
}

/// What backward needs of forward.
pub(crate) struct FlatSaved {
    pub(crate) input_noise: Option<InputNoise>,
    pub(crate) scorer: Scorer,
    pub(crate) noise: LogitNoise,
    pub(crate) temperature: f32,
    /// `[T, E]`: the logits before noise, where the load loss needs them.
    pub(crate) clean: Option<Tensor>,
    pub(crate) scores: Scores,
    /// `[T, K]`: the experts whose gates the weights were taken from.
    pub(crate) ids: Tensor,
    /// `[T, K]`
    pub(crate) weights: Tensor,
    /// `[T]`: the modality of each token; empty where there is one.
    pub(crate) modalities: Vec<u32>,
    pub(crate) seq_len: usize,
    /// Where a GPU has the distributions, for the sequence-wise loss: sums of those of some tokens of a sequence from each of these on.
    pub(crate) sums_of_pieces: Option<(Vec<u32>, Tensor)>,
    /// Tokens of each local group; 0: all.
    pub(crate) group_len: usize,
    /// The first choices in local groups that are shared with other ranks.
    pub(crate) shared_groups: Option<Parts>,
    /// `[E]`: the smooth load under noise; empty without.
    pub(crate) smooth_load: Vec<f64>,
    pub(crate) way: Way,
    pub(crate) residual: Option<Residual>,
}

/// How a pass computes scores and choices.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Way {
    /// By the fused operation for the highest of a softmax.
    Fused,
    /// By a GPU's kernel for scores of other kinds.
    OnGpu,
    /// Row by row on the host.
    StepByStep,
}

/// What is chosen of logits.
struct Choice {
    scores: Scores,
    /// `[T, K]`
    ids: Tensor,
    /// `[T, K]`
    weights: Tensor,
    num_rerouted: usize,
    /// The choices sorted by expert, where that came by the way.
    sorted: Option<SortedChoices>,
}

/// The logits and how they came about.
struct Logits {
    input_noise: Option<InputNoise>,
    scorer: Scorer,
    values: Tensor,
    noise: LogitNoise,
    residual: Option<Residual>,
}

impl FlatRouter<'_> {
    pub(crate) fn router(&self) -> &RouterConfig {
        &self.config.router
    }

    /// The decision for `x [T, D]`.
    pub(crate) fn forward(&self, ctx: &Context, x: &Tensor) -> Decision {
        self.decide(ctx, self.logits(ctx, x))
    }

    /// The decision for `x [T, D]`; fails if a logit is not finite.
    pub(crate) fn checked(&self, ctx: &Context, x: &Tensor) -> Result<Decision, RoutingError> {
        let logits = self.logits(ctx, x);
        let (values, temperature) = (&logits.values, self.temperature());
        let is_finite = |logit: &f32| (logit / temperature).is_finite();
        // All of a row at once, which vectors can do.
        let rows = values.f32s().chunks(values.cols()).enumerate();
        for (token, row) in rows.filter(|(_, row)| !row.iter().fold(true, |all, logit| all & is_finite(logit))) {
            let bad = row.iter().enumerate().find(|(_, logit)| !is_finite(logit));
            if let Some((expert, logit)) = bad {
                return Err(RoutingError::NotFinite { token, expert, logit: logit / temperature });
            }
        }
        Ok(self.decide(ctx, logits))
    }

    fn decide(&self, ctx: &Context, logits: Logits) -> Decision {
        let Logits { input_noise, scorer, values, noise, residual } = logits;
        let clean = noise.is_normal().then(|| values.copied(ctx.pool()));
        let modalities = self.modalities();
        let way = self.way(ctx, &scorer);
        // A GPU's fused operation finds them by the way, where it sees the logits themselves.
        let sees_logits = way == Way::Fused && ctx.gpu().is_some() && matches!(noise, LogitNoise::None);
        let squared_logits = (!sees_logits).then(|| scorer.squared_logits(ctx, &values));
        let Choice { scores, ids, weights, num_rerouted, sorted } = match way {
            Way::Fused => self.fused(ctx, values, &noise),
            Way::OnGpu => self.scored(ctx, values, &noise),
            Way::StepByStep => self.step_by_step(ctx, values, (&noise, &scorer), &modalities),
        };
        let has_all = self.gives_all(way) && !self.may_leave_second();
        let routing = self.routing(self.with_second(ctx, &ids, &weights), weights.clone()).whole(has_all);
        let routing = routing.with_sorted(sorted.filter(|_| has_all));
        let mut saved = FlatSaved {
            input_noise,
            scorer,
            noise,
            temperature: self.temperature(),
            clean,
            scores: match squared_logits {
                Some(squared_logits) => Scores { squared_logits, ..scores },
                None => scores,
            },
            modalities,
            seq_len: self.input.seq_len,
            sums_of_pieces: None,
            group_len: self.router().local_group,
            shared_groups: self.shared_groups(&ids),
            ids,
            weights,
            smooth_load: Vec::new(),
            way,
            residual,
        };
        if way != Way::StepByStep && ctx.gpu().is_some() && saved.seq_len > 0 {
            let starts = pieces_of_sequences(saved.scores.probs.rows(), saved.seq_len);
            let sums = sums_of_rows(ctx, &saved.scores.probs, &starts);
            saved.sums_of_pieces = Some((starts, sums));
        }
        if let Some(clean) = &saved.clean {
            saved.smooth_load = load::smooth_load(ctx, &saved, clean, self.config.top_k);
        }
        Decision { routing, saved, num_rerouted }
    }

    /// The choice by the fused operation of `values` with `noise`.
    fn fused(&self, ctx: &Context, mut values: Tensor, noise: &LogitNoise) -> Choice {
        noise.add(ctx, &mut values);
        let logits = noise.is_normal().then(|| values.copied(ctx.pool()));
        let rule = (self.config.top_k, is_normalized(self.config));
        let is_training = !self.input.is_inference;
        let TopK { probs, ids, weights, lse, sums, sorted } = softmax_top_k_with(ctx, values, rule, is_training);
        let of_logits = sums.clone();
        let squared_logits = Late::new(move || vec![of_logits.logits_squared.unwrap_or(0.0)]);
        let scores = Scores { probs, gates: None, logits, lse, sums, squared_logits };
        Choice { scores, ids, weights, num_rerouted: 0, sorted }
    }

    /// The same by the rule of other scores, on a GPU.
    fn scored(&self, ctx: &Context, mut values: Tensor, noise: &LogitNoise) -> Choice {
        noise.add(ctx, &mut values);
        let scored = score_top_k(ctx, values, &self.score_rule()).expect("a GPU");
        let Scored { probs, gates, logits, lse, ids, weights, sums } = scored;
        let scores = Scores { probs, gates, logits: Some(logits), lse, sums, squared_logits: Late::now(vec![0.0]) };
        Choice { scores, ids, weights, num_rerouted: 0, sorted: None }
    }

    pub(crate) fn score_rule(&self) -> ScoreRule<'_> {
        let (router, weigh) = (self.router(), WeightRule::of(self.config));
        ScoreRule {
            is_sigmoid: self.gate() == Gate::Sigmoid,
            temperature: self.temperature(),
            bias: router.expert_bias.then(|| self.weights.state(EXPERT_BIAS)),
            num_groups: router.num_groups,
            top_groups: router.top_groups,
            by_top_two: router.group_score == GroupScore::TopTwo,
            top_k: self.config.top_k,
            is_normalized: weigh.is_normalized,
            scale: weigh.scale,
            first_null: weigh.first_null,
            are_sums_wanted: !self.input.is_inference,
        }
    }

    fn step_by_step(
        &self,
        ctx: &Context,
        values: Tensor,
        (noise, scorer): (&LogitNoise, &Scorer),
        modalities: &[u32],
    ) -> Choice {
        let (temperature, reach) = (self.temperature(), self.reach());
        let lower_lse_squared = scorer.lower_lse_squared();
        let rule = LogitRule { gate: self.gate(), noise, temperature, reach: &reach, modalities, lower_lse_squared };
        let scores = Scores::of(ctx, values, &rule);
        let ranking = self.ranking(ctx, &scores, scorer);
        let mut ids = self.choose(ctx, &scores, &ranking);
        let num_rerouted = self.reroute(&mut ids, &ranking);
        let weights = self.weigh(ctx, &scores, &ids);
        Choice { scores, ids, weights, num_rerouted, sorted: None }
    }

    fn routing(&self, ids: Tensor, weights: Tensor) -> Routing {
        Routing::from_tensors(self.config.num_choosable(), ids, weights)
    }

    /// The source of this pass's noise, in training.
    fn random(&self) -> Option<moeworks_tensor::Random> {
        self.input.noise.filter(|_| !self.input.is_inference)
    }

    fn logits(&self, ctx: &Context, x: &Tensor) -> Logits {
        let mut logits = self.own_logits(ctx, x);
        if self.router().gate_residual {
            logits.residual = Some(Residual::forward(ctx, self.weights, self.input.previous, &mut logits.values));
        }
        logits
    }

    /// The logits without those of the layer before.
    fn own_logits(&self, ctx: &Context, x: &Tensor) -> Logits {
        let (eps, dropout) = (self.now(self.config.jitter), self.now(self.router().input_dropout));
        let input_noise =
            self.random().map(|random| InputNoise { eps, dropout, random, first: self.input.first_token * x.cols() });
        let input_noise = input_noise.filter(|_| eps > 0.0 || dropout > 0.0);
        if self.router().kind == RouterKind::Hash {
            let values = ctx.zeros(&[x.rows(), self.config.num_experts], DType::F32);
            return Logits { input_noise: None, scorer: Scorer::None, values, noise: LogitNoise::None, residual: None };
        }
        let x = (x, input_noise.as_ref());
        let first = self.input.first_token * self.config.num_choosable();
        let draws = self.random().map(|random| LogitDraws { random, first });
        if let (Some(draws), RouterKind::NoisyTopK) = (draws, self.router().kind) {
            let (values, deviations) = scorer::with_deviations(ctx, self.weights, x);
            let noise = LogitNoise::Learned(deviations, draws);
            let of = x.1.map_or(x.0.dtype(), |_| DType::F32);
            return Logits { input_noise, scorer: Scorer::Linear(of), values, noise, residual: None };
        }
        let (values, scorer) = Scorer::forward(ctx, self.config, self.weights, x);
        let noise = match (draws, self.router().kind) {
            (None, _) => LogitNoise::None,
            (Some(draws), RouterKind::Gumbel) => LogitNoise::Gumbel(draws),
            (Some(draws), _) => match self.now(self.router().noise_std) {
                0.0 => LogitNoise::None,
                std => LogitNoise::Normal(std, draws),
            },
        };
        Logits { input_noise, scorer, values, noise, residual: None }
    }

    fn way(&self, ctx: &Context, scorer: &Scorer) -> Way {
        let router = self.router();
        let is_random = self.random().is_some() && router.random_probability(self.input.progress) > 0.0;
        let tokens_choose = self.input.is_inference || !router.is_joint();
        if !tokens_choose || is_random || self.reroutes() {
            return Way::StepByStep;
        }
        let is_flat = !matches!(scorer, Scorer::None | Scorer::Tree(_));
        let has_kernel = ctx.gpu().is_some() && is_flat && router.is_score_top_k();
        // The gradients of losses of sequences are those kernels' alone.
        let is_fused = router.is_softmax_top_k() && self.temperature() == 1.0;
        if is_fused && !(has_kernel && self.input.seq_len > 0) {
            Way::Fused
        } else if has_kernel {
            Way::OnGpu
        } else {
            Way::StepByStep
        }
    }

    /// Whether a token always gets K experts that compute.
    fn gives_all(&self, way: Way) -> bool {
        let router = self.router();
        let reachable = self.config.num_experts / router.num_groups * router.top_groups;
        way == Way::Fused || way == Way::OnGpu && router.num_free() == 0 && reachable >= self.config.top_k
    }

    /// What a setting of training is at this time of the run.
    fn now(&self, ramp: Ramp) -> f32 {
        ramp.at(self.input.progress) as f32
    }

    fn temperature(&self) -> f32 {
        let progress = if self.input.is_inference { 1.0 } else { self.input.progress };
        self.router().temperature.at(progress) as f32
    }

    fn gate(&self) -> Gate {
        match (self.router().kind, self.router().scores) {
            (RouterKind::Relu, _) => Gate::Relu,
            (RouterKind::Base, _) => Gate::Sigmoid,
            (RouterKind::Sinkhorn, _) if self.config.top_k == 1 => Gate::Sigmoid,
            (RouterKind::Sinkhorn, _) | (_, ScoreFunction::Softmax) => Gate::Softmax,
            (_, ScoreFunction::Sigmoid) => Gate::Sigmoid,
        }
    }

    /// The modality of each token, where there are several.
    fn modalities(&self) -> Vec<u32> {
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

    /// Whether an expert is in reach of a modality; empty if all are.
    fn reach(&self) -> Vec<Vec<bool>> {
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

    /// `[T, E]`: what experts are chosen by, negative infinity for those out of reach.
    fn ranking(&self, ctx: &Context, scores: &Scores, scorer: &Scorer) -> Tensor {
        let (router, e) = (self.router(), scores.probs.cols());
        let logits = scores.logits.as_ref().expect("only the fused operation keeps no logits");
        let is_limited = router.top_groups < router.num_groups;
        let mut ranking = if router.expert_bias || is_limited {
            let bias = router.expert_bias.then(|| self.weights.state(EXPERT_BIAS).f32s());
            let gates = scores.gates();
            let mut ranking = ctx.empty(&[gates.rows(), e], DType::F32);
            let inputs = blocks::of_mut(ranking.f32s_mut(), e).zip(blocks::of(gates.f32s(), e));
            blocks::for_each(ctx, inputs.zip(blocks::of(logits.f32s(), e)), |_, ((ranking, gates), logits)| {
                let rows = ranking.chunks_mut(e).zip(gates.chunks(e)).zip(logits.chunks(e));
                for ((ranking, gates), logits) in rows {
                    rank_row(ranking, gates, logits, bias);
                    choice::limit_groups(ranking, router.num_groups, router.top_groups, router.group_score);
                }
            });
            ranking
        } else {
            // The order of the logits is that of the scores, without their ties.
            logits.clone()
        };
        if let Scorer::Tree(tree) = scorer {
            ranking = ranking.copied(ctx.pool());
            tree.close(ctx, &mut ranking);
        }
        self.randomize(ctx, &mut ranking);
        ranking
    }

    /// In the beginning of a run, some tokens rank experts at random.
    fn randomize(&self, ctx: &Context, ranking: &mut Tensor) {
        let probability = self.router().random_probability(self.input.progress) as f32;
        let Some(random) = self.random().filter(|_| probability > 0.0) else { return };
        let (e, first) = (ranking.cols(), self.input.first_token);
        // A random choice is one of all clusters, too.
        let is_open = self.router().kind == RouterKind::Hierarchical;
        let mut own = ranking.copied(ctx.pool());
        blocks::for_each(ctx, blocks::of_mut(own.f32s_mut(), e), |block, rows| {
            for (t, row) in (block * blocks::ROWS..).zip(rows.chunks_mut(e)) {
                if random.uniform(Draw::IsRandom.at(first + t)) < probability {
                    let reachable =
                        row.iter_mut().enumerate().filter(|(_, rank)| is_open || **rank > f32::NEG_INFINITY);
                    reachable.for_each(|(i, rank)| *rank = random.uniform(Draw::Ranking.at((first + t) * e + i)));
                }
            }
        });
        *ranking = own;
    }

    fn choose(&self, ctx: &Context, scores: &Scores, ranking: &Tensor) -> Tensor {
        let (num_tokens, e, k) = (ranking.rows(), ranking.cols(), self.config.top_k);
        let rows = |width: usize, scores: &Tensor, choose: &(dyn Fn(&[f32], &mut [u32]) + Sync)| {
            let mut ids = ctx.empty(&[num_tokens, width], DType::U32);
            let inputs = blocks::of_mut(ids.u32s_mut(), width).zip(blocks::of(scores.f32s(), e));
            blocks::for_each(ctx, inputs, |_, (ids, scores)| {
                for (ids, scores) in ids.chunks_mut(width).zip(scores.chunks(e)) {
                    choose(scores, ids);
                }
            });
            ids
        };
        let tensor = |(ids, k): (Vec<u32>, usize)| Tensor::from_slice(ctx.pool(), &[num_tokens, k], &ids);
        match self.router().kind {
            RouterKind::TopP => {
                let p = self.router().top_p;
                tensor(choice::compact(rows(e, &scores.probs, &|probs, ids| choice::top_p(probs, p, ids)).u32s(), e))
            }
            RouterKind::Relu => tensor(choice::compact(rows(e, scores.gates(), &choice::positive).u32s(), e)),
            RouterKind::Hash => self.hashed(ctx, num_tokens),
            RouterKind::ExpertChoice if !self.input.is_inference => tensor(self.expert_choice(ctx, scores)),
            RouterKind::Base if !self.input.is_inference => tensor((self.auctioned(ctx, ranking), 1)),
            RouterKind::Sinkhorn if !self.input.is_inference => rows(k, &self.balanced(ctx, ranking), &choice::top_k),
            _ if self.sparsemixer().is_some_and(|mixer| mixer.random.is_some()) => self.drawn(ctx, ranking),
            _ => rows(k, ranking, &choice::top_k),
        }
    }

    /// The rule of sparsemixer, if that is the scheme.
    pub(crate) fn sparsemixer(&self) -> Option<Sparsemixer> {
        let jitter = self.router().sparsemixer_jitter;
        (jitter > 0.0).then(|| Sparsemixer { jitter, random: self.random(), first: self.input.first_token })
    }

    /// The choices of sparsemixer in training.
    fn drawn(&self, ctx: &Context, ranking: &Tensor) -> Tensor {
        let (num_tokens, e, k) = (ranking.rows(), ranking.cols(), self.config.top_k);
        let mut ids = ctx.empty(&[num_tokens, k], DType::U32);
        let inputs = blocks::of_mut(ids.u32s_mut(), k).zip(blocks::of(ranking.f32s(), e));
        blocks::for_each(ctx, inputs, |block, (ids, logits)| {
            let mut room = vec![0.0; e];
            for (t, (ids, logits)) in (block * blocks::ROWS..).zip(ids.chunks_mut(k).zip(logits.chunks(e))) {
                if let Some(mixer) = self.sparsemixer() {
                    mixer.choose(t, logits, &mut room, ids);
                }
            }
        });
        ids
    }

    /// Whether some tokens go without their second choice.
    fn may_leave_second(&self) -> bool {
        self.router().kind == RouterKind::Gshard && self.router().second != SecondExpert::Always
    }

    /// The choices without the second experts that are not used this time.
    fn with_second(&self, ctx: &Context, ids: &Tensor, weights: &Tensor) -> Tensor {
        if !self.may_leave_second() {
            return ids.clone();
        }
        let router = self.router();
        let threshold = router.second_threshold;
        let random = self.random();
        let mut used = ids.copied(ctx.pool());
        let tokens = used.u32s_mut().chunks_mut(2).zip(weights.f32s().chunks(2));
        for (t, (ids, weights)) in tokens.enumerate() {
            let share = weights[1] / (weights[0] + weights[1]);
            let is_used = match (router.second, random) {
                (SecondExpert::Random, Some(random)) => {
                    share / threshold > random.uniform(Draw::Second.at(self.input.first_token + t))
                }
                (SecondExpert::Threshold, _) => share > threshold,
                _ => true,
            };
            // What is not finite stays, so that it shows.
            if !is_used && share.is_finite() {
                ids[1] = NO_EXPERT;
            }
        }
        used
    }

    /// The first choices `ids [T, K]` in local groups of all ranks' tokens, where GShard's loss wants them.
    fn shared_groups(&self, ids: &Tensor) -> Option<Parts> {
        let together = self.together.filter(|_| self.input.has_gshard_loss)?;
        let (ids, len) = ((ids.u32s(), ids.cols()), self.router().local_group);
        Some(Parts::of(ids, 1, self.config.num_choosable(), len, Some(together)))
    }

    /// How this router's choices become rows.
    pub(crate) fn rule<'p>(&self, priority: Option<&'p [f32]>) -> DispatchRule<'p> {
        let router = self.router();
        // Experts that choose have taken what they have room for.
        let has_taken = matches!(router.kind, RouterKind::ExpertChoice | RouterKind::Base);
        let has_room = self.input.is_inference || has_taken;
        DispatchRule {
            capacity_factor: if has_room { 0.0 } else { self.config.capacity_factor },
            top_k: self.config.top_k,
            num_free: router.num_free(),
            free_ratio: router.free_ratio,
            group_tokens: self.input.capacity.map_or(router.local_group, |capacity| capacity.group_tokens),
            priority,
            fixed: self.input.capacity.map(|capacity| capacity.num_tokens),
            counted: None,
            shared: None,
        }
    }

    /// `[T, K]`: the choices that counters move by, if some of them are not used.
    pub(crate) fn counted<'p>(&self, saved: &'p FlatSaved) -> Option<&'p [u32]> {
        (self.router().kind == RouterKind::Gshard).then(|| saved.ids.u32s())
    }

    /// `[T]`: the score of each token's first choice, if that decides who is served first.
    pub(crate) fn priority(&self, saved: &FlatSaved) -> Option<Vec<f32>> {
        if self.router().overflow != Overflow::Priority || self.config.capacity_factor == 0.0 {
            return None;
        }
        let (gates, k) = (saved.scores.gates(), saved.ids.cols());
        let rows = gates.f32s().chunks(gates.cols()).zip(saved.ids.u32s().chunks(k));
        Some(rows.map(|(gates, ids)| gates.get(ids[0] as usize).copied().unwrap_or(0.0)).collect())
    }

    /// The weights of the choices `ids [T, K]`.
    fn weigh(&self, ctx: &Context, scores: &Scores, ids: &Tensor) -> Tensor {
        let (gates, k) = (scores.gates(), ids.cols());
        let e = gates.cols();
        let rule = WeightRule::of(self.config);
        let mut weights = ctx.empty(ids.shape(), DType::F32);
        if let (Some(mixer), Some(logits)) = (self.sparsemixer(), &scores.logits) {
            let inputs = blocks::of_mut(weights.f32s_mut(), k).zip(blocks::of(ids.u32s(), k));
            blocks::for_each(ctx, inputs.zip(blocks::of(logits.f32s(), e)), |block, ((weights, ids), logits)| {
                let mut room = vec![0.0; e];
                let rows = weights.chunks_mut(k).zip(ids.chunks(k)).zip(logits.chunks(e));
                for (t, ((weights, ids), logits)) in (block * blocks::ROWS..).zip(rows) {
                    mixer.weigh(t, logits, &mut room, ids, weights);
                }
            });
            return weights;
        }
        let inputs = blocks::of_mut(weights.f32s_mut(), k).zip(blocks::of(ids.u32s(), k));
        blocks::for_each(ctx, inputs.zip(blocks::of(gates.f32s(), e)), |_, ((weights, ids), gates)| {
            for ((weights, ids), gates) in weights.chunks_mut(k).zip(ids.chunks(k)).zip(gates.chunks(e)) {
                rule.weigh(gates, ids, weights);
            }
        });
        weights
    }
}

/// What one token ranks experts by: gates and bias; what is out of reach stays so.
fn rank_row(ranking: &mut [f32], gates: &[f32], logits: &[f32], bias: Option<&[f32]>) {
    for (i, ((rank, &gate), &logit)) in ranking.iter_mut().zip(gates).zip(logits).enumerate() {
        let gate = if gate.is_nan() { 0.0 } else { gate };
        *rank = if logit == f32::NEG_INFINITY { logit } else { gate + bias.map_or(0.0, |bias| bias[i]) };
    }
}

/// Tokens whose distributions are added up at most before the sums go on in f64.
const PIECE_TOKENS: usize = 128;

/// The tokens from which pieces of at most [`PIECE_TOKENS`] of sequences begin, and the number of tokens.
fn pieces_of_sequences(num_tokens: usize, seq_len: usize) -> Vec<u32> {
    let sequences = (0..num_tokens).step_by(seq_len);
    let pieces = sequences.flat_map(|start| (start..(start + seq_len).min(num_tokens)).step_by(PIECE_TOKENS));
    pieces.chain([num_tokens]).map(|start| start as u32).collect()
}
