//! The router's steps over all tokens: logits, scores, choice, weights.
//!
//! Softmax top-k has a fused operation in `ops`, wherever the logits come from. A GPU has a kernel for other scores,
//! biases and groups. Everything else runs step by step. Backward (in `grads`) goes from the weights to the gates,
//! adds the gradients of the losses on the distribution and the logits, and ends at the logits. The discrete choice
//! has no gradient.

use moeworks_ops::Context;
use moeworks_ops::counting_sort::SortedChoices;
use moeworks_ops::deferred::Deferred;
use moeworks_ops::elementwise::sums_of_rows;
use moeworks_ops::score_top_k::{ScoreRule, Scored, score_top_k};
use moeworks_ops::top_k::{TopK, softmax_top_k_with};
use moeworks_tensor::{DType, Tensor};

use super::blocks;
use super::config::{GroupScore, RouterConfig};
use super::input::RouterInput;
use super::logits::{NoisyInput, SavedLogits, SchemeLogits};
use super::noise::{InputNoise, LogitDraws, LogitNoise};
use super::replay::Weighed;
use super::residual::Residual;
use super::scheme::RoutingScheme;
use super::scores::{Gate, LogitRule, Scores};
use super::sparsemixer::Sparsemixer;
use super::state::EXPERT_BIAS;
use super::token_groups::{CountedChoices, TokenGroups};
use super::weigh::{WeightRule, is_normalized};
use super::{ExpertIds, choice, load};
use crate::ep::CrossRank;
use crate::overflow::Overflow;
use crate::{DispatchRule, MoeConfig, MoeWeights, Ramp, Routing, RoutingError};

/// A router in a pass: its configuration, weights and inputs.
#[derive(Clone, Copy)]
pub(crate) struct ScoreRouter<'a> {
    pub(crate) config: &'a MoeConfig,
    pub(crate) weights: &'a MoeWeights,
    pub(crate) input: &'a RouterInput<'a>,
    /// The tokens of other ranks, if the decision depends on them.
    pub(crate) cross_rank: Option<&'a CrossRank<'a>>,
}

/// A router's decision, and the state that its backward needs.
pub(crate) struct Decision {
    pub(crate) routing: Routing,
    pub(crate) saved: RouterSaved,
    /// Choices that were rerouted because their expert was full.
    pub(crate) num_rerouted: usize,
}

/// The saved state of forward that backward needs.
pub(crate) struct RouterSaved {
    pub(crate) input_noise: Option<InputNoise>,
    /// The saved state of the logits.
    pub(crate) logits: Box<dyn SavedLogits>,
    pub(crate) noise: LogitNoise,
    pub(crate) temperature: f32,
    /// K in this pass.
    pub(crate) top_k: usize,
    /// `[T, E]`: the logits before noise, if the load loss needs them.
    pub(crate) clean: Option<Tensor>,
    pub(crate) scores: Scores,
    /// `[T, K]`: the experts whose gates became the weights.
    pub(crate) ids: Tensor,
    /// `[T, K]`: the weights.
    pub(crate) weights: Tensor,
    /// `[T]`: the modality of each token; empty if there is one.
    pub(crate) modalities: Vec<u32>,
    pub(crate) seq_len: usize,
    /// Start tokens of pieces of sequences and the sums of the pieces' distributions, for the sequence-wise loss on a
    /// GPU.
    pub(crate) sums_of_pieces: Option<(Vec<u32>, Tensor)>,
    /// Tokens per local group; 0: all.
    pub(crate) group_len: usize,
    /// The first choices in local groups that span several ranks.
    pub(crate) shared_groups: Option<TokenGroups>,
    /// `[E]`: the smooth load under noise; empty without noise.
    pub(crate) smooth_load: Vec<f64>,
    pub(crate) backend: ScoreBackend,
    pub(crate) residual: Option<Residual>,
}

/// The implementation that computes scores and choices in a pass.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum ScoreBackend {
    /// The fused softmax top-k.
    Fused,
    /// A GPU's kernel for other scores.
    GpuScores,
    /// Separate steps over rows on the host.
    StepByStep,
}

/// A choice made from logits.
struct Choice {
    scores: Scores,
    /// `[T, K]`: the experts.
    ids: Tensor,
    /// `[T, K]`: their weights.
    weights: Tensor,
    num_rerouted: usize,
    /// The choices sorted by expert, if the operation sorted them as well.
    sorted: Option<SortedChoices>,
}

/// The logits of a pass and the state of their backward.
struct Logits {
    input_noise: Option<InputNoise>,
    saved: Box<dyn SavedLogits>,
    values: Tensor,
    noise: LogitNoise,
    residual: Option<Residual>,
}

impl ScoreRouter<'_> {
    pub(crate) fn router(&self) -> &RouterConfig {
        &self.config.router
    }

    /// Routes `x [T, D]`.
    pub(crate) fn forward(&self, ctx: &Context, x: &Tensor) -> Decision {
        self.decide(ctx, self.logits(ctx, x))
    }

    /// Routes `x [T, D]`; fails if a logit is not finite.
    pub(crate) fn checked(&self, ctx: &Context, x: &Tensor) -> Result<Decision, RoutingError> {
        let logits = self.logits(ctx, x);
        let (values, temperature) = (&logits.values, self.temperature());
        let is_finite = |logit: &f32| (logit / temperature).is_finite();
        // The fold has no early exit, so that it vectorises.
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
        let Logits { input_noise, saved: saved_logits, values, noise, residual } = logits;
        self.check_expert_ids(values.rows());
        let clean = noise.is_normal().then(|| values.copied(ctx.pool()));
        let modalities = self.modalities();
        let backend = self.backend(ctx);
        // On a GPU the fused operation sums the squares itself, if the logits have no noise.
        let sees_logits = backend == ScoreBackend::Fused && ctx.gpu().is_some() && matches!(noise, LogitNoise::None);
        let squared_logits = (!sees_logits).then(|| saved_logits.squared_logits(ctx, &values));
        let Choice { scores, ids, weights, num_rerouted, sorted } = match backend {
            ScoreBackend::Fused => self.fused(ctx, values, &noise),
            ScoreBackend::GpuScores => self.fused_scores(ctx, values, &noise),
            ScoreBackend::StepByStep => self.step_by_step(ctx, values, &noise, &*saved_logits, &modalities),
        };
        let chooses_all = || self.gives_all(backend) && !self.scheme().may_leave_out();
        let has_all = self.input.expert_ids.map_or_else(chooses_all, ExpertIds::is_whole);
        let routing = self.routing(self.scheme().used(self, ctx, &ids, &weights), weights.clone()).whole(has_all);
        let routing = routing.with_sorted(sorted.filter(|_| has_all));
        let mut saved = RouterSaved {
            input_noise,
            logits: saved_logits,
            noise,
            temperature: self.temperature(),
            top_k: self.top_k(),
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
            backend,
            residual,
        };
        if backend != ScoreBackend::StepByStep && ctx.gpu().is_some() && saved.seq_len > 0 {
            let starts = pieces_of_sequences(saved.scores.probs.rows(), saved.seq_len);
            let sums = sums_of_rows(ctx, &saved.scores.probs, &starts);
            saved.sums_of_pieces = Some((starts, sums));
        }
        if let Some(clean) = &saved.clean {
            saved.smooth_load = load::smooth_load(ctx, &saved, clean);
        }
        Decision { routing, saved, num_rerouted }
    }

    /// Chooses by fused softmax top-k of `values` with `noise`.
    fn fused(&self, ctx: &Context, mut values: Tensor, noise: &LogitNoise) -> Choice {
        noise.add(ctx, &mut values);
        let logits = noise.is_normal().then(|| values.copied(ctx.pool()));
        let (k, normalize) = (self.top_k(), is_normalized(self.config));
        let is_training = !self.input.is_inference;
        let TopK { probs, ids, weights, lse, sums, sorted } =
            softmax_top_k_with(ctx, values, k, normalize, is_training);
        let of_logits = sums.clone();
        let squared_logits = Deferred::new(move || vec![of_logits.logits_squared.unwrap_or(0.0)]);
        let scores = Scores { probs, gates: None, logits, lse, sums, squared_logits };
        let Weighed { ids, weights } = self.replayed(ctx, &scores, Weighed { ids, weights });
        // The sorted choices are the router's own, not the given ones.
        let sorted = sorted.filter(|_| self.input.expert_ids.is_none());
        Choice { scores, ids, weights, num_rerouted: 0, sorted }
    }

    /// Chooses by the GPU's kernel for other scores.
    fn fused_scores(&self, ctx: &Context, mut values: Tensor, noise: &LogitNoise) -> Choice {
        noise.add(ctx, &mut values);
        let rule = self.score_rule(self.top_k(), self.temperature());
        let scored = score_top_k(ctx, values, &rule).expect("a GPU");
        let Scored { probs, gates, logits, lse, ids, weights, sums } = scored;
        let scores = Scores { probs, gates, logits: Some(logits), lse, sums, squared_logits: Deferred::now(vec![0.0]) };
        let Weighed { ids, weights } = self.replayed(ctx, &scores, Weighed { ids, weights });
        Choice { scores, ids, weights, num_rerouted: 0, sorted: None }
    }

    /// Returns the rule of the GPU's kernel for scores, in a pass of this K and temperature.
    pub(crate) fn score_rule(&self, top_k: usize, temperature: f32) -> ScoreRule<'_> {
        let (router, weigh) = (self.router(), WeightRule::from_config(self.config));
        ScoreRule {
            is_sigmoid: self.gate() == Gate::Sigmoid,
            temperature,
            bias: router.expert_bias.then(|| self.weights.state(EXPERT_BIAS)),
            num_groups: router.num_groups,
            top_groups: router.top_groups,
            by_top_two: router.group_score == GroupScore::TopTwo,
            top_k,
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
        noise: &LogitNoise,
        saved: &dyn SavedLogits,
        modalities: &[u32],
    ) -> Choice {
        let (temperature, reach) = (self.temperature(), self.reach());
        let lower_lse_squared = saved.lower_lse_squared();
        let rule = LogitRule { gate: self.gate(), noise, temperature, reach: &reach, modalities, lower_lse_squared };
        let scores = Scores::new(ctx, values, &rule);
        let (ids, num_rerouted) = match self.given_ids() {
            Some(given) => (given, 0),
            None => {
                let ranking = self.ranking(ctx, &scores, saved);
                let mut ids = self.choose(ctx, &scores, &ranking);
                let num_rerouted = self.reroute(&mut ids, &ranking);
                (ids, num_rerouted)
            }
        };
        let weights = self.weigh(ctx, &scores, &ids);
        Choice { scores, ids, weights, num_rerouted, sorted: None }
    }

    fn routing(&self, ids: Tensor, weights: Tensor) -> Routing {
        Routing::from_tensors(self.config.num_choosable(), ids, weights)
    }

    /// Returns the chosen scheme.
    pub(super) fn scheme(&self) -> &dyn RoutingScheme {
        self.router().scheme()
    }

    /// Returns K in this pass.
    pub(super) fn top_k(&self) -> usize {
        self.scheme().top_k(self.config, self.input)
    }

    /// Returns the source of noise of a training pass.
    pub(super) fn random(&self) -> Option<moeworks_tensor::Random> {
        self.input.noise.filter(|_| !self.input.is_inference)
    }

    /// Returns the random stream of the logits of a training pass.
    pub(super) fn logit_draws(&self) -> Option<LogitDraws> {
        let first = self.input.first_token * self.config.num_choosable();
        self.random().map(|random| LogitDraws { random, first })
    }

    fn logits(&self, ctx: &Context, x: &Tensor) -> Logits {
        let mut logits = self.own_logits(ctx, x);
        if self.router().gate_residual {
            logits.residual = Some(Residual::forward(ctx, self.weights, self.input.previous, &mut logits.values));
        }
        logits
    }

    /// Computes the logits without those of the previous layer.
    fn own_logits(&self, ctx: &Context, x: &Tensor) -> Logits {
        let (eps, dropout) = (self.now(self.config.jitter), self.now(self.router().input_dropout));
        let input_noise =
            self.random().map(|random| InputNoise { eps, dropout, random, first: self.input.first_token * x.cols() });
        let input_noise = input_noise.filter(|_| eps > 0.0 || dropout > 0.0);
        let x = NoisyInput { values: x, noise: input_noise.as_ref() };
        let SchemeLogits { values, saved, noise } = self.scheme().logits(self, ctx, x);
        let noise = noise.unwrap_or_else(|| match (self.logit_draws(), self.now(self.router().noise_std)) {
            (None, _) | (_, 0.0) => LogitNoise::None,
            (Some(draws), std) => LogitNoise::Normal(std, draws),
        });
        Logits { input_noise, saved, values, noise, residual: None }
    }

    fn backend(&self, ctx: &Context) -> ScoreBackend {
        let router = self.router();
        let is_random = self.random().is_some() && router.random_probability(self.input.progress) > 0.0;
        let tokens_choose = self.input.is_inference || !self.scheme().is_global();
        if !tokens_choose || is_random || self.reroutes() {
            return ScoreBackend::StepByStep;
        }
        let has_kernel = ctx.gpu().is_some() && router.is_score_top_k();
        // Only the score kernels' backward handles the sequence-wise loss.
        let is_fused = router.is_softmax_top_k() && self.temperature() == 1.0;
        let has_gaps = self.input.expert_ids.is_some_and(|given| !given.is_whole());
        if is_fused && !(has_kernel && self.input.seq_len > 0) && !has_gaps {
            ScoreBackend::Fused
        } else if has_kernel {
            ScoreBackend::GpuScores
        } else {
            ScoreBackend::StepByStep
        }
    }

    /// Returns whether every token certainly gets K experts that compute.
    fn gives_all(&self, backend: ScoreBackend) -> bool {
        let router = self.router();
        let reachable = self.config.num_experts / router.num_groups * router.top_groups;
        let is_enough = router.num_zero_computation() == 0 && reachable >= self.top_k();
        backend == ScoreBackend::Fused || backend == ScoreBackend::GpuScores && is_enough
    }

    /// Returns the value of a ramp at this pass's progress.
    fn now(&self, ramp: Ramp) -> f32 {
        ramp.at(self.input.progress) as f32
    }

    fn temperature(&self) -> f32 {
        let progress = if self.input.is_inference { 1.0 } else { self.input.progress };
        self.router().temperature.at(progress) as f32
    }

    pub(super) fn gate(&self) -> Gate {
        self.scheme().gate(self.router(), self.config.top_k)
    }

    /// Chooses `[T, K]`: the experts of each token.
    fn choose(&self, ctx: &Context, scores: &Scores, ranking: &Tensor) -> Tensor {
        let scheme = self.scheme();
        if self.sparsemixer().is_some_and(|mixer| mixer.random.is_some()) {
            self.drawn(ctx, ranking)
        } else if self.input.is_inference && scheme.is_global() {
            self.highest(ctx, ranking)
        } else {
            scheme.choose(self, ctx, scores, ranking)
        }
    }

    /// Returns `[T, K]`: the experts that rank highest in `ranking [T, E]`.
    pub(super) fn highest(&self, ctx: &Context, ranking: &Tensor) -> Tensor {
        self.rows(ctx, self.top_k(), ranking, choice::top_k)
    }

    /// Returns `[T, width]`: the ids that `choose` writes for each row of `scores [T, E]`.
    pub(super) fn rows(
        &self,
        ctx: &Context,
        width: usize,
        scores: &Tensor,
        choose: impl Fn(&[f32], &mut [u32]) + Sync,
    ) -> Tensor {
        let e = scores.cols();
        let mut ids = ctx.empty(&[scores.rows(), width], DType::U32);
        let inputs = blocks::split_mut(ids.u32s_mut(), width).zip(blocks::split(scores.f32s(), e));
        blocks::for_each(ctx, inputs, |_, (ids, scores)| {
            for (ids, scores) in ids.chunks_mut(width).zip(scores.chunks(e)) {
                choose(scores, ids);
            }
        });
        ids
    }

    /// Returns the rule of SparseMixer, if it is in use.
    pub(crate) fn sparsemixer(&self) -> Option<Sparsemixer> {
        let jitter = self.router().sparsemixer_jitter;
        (jitter > 0.0).then(|| Sparsemixer { jitter, random: self.random(), first: self.input.first_token })
    }

    /// Draws the choices of SparseMixer.
    fn drawn(&self, ctx: &Context, ranking: &Tensor) -> Tensor {
        let (num_tokens, e, k) = (ranking.rows(), ranking.cols(), self.config.top_k);
        let mut ids = ctx.empty(&[num_tokens, k], DType::U32);
        let inputs = blocks::split_mut(ids.u32s_mut(), k).zip(blocks::split(ranking.f32s(), e));
        blocks::for_each(ctx, inputs, |block, (ids, logits)| {
            let mut gates = vec![0.0; e];
            for (t, (ids, logits)) in (block * blocks::ROWS..).zip(ids.chunks_mut(k).zip(logits.chunks(e))) {
                if let Some(mixer) = self.sparsemixer() {
                    mixer.choose(t, logits, &mut gates, ids);
                }
            }
        });
        ids
    }

    /// Groups the first choices `ids [T, K]` of all ranks' tokens by local group, if GShard's loss needs them.
    fn shared_groups(&self, ids: &Tensor) -> Option<TokenGroups> {
        let cross_rank = self.cross_rank.filter(|_| self.input.has_gshard_loss)?;
        let (ids, top_k, num_experts) = (ids.u32s(), ids.cols(), self.config.num_choosable());
        let firsts = CountedChoices { ids, top_k, first_k: 1, num_experts };
        Some(TokenGroups::new(firsts, self.router().local_group, Some(cross_rank)))
    }

    /// Returns the rule by which this router's choices become rows.
    pub(crate) fn rule<'p>(&self, priority: Option<&'p [f32]>) -> DispatchRule<'p> {
        let router = self.router();
        // Expert choice has respected the capacity already.
        let is_unlimited = self.input.is_inference || self.scheme().keeps_to_capacity();
        DispatchRule {
            capacity_factor: if is_unlimited { 0.0 } else { self.config.capacity_factor },
            top_k: self.top_k(),
            num_zero_computation: router.num_zero_computation(),
            zero_computation_ratio: router.zero_computation_ratio,
            group_tokens: self.input.capacity.map_or(router.local_group, |capacity| capacity.group_tokens),
            priority,
            fixed: self.input.capacity.map(|capacity| capacity.num_tokens),
            capacity_ids: None,
            shared: None,
        }
    }

    /// Returns `[T, K]`: the choices that count towards the capacity, if they differ from the routing's.
    pub(crate) fn capacity_ids<'p>(&self, saved: &'p RouterSaved) -> Option<&'p [u32]> {
        self.scheme().counts_left_out().then(|| saved.ids.u32s())
    }

    /// Returns `[T]`: the score of each token's first choice, if tokens are served by priority.
    pub(crate) fn priority(&self, saved: &RouterSaved) -> Option<Vec<f32>> {
        let has_capacity = self.config.capacity_factor != 0.0 && !self.input.is_inference;
        if self.router().overflow != Overflow::Priority || !has_capacity {
            return None;
        }
        let (gates, k) = (saved.scores.gates(), saved.ids.cols());
        let rows = gates.f32s().chunks(gates.cols()).zip(saved.ids.u32s().chunks(k));
        Some(rows.map(|(gates, ids)| gates.get(ids[0] as usize).copied().unwrap_or(0.0)).collect())
    }

    /// Computes the weights of the choices `ids [T, K]`.
    fn weigh(&self, ctx: &Context, scores: &Scores, ids: &Tensor) -> Tensor {
        let (gates, k) = (scores.gates(), ids.cols());
        let e = gates.cols();
        let rule = WeightRule::from_config(self.config);
        let mut weights = ctx.empty(ids.shape(), DType::F32);
        if let (Some(mixer), Some(logits)) = (self.sparsemixer(), &scores.logits) {
            let inputs = blocks::split_mut(weights.f32s_mut(), k).zip(blocks::split(ids.u32s(), k));
            blocks::for_each(ctx, inputs.zip(blocks::split(logits.f32s(), e)), |block, ((weights, ids), logits)| {
                let mut gates = vec![0.0; e];
                let rows = weights.chunks_mut(k).zip(ids.chunks(k)).zip(logits.chunks(e));
                for (t, ((weights, ids), logits)) in (block * blocks::ROWS..).zip(rows) {
                    mixer.weigh(t, logits, &mut gates, ids, weights);
                }
            });
            return weights;
        }
        let inputs = blocks::split_mut(weights.f32s_mut(), k).zip(blocks::split(ids.u32s(), k));
        blocks::for_each(ctx, inputs.zip(blocks::split(gates.f32s(), e)), |_, ((weights, ids), gates)| {
            for ((weights, ids), gates) in weights.chunks_mut(k).zip(ids.chunks(k)).zip(gates.chunks(e)) {
                rule.weigh(gates, ids, weights);
            }
        });
        weights
    }
}

/// The most tokens of a piece, whose distributions are summed in f32 before the sums go on in f64.
const PIECE_TOKENS: usize = 128;

/// Returns the start tokens of the pieces (at most [`PIECE_TOKENS`] tokens of one sequence), and the number of
/// tokens.
fn pieces_of_sequences(num_tokens: usize, seq_len: usize) -> Vec<u32> {
    let sequences = (0..num_tokens).step_by(seq_len);
    let pieces = sequences.flat_map(|start| (start..(start + seq_len).min(num_tokens)).step_by(PIECE_TOKENS));
    pieces.chain([num_tokens]).map(|start| start as u32).collect()
}
