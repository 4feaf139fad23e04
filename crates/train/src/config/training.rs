//! The settings of the training loop, the optimizer and the losses.

use moeworks_gpu::DeviceChoice;
use moeworks_model::BalanceKind;
use moeworks_moe::{Ramp, Range, settings};
use moeworks_ops::Context;
use moeworks_plan::Precision;
use moeworks_tensor::DType;
use serde::{Deserialize, Serialize};

/// The course of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleKind {
    /// Half a cosine down to `lr * min_lr_ratio` at the last step.
    Cosine,
    /// Warm-up, stable, decay: constant, then linear down to `lr * min_lr_ratio` over the last `decay_fraction` of
    /// the steps.
    Wsd,
    /// Constant.
    Constant,
}

/// The type of the experts' gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GradientType {
    /// f32.
    F32,
    /// bf16: f32 sums, rounded once per microbatch.
    Bf16,
}

impl GradientType {
    /// Returns the bytes of one number.
    #[must_use]
    pub fn bytes(self) -> usize {
        self.dtype().size()
    }

    /// Returns the type of the tensors.
    #[must_use]
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }
}

settings! {
    /// Training loop, optimizer, losses and device.
    #[serde(deny_unknown_fields, default)]
    pub struct TrainConfig in "train." {
        /// Optimizer steps in total.
        ///
        /// Random streams number the steps in 56 bits.
        steps: u64 = 400, in Range::whole(1..=(1 << 48) - 1);
        /// Tokens of a sequence (S); with an encoder, of a text before spans are masked out.
        seq_len: usize = 256, in Range::whole(1..=1 << 24);
        /// Sequences of a microbatch, which are in memory together.
        batch_size: usize = 8, in Range::whole(1..=(1 << 31) - 1);
        /// Microbatches of a step (gradient accumulation).
        grad_accumulation: usize = 1, in Range::whole(1..=1 << 24);
        /// Peak learning rate.
        lr: f64 = 1.5e-3, in Range::POSITIVE;
        /// Final learning rate as a share of the peak.
        min_lr_ratio: f64 = 0.1, in Range::SHARE;
        /// Learning-rate schedule after the warm-up: cosine, wsd (constant, then linear decay) or constant.
        schedule: ScheduleKind = ScheduleKind::Cosine;
        /// Steps of the linear warm-up.
        warmup_steps: u64 = 25, in Range::COUNT;
        /// Share of the steps over which wsd decays.
        decay_fraction: f64 = 0.2, in Range::SHARE;
        /// Decoupled weight decay of matrices.
        weight_decay: f64 = 0.1, in Range::NOT_NEGATIVE;
        /// AdamW beta1: decay of the first moment.
        beta1: f64 = 0.9, in Range::BELOW_ONE;
        /// AdamW beta2: decay of the second moment.
        beta2: f64 = 0.95, in Range::BELOW_ONE;
        /// AdamW epsilon.
        eps: f64 = 1e-8, in Range::POSITIVE;
        /// Maximum global norm of the gradient (clipping); 0: no clipping.
        clip_norm: f64 = 1.0, in Range::NOT_NEGATIVE;
        /// f32; bf16: GEMMs in bf16 with f32 master weights; or fp8: like bf16, with the experts' GEMMs in FP8.
        precision: Precision = Precision::Bf16;
        /// Type of the experts' gradients: f32; or bf16, on one rank: half the memory, rounded once per microbatch.
        ///
        /// All other gradients are f32. Writing bf16 gradients also takes half the time.
        expert_gradients: GradientType = GradientType::F32;
        /// Saves only each layer's input for backward and recomputes the rest (activation checkpointing).
        checkpoint_layers: bool = false;
        /// Balance loss over experts: none, layer (each layer by itself), pooled (over all layers) or gshard (by
        /// first choices).
        balance: BalanceKind = BalanceKind::Layer;
        /// Weight of the balance loss: a number, or a ramp such as "linear 0.01 to 0.001 over 0.5".
        balance_coef: Ramp = Ramp::constant(0.01), in Range::NOT_NEGATIVE;
        /// Weight of the balance loss over the router's groups of experts (DeepSeek-V2's device-level loss), like
        /// balance_coef; needs groups.
        device_coef: Ramp = Ramp::ZERO, in Range::NOT_NEGATIVE;
        /// Weight of the balance loss over the tokens that each group gets (DeepSeek-V2's communication loss), like
        /// balance_coef.
        communication_coef: Ramp = Ramp::ZERO, in Range::NOT_NEGATIVE;
        /// Weight of the sequence-wise balance loss (DeepSeek-V3), like balance_coef.
        sequence_coef: Ramp = Ramp::ZERO, in Range::NOT_NEGATIVE;
        /// Weight of the squared variation of the experts' summed weights (importance, Shazeer), like balance_coef.
        importance_coef: Ramp = Ramp::ZERO, in Range::NOT_NEGATIVE;
        /// Weight of the squared variation of the experts' smooth load under noise (Shazeer), like balance_coef.
        load_coef: Ramp = Ramp::ZERO, in Range::NOT_NEGATIVE;
        /// Weight of the mean entropy of a token's router distribution (LIMoE's local loss), like balance_coef.
        local_entropy_coef: Ramp = Ramp::ZERO, in Range::NOT_NEGATIVE;
        /// Weight of the shortfall of the mean distribution's entropy below min_entropy (LIMoE's global loss), like
        /// balance_coef.
        global_entropy_coef: Ramp = Ramp::ZERO, in Range::NOT_NEGATIVE;
        /// Target entropy of the mean router distribution, in nats; 0: the logarithm of the number of experts.
        min_entropy: f64 = 0.0, in Range::NOT_NEGATIVE;
        /// Weight of the router z-loss, like balance_coef.
        z_coef: Ramp = Ramp::constant(0.001), in Range::NOT_NEGATIVE;
        /// Steps between evaluations; 0: only at the end.
        eval_every: u64 = 50, in Range::COUNT;
        /// Microbatches of an evaluation; 0: all held-out data.
        eval_batches: usize = 8, in Range::COUNT;
        /// Steps between samples of generated text; 0: none.
        sample_every: u64 = 100, in Range::COUNT;
        /// Tokens of a sample.
        sample_tokens: usize = 120, in Range::COUNT;
        /// Prompt that a sample continues.
        sample_prompt: String = "The ".into();
        /// Steps between records of routing in routing.records of the run: loads, and choices of single tokens; 0:
        /// none.
        record_routing: u64 = 0, in Range::COUNT;
        /// Tokens of a recorded step whose choices are recorded, in whole sequences; 0: loads alone.
        ///
        /// They cost a forward pass over these tokens.
        record_tokens: usize = 4096, in Range::COUNT;
        /// Steps between checkpoints; 0: only at the end.
        checkpoint_every: u64 = 100, in Range::COUNT;
        /// Number of the newest checkpoints that are kept, besides the best.
        keep_last: usize = 2, in Range::AT_LEAST_ONE;
        /// Consecutive steps with a non-finite loss or gradient that end the run.
        max_bad_steps: u64 = 10, in Range::AT_LEAST_ONE;
        /// Seed of initial weights, data order, routing noise and samples.
        seed: u64 = 1, in Range::COUNT;
        /// Number of CPU threads; 0: one per core.
        threads: usize = 0, in Range::whole(0..=1024);
        /// Device: cpu, cuda (an NVIDIA GPU), cuda:N, or auto: a GPU if there is one.
        #[serde(with = "device_name")]
        device: DeviceChoice = DeviceChoice::Cpu;
        /// With a GPU: keeps moments and f32 weights in host memory and updates weights on the CPU (ZeRO-Offload).
        ///
        /// In bf16 that leaves 6 of 18 bytes per weight on the GPU (2101.06840).
        offload_optimizer: bool = false;
        /// Frozen weights, by patterns of names such as "model.embed_tokens.*" or "*.mlp.experts.*": no gradient, no
        /// optimizer state, no weight decay. `*` matches any run of characters. `moeworks inspect MODEL --sharding`
        /// lists names.
        freeze: Vec<String> = Vec::new();
    }
}

impl TrainConfig {
    /// Returns the context in which the optimizer updates weights: the host if `offload_optimizer` is set.
    #[must_use]
    pub fn optimizer_context(&self, ctx: &Context) -> Context {
        if self.offload_optimizer { ctx.on_host() } else { ctx.clone() }
    }
}

/// Serialises a device as its name.
mod device_name {
    use moeworks_gpu::DeviceChoice;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(choice: &DeviceChoice, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(choice)
    }

    pub(super) fn deserialize<'d, D: Deserializer<'d>>(deserializer: D) -> Result<DeviceChoice, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}
