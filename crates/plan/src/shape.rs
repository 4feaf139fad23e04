//! The properties of a model and of a step that costs depend on.

use serde::{Deserialize, Serialize};

/// The sizes of a model that costs depend on.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    /// D, the width.
    pub width: usize,
    /// L, the number of layers.
    pub num_layers: usize,
    /// The number of layers with experts.
    pub num_moe_layers: usize,
    /// E, the number of experts of each.
    pub num_experts: usize,
    /// K, the number of experts a token.
    pub top_k: usize,
    /// The number of parameters of one expert.
    pub expert_params: u64,
    /// The number of parameters outside routed experts.
    pub dense_params: u64,
    /// The number of `dense_params` that tensor parallelism replicates: norms, routers, shared experts.
    pub whole_params: u64,
    /// The number of `dense_params` outside the layers: embedding, last norm, head.
    pub outside_params: u64,
    /// The largest tensor-parallel size.
    pub max_tp: usize,
    /// The share of `dense_params` that is trained, 0 to 1. Frozen parameters have neither gradients nor moments.
    pub trained_dense: f64,
    /// The share of the experts' parameters that is trained.
    pub trained_experts: f64,
    /// Operations of a forward pass for a token, without routed experts.
    pub dense_flops: f64,
    /// Bytes that one token keeps for backward.
    pub activation_bytes: f64,
}

impl ModelShape {
    /// Returns the number of parameters.
    #[must_use]
    pub fn params(&self) -> u64 {
        self.dense_params + self.expert_params * (self.num_experts * self.num_moe_layers) as u64
    }

    /// Returns the operations of a forward pass for a token in the experts of all its layers.
    #[must_use]
    pub fn expert_flops(&self) -> f64 {
        2.0 * self.expert_params as f64 * (self.top_k * self.num_moe_layers) as f64
    }

    /// Returns the operations of a training step for a token: those of three forward passes.
    #[must_use]
    pub fn training_flops(&self) -> f64 {
        3.0 * (self.dense_flops + self.expert_flops())
    }

    /// Returns an example model for tables on paper: 24 layers of width 2048, each with 64 experts of width 1408, six
    /// a token.
    #[must_use]
    pub fn example() -> Self {
        let (width, num_layers, expert_width) = (2048, 24, 1408);
        let attention = 4 * width * width;
        let head = 50_000 * width;
        let dense_params = (num_layers * attention + 2 * head) as u64;
        Self {
            width,
            num_layers,
            num_moe_layers: num_layers,
            num_experts: 64,
            top_k: 6,
            expert_params: (3 * width * expert_width) as u64,
            dense_params,
            whole_params: (num_layers * 64 * width) as u64,
            outside_params: 2 * head as u64,
            max_tp: 16,
            trained_dense: 1.0,
            trained_experts: 1.0,
            dense_flops: 2.0 * (num_layers * attention + head) as f64 + (num_layers * 4096 * 2 * width) as f64,
            activation_bytes: (num_layers * 2 * (8 * width + 6 * 2 * expert_width)) as f64,
        }
    }
}

/// The number format of matrix products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// f32 throughout.
    F32,
    /// Mixed: bf16 matrix products with f32 sums, f32 master weights, optimizer, norms, router and losses.
    Bf16,
    /// `bf16`, but the products of experts and dense feed-forwards, forward and for input gradients, are in FP8
    /// (e4m3).
    Fp8,
}

impl Precision {
    /// Returns whether products read bf16 copies of the weights.
    #[must_use]
    pub fn has_bf16_copies(self) -> bool {
        self != Self::F32
    }

    /// Returns the bytes of a number in memory and on the wire.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::Fp8 => 2,
        }
    }

    /// Returns the number format of what stays wider beside FP8 products: attention and the output projection
    /// (2412.19437, section 3.3.1).
    #[must_use]
    pub fn beside_fp8(self) -> Self {
        if self == Self::Fp8 { Self::Bf16 } else { self }
    }

    /// Returns the bytes of a weight in memory: the f32 one, and the copy that products read.
    #[must_use]
    pub fn weight_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::Fp8 => 6,
        }
    }
}

/// The tokens of a microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tokens {
    /// A number of tokens for each rank, whatever the number of ranks.
    OfEachRank(usize),
    /// Sequences that are divided among the ranks.
    Sequences {
        /// The number of sequences.
        num: usize,
        /// The tokens of each.
        len: usize,
    },
}

impl Tokens {
    /// Returns the tokens of the fullest tensor-parallel group, if `num_ranks` ranks form groups of `tp` ranks.
    #[must_use]
    pub fn of_group(self, num_ranks: usize, tp: usize) -> usize {
        match self {
            Self::OfEachRank(tokens) => tokens * tp,
            Self::Sequences { num, len } => num.div_ceil((num_ranks / tp.max(1)).max(1)) * len,
        }
    }
}

/// The work of one step on each rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workload {
    /// The tokens of a microbatch.
    pub tokens: Tokens,
    /// The number format of matrix products.
    pub precision: Precision,
    /// The ZeRO stage: copies of a weight share nothing (0), its optimizer state (1), its gradient too (2), or the
    /// weight itself too (3).
    pub zero: u8,
    /// Bytes of a gradient of an expert's weight: 4 in f32, 2 in bf16. All other gradients are f32.
    pub expert_gradient_bytes: usize,
}
