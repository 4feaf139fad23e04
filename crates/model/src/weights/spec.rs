//! The description of a weight: everything about a tensor that is known before it exists.

use std::fmt;

use moeworks_ops::Context;
use moeworks_ops::elementwise::fill_normal;
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use super::role::{WeightPlace, WeightRole};

/// A weight of a model: name, shape and role, initial values, sharding over ranks, and whether it is trained.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightSpec {
    /// The index of the tensor among those of its model.
    pub index: usize,
    /// The name in memory, from which the names in files follow.
    pub name: String,
    /// The stack and the layer that it belongs to.
    pub place: WeightPlace,
    /// The role.
    pub role: WeightRole,
    /// The shape of the whole tensor.
    pub shape: Vec<usize>,
    /// The initial values.
    pub init: Init,
    /// The sharding over ranks.
    pub shard: Shard,
    /// True if it is trained. A frozen tensor has no optimizer state and is not decayed.
    pub is_trainable: bool,
    /// True if weight decay applies: to matrices, not to norms and biases of one dim.
    pub is_decayed: bool,
}

/// The initial values of a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Zeros.
    Zeros,
    /// Ones.
    Ones,
    /// One number for all elements.
    Constant(f32),
    /// Normally distributed numbers, truncated at three standard deviations, from a stream of their own.
    Normal {
        /// The standard deviation.
        std: f32,
        /// The stream of random numbers.
        stream: u64,
    },
}

/// The sharding of a tensor over ranks, and the part of its gradient that each rank computes.
///
/// Sharding is an annotation of the tensor that the computation follows: GShard (Lepikhin et al., 2006.16668, section
/// 3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shard {
    /// Whole on every rank; each rank computes the whole gradient.
    Replicated,
    /// Whole on every rank; each rank computes the gradient of its own tokens or heads, and these are summed.
    ReplicatedPartialGrad,
    /// Sharded over tensor-parallel ranks by query heads.
    Heads {
        /// The dim that is sharded.
        dim: usize,
        /// The number of elements of that dim per head.
        size: usize,
    },
    /// Sharded over tensor-parallel ranks by heads of keys and values; with more ranks than heads, several ranks
    /// share one.
    KvHeads {
        /// The dim that is sharded.
        dim: usize,
        /// The number of elements of that dim per head.
        size: usize,
    },
    /// Sharded over tensor-parallel ranks by the hidden width of a dense feed-forward; stacked gate and up are
    /// sharded each.
    Hidden {
        /// The dim that is sharded.
        dim: usize,
    },
    /// Dim 0 sharded over tensor-parallel ranks by the vocabulary.
    Vocabulary,
    /// Dim 0 sharded over the ranks of a group by experts, according to a placement.
    Experts,
}

impl Shard {
    /// Returns the dim that is sharded; none for a tensor that is whole on every rank.
    #[must_use]
    pub fn dim(self) -> Option<usize> {
        match self {
            Self::Replicated | Self::ReplicatedPartialGrad => None,
            Self::Heads { dim, .. } | Self::KvHeads { dim, .. } | Self::Hidden { dim } => Some(dim),
            Self::Vocabulary | Self::Experts => Some(0),
        }
    }

    /// Returns true if tensor parallelism shards the tensor.
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
    /// Returns the number of elements of the whole tensor.
    #[must_use]
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the number of parameters that one token uses, with `top_k` of `num_experts` experts.
    pub(crate) fn active_elements(&self, num_experts: usize, top_k: usize) -> u64 {
        let total = self.shape.iter().map(|&dim| dim as u64).product::<u64>();
        if self.role.is_of_experts() { total / num_experts.max(1) as u64 * top_k as u64 } else { total }
    }

    /// Returns true if tokens are multiplied with the tensor. Biases of stacked experts have two dims, but are only
    /// added.
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
