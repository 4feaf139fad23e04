//! The MoE layer: router, dispatch, experts and shared experts, in three phases.
//!
//! Forward keeps the input, the router's probabilities, the routing, the dispatch and the experts' pre-activations;
//! neither the experts' outputs nor their activations. Backward gives the input's gradient at once and leaves the
//! weights' gradients, the router's included, as a task.
//!
//! With choices i_1..i_k and their weights w, `y = sum_j w_j expert_ij(x) + shared(x)`. The choice itself has no gradient:
//! the router learns through w and through the losses on its scores.

use std::sync::Arc;

use moeworks_ops::Context;
use moeworks_ops::elementwise::{add_assign, into_type};
use moeworks_ops::experts::{
    ExpertGrads, ExpertRows, ExpertsSaved, WeightGradInputs, add_bias_row_weight_grads, choice_weight_grads,
    experts_backward, experts_backward_with_weight_grad, experts_bias_grad, experts_forward_onto, experts_weight_grad,
    experts_weight_grad_of_used, send_experts_ahead,
};
use moeworks_ops::late::Late;
use moeworks_ops::linear::Write;
use moeworks_ops::top_k::{ChoiceSums, choice_sums, choice_sums_in_host};
use moeworks_tensor::Tensor;

use crate::ep::{CrossRank, MergedChunks, RanksSaved, RanksTask};
use crate::router::{Decision, RouterGradTask, RouterSaved, ScoreRouter};
use crate::shared::{SharedSaved, SharedTask};
use crate::weights::is_left_out;
use crate::zero_computation::{self, ZeroComputationChoices, ZeroComputationGrads};
use crate::{
    ConfigError, Dispatch, DispatchRule, ExpertRanks, LayerStats, LossGrad, MoeConfig, MoeWeights, RouterInput,
    Routing, RoutingError, ZeroComputationShare,
};

/// An MoE layer: its configuration, checked. Weights are arguments.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeLayer {
    config: MoeConfig,
    /// Where the experts are, if not all here.
    ranks: Option<ExpertRanks>,
}

/// What backward needs of forward, and what forward decided. Cloning shares the tensors.
#[derive(Clone)]
pub struct MoeSaved {
    inner: Arc<Saved>,
}

struct Saved {
    x: Tensor,
    /// `x` in f32, where there are experts without computation.
    exact_x: Option<Tensor>,
    router: RouterSaved,
    routing: Routing,
    choice_sums: Late<ChoiceSums>,
    free: ZeroComputationShare,
    /// Groups of experts.
    num_groups: usize,
    num_rerouted: usize,
    dispatch: Dispatch,
    experts: ExpertsPart,
    shared: Option<SharedSaved>,
}

/// What the experts saved of forward.
#[allow(clippy::large_enum_variant)] // one for each layer
enum ExpertsPart {
    /// Nothing where no backward pass was to follow.
    Here(Option<ExpertsSaved>),
    Ranks(RanksSaved),
}

/// What a backward pass needs of experts; that of a pass which was said to be forward only is a fault of the caller.
pub(crate) fn kept(saved: &Option<ExpertsSaved>) -> &ExpertsSaved {
    saved.as_ref().expect("a pass that was to be forward only has no backward pass")
}

/// What the gradients of the experts are computed of, besides what forward saved.
enum ExpertsTask {
    Here {
        dh: Tensor,
        weighed: Option<Tensor>,
        /// The gradients of the matrices are there already.
        is_done: bool,
    },
    Ranks(RanksTask),
}

/// Where the gradients of a layer's weights are, for what is written there at once.
pub struct GradsNow<'a> {
    /// Whether they replace what is there or are added to it.
    pub write: Write,
    /// Whether those of experts without tokens stay as they are even if others are replaced.
    pub of_used: bool,
    /// The gradients.
    pub grads: &'a mut MoeWeights,
}

/// The gradient of a layer's weights, to be computed when it suits.
pub struct MoeGradTask {
    saved: Arc<Saved>,
    dy: Tensor,
    router: Option<RouterGradTask>,
    free: Option<ZeroComputationGrads>,
    experts: ExpertsTask,
    shared: Option<SharedTask>,
    config: MoeConfig,
}

impl MoeLayer {
    /// A layer of `config`, or what is wrong with it.
    pub fn new(config: MoeConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self { config, ranks: None })
    }

    /// A layer of `config` whose experts live on the ranks of `ranks`: weights are those of the experts held here, in their
    /// order. All ranks of the group make the same calls of [`forward`](Self::forward) and [`backward`](Self::backward),
    /// each with tokens of its own, or none. Panics if the placement is of another number of experts.
    pub fn over_ranks(config: MoeConfig, ranks: ExpertRanks) -> Result<Self, ConfigError> {
        assert_eq!(ranks.placement().num_experts(), config.num_experts, "experts of a placement");
        Ok(Self { ranks: Some(ranks), ..Self::new(config)? })
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &MoeConfig {
        &self.config
    }

    /// The layer's output `y [T, D]` (f32) for `x [T, D]` (f32 or bf16), and what backward needs.
    ///
    /// Products of experts are taken in their weights' type, those of the router in f32. `input` is what the router looks
    /// at besides x. Panics if `weights` or `x` have other shapes than the configuration says.
    #[must_use]
    pub fn forward(
        &self,
        ctx: &Context,
        weights: &MoeWeights,
        x: &Tensor,
        input: &RouterInput<'_>,
    ) -> (Tensor, MoeSaved) {
        self.forward_onto(ctx, weights, x, input, None)
    }

    /// As [`forward`](Self::forward) with what `base [T, D]` (f32) has besides, if it is there: the stream that the layer's output is
    /// added to.
    #[must_use]
    pub fn forward_onto(
        &self,
        ctx: &Context,
        weights: &MoeWeights,
        x: &Tensor,
        input: &RouterInput<'_>,
        base: Option<&Tensor>,
    ) -> (Tensor, MoeSaved) {
        let num_held = self.ranks.as_ref().map_or(self.config.num_experts, |ranks| ranks.held().len());
        weights.check(&self.config, num_held);
        assert_eq!(x.shape(), [x.rows(), self.config.width], "input of an MoE layer");
        let router = self.router(weights, input);
        let ranks = self.ranks.as_ref().filter(|_| router.decides_across_ranks());
        let cross_rank = ranks.map(|ranks| CrossRank::of(ranks, x.rows()));
        let cross_rank = cross_rank.as_ref();
        let router = ScoreRouter { cross_rank, ..router };
        let Decision { routing, saved: router_saved, num_rerouted } = self.timed("router", || router.forward(ctx, x));
        let priority = router.priority(&router_saved);
        let rule = DispatchRule { counted: router.counted(&router_saved), ..router.rule(priority.as_deref()) };
        let sizes = (routing.top_k(), routing.num_experts());
        let counted = || rule.counted.unwrap_or_else(|| routing.expert_ids());
        let shared = cross_rank.filter(|_| rule.is_shared()).map(|cross_rank| cross_rank.room(&rule, counted(), sizes));
        let rule = DispatchRule { shared: shared.as_ref(), ..rule };
        let dispatch = Dispatch::with_rule(ctx, &routing, &rule);
        let choice_sums = choice_sums_of(ctx, &routing, !input.is_inference);
        let choices = (&dispatch, routing.top_k(), !input.is_inference);
        // A GPU adds it where outputs are added up; the processor, or what comes over ranks, at the end.
        let is_early = ctx.gpu().is_some() && self.ranks.is_none();
        let (early, late) = if is_early { (base, None) } else { (None, base) };
        let (mut y, experts) = self.experts_forward(ctx, weights, x, choices, (early, input.is_forward_only));
        let exact_x = zero_computation::exact(ctx, &self.config, x);
        if let Some(x) = &exact_x {
            ZeroComputationChoices { config: &self.config, weights, routing: &routing, dispatch: &dispatch, x }
                .forward(&mut y);
        }
        let shared = weights.shared.as_ref().map(|shared| {
            let options = (self.config.activation, input.is_forward_only);
            let (sum, saved) = SharedSaved::forward_onto(ctx, shared, options, x, &y);
            y = sum;
            saved
        });
        if let Some(base) = late {
            add_assign(ctx, &mut y, base);
        }
        let (x, router) = (x.clone(), router_saved);
        let (free, num_groups) = (ZeroComputationShare::of(&self.config), self.config.router.num_groups);
        let saved = Saved {
            x,
            exact_x,
            router,
            routing,
            choice_sums,
            free,
            num_groups,
            num_rerouted,
            dispatch,
            experts,
            shared,
        };
        (y, MoeSaved { inner: Arc::new(saved) })
    }

    fn experts_forward(
        &self,
        ctx: &Context,
        weights: &MoeWeights,
        x: &Tensor,
        (dispatch, num_choices, is_training): (&Dispatch, usize, bool),
        options: (Option<&Tensor>, bool),
    ) -> (Tensor, ExpertsPart) {
        let activation = self.config.activation;
        if let Some(ranks) = &self.ranks {
            let choices = (dispatch, num_choices);
            let (y, saved) =
                RanksSaved::forward(ctx, ranks, (weights, activation), x, choices, (is_training, options.1));
            return (y, ExpertsPart::Ranks(saved));
        }
        let (experts, biases) = (weights.experts(activation), weights.expert_biases());
        let (y, saved) = experts_forward_onto(ctx, x, experts, biases, dispatch.rows(), options);
        (y, ExpertsPart::Here(saved))
    }

    /// The gradients of the input and of each choice's weight.
    fn experts_backward(
        &self,
        ctx: &Context,
        weights: &MoeWeights,
        saved: &Saved,
        dy: &Tensor,
        now: Option<GradsNow<'_>>,
    ) -> (Tensor, Tensor, ExpertsTask) {
        match &saved.experts {
            ExpertsPart::Ranks(saved) => {
                let back = saved.backward(ctx, (weights, self.config.activation), dy);
                (back.dx, back.dweights, ExpertsTask::Ranks(back.task))
            }
            ExpertsPart::Here(experts_saved) => {
                let (rows, experts) = (saved.dispatch.rows(), weights.experts(self.config.activation));
                let (kept, is_done) = (kept(experts_saved), now.is_some());
                let mut back = match now {
                    Some(GradsNow { write, of_used, grads }) => {
                        let into = ExpertGrads { gate_up: &mut grads.gate_up, down: &mut grads.down };
                        let inputs = (&saved.x, dy);
                        experts_backward_with_weight_grad(ctx, inputs, experts, rows, kept, (write, of_used), into)
                    }
                    None => experts_backward(ctx, dy, experts, rows, kept),
                };
                if let Some((_, down)) = &weights.biases {
                    add_bias_row_weight_grads(ctx, dy, down, rows, &mut back.d_row_weights);
                }
                let dweights = choice_weight_grads(ctx, rows, &back.d_row_weights);
                (back.dx, dweights, ExpertsTask::Here { dh: back.dh, weighed: back.weighed, is_done })
            }
        }
    }

    /// The decision alone: which experts each token of `x [T, D]` goes to. Arguments as in [`forward`](Self::forward).
    ///
    /// Fails if a logit is not finite. `forward` does not: there such a token's output is NaN, so that a training step shows
    /// it in its loss.
    pub fn route(
        &self,
        ctx: &Context,
        weights: &MoeWeights,
        x: &Tensor,
        input: &RouterInput<'_>,
    ) -> Result<Routing, RoutingError> {
        Ok(self.router(weights, input).checked(ctx, x)?.routing)
    }

    /// The experts `[T, K]` that the tokens of `x [T, D]` will probably go to, where `x` is what the layer's input will probably be: none
    /// where this says nothing of them, as its router looks at more. Arguments as in [`forward`](Self::forward).
    #[must_use]
    pub fn foresee(&self, ctx: &Context, weights: &MoeWeights, x: &Tensor, input: &RouterInput<'_>) -> Option<Tensor> {
        let is_of_input = self.ranks.is_none() && !self.config.router.gate_residual;
        let decide = || self.router(weights, input).forward(ctx, x).routing.tensors().0.clone();
        is_of_input.then(decide)
    }

    /// Sends experts that were [foreseen](Self::foresee) ahead to a GPU, where they otherwise stay in the host's memory
    /// (`moeworks_gpu::Gpu::with_expert_cache`).
    pub fn send_ahead(&self, ctx: &Context, weights: &MoeWeights, ids: &Tensor) {
        let num_experts = weights.gate_up.shape()[0];
        send_experts_ahead(ctx, weights.experts(self.config.activation), num_experts, ids.u32s());
    }

    /// Does `work`; where ranks have a meter it learns how long it took.
    fn timed<R>(&self, name: &'static str, work: impl FnOnce() -> R) -> R {
        match &self.ranks {
            Some(ranks) => ranks.time(name, work),
            None => work(),
        }
    }

    fn router<'a>(&'a self, weights: &'a MoeWeights, input: &'a RouterInput<'a>) -> ScoreRouter<'a> {
        ScoreRouter { config: &self.config, weights, input, cross_rank: None }
    }

    /// The gradient of the input `[T, D]` (f32), and the weights' gradients as a task. `dy` is `[T, D]`, f32 or bf16, the
    /// gradient of `y`; `losses` is what the losses on the router say. `weights` are those of forward.
    #[must_use]
    pub fn backward(
        &self,
        ctx: &Context,
        weights: &MoeWeights,
        saved: &MoeSaved,
        dy: &Tensor,
        losses: &LossGrad,
    ) -> (Tensor, MoeGradTask) {
        self.backward_with_next(ctx, weights, saved, (dy, None), losses, None)
    }

    /// As [`backward`](Self::backward) in a model with [gating residuals](crate::RouterConfig::gate_residual): `dnext [T, E]` is what
    /// the task of the next MoE layer says of this one's logits, [`MoeGradTask::d_previous_logits`]. With `now` the gradients of the
    /// experts' matrices need not wait for the task, which is then run with the same gradients and the same way of writing: beside
    /// those of the inputs they take less time.
    #[must_use]
    pub fn backward_with_next(
        &self,
        ctx: &Context,
        weights: &MoeWeights,
        saved: &MoeSaved,
        (dy, dnext): (&Tensor, Option<&Tensor>),
        losses: &LossGrad,
        now: Option<GradsNow<'_>>,
    ) -> (Tensor, MoeGradTask) {
        let saved = &saved.inner;
        assert_eq!(dy.shape(), saved.x.shape(), "gradient of an MoE layer's output");
        // Every product with it would round it again, row by row.
        let dy = &into_type(ctx, dy.clone(), weights.gate_up.dtype());
        let (mut dx, mut dweights, experts) = self.experts_backward(ctx, weights, saved, dy, now);
        let free = saved.exact_x.as_ref().map(|x| {
            let (routing, dispatch) = (&saved.routing, &saved.dispatch);
            let choices = ZeroComputationChoices { config: &self.config, weights, routing, dispatch, x };
            let dy = zero_computation::exact(ctx, &self.config, dy);
            choices.backward(dy.as_ref().unwrap_or(x), &mut dx, &mut dweights)
        });
        let input = RouterInput::default();
        let grads = (&dweights, saved.routing.tensors().0);
        let router = self.router(weights, &input);
        let router =
            self.timed("router, backward", || router.backward(ctx, &saved.router, grads, (losses, dnext), &mut dx));
        let shared = saved.shared.as_ref().zip(weights.shared.as_ref()).map(|(saved, weights)| {
            let (shared_dx, task) = saved.backward(ctx, weights, self.config.activation, dy);
            add_assign(ctx, &mut dx, &shared_dx);
            task
        });
        let saved = Arc::clone(saved);
        let task = MoeGradTask { saved, dy: dy.clone(), router, free, experts, shared, config: self.config.clone() };
        (dx, task)
    }
}

/// The sums of a routing's choices; `are_wanted` where they will surely be looked at.
fn choice_sums_of(ctx: &Context, routing: &Routing, are_wanted: bool) -> Late<ChoiceSums> {
    let ((ids, weights), num_experts) = (routing.tensors(), routing.num_experts());
    if are_wanted {
        choice_sums(ctx, ids, weights, num_experts)
    } else {
        choice_sums_in_host(ids, weights, num_experts)
    }
}

impl MoeSaved {
    /// Which experts each token went to.
    #[must_use]
    pub fn routing(&self) -> &Routing {
        &self.inner.routing
    }

    /// Which row went where.
    #[must_use]
    pub fn dispatch(&self) -> &Dispatch {
        &self.inner.dispatch
    }

    /// `[T, E]`: each token's distribution over the experts: the softmax of its logits or its scores divided by their sum.
    #[must_use]
    pub fn probs(&self) -> &[f32] {
        self.inner.router.scores.probs.f32s()
    }

    /// `[T, E]` f32: the router's logits before noise and temperature, which the next MoE layer looks at; kept with
    /// [gating residuals](crate::RouterConfig::gate_residual) alone.
    #[must_use]
    pub fn logits(&self) -> Option<&Tensor> {
        Some(&self.inner.router.residual.as_ref()?.logits)
    }

    /// What the routing looked like.
    #[must_use]
    pub fn stats(&self) -> LayerStats {
        let Saved { x, router, choice_sums, num_rerouted, dispatch, .. } = &*self.inner;
        let scores = &router.scores;
        let per_token = 1.0 / x.rows().max(1) as f64;
        LayerStats {
            num_tokens: x.rows(),
            num_choices: dispatch.num_choices(),
            num_dropped: dispatch.num_dropped(),
            num_rerouted: *num_rerouted,
            tokens_per_expert: dispatch.tokens_per_expert().to_vec(),
            kept_per_expert: dispatch.kept_per_expert(),
            tokens_per_group: self.tokens_per_group(),
            mean_prob: scores.sums.probs.iter().map(|sum| (sum * per_token) as f32).collect(),
            mean_entropy: scores.sums.entropy * per_token,
            z: scores.sums.lse_squared * per_token,
            mean_squared_logit: scores.squared_logits[0] * per_token / scores.probs.cols() as f64,
            sequence_loss: if router.seq_len > 0 { router.sequence_loss() } else { 0.0 },
            gshard_loss: router.gshard_loss(&choice_sums.firsts),
            importance: choice_sums.weights.clone(),
            smooth_load: router.smooth_load.clone(),
            modalities: router.modality_stats(),
            free: self.inner.free,
        }
    }

    /// `[G]`: the tokens of each group of experts; empty where there is one group.
    fn tokens_per_group(&self) -> Vec<u32> {
        let Saved { routing, free, num_groups, .. } = &*self.inner;
        if *num_groups < 2 {
            return Vec::new();
        }
        let computing = routing.num_experts() - free.num_zero_computation - free.num_null;
        let size = computing / num_groups;
        let mut counts = vec![0; *num_groups];
        let mut last = vec![usize::MAX; *num_groups];
        for (t, ids) in routing.expert_ids().chunks(routing.top_k()).enumerate() {
            for group in ids.iter().filter(|id| (**id as usize) < computing).map(|id| *id as usize / size) {
                counts[group] += u32::from(last[group] != t);
                last[group] = t;
            }
        }
        counts
    }
}

impl MoeGradTask {
    /// `[T, E]` f32: the gradient of the logits of the MoE layer before; none if this one does not look at them.
    #[must_use]
    pub fn d_previous_logits(&self) -> Option<&Tensor> {
        self.router.as_ref()?.dprevious.as_ref()
    }

    /// Computes the gradients of all weights of the layer and writes or adds them to `grads`, which is f32, or bf16 for
    /// the experts' matrices. An expert without rows gets zeros, or is left as it is.
    pub fn run(self, ctx: &Context, write: Write, grads: &mut MoeWeights) {
        let into = ExpertGrads { gate_up: &mut grads.gate_up, down: &mut grads.down };
        let merged = self.timed(|| {
            let merged = self.merged(ctx);
            let (inputs, rows) = self.inputs(merged.as_ref());
            if !self.is_done() && !is_left_out(into.gate_up) {
                experts_weight_grad(ctx, inputs, self.config.activation, rows, write, into);
            }
            merged
        });
        self.run_rest(ctx, write, merged.as_ref(), grads);
    }

    /// As [`run`](Self::run) with [`Write::Replace`], but the gradients of experts without rows stay as they are: for a caller
    /// who keeps them zero.
    pub fn run_for_used_experts(self, ctx: &Context, grads: &mut MoeWeights) {
        let into = ExpertGrads { gate_up: &mut grads.gate_up, down: &mut grads.down };
        let merged = self.timed(|| {
            let merged = self.merged(ctx);
            let (inputs, rows) = self.inputs(merged.as_ref());
            if !self.is_done() && !is_left_out(into.gate_up) {
                experts_weight_grad_of_used(ctx, inputs, self.config.activation, rows, into);
            }
            merged
        });
        self.run_rest(ctx, Write::Replace, merged.as_ref(), grads);
    }

    /// Whether backward has found the gradients of the experts' matrices.
    fn is_done(&self) -> bool {
        matches!(self.experts, ExpertsTask::Here { is_done: true, .. })
    }

    /// Does the products of experts; where ranks have a meter it learns how long they took.
    fn timed<R>(&self, work: impl FnOnce() -> R) -> R {
        match &self.saved.experts {
            ExpertsPart::Ranks(saved) => saved.time("experts, weights", work),
            ExpertsPart::Here(_) => work(),
        }
    }

    /// What arrived from all ranks, where experts live on several.
    fn merged(&self, ctx: &Context) -> Option<MergedChunks> {
        match (&self.saved.experts, &self.experts) {
            (ExpertsPart::Ranks(saved), ExpertsTask::Ranks(task)) => Some(saved.merged(ctx, task)),
            _ => None,
        }
    }

    /// What the experts' gradients are computed from, and for which rows.
    fn inputs<'a>(&'a self, merged: Option<&'a MergedChunks>) -> (WeightGradInputs<'a>, ExpertRows<'a>) {
        let Saved { x, experts, dispatch, .. } = &*self.saved;
        match (experts, &self.experts, merged) {
            (ExpertsPart::Here(saved), ExpertsTask::Here { dh, weighed, .. }, _) => {
                let saved = kept(saved);
                (WeightGradInputs { x, dy: &self.dy, saved, dh, weighed: weighed.as_ref() }, dispatch.rows())
            }
            (_, _, Some(merged)) => merged.inputs(),
            _ => unreachable!("backward makes the task of what forward saved"),
        }
    }

    /// All but the experts' matrices.
    fn run_rest(self, ctx: &Context, write: Write, merged: Option<&MergedChunks>, grads: &mut MoeWeights) {
        let Saved { x, router, .. } = &*self.saved;
        if let Some((gate_up, down)) = grads.biases.as_mut().filter(|(gate_up, _)| !is_left_out(gate_up)) {
            let (WeightGradInputs { dy, dh, .. }, rows) = self.inputs(merged);
            experts_bias_grad(ctx, (dy, dh), rows, write, (gate_up, down));
        }
        if let (ExpertsPart::Ranks(saved), ExpertsTask::Ranks(task)) = (&self.saved.experts, &self.experts) {
            saved.shadow_weight_grads(ctx, (x, &self.dy), task, grads);
        }
        if let Some(task) = self.router {
            task.run(ctx, router, x, write, grads);
        }
        if let Some(free) = self.free {
            free.run(write, grads);
        }
        if let (Some(task), Some(saved), Some(grads)) = (self.shared, &self.saved.shared, &mut grads.shared) {
            task.run(ctx, saved, (x, &self.dy), self.config.activation, write, grads);
        }
    }
}
