//! Memory of the hottest rank: of the first pipeline rank, which holds the most microbatches, the one with the most
//! loaded experts.

use super::{Step, peak_microbatches};
use crate::cost::memory::RankMemory;
use crate::{Recompute, ScheduleKind};

/// Numbers of parameters of a rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeldParams {
    /// Divided among tensor-parallel ranks: the rank's part.
    pub(super) cut: f64,
    /// On each rank of a stage: norms, routers, shared experts.
    pub(super) whole: f64,
    /// The share of routed experts.
    pub(super) experts: f64,
}

impl HeldParams {
    fn sum(&self) -> f64 {
        self.cut + self.whole + self.experts
    }
}

/// Bytes of a token's activations in all layers of a model, before division.
struct TokenBytes {
    /// The residual stream and outputs of norms.
    residual: f64,
    /// Attention and dense feed-forwards.
    inner: f64,
    /// Values inside of routed experts.
    experts: f64,
}

impl Step<'_> {
    /// Returns the parameters of the rank with the most: with the embedding, and with a tied or lone output
    /// projection.
    pub(super) fn params(&self) -> HeldParams {
        let (parts, mesh) = (&self.job.parts, self.mesh);
        let (layers, moe) = self.layers_of_rank();
        let outside = if mesh.pp == 1 { parts.outside_params() } else { parts.head_params() };
        // A stage with as few layers with experts as its share has the more dense feed-forwards.
        let dense = ((parts.num_layers - parts.num_moe_layers) as f64).min(layers - moe.min(layers));
        let held = parts.num_experts.div_ceil(mesh.ep) as f64;
        HeldParams {
            cut: (layers * parts.attention_params + dense * parts.dense_params + outside) / mesh.tp as f64,
            whole: layers * parts.norm_params + moe * (parts.shared_params + parts.router_params) + parts.width as f64,
            experts: moe * held * parts.expert_params / mesh.etp as f64,
        }
    }

    /// Returns the number of parameters in a rank's ZeRO slices.
    fn slices(&self) -> HeldParams {
        let HeldParams { cut, whole, experts } = self.params();
        let copies = (self.mesh.dp * self.mesh.cp) as f64;
        HeldParams { cut: cut / copies, whole: whole / copies, experts: experts / self.mesh.edp() as f64 }
    }

    /// Returns the number of parameters that a rank updates.
    pub(super) fn updated_params(&self) -> f64 {
        if self.mesh.zero >= 1 { self.slices().sum() } else { self.params().sum() }
    }

    /// Returns the parameters that are whole at a time under ZeRO 2 and 3: those of two layers, and those outside.
    fn gathered(&self) -> HeldParams {
        let parts = &self.job.parts;
        let HeldParams { cut, whole, experts } = self.params();
        let outside = parts.outside_params() / self.mesh.tp as f64;
        let two = |num: usize| (2.0 / num.max(1) as f64).min(1.0);
        HeldParams {
            cut: outside + (cut - outside) * two(parts.num_layers),
            whole: whole * two(parts.num_layers),
            experts: experts * two(parts.num_moe_layers),
        }
    }

    fn gradient_bytes(&self, params: HeldParams) -> f64 {
        4.0 * (params.cut + params.whole) + self.job.expert_gradient_bytes as f64 * params.experts
    }

    pub(super) fn memory(&self) -> RankMemory {
        let (mesh, practice) = (self.mesh, &self.job.practice);
        let params = self.params();
        let copies = if mesh.schedule == ScheduleKind::DualPipe && mesh.pp > 1 { 2.0 } else { 1.0 };
        let product_bytes = self.job.precision.bytes() as f64;
        let weights = match mesh.zero {
            3 => self.slices().sum() * practice.weight_bytes + self.gathered().sum() * product_bytes,
            _ => params.sum() * practice.weight_bytes,
        };
        let gradients = match mesh.zero {
            2 | 3 => self.gradient_bytes(self.slices()) + self.gradient_bytes(self.gathered()),
            _ => self.gradient_bytes(params),
        };
        let (activations, received) = self.activations();
        RankMemory {
            weights: copies * weights,
            gradients: copies * gradients,
            optimizer: self.updated_params() * practice.optimizer_bytes,
            activations,
            received,
        }
    }

    /// Returns the bytes of activations and of rows that other ranks sent, of all microbatches that are held.
    fn activations(&self) -> (f64, f64) {
        let (parts, mesh) = (&self.job.parts, self.mesh);
        let (layers, moe) = self.layers_of_rank();
        let microbatches = peak_microbatches(mesh, self.microbatches);
        let (tokens, tp) = (self.tokens(), mesh.tp as f64);
        let residual_tp = if self.job.practice.divides_residual { tp } else { 1.0 };
        let bytes = self.token_bytes(layers, moe);
        let kept = |bytes: &TokenBytes| {
            tokens * (bytes.residual / residual_tp + (bytes.inner + bytes.experts * self.hot.memory) / tp)
        };
        let is_sent = if mesh.ep * mesh.etp > 1 { 1.0 } else { 0.0 };
        let row = (parts.width * self.job.precision.bytes() * parts.top_k) as f64;
        let received = |moe: f64| is_sent * tokens / tp * row * moe * self.hot.memory * mesh.etp as f64;
        if mesh.recompute == Recompute::Full {
            let inputs = tokens * layers * self.job.practice.residual_bytes * parts.width as f64 / residual_tp;
            let one = self.token_bytes(1.0, moe.min(1.0));
            return (microbatches * inputs + kept(&one), received(moe.min(1.0)));
        }
        (microbatches * kept(&bytes), microbatches * received(moe))
    }

    /// Returns the bytes that a microbatch leaves for backward in a number of layers, whatever is computed again.
    pub(super) fn kept_bytes(&self, layers: f64, moe: f64) -> f64 {
        let bytes = self.token_bytes(layers, moe);
        let tp = self.mesh.tp as f64;
        let residual_tp = if self.job.practice.divides_residual { tp } else { 1.0 };
        self.tokens() * (bytes.residual / residual_tp + (bytes.inner + bytes.experts * self.hot.time) / tp)
    }

    /// Returns the bytes that a token leaves for backward in a number of layers.
    fn token_bytes(&self, layers: f64, moe: f64) -> TokenBytes {
        let (parts, practice) = (&self.job.parts, &self.job.practice);
        let (width, bytes) = (parts.width as f64, self.job.precision.bytes() as f64);
        let is_selective = self.mesh.recompute == Recompute::Selective;
        let outputs = if practice.keeps_outputs && !is_selective { 1.0 } else { 0.0 };
        let kept_inputs = parts.activation_inputs as f64 + outputs;
        let matrices = parts.activation_inputs as f64 + 1.0;
        let hidden = |params: f64| params / (width * matrices);
        let norms = if is_selective { 0.0 } else { 2.0 * width };
        // Latent attention retains its narrow vectors alone where their products are done again.
        let wide = parts.query_elements + parts.key_value_elements;
        let inputs = if is_selective && parts.latent_elements > 0.0 { parts.latent_elements } else { wide };
        let attention = inputs + parts.value_elements;
        let dense = (layers - moe) * hidden(parts.dense_params) + moe * hidden(parts.shared_params);
        TokenBytes {
            residual: layers * (2.0 * practice.residual_bytes * width + bytes * norms),
            inner: bytes * (layers * attention + dense * kept_inputs),
            experts: bytes * moe * kept_inputs * (parts.top_k * parts.expert_width) as f64,
        }
    }
}
