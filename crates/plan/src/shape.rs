//! What a planner has to know of a model and of a step.

use serde::{Deserialize, Serialize};

/// The sizes of a model that costs depend on.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    /// D.
    pub width: usize,
    /// L.
    pub num_layers: usize,
    /// Layers with experts.
    pub num_moe_layers: usize,
    /// E of each of them.
    pub num_experts: usize,
    /// K.
    pub top_k: usize,
    /// Parameters of one expert.
    pub expert_params: u64,
    /// Parameters that are in no routed expert.
    pub dense_params: u64,
    /// Those of them that ranks which cut matrices between them have whole: norms, routers, shared experts.
    pub whole_params: u64,
    /// Those of `dense_params` that belong to no layer: embedding, last norm, head.
    pub outside_params: u64,
    /// The most ranks that matrices can be cut across.
    pub max_tp: usize,
    /// Share of `dense_params` that are trained: frozen ones have neither gradients nor moments. 0 to 1.
    pub trained_dense: f64,
    /// Share of the experts' parameters that are trained.
    pub trained_experts: f64,
    /// Operations of a forward pass for a token, without routed experts.
    pub dense_flops: f64,
    /// Bytes that one token keeps for backward.
    pub activation_bytes: f64,
}

impl ModelShape {
    /// Parameters in all.
    #[must_use]
    pub fn params(&self) -> u64 {
        self.dense_params + self.expert_params * (self.num_experts * self.num_moe_layers) as u64
    }

    /// Operations of a forward pass for a token in the experts of all its layers.
    #[must_use]
    pub fn expert_flops(&self) -> f64 {
        2.0 * self.expert_params as f64 * (self.top_k * self.num_moe_layers) as f64
    }

    /// Operations of a training step for a token: three forward passes.
    #[must_use]
    pub fn training_flops(&self) -> f64 {
        3.0 * (self.dense_flops + self.expert_flops())
    }

    /// A made-up model for tables on paper: 24 layers of width 2048, 64 experts of 1408 in each, six a token.
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

/// Number format of the matrices that compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// f32 throughout.
    F32,
    /// Mixed: bf16 matrix products with f32 sums, f32 master weights, optimizer, norms, router and losses.
    Bf16,
    /// As `bf16`; the products of experts and dense feed-forwards, forward and back to their inputs, in FP8 (e4m3).
    Fp8,
}

impl Precision {
    /// Returns whether products are made of bf16 copies of the weights.
    #[must_use]
    pub fn has_bf16_copies(self) -> bool {
        self != Self::F32
    }

    /// Bytes of a number in memory and on the wire.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::Fp8 => 2,
        }
    }

    /// Bytes of a weight in memory: the f32 one, and the copy that products read.
    #[must_use]
    pub fn weight_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::Fp8 => 6,
        }
    }
}

/// The tokens of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tokens {
    /// So many for each rank, however many there are.
    OfEachRank(usize),
    /// Sequences that are shared out.
    Sequences {
        /// How many.
        num: usize,
        /// Tokens of each.
        len: usize,
    },
}

impl Tokens {
    /// The tokens of the fullest of the groups of `tp` ranks with the same tokens that `num_ranks` ranks make.
    #[must_use]
    pub fn of_group(self, num_ranks: usize, tp: usize) -> usize {
        match self {
            Self::OfEachRank(tokens) => tokens * tp,
            Self::Sequences { num, len } => num.div_ceil((num_ranks / tp.max(1)).max(1)) * len,
        }
    }
}

/// What one step does on each rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workload {
    /// The tokens of a micro-batch.
    pub tokens: Tokens,
    /// Number format of matrices.
    pub precision: Precision,
    /// What copies of a weight share between them: 0 nothing, 1 its optimizer state, 2 its gradient, too, 3 and the
    /// weight itself (the stages of ZeRO).
    pub zero: u8,
    /// Bytes of a gradient of an expert's weight: 4 in f32, 2 in bf16. All other gradients are f32.
    pub expert_gradient_bytes: usize,
}
