//! The forward pass of a layer.

use moeworks_ops::Context;
use moeworks_ops::deferred::Deferred;
use moeworks_ops::elementwise::add_assign;
use moeworks_ops::experts::{ForwardOptions, experts_forward_with};
use moeworks_ops::top_k::{ChoiceSums, choice_sums, choice_sums_in_host};
use moeworks_tensor::Tensor;

use super::saved::{ExpertsPart, Saved};
use super::{ForwardInput, MoeLayer, MoeSaved};
use crate::ep::{Arriving, ChoiceIds, CrossRank, ExpertsInput, LayerRanks, RanksSaved};
use crate::router::{Decision, RouterSaved, ScoreRouter};
use crate::shared::{SharedPass, SharedSaved};
use crate::zero_computation::{self, ZeroComputationChoices};
use crate::{Dispatch, DispatchRule, MoeWeights, RouterInput, Routing, ZeroComputationShare};

/// A router's decision and the dispatch made from it.
struct Dispatched {
    routing: Routing,
    router: RouterSaved,
    num_rerouted: usize,
    dispatch: Dispatch,
}

/// The output of the experts, and that of the shared experts if it was computed while tokens travelled.
struct ExpertsOutput {
    y: Tensor,
    part: ExpertsPart,
    shared: Option<SharedOutput>,
}

/// The output of the shared experts `[T, D]`, f32, with what backward needs.
struct SharedOutput {
    y: Tensor,
    saved: SharedSaved,
}

impl MoeLayer {
    /// Returns the layer's output `y [T, D]` (f32) for `x [T, D]` (f32 or bf16), and the state that backward needs.
    ///
    /// The experts' GEMMs run in the type of their weights, the router's in f32. `input` is a [`RouterInput`] or a
    /// [`ForwardInput`], which also has a tensor to add the output to. Panics if the shapes of `weights`, `x` or
    /// expert ids do not match the configuration.
    #[must_use]
    pub fn forward<'a>(
        &self,
        ctx: &Context,
        weights: &MoeWeights,
        x: &Tensor,
        input: impl Into<ForwardInput<'a>>,
    ) -> (Tensor, MoeSaved) {
        let ForwardInput { router: input, base } = input.into();
        let ranks = self.ranks_in_force();
        weights.check(&self.config, self.num_held(ranks.as_ref()));
        assert_eq!(x.shape(), [x.rows(), self.config.width], "input of an MoE layer");
        let is_training = !input.is_inference && !input.is_forward_only;
        let arriving = ranks.as_ref().map(|ranks| ranks.arriving(ctx, weights, is_training));
        let dispatched = self.dispatch(ctx, weights, x, &input);
        let choice_sums = choice_sums_of(ctx, &dispatched.routing, !input.is_inference);
        let experts = ExpertsInput {
            weights,
            activation: self.config.activation,
            x,
            dispatch: &dispatched.dispatch,
            num_choices: dispatched.routing.top_k(),
            is_training: !input.is_inference,
            is_forward_only: input.is_forward_only,
        };
        // A GPU adds it where it sums the experts' outputs; the CPU and expert-parallel layers add it at the end.
        let is_early = ctx.gpu().is_some() && ranks.is_none();
        let (early, late) = if is_early { (base, None) } else { (None, base) };
        let ExpertsOutput { mut y, part: experts_saved, shared } =
            self.experts_forward(ctx, ranks.as_ref().zip(arriving), experts, early);
        let exact_x = self.add_zero_computation(ctx, experts, &dispatched.routing, &mut y);
        let shared = match shared {
            // The sum of the same two numbers as where the shared experts' output is added as it is computed.
            Some(SharedOutput { y: of_shared, saved }) => {
                add_assign(ctx, &mut y, &of_shared);
                Some(saved)
            }
            None => self.add_shared(ctx, experts, &mut y),
        };
        if let Some(base) = late {
            add_assign(ctx, &mut y, base);
        }
        let Dispatched { routing, router, num_rerouted, dispatch } = dispatched;
        let saved = Saved {
            x: x.clone(),
            exact_x,
            router,
            routing,
            choice_sums,
            zero_computation: ZeroComputationShare::from_config(&self.config),
            num_groups: self.config.router.num_groups,
            takes_expert_ids: self.config.router.takes_expert_ids(),
            num_rerouted,
            dispatch,
            experts: experts_saved,
            shared,
        };
        (y, MoeSaved::computed(saved))
    }

    /// Starts to gather the experts of this rank's domain for the next pass through the layer, under what is computed
    /// before it, such as attention. `is_training` is true of a pass that a backward pass follows. Nothing happens
    /// without domains. All ranks that do so make the pass.
    pub fn start_gathering(&self, ctx: &Context, weights: &MoeWeights, is_training: bool) {
        if let Some(ranks) = self.ranks_in_force() {
            ranks.start_gathering(ctx, weights, is_training);
        }
    }

    /// Returns the number of experts on this rank, among `ranks` or with remote ones.
    fn num_held(&self, ranks: Option<&LayerRanks>) -> usize {
        let of_ranks = ranks.map(|ranks| ranks.held().len());
        let of_remote = self.remote.as_ref().map(|remote| remote.num_held());
        of_ranks.or(of_remote).unwrap_or(self.config.num_experts)
    }

    /// Adds the outputs of the zero-computation experts to `y`. Returns their input in f32, if there are any.
    fn add_zero_computation(
        &self,
        ctx: &Context,
        experts: ExpertsInput<'_>,
        routing: &Routing,
        y: &mut Tensor,
    ) -> Option<Tensor> {
        let ExpertsInput { weights, x, dispatch, .. } = experts;
        let exact_x = zero_computation::exact(ctx, &self.config, x)?;
        let choices = ZeroComputationChoices { config: &self.config, weights, routing, dispatch, x: &exact_x };
        choices.forward(y);
        Some(exact_x)
    }

    /// Routes the tokens of `x` and dispatches them.
    fn dispatch(&self, ctx: &Context, weights: &MoeWeights, x: &Tensor, input: &RouterInput<'_>) -> Dispatched {
        let router = self.router(weights, input);
        let ranks = self.ranks.as_ref().filter(|_| router.decides_across_ranks());
        let cross_rank = ranks.map(|ranks| CrossRank::new(ranks, x.rows()));
        let cross_rank = cross_rank.as_ref();
        let router = ScoreRouter { cross_rank, ..router };
        let Decision { routing, saved, num_rerouted } = self.timed("router", || router.forward(ctx, x));
        let priority = router.priority(&saved);
        let rule = DispatchRule { capacity_ids: router.capacity_ids(&saved), ..router.rule(priority.as_deref()) };
        let within_capacity = cross_rank.filter(|_| rule.is_shared()).map(|cross_rank| {
            let ids = rule.capacity_ids.unwrap_or_else(|| routing.expert_ids());
            let choices = ChoiceIds { ids, top_k: routing.top_k(), num_experts: routing.num_experts() };
            cross_rank.within_capacity(&rule, choices)
        });
        let rule = DispatchRule { shared: within_capacity.as_ref(), ..rule };
        let dispatch = Dispatch::with_rule(ctx, &routing, &rule);
        Dispatched { routing, router: saved, num_rerouted, dispatch }
    }

    /// Sums the experts' outputs onto `base`, if given; `ranks` hold the experts unless all are on this rank or are
    /// remote.
    fn experts_forward(
        &self,
        ctx: &Context,
        ranks: Option<(&LayerRanks, Arriving)>,
        input: ExpertsInput<'_>,
        base: Option<&Tensor>,
    ) -> ExpertsOutput {
        if let Some((ranks, arriving)) = ranks {
            let mut shared = None;
            // A GPU sums the outputs of shared experts onto those of the others as it computes them.
            let is_early = ctx.gpu().is_none() && ranks.computes_shared_under_dispatch();
            let meanwhile = || shared = if is_early { self.shared_output(ctx, input, None) } else { None };
            let (y, saved) = RanksSaved::forward(ctx, ranks, input, arriving, meanwhile);
            return ExpertsOutput { y, part: ExpertsPart::Ranks(saved), shared };
        }
        if let Some(remote) = &self.remote {
            return ExpertsOutput { y: remote.forward(ctx, input), part: ExpertsPart::Here(None), shared: None };
        }
        let ExpertsInput { weights, activation, x, dispatch, is_forward_only, .. } = input;
        let (experts, biases) = (weights.experts(activation), weights.expert_biases());
        let options = ForwardOptions { biases, base, is_forward_only };
        let (y, saved) = experts_forward_with(ctx, x, experts, dispatch.rows(), options);
        ExpertsOutput { y, part: ExpertsPart::Here(saved), shared: None }
    }

    /// Adds the output of the shared experts to `y`, if there are any.
    fn add_shared(&self, ctx: &Context, experts: ExpertsInput<'_>, y: &mut Tensor) -> Option<SharedSaved> {
        let SharedOutput { y: sum, saved } = self.shared_output(ctx, experts, Some(y))?;
        *y = sum;
        Some(saved)
    }

    /// Computes the output of the shared experts, if there are any, added to `base` if given.
    fn shared_output(&self, ctx: &Context, experts: ExpertsInput<'_>, base: Option<&Tensor>) -> Option<SharedOutput> {
        let ExpertsInput { weights, x, activation, is_forward_only, .. } = experts;
        let shared = weights.shared.as_ref()?;
        let pass = SharedPass { x, base, activation, is_forward_only };
        let forward = || {
            self.wait_as_for(|pace| pace.shared_forward_s);
            SharedSaved::forward(ctx, shared, pass)
        };
        let (y, saved) = self.timed("shared experts", forward);
        Some(SharedOutput { y, saved })
    }
}

/// Sums the weights of a routing's choices. The sums are computed at once if `are_wanted`, otherwise when they are
/// read.
fn choice_sums_of(ctx: &Context, routing: &Routing, are_wanted: bool) -> Deferred<ChoiceSums> {
    let ((ids, weights), num_experts) = (routing.tensors(), routing.num_experts());
    if are_wanted {
        choice_sums(ctx, ids, weights, num_experts)
    } else {
        choice_sums_in_host(ids, weights, num_experts)
    }
}
