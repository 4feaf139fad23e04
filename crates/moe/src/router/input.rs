//! The inputs of a router besides the layer's input.

use moeworks_tensor::{Random, Tensor};

use super::replay::ExpertIds;

/// A capacity that applies in every pass, training and inference alike (`expert_capacity` in Switch Transformers).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FixedCapacity {
    /// Tokens of a group that an expert takes: the first that choose it. Further ones get nothing from the layer.
    pub num_tokens: u32,
    /// Tokens per group, such as those of a sequence.
    pub group_tokens: usize,
}

/// The inputs of a router besides the layer's input `x [T, D]`.
#[derive(Clone, Copy, Debug)]
pub struct RouterInput<'a> {
    /// The source of all noise of a training pass, addressed by position; each layer and pass needs its own stream.
    /// `None`: nothing is random.
    pub noise: Option<Random>,
    /// `[T]`: the token ids, for schemes that use them; may be empty for others.
    pub token_ids: &'a [u32],
    /// `[T]`: the tokens' modalities, from 0. Empty: derived from the ids by
    /// [`RouterConfig::modality_boundaries`](crate::RouterConfig::modality_boundaries). With reserved experts, a
    /// modality that the configuration does not have panics.
    pub modalities: &'a [u32],
    /// Tokens per sequence, for the sequence-wise loss; 0: that loss is not computed.
    pub seq_len: usize,
    /// The finished share of the run, 0 to 1, for settings that are ramps.
    pub progress: f64,
    /// The index of this pass's first token among those of all ranks. Noise is addressed by it, so that it does not
    /// depend on the split of tokens over ranks.
    pub first_token: usize,
    /// True when the model is used rather than trained. Tokens then choose their experts themselves even if the
    /// training scheme does otherwise, so that a token's experts do not depend on other tokens, and nothing is
    /// random.
    pub is_inference: bool,
    /// True if no backward pass follows; the experts' state for it is then not saved.
    pub is_forward_only: bool,
    /// `[T, E]` f32: the logits of the previous MoE layer ([`MoeSaved::logits`](crate::MoeSaved::logits)), for
    /// [`RouterConfig::gate_residual`](crate::RouterConfig::gate_residual); none in the first layer.
    pub previous: Option<&'a Tensor>,
    /// True if GShard's loss is needed. Ranks then exchange the counts of first choices of local groups that span
    /// ranks.
    pub has_gshard_loss: bool,
    /// A capacity that replaces the configuration's, in training and inference.
    pub capacity: Option<FixedCapacity>,
    /// `[T, K]`: experts that replace the router's choice; their weights are computed from this pass's logits. On
    /// several ranks either all pass ids, or none.
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
    /// Creates the input of a training pass with noise.
    #[must_use]
    pub fn with_noise(random: Random) -> Self {
        Self { noise: Some(random), ..Self::default() }
    }
}

/// A use of a pass's random stream. The uses begin far apart, so that they share no number.
#[derive(Clone, Copy, Debug)]
#[repr(u64)]
pub(crate) enum Draw {
    /// Multiplicative jitter of the router's input.
    Jitter = 0,
    /// Dropout of the router's input.
    Dropout = 1,
    /// Normal or Gumbel noise on the logits.
    Logits = 2,
    /// Probabilistic use of the second expert.
    Second = 3,
    /// Replacement of a token's choice by a random one.
    IsRandom = 4,
    /// The ranking of a random choice.
    Ranking = 5,
}

impl Draw {
    /// Returns the position of number `i` of this use.
    pub(crate) fn at(self, i: usize) -> u64 {
        ((self as u64) << 48) + i as u64
    }
}
