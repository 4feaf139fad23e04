//! The routing: the experts chosen for each token.

use std::fmt;

use moeworks_ops::Context;
use moeworks_ops::counting_sort::SortedChoices;
use moeworks_tensor::Tensor;

/// The entry of [`Routing::expert_ids`] for no expert, where a token has fewer than K.
pub const NO_EXPERT: u32 = u32::MAX;

/// The experts of each token and their weights: a plain value that can be printed, compared and built by hand.
#[derive(Clone)]
pub struct Routing {
    num_experts: usize,
    expert_ids: Tensor,
    expert_weights: Tensor,
    /// True if no choice is [`NO_EXPERT`]; false if that is unknown.
    is_whole: bool,
    /// The choices sorted by expert, where they are known already.
    sorted: Option<SortedChoices>,
}

/// The error of an invalid routing, or of expert ids that a layer cannot take.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RoutingError {
    /// The lists do not hold K entries for each token.
    #[error("{num_ids} expert ids and {num_weights} weights: must be as many, and a multiple of k = {top_k}")]
    Length {
        /// Expert ids given.
        num_ids: usize,
        /// Weights given.
        num_weights: usize,
        /// K.
        top_k: usize,
    },
    /// The routing scheme takes no expert ids.
    #[error("router.kind = {scheme} takes no expert ids: {reason}")]
    NoReplay {
        /// The scheme's name.
        scheme: &'static str,
        /// The reason.
        reason: &'static str,
    },
    /// The number of expert ids is not K for each token.
    #[error("{num_ids} expert ids for {num_tokens} tokens: must be {top_k} for each token")]
    NumIds {
        /// Expert ids given.
        num_ids: usize,
        /// T.
        num_tokens: usize,
        /// K.
        top_k: usize,
    },
    /// A logit is NaN or infinite.
    #[error("the router's logit of token {token} for expert {expert} is {logit}: must be a finite number")]
    NotFinite {
        /// The token.
        token: usize,
        /// The expert.
        expert: usize,
        /// The logit.
        logit: f32,
    },
    /// A token has the same expert twice.
    #[error("token {token} has expert {expert} twice: must be at most once")]
    Twice {
        /// The token.
        token: usize,
        /// The expert.
        expert: u32,
    },
    /// An expert id is out of range.
    #[error("choice {choice} of token {token} is expert {expert}: must be below the number of experts, {num_experts}")]
    Expert {
        /// The token.
        token: usize,
        /// The index of the choice.
        choice: usize,
        /// The id.
        expert: u32,
        /// E.
        num_experts: usize,
    },
}

impl Routing {
    /// Creates a routing from lists, `[T, K]` row by row. A token's first entry is its first choice; [`NO_EXPERT`]
    /// stands for none. A token may have an expert at most once.
    pub fn new(
        ctx: &Context,
        num_experts: usize,
        top_k: usize,
        expert_ids: &[u32],
        expert_weights: &[f32],
    ) -> Result<Self, RoutingError> {
        let (num_ids, num_weights) = (expert_ids.len(), expert_weights.len());
        if top_k == 0 || num_ids != num_weights || !num_ids.is_multiple_of(top_k) {
            return Err(RoutingError::Length { num_ids, num_weights, top_k });
        }
        check_ids(expert_ids, top_k, num_experts)?;
        let shape = [num_ids / top_k, top_k];
        Ok(Self {
            num_experts,
            expert_ids: Tensor::from_slice(ctx.pool(), &shape, expert_ids),
            expert_weights: Tensor::from_slice(ctx.pool(), &shape, expert_weights),
            is_whole: false,
            sorted: None,
        })
    }

    /// Creates a routing from the router's own tensors, `[T, K]` each.
    pub(crate) fn from_tensors(num_experts: usize, expert_ids: Tensor, expert_weights: Tensor) -> Self {
        Self { num_experts, expert_ids, expert_weights, is_whole: false, sorted: None }
    }

    /// Attaches the choices sorted by expert.
    pub(crate) fn with_sorted(self, sorted: Option<SortedChoices>) -> Self {
        Self { sorted, ..self }
    }

    /// Returns the choices sorted by expert, if they are known already.
    pub(crate) fn sorted(&self) -> Option<&SortedChoices> {
        self.sorted.as_ref()
    }

    /// Sets the promise that no choice is [`NO_EXPERT`].
    pub(crate) fn whole(self, is_whole: bool) -> Self {
        Self { is_whole, ..self }
    }

    /// Returns whether it is known that no choice is [`NO_EXPERT`].
    pub(crate) fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// Returns E, the number of experts.
    #[must_use]
    pub fn num_experts(&self) -> usize {
        self.num_experts
    }

    /// Returns T, the number of tokens.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.expert_ids.rows()
    }

    /// Returns K, the most experts that a token can have.
    #[must_use]
    pub fn top_k(&self) -> usize {
        self.expert_ids.cols()
    }

    /// Returns the number of choices: T K less those that are [`NO_EXPERT`].
    #[must_use]
    pub fn num_choices(&self) -> usize {
        self.expert_ids().iter().filter(|&&id| id != NO_EXPERT).count()
    }

    /// Returns `[T, K]`: the experts of each token, first choice first; [`NO_EXPERT`] where a token has fewer than K.
    #[must_use]
    pub fn expert_ids(&self) -> &[u32] {
        self.expert_ids.u32s()
    }

    /// Returns `[T, K]`: the weights of [`Routing::expert_ids`].
    #[must_use]
    pub fn expert_weights(&self) -> &[f32] {
        self.expert_weights.f32s()
    }

    /// Returns the experts of token `t` and their weights, first choice first.
    pub fn choices(&self, t: usize) -> impl Iterator<Item = (u32, f32)> + '_ {
        let range = t * self.top_k()..(t + 1) * self.top_k();
        let choices =
            self.expert_ids()[range.clone()].iter().copied().zip(self.expert_weights()[range].iter().copied());
        choices.filter(|&(expert, _)| expert != NO_EXPERT)
    }

    pub(crate) fn tensors(&self) -> (&Tensor, &Tensor) {
        (&self.expert_ids, &self.expert_weights)
    }
}

/// Checks that all `ids [T, K]` are in range or [`NO_EXPERT`], and that no token has an expert twice.
pub(crate) fn check_ids(ids: &[u32], top_k: usize, num_experts: usize) -> Result<(), RoutingError> {
    if let Some(i) = ids.iter().position(|&id| id as usize >= num_experts && id != NO_EXPERT) {
        let (token, choice) = (i / top_k, i % top_k);
        return Err(RoutingError::Expert { token, choice, expert: ids[i], num_experts });
    }
    for (token, ids) in ids.chunks(top_k).enumerate() {
        let is_twice = |&(i, id): &(usize, &u32)| *id != NO_EXPERT && ids[..i].contains(id);
        if let Some((_, &expert)) = ids.iter().enumerate().find(is_twice) {
            return Err(RoutingError::Twice { token, expert });
        }
    }
    Ok(())
}

impl PartialEq for Routing {
    fn eq(&self, other: &Self) -> bool {
        (self.num_experts, self.top_k()) == (other.num_experts, other.top_k())
            && self.expert_ids() == other.expert_ids()
            && self.expert_weights() == other.expert_weights()
    }
}

impl fmt::Debug for Routing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tokens: Vec<Vec<(u32, f32)>> = (0..self.num_tokens()).map(|t| self.choices(t).collect()).collect();
        f.debug_struct("Routing").field("num_experts", &self.num_experts).field("tokens", &tokens).finish()
    }
}

/// Prints a line for each token: `0: 5 (0.7500), 2 (0.2500)`.
impl fmt::Display for Routing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for t in 0..self.num_tokens() {
            write!(f, "{t}:")?;
            for (i, (expert, weight)) in self.choices(t).enumerate() {
                write!(f, "{} {expert} ({weight:.4})", if i == 0 { "" } else { "," })?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
