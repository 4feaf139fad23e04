//! The model of memory: the bytes of a rank for a model under a layout, at rest and in a training step. `inspect`,
//! `estimate`, `plan` and the check before a run all use it.

use crate::{Layout, ModelShape, Workload};

/// Bytes of an f32 number.
const F32: f64 = 4.0;

/// Memory of the rank that holds the most, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankMemory {
    /// Weights, and the copy that products read. Under ZeRO 3 the rank's slices, and the weights that are whole at a
    /// time.
    pub weights: f64,
    /// Gradients, as many as exist at a time.
    pub gradients: f64,
    /// The two f32 moments of AdamW.
    pub optimizer: f64,
    /// Values that forward keeps for backward.
    pub activations: f64,
    /// Rows received from other ranks, which backward needs too.
    pub received: f64,
}

impl RankMemory {
    /// Returns the sum.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.state() + self.activations + self.received
    }

    /// Returns the part that does not depend on the tokens: weights, gradients and optimizer state.
    #[must_use]
    pub fn state(&self) -> f64 {
        self.weights + self.gradients + self.optimizer
    }
}

/// Returns the memory of the rank that holds the most, in a training step of `shape` under `layout`.
#[must_use]
pub fn rank_memory(shape: &ModelShape, workload: &Workload, layout: &Layout) -> RankMemory {
    Share { shape, workload, layout }.memory()
}

/// Numbers of parameters outside and in the experts.
#[derive(Clone, Copy)]
pub(super) struct Params {
    pub(super) dense: f64,
    pub(super) experts: f64,
}

impl Params {
    fn total(self) -> f64 {
        self.dense + self.experts
    }
}

/// A rank's share of a step.
pub(super) struct Share<'a> {
    pub(super) shape: &'a ModelShape,
    pub(super) workload: &'a Workload,
    pub(super) layout: &'a Layout,
}

impl Share<'_> {
    /// Returns T, the tokens of a tensor-parallel group.
    pub(super) fn tokens(&self) -> f64 {
        self.workload.tokens.of_group(self.layout.stage_group_size(), self.layout.tp) as f64
    }

    /// Returns the number of parameters of a rank.
    pub(super) fn params(&self) -> Params {
        let (cut, whole) = self.dense_params();
        let held = self.shape.num_experts.div_ceil(self.layout.num_expert_ranks()) * self.shape.num_moe_layers;
        let experts = held as f64 * self.shape.expert_params as f64;
        Params {
            dense: (cut + whole) * self.of_stage_group(self.outside()),
            experts: experts * self.of_stage_group(0.0),
        }
    }

    /// Returns the part of parameters outside the experts that belongs to no layer.
    fn outside(&self) -> f64 {
        self.shape.outside_params as f64 / self.shape.dense_params.max(1) as f64
    }

    /// Returns the share of parameters that the stage group with the most has: its layers, rounded up, and all of the
    /// part `outside` layers, since a tied embedding is in the first and in the last stage.
    fn of_stage_group(&self, outside: f64) -> f64 {
        let num_layers = self.shape.num_layers.max(1);
        let layers = num_layers.div_ceil(self.layout.pp).min(num_layers) as f64 / num_layers as f64;
        if self.layout.pp == 1 { 1.0 } else { outside + (1.0 - outside) * layers }
    }

    /// Returns the number of parameters outside the experts: the rank's part of the sharded ones, and the replicated
    /// ones.
    pub(super) fn dense_params(&self) -> (f64, f64) {
        let whole = self.shape.whole_params.min(self.shape.dense_params) as f64;
        ((self.shape.dense_params as f64 - whole) / self.layout.tp as f64, whole)
    }

    /// Returns the number of parameters in a rank's ZeRO slices.
    fn slices(&self) -> Params {
        let Params { dense, experts } = self.params();
        Params { dense: dense / (self.layout.dp * self.layout.ep) as f64, experts: experts / self.layout.dp as f64 }
    }

    /// Returns the number of trained parameters among `params`.
    fn trained(&self, params: Params) -> Params {
        let Params { dense, experts } = params;
        Params { dense: dense * self.shape.trained_dense, experts: experts * self.shape.trained_experts }
    }

    /// Returns the bytes of the gradients of `params`.
    fn gradient_bytes(&self, params: Params) -> f64 {
        let Params { dense, experts } = self.trained(params);
        dense * F32 + experts * self.workload.expert_gradient_bytes as f64
    }

    /// Returns the number of parameters whose optimizer state a rank keeps.
    pub(super) fn updated_params(&self) -> f64 {
        self.trained(if self.workload.zero >= 1 { self.slices() } else { self.params() }).total()
    }

    /// Returns the number of parameters that are whole at a time under ZeRO 3: those of two layers, and those outside
    /// the layers.
    fn gathered_params(&self) -> Params {
        let Params { dense, experts } = self.params();
        let outside = dense * self.shape.outside_params as f64 / self.shape.dense_params.max(1) as f64;
        let layers = |params: f64, num: usize| params * (2.0 / num.max(1) as f64).min(1.0);
        Params {
            dense: outside + layers(dense - outside, self.shape.num_layers),
            experts: layers(experts, self.shape.num_moe_layers),
        }
    }

    fn memory(&self) -> RankMemory {
        let params = self.params();
        let (zero, precision) = (self.workload.zero, self.workload.precision);
        let rows = self.tokens() / self.layout.tp as f64 * (self.shape.top_k * self.shape.num_moe_layers) as f64;
        let is_sent = if self.layout.num_expert_ranks() > 1 { 1.0 } else { 0.0 };
        let (kept, gathered) = (precision.weight_bytes() as f64, self.gathered_params());
        let weights = || self.slices().total() * kept + gathered.total() * precision.bytes() as f64;
        let gradients = || self.gradient_bytes(self.slices()) + self.gradient_bytes(gathered);
        RankMemory {
            weights: if zero >= 3 { weights() } else { params.total() * kept },
            gradients: if zero >= 2 { gradients() } else { self.gradient_bytes(params) },
            optimizer: self.updated_params() * 2.0 * F32,
            activations: self.tokens() * self.activation_bytes(),
            received: is_sent * rows * (self.shape.width * precision.bytes()) as f64,
        }
    }

    /// Returns the bytes that a rank keeps of a token for backward. Tensor parallelism replicates the residual stream
    /// and the outputs of norms, and shards the rest.
    fn activation_bytes(&self) -> f64 {
        let elements = (self.shape.num_layers * self.shape.width) as f64;
        let whole = elements * (8 + 2 * self.workload.precision.bytes()) as f64;
        let whole = whole.min(self.shape.activation_bytes);
        whole + (self.shape.activation_bytes - whole) / self.layout.tp as f64
    }
}
