//! The model of memory: what a rank holds of a model under a layout, and what a training step takes there. `inspect`,
//! `estimate`, `plan` and the check before a run all ask it.

use crate::{Layout, ModelShape, Workload};

/// Bytes of an f32 number.
const F32: f64 = 4.0;

/// Memory of the rank that holds the most, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankMemory {
    /// Weights, and the copy that products read; where ranks share them out, their slices and what is whole at a
    /// time.
    pub weights: f64,
    /// Gradients, as many as are there at a time.
    pub gradients: f64,
    /// Two f32 moments.
    pub optimizer: f64,
    /// The values that backward needs of forward.
    pub activations: f64,
    /// Rows received from other ranks, which backward needs too.
    pub received: f64,
}

impl RankMemory {
    /// The sum.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.state() + self.activations + self.received
    }

    /// What does not depend on the tokens: weights, gradients and optimizer state.
    #[must_use]
    pub fn state(&self) -> f64 {
        self.weights + self.gradients + self.optimizer
    }
}

/// The memory of the rank that holds the most, in a training step of `shape` under `layout`.
#[must_use]
pub fn rank_memory(shape: &ModelShape, workload: &Workload, layout: &Layout) -> RankMemory {
    Share { shape, workload, layout }.memory()
}

/// A rank's share in a step.
pub(super) struct Share<'a> {
    pub(super) shape: &'a ModelShape,
    pub(super) workload: &'a Workload,
    pub(super) layout: &'a Layout,
}

impl Share<'_> {
    /// T: tokens of a group of ranks that cut matrices between them.
    pub(super) fn tokens(&self) -> f64 {
        self.workload.tokens.of_group(self.layout.num_ranks(), self.layout.tp) as f64
    }

    /// Parameters of a rank: outside the experts, and in them.
    pub(super) fn params(&self) -> (f64, f64) {
        let (cut, whole) = self.dense_params();
        let held = self.shape.num_experts.div_ceil(self.layout.num_expert_ranks()) * self.shape.num_moe_layers;
        (cut + whole, held as f64 * self.shape.expert_params as f64)
    }

    /// Those outside the experts: its part of what is cut, and the rest.
    pub(super) fn dense_params(&self) -> (f64, f64) {
        let whole = self.shape.whole_params.min(self.shape.dense_params) as f64;
        ((self.shape.dense_params as f64 - whole) / self.layout.tp as f64, whole)
    }

    /// A rank's slices of its parameters outside the experts and in them, where copies share them out.
    fn slices(&self) -> (f64, f64) {
        let (dense, experts) = self.params();
        (dense / (self.layout.dp * self.layout.ep) as f64, experts / self.layout.dp as f64)
    }

    /// Their sum.
    fn sliced_params(&self) -> f64 {
        let (dense, experts) = self.slices();
        dense + experts
    }

    /// Trained parameters of so many outside the experts and in them.
    fn trained(&self, (dense, experts): (f64, f64)) -> (f64, f64) {
        (dense * self.shape.trained_dense, experts * self.shape.trained_experts)
    }

    /// Bytes of the gradients of so many parameters outside the experts and in them.
    fn gradient_bytes(&self, params: (f64, f64)) -> f64 {
        let (dense, experts) = self.trained(params);
        dense * F32 + experts * self.workload.expert_gradient_bytes as f64
    }

    /// Parameters whose optimizer state a rank keeps.
    pub(super) fn updated_params(&self) -> f64 {
        let (dense, experts) = self.trained(if self.workload.zero >= 1 { self.slices() } else { self.params() });
        dense + experts
    }

    /// Parameters that are whole at a time where copies share them out: those of two layers, and of what belongs to
    /// no layer.
    fn passing_params(&self) -> (f64, f64) {
        let (dense, experts) = self.params();
        let outside = dense * self.shape.outside_params as f64 / self.shape.dense_params.max(1) as f64;
        let layers = |params: f64, num: usize| params * (2.0 / num.max(1) as f64).min(1.0);
        (outside + layers(dense - outside, self.shape.num_layers), layers(experts, self.shape.num_moe_layers))
    }

    fn memory(&self) -> RankMemory {
        let (dense, experts) = self.params();
        let (zero, precision) = (self.workload.zero, self.workload.precision);
        let rows = self.tokens() / self.layout.tp as f64 * (self.shape.top_k * self.shape.num_moe_layers) as f64;
        let is_sent = if self.layout.num_expert_ranks() > 1 { 1.0 } else { 0.0 };
        let (kept, passing) = (precision.weight_bytes() as f64, self.passing_params());
        let weights = || self.sliced_params() * kept + (passing.0 + passing.1) * precision.bytes() as f64;
        let gradients = || self.gradient_bytes(self.slices()) + self.gradient_bytes(passing);
        RankMemory {
            weights: if zero >= 3 { weights() } else { (dense + experts) * kept },
            gradients: if zero >= 2 { gradients() } else { self.gradient_bytes((dense, experts)) },
            optimizer: self.updated_params() * 2.0 * F32,
            activations: self.tokens() * self.activation_bytes(),
            received: is_sent * rows * (self.shape.width * precision.bytes()) as f64,
        }
    }

    /// Bytes that a rank keeps of a token for backward: the residual stream and what was normed of it whole.
    fn activation_bytes(&self) -> f64 {
        let elements = (self.shape.num_layers * self.shape.width) as f64;
        let whole = elements * (8 + 2 * self.workload.precision.bytes()) as f64;
        let whole = whole.min(self.shape.activation_bytes);
        whole + (self.shape.activation_bytes - whole) / self.layout.tp as f64
    }
}
