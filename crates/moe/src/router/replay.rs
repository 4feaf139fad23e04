//! Expert ids passed in to replace a router's choice (routing replay).
//!
//! Reinforcement learning replays the routing of its rollouts in training, because training becomes unstable if its
//! router chooses other experts than the rollout's (Ma et al., "Stabilizing MoE reinforcement learning by aligning
//! training and inference routers", 2510.11370). Recomputation of a layer for its backward pass uses expert ids as
//! well.
//!
//! The experts' weights are computed from the live logits, as they are for a choice, and gradients flow through them.
//! Losses on the router use the live scores and the given ids. Only the choice itself is skipped.

use moeworks_ops::Context;
use moeworks_tensor::Tensor;

use super::blocks;
use super::config::RouterConfig;
use super::score_router::ScoreRouter;
use super::scores::Scores;
use super::weigh::WeightRule;
use crate::routing::check_ids;
use crate::{MoeConfig, NO_EXPERT, Routing, RoutingError};

/// The lists of expert ids that a scheme accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Replay {
    /// K experts per token.
    TopK,
    /// Any number of experts, equal for all tokens of a pass; a token with fewer has [`NO_EXPERT`] at the end of its
    /// list.
    AnyNumber,
    /// No list, for this reason.
    Refused(&'static str),
}

/// Checked expert ids `[T, K]` of a pass's tokens, for [`RouterInput::expert_ids`](crate::RouterInput::expert_ids).
/// [`MoeLayer::expert_ids`](crate::MoeLayer::expert_ids) makes them from a list,
/// [`MoeSaved::expert_ids`](crate::MoeSaved::expert_ids) from a pass. Clones share the list.
///
/// ```
/// use moeworks_moe::{MoeConfig, MoeLayer, MoeWeights, RouterInput};
/// use moeworks_ops::Context;
/// use moeworks_tensor::Tensor;
///
/// let layer = MoeLayer::new(MoeConfig::plain(4, 8, 8, 2))?;
/// let ctx = Context::cpu(1);
/// let weights = MoeWeights::random(&ctx, layer.config(), 1, 0.5);
/// let x = Tensor::from_slice(ctx.pool(), &[3, 4], &[0.1, 0.7, -0.4, 0.3, 0.9, -0.2, 0.5, 0.0, -0.6, 0.4, 0.2, 0.8]);
///
/// let (y, saved) = layer.forward(&ctx, &weights, &x, &RouterInput::default());
/// let ids = saved.expert_ids().expect("top_k takes expert ids"); // [T, K]
///
/// let input = RouterInput { expert_ids: Some(&ids), ..RouterInput::default() };
/// let (again, _) = layer.forward(&ctx, &weights, &x, &input);
/// assert_eq!(again.f32s(), y.f32s());
///
/// // Ids from elsewhere are checked once: two experts for each of three tokens.
/// let ids = layer.expert_ids(&ctx, 3, &[0, 1, 7, 2, 3, 4])?;
/// assert_eq!((ids.num_tokens(), ids.top_k()), (3, 2));
/// let error = layer.expert_ids(&ctx, 2, &[0, 1, 3, 3]).unwrap_err();
/// assert_eq!(error.to_string(), "token 1 has expert 3 twice: must be at most once");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct ExpertIds {
    /// `[T, K]` u32.
    ids: Tensor,
    num_experts: usize,
    /// True if no id is [`NO_EXPERT`].
    is_whole: bool,
}

impl RouterConfig {
    /// Returns whether the scheme accepts expert ids. It does if a token's choice is a list of experts whose weights
    /// are a function of the token's logits and that list.
    #[must_use]
    pub fn takes_expert_ids(&self) -> bool {
        !matches!(self.scheme().replay(), Replay::Refused(_))
    }
}

impl ExpertIds {
    /// Checks `ids [T, K]` of `num_tokens` tokens for a layer of `config`.
    pub(crate) fn new(ctx: &Context, config: &MoeConfig, num_tokens: usize, ids: &[u32]) -> Result<Self, RoutingError> {
        let num_experts = config.num_choosable();
        let top_k = match config.router.scheme().replay() {
            Replay::Refused(reason) => {
                return Err(RoutingError::NoReplay { scheme: config.router.kind.name(), reason });
            }
            Replay::AnyNumber if num_tokens > 0 => (ids.len() / num_tokens).clamp(1, num_experts),
            Replay::TopK | Replay::AnyNumber => config.top_k,
        };
        if ids.len() != num_tokens * top_k {
            return Err(RoutingError::NumIds { num_ids: ids.len(), num_tokens, top_k });
        }
        check_ids(ids, top_k, num_experts)?;
        let is_whole = !ids.contains(&NO_EXPERT);
        Ok(Self { ids: Tensor::from_slice(ctx.pool(), &[num_tokens, top_k], ids), num_experts, is_whole })
    }

    /// Takes the ids of a pass's routing.
    pub(crate) fn from_routing(routing: &Routing) -> Self {
        let ids = routing.tensors().0.clone();
        let is_whole = routing.is_whole() || !ids.u32s().contains(&NO_EXPERT);
        Self { ids, num_experts: routing.num_experts(), is_whole }
    }

    /// Returns the ids, row by row.
    #[must_use]
    pub fn ids(&self) -> &[u32] {
        self.ids.u32s()
    }

    /// Returns T, the number of tokens.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.ids.rows()
    }

    /// Returns K, the most experts that a token can have.
    #[must_use]
    pub fn top_k(&self) -> usize {
        self.ids.cols()
    }

    /// Returns the number of experts that the layer chooses among.
    #[must_use]
    pub fn num_experts(&self) -> usize {
        self.num_experts
    }

    /// Returns the ids of a range of tokens.
    #[must_use]
    pub fn rows(&self, ctx: &Context, tokens: std::ops::Range<usize>) -> Self {
        let (k, shape) = (self.top_k(), [tokens.len(), self.top_k()]);
        let ids = Tensor::from_slice(ctx.pool(), &shape, &self.ids()[tokens.start * k..tokens.end * k]);
        Self { ids, ..self.clone() }
    }

    /// Concatenates the ids of several groups of tokens. A group with a smaller K is padded with [`NO_EXPERT`].
    ///
    /// # Panics
    /// If there is no group, or if the groups are for different numbers of experts.
    #[must_use]
    pub fn concat(ctx: &Context, groups: &[&Self]) -> Self {
        let num_experts = groups.first().expect("at least one group").num_experts;
        assert!(groups.iter().all(|ids| ids.num_experts == num_experts), "expert ids are of one layer");
        let top_k = groups.iter().map(|ids| ids.top_k()).max().unwrap_or(1);
        let num_tokens = groups.iter().map(|ids| ids.num_tokens()).sum();
        let mut all = Vec::with_capacity(num_tokens * top_k);
        for row in groups.iter().flat_map(|ids| ids.ids().chunks(ids.top_k())) {
            all.extend_from_slice(row);
            all.resize(all.len() + top_k - row.len(), NO_EXPERT);
        }
        let is_whole = groups.iter().all(|ids| ids.is_whole && ids.top_k() == top_k);
        Self { ids: Tensor::from_slice(ctx.pool(), &[num_tokens, top_k], &all), num_experts, is_whole }
    }

    /// Returns whether no id is [`NO_EXPERT`].
    pub(super) fn is_whole(&self) -> bool {
        self.is_whole
    }

    pub(super) fn tensor(&self) -> &Tensor {
        &self.ids
    }
}

/// Chosen experts and their weights, `[T, K]` each.
pub(super) struct Weighed {
    pub(super) ids: Tensor,
    pub(super) weights: Tensor,
}

impl ScoreRouter<'_> {
    /// Panics if the expert ids of the input are for another number of tokens or experts.
    pub(super) fn check_expert_ids(&self, num_tokens: usize) {
        if let Some(given) = self.input.expert_ids {
            let expected = (num_tokens, self.config.num_choosable());
            assert_eq!((given.num_tokens(), given.num_experts), expected, "tokens and experts of expert ids");
        }
    }

    /// Replaces the choice `own` of a fused operation by the expert ids of the input, if any. Tokens for which both
    /// agree keep the operation's weights, bit for bit.
    pub(super) fn replayed(&self, ctx: &Context, scores: &Scores, own: Weighed) -> Weighed {
        let Some(given) = self.input.expert_ids else { return own };
        let (gates, k, rule) = (scores.gates(), given.top_k(), WeightRule::from_config(self.config));
        let e = gates.cols();
        let mut weights = own.weights.copied(ctx.pool());
        let rows = blocks::split_mut(weights.f32s_mut(), k).zip(blocks::split(gates.f32s(), e));
        let rows = rows.zip(blocks::split(own.ids.u32s(), k).zip(blocks::split(given.ids(), k)));
        blocks::for_each(ctx, rows, |_, ((weights, gates), (own, given))| {
            let ids = own.chunks(k).zip(given.chunks(k));
            let tokens = weights.chunks_mut(k).zip(gates.chunks(e)).zip(ids);
            for ((weights, gates), (_, given)) in tokens.filter(|(_, (own, given))| own != given) {
                rule.weigh(gates, given, weights);
            }
        });
        Weighed { ids: given.tensor().clone(), weights }
    }

    /// Returns the expert ids of the input, `[T, K]`, if any.
    pub(super) fn given_ids(&self) -> Option<Tensor> {
        self.input.expert_ids.map(|given| given.tensor().clone())
    }
}
