//! A weight of a model as a value: everything that can be known of a tensor before it exists.

use std::fmt;

use moeworks_ops::Context;
use moeworks_ops::elementwise::fill_normal;
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use super::role::{WeightPlace, WeightRole};

/// A weight of a model: its name, shape and role, its first values, how it is cut over ranks, and whether it is trained.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightSpec {
    /// The number of the tensor among those of its model.
    pub index: usize,
    /// The name in memory, from which those in files follow.
    pub name: String,
    /// The stack and the layer that it belongs to.
    pub place: WeightPlace,
    /// The part that it plays.
    pub role: WeightRole,
    /// The shape of the whole tensor.
    pub shape: Vec<usize>,
    /// The values that it has before training.
    pub init: Init,
    /// The cut over ranks.
    pub shard: Shard,
    /// Whether training changes it. A frozen tensor has no optimizer state and is not decayed.
    pub is_trainable: bool,
    /// Whether weight decay applies: to matrices, not to norms and biases of one dimension.
    pub is_decayed: bool,
}

/// The values that a tensor has before training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Zeros.
    Zeros,
    /// Ones.
    Ones,
    /// One number throughout.
    Constant(f32),
    /// Normal numbers, cut at three deviations, of a stream of their own.
    Normal {
        /// The standard deviation.
        std: f32,
        /// The stream of random numbers.
        stream: u64,
    },
}

/// The cut of a tensor over ranks, and what each rank finds of its gradient.
///
/// The cut is an annotation of the tensor, and the computation follows it: GShard (Lepikhin et al., 2006.16668, section 3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shard {
    /// Whole on every rank; each finds its whole gradient.
    Replicated,
    /// Whole on every rank; each finds the gradient of its tokens or heads alone, and these add up.
    ReplicatedPartialGrad,
    /// Over tensor-parallel ranks by query heads.
    Heads {
        /// The dimension that is cut.
        dim: usize,
        /// Places of it that belong to a head.
        size: usize,
    },
    /// Over tensor-parallel ranks by heads of keys and values; where there are more ranks than heads, several ranks have the same.
    KvHeads {
        /// The dimension that is cut.
        dim: usize,
        /// Places of it that belong to a head.
        size: usize,
    },
    /// Over tensor-parallel ranks by the hidden numbers of a dense feed-forward; where gate and up are stacked, each of the two.
    Hidden {
        /// The dimension that is cut.
        dim: usize,
    },
    /// Dimension 0 over tensor-parallel ranks by tokens of the vocabulary.
    Vocabulary,
    /// Dimension 0 over the ranks of a group by experts, as a placement says.
    Experts,
}

impl Shard {
    /// The dimension that is cut; none for a tensor that is whole on every rank.
    #[must_use]
    pub fn dim(self) -> Option<usize> {
        match self {
            Self::Replicated | Self::ReplicatedPartialGrad => None,
            Self::Heads { dim, .. } | Self::KvHeads { dim, .. } | Self::Hidden { dim } => Some(dim),
            Self::Vocabulary | Self::Experts => Some(0),
        }
    }

    /// Whether tensor-parallel ranks have parts of the tensor.
    #[must_use]
    pub fn is_over_tensor_ranks(self) -> bool {
        self.dim().is_some() && self != Self::Experts
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = match self {
            Self::Replicated | Self::ReplicatedPartialGrad => return write!(f, "replicated"),
            Self::Heads { .. } => "tp, heads",
            Self::KvHeads { .. } => "tp, KV heads",
            Self::Hidden { .. } => "tp, hidden",
            Self::Vocabulary => "tp, vocabulary",
            Self::Experts => "ep, experts",
        };
        write!(f, "dim {} over {unit}", self.dim().unwrap_or_default())
    }
}

impl WeightSpec {
    /// Elements of the whole tensor.
    #[must_use]
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Parameters of `total` that one token passes through, where `top_k` of `num_experts` experts are used.
    pub(crate) fn active_elements(&self, num_experts: usize, top_k: usize) -> u64 {
        let total = self.shape.iter().map(|&dim| dim as u64).product::<u64>();
        if self.role.is_of_experts() { total / num_experts.max(1) as u64 * top_k as u64 } else { total }
    }

    /// Whether a token is multiplied with the tensor. Biases of stacked experts have two dimensions, but multiply nothing.
    pub(crate) fn is_multiplied(&self) -> bool {
        self.shape.len() > 1 && !self.role.is_bias() && !self.role.is_lookup()
    }

    /// Returns the whole tensor as it is before training, f32, with random numbers of `seed`.
    #[must_use]
    pub fn first_values(&self, ctx: &Context, seed: u64) -> Tensor {
        let mut tensor = ctx.zeros(&self.shape, DType::F32);
        match self.init {
            Init::Zeros => {}
            Init::Ones => tensor.f32s_mut().fill(1.0),
            Init::Constant(value) => tensor.f32s_mut().fill(value),
            Init::Normal { std, stream } => {
                fill_normal(ctx, &Random::new(seed, Purpose::Init, stream), std, &mut tensor);
            }
        }
        tensor
    }
}
