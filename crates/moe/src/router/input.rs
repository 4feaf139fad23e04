//! The inputs of a router besides the layer's input.

use moeworks_tensor::{Random, Tensor};

use super::replay::ExpertIds;

/// A capacity that a model has in every pass, in use as in training (`expert_capacity` in Switch Transformers).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FixedCapacity {
    /// Tokens of a group that an expert takes: the first of those that choose it. Others get nothing from the layer.
    pub num_tokens: u32,
    /// Tokens of a group, such as those of a sequence.
    pub group_tokens: usize,
}

/// The inputs of a router besides the layer's input `x [T, D]`.
#[derive(Clone, Copy, Debug)]
pub struct RouterInput<'a> {
    /// The source of all noise of a training pass, addressed by position, so that each layer and each pass needs a stream
    /// of its own. `None`: nothing is random.
    pub noise: Option<Random>,
    /// `[T]`: the tokens' ids, for schemes that look at them; others take an empty list too.
    pub token_ids: &'a [u32],
    /// `[T]`: the tokens' modalities, from 0. Empty: by their ids, as
    /// [`RouterConfig::modality_boundaries`](crate::RouterConfig::modality_boundaries) says. Where experts are reserved, a modality
    /// that the configuration does not have makes the layer panic.
    pub modalities: &'a [u32],
    /// Tokens of each sequence, for the sequence-wise loss; 0: that loss is not computed.
    pub seq_len: usize,
    /// The share of the run that is done, 0 to 1, for what changes over a run.
    pub progress: f64,
    /// The position of the first of these tokens among those of all ranks, by which noise is addressed: so that it does not
    /// depend on how tokens are shared out.
    pub first_token: usize,
    /// Whether the model is used rather than trained: tokens choose by themselves, whatever the scheme of training, so that
    /// a token's experts do not depend on other tokens, and nothing is random.
    pub is_inference: bool,
    /// Whether no backward pass follows, so that what it would need of the experts is not kept.
    pub is_forward_only: bool,
    /// `[T, E]` f32: the logits of the MoE layer before ([`MoeSaved::logits`](crate::MoeSaved::logits)), for
    /// [`RouterConfig::gate_residual`](crate::RouterConfig::gate_residual); none in the first, and others look at none.
    pub previous: Option<&'a Tensor>,
    /// Whether GShard's loss counts: ranks then tell each other of the first choices in local groups, which without it are each
    /// rank's own.
    pub has_gshard_loss: bool,
    /// Holds in place of the configuration's capacity, in training and in use.
    pub capacity: Option<FixedCapacity>,
    /// `[T, K]`: the experts that tokens go to in place of the router's choice; their weights are computed from the logits of this
    /// pass. On several ranks all hand ids in, or none.
    pub expert_ids: Option<&'a ExpertIds>,
}

impl Default for RouterInput<'_> {
    fn default() -> Self {
        Self {
            noise: None,
            token_ids: &[],
            modalities: &[],
            seq_len: 0,
            progress: 1.0,
            first_token: 0,
            is_inference: false,
            is_forward_only: false,
            previous: None,
            has_gshard_loss: false,
            capacity: None,
            expert_ids: None,
        }
    }
}

impl RouterInput<'_> {
    /// A training pass with noise.
    #[must_use]
    pub fn with_noise(random: Random) -> Self {
        Self { noise: Some(random), ..Self::default() }
    }
}

/// A use of a pass's stream of random numbers. They begin far apart, so that no two share a number.
#[derive(Clone, Copy, Debug)]
#[repr(u64)]
pub(crate) enum Draw {
    /// Factors on the router's input.
    Jitter = 0,
    /// Which elements of the router's input are left out.
    Dropout = 1,
    /// Normal or Gumbel noise on the logits.
    Logits = 2,
    /// Whether a second expert is used.
    Second = 3,
    /// Whether a token's choice is random.
    IsRandom = 4,
    /// The ranking of a random choice.
    Ranking = 5,
}

impl Draw {
    /// The position of number `i` of this use.
    pub(crate) fn at(self, i: usize) -> u64 {
        ((self as u64) << 48) + i as u64
    }
}
