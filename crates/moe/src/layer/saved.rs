//! The saved state of a forward pass, and its decisions.

use std::sync::Arc;

use moeworks_ops::Context;
use moeworks_ops::deferred::Deferred;
use moeworks_ops::experts::ExpertsSaved;
use moeworks_ops::top_k::ChoiceSums;
use moeworks_tensor::Tensor;

use crate::ep::RanksSaved;
use crate::router::RouterSaved;
use crate::shared::SharedSaved;
use crate::{Dispatch, DispatchRule, ExpertIds, LayerStats, MoeConfig, Routing, ZeroComputationShare};

/// The state that backward needs from forward, with the routing and its statistics. Clones share the tensors.
#[derive(Clone)]
pub struct MoeSaved {
    inner: Inner,
}

#[derive(Clone)]
enum Inner {
    Computed(Arc<Saved>),
    Reported(Arc<Report>),
}

/// The decisions of a layer that another rank computed.
struct Report {
    routing: Routing,
    dispatch: Dispatch,
    stats: LayerStats,
    takes_expert_ids: bool,
}

pub(super) struct Saved {
    pub(super) x: Tensor,
    /// `x` in f32; only with zero-computation experts.
    pub(super) exact_x: Option<Tensor>,
    pub(super) router: RouterSaved,
    pub(super) routing: Routing,
    pub(super) choice_sums: Deferred<ChoiceSums>,
    pub(super) zero_computation: ZeroComputationShare,
    /// The number of groups of experts.
    pub(super) num_groups: usize,
    /// True if the routing scheme takes expert ids.
    pub(super) takes_expert_ids: bool,
    pub(super) num_rerouted: usize,
    pub(super) dispatch: Dispatch,
    pub(super) experts: ExpertsPart,
    pub(super) shared: Option<SharedSaved>,
}

/// The experts' saved state.
#[allow(clippy::large_enum_variant)] // one for each layer
pub(super) enum ExpertsPart {
    /// All experts on this rank; none after a forward-only pass.
    Here(Option<ExpertsSaved>),
    Ranks(RanksSaved),
}

impl MoeSaved {
    pub(super) fn computed(saved: Saved) -> Self {
        Self { inner: Inner::Computed(Arc::new(saved)) }
    }

    /// Makes the saved state of a layer of `config` that another rank computed in a pass of inference, for a hook
    /// that looks at its decisions. There is no backward pass from it.
    #[must_use]
    pub fn reported(ctx: &Context, config: &MoeConfig, routing: Routing, stats: LayerStats) -> Self {
        let num_zero_computation = config.router.num_zero_computation();
        let rule = DispatchRule { num_zero_computation, ..DispatchRule::new(&routing, 0.0) };
        let dispatch = Dispatch::with_rule(ctx, &routing, &rule);
        let takes_expert_ids = config.router.takes_expert_ids();
        Self { inner: Inner::Reported(Arc::new(Report { routing, dispatch, stats, takes_expert_ids })) }
    }

    /// Returns the state of the forward pass. Panics if another rank has it.
    pub(super) fn state(&self) -> &Arc<Saved> {
        match &self.inner {
            Inner::Computed(saved) => saved,
            Inner::Reported(_) => panic!("backward needs a forward pass on this rank"),
        }
    }

    /// Returns the experts of each token.
    #[must_use]
    pub fn routing(&self) -> &Routing {
        match &self.inner {
            Inner::Computed(saved) => &saved.routing,
            Inner::Reported(report) => &report.routing,
        }
    }

    /// Returns the dispatch: the row of each choice.
    #[must_use]
    pub fn dispatch(&self) -> &Dispatch {
        match &self.inner {
            Inner::Computed(saved) => &saved.dispatch,
            Inner::Reported(report) => &report.dispatch,
        }
    }

    /// Returns this pass's expert ids, for [`RouterInput::expert_ids`](crate::RouterInput::expert_ids) of another
    /// pass over the same tokens. With the same weights and inputs that pass gives the same bits. `None` if the
    /// routing scheme takes none.
    #[must_use]
    pub fn expert_ids(&self) -> Option<ExpertIds> {
        let takes_expert_ids = match &self.inner {
            Inner::Computed(saved) => saved.takes_expert_ids,
            Inner::Reported(report) => report.takes_expert_ids,
        };
        takes_expert_ids.then(|| ExpertIds::from_routing(self.routing()))
    }

    /// Returns `[T, E]`: each token's distribution over the experts, the softmax of its logits or its scores divided
    /// by their sum. Empty if another rank computed the layer.
    #[must_use]
    pub fn probs(&self) -> &[f32] {
        match &self.inner {
            Inner::Computed(saved) => saved.router.scores.probs.f32s(),
            Inner::Reported(_) => &[],
        }
    }

    /// Returns `[T, E]` f32: the router's logits before noise and temperature, an input of the next MoE layer. Saved
    /// only with [gating residuals](crate::RouterConfig::gate_residual), and on the rank that computed the layer.
    #[must_use]
    pub fn logits(&self) -> Option<&Tensor> {
        match &self.inner {
            Inner::Computed(saved) => Some(&saved.router.residual.as_ref()?.logits),
            Inner::Reported(_) => None,
        }
    }

    /// Computes the statistics of the routing.
    #[must_use]
    pub fn stats(&self) -> LayerStats {
        match &self.inner {
            Inner::Computed(saved) => saved.stats(),
            Inner::Reported(report) => report.stats.clone(),
        }
    }
}

impl Saved {
    fn stats(&self) -> LayerStats {
        let Self { x, router, choice_sums, num_rerouted, dispatch, .. } = self;
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
            zero_computation: self.zero_computation,
        }
    }

    /// Counts the tokens of each group of experts, `[G]`; empty if there is one group.
    fn tokens_per_group(&self) -> Vec<u32> {
        let Self { routing, zero_computation, num_groups, .. } = self;
        if *num_groups < 2 {
            return Vec::new();
        }
        let computing = routing.num_experts() - zero_computation.num_zero_computation - zero_computation.num_null;
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
