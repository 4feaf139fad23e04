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
    /// Warm-up, stable, decay: constant, then linear down to `lr * min_lr_ratio` over the last `decay_fraction` of the
    /// steps.
    Wsd,
    /// Constant.
    Constant,
}

/// The type of gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GradientType {
    /// f32.
    F32,
    /// bf16: sums of f32, rounded once a microbatch.
    Bf16,
}

impl GradientType {
    /// Bytes of a gradient.
    #[must_use]
    pub fn bytes(self) -> usize {
        self.dtype().size()
    }

    /// The tensors' type.
    #[must_use]
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }
}

settings! {
    /// How the model is trained.
    #[serde(deny_unknown_fields, default)]
    pub struct TrainConfig in "train." {
        /// Optimizer steps in total.
        ///
        /// The streams of random numbers count them in 56 bits.
        steps: u64 = 400, in Range::whole(1..=(1 << 48) - 1);
        /// Tokens of a sequence (S); with an encoder those of a text before some are left out.
        seq_len: usize = 256, in Range::whole(1..=1 << 24);
        /// Sequences of a microbatch.
        ///
        /// They are in memory together.
        batch_size: usize = 8, in Range::whole(1..=(1 << 31) - 1);
        /// Microbatches of a step.
        grad_accumulation: usize = 1, in Range::whole(1..=1 << 24);
        /// Highest learning rate.
        lr: f64 = 1.5e-3, in Range::POSITIVE;
        /// Last learning rate as a share of the highest.
        min_lr_ratio: f64 = 0.1, in Range::SHARE;
        /// After the warm-up: cosine, wsd (constant, then linear decay) or constant.
        schedule: ScheduleKind = ScheduleKind::Cosine;
        /// Steps of the linear warm-up.
        warmup_steps: u64 = 25, in Range::COUNT;
        /// Share of the steps that wsd decays over.
        decay_fraction: f64 = 0.2, in Range::SHARE;
        /// Decoupled weight decay of matrices.
        weight_decay: f64 = 0.1, in Range::NOT_NEGATIVE;
        /// AdamW beta1: decay of the first moment.
        beta1: f64 = 0.9, in Range::BELOW_ONE;
        /// AdamW beta2: decay of the second moment.
        beta2: f64 = 0.95, in Range::BELOW_ONE;
        /// AdamW's epsilon.
        eps: f64 = 1e-8, in Range::POSITIVE;
        /// Largest global norm of the gradient; 0: no clipping.
        clip_norm: f64 = 1.0, in Range::NOT_NEGATIVE;
        /// f32; bf16: matrix products in bf16 with f32 master weights; or fp8: as bf16, with the products of experts in FP8.
        precision: Precision = Precision::Bf16;
        /// f32; or bf16, on one rank: gradients of experts in half the memory, rounded once a microbatch.
        ///
        /// All other gradients are f32. In bf16 writing them takes half the time, too.
        expert_gradients: GradientType = GradientType::F32;
        /// Whether layers keep only their input for backward and compute the rest again.
        checkpoint_layers: bool = false;
        /// Balance loss over experts: none, layer (each by itself), pooled (over all layers) or gshard (by first choices).
        balance: BalanceKind = BalanceKind::Layer;
        /// Weight of the balance loss: a number, or a ramp such as "linear 0.01 to 0.001 over 0.5".
        balance_coef: Ramp = Ramp::constant(0.01), in Range::NOT_NEGATIVE;
        /// Weight of the balance loss over the router's groups of experts, as balance_coef; none without groups.
        ///
        /// DeepSeek-V2's device-level loss.
        device_coef: Ramp = Ramp::ZERO, in Range::NOT_NEGATIVE;
        /// Weight of the balance loss over the tokens that each group gets, as device_coef.
        ///
        /// DeepSeek-V2's communication balance loss.
        communication_coef: Ramp = Ramp::ZERO, in Range::NOT_NEGATIVE;
        /// Weight of the sequence-wise balance loss, as balance_coef.
        ///
        /// DeepSeek-V3's.
        sequence_coef: Ramp = Ramp::ZERO, in Range::NOT_NEGATIVE;
        /// Weight of the squared variation of the experts' summed weights, as balance_coef.
        ///
        /// The squared coefficient of variation of their importance (Shazeer).
        importance_coef: Ramp = Ramp::ZERO, in Range::NOT_NEGATIVE;
        /// Weight of the squared variation of the experts' load under noise, as balance_coef.
        ///
        /// The squared coefficient of variation of their smooth load (Shazeer).
        load_coef: Ramp = Ramp::ZERO, in Range::NOT_NEGATIVE;
        /// Weight of the mean entropy of a token's choice, as balance_coef.
        ///
        /// LIMoE's local loss, the loss of top-p routing.
        local_entropy_coef: Ramp = Ramp::ZERO, in Range::NOT_NEGATIVE;
        /// Weight of the shortfall of the mean choice's entropy below min_entropy, as balance_coef.
        ///
        /// LIMoE's global loss.
        global_entropy_coef: Ramp = Ramp::ZERO, in Range::NOT_NEGATIVE;
        /// Entropy that the mean choice should have, in nats; 0: the logarithm of the number of experts.
        min_entropy: f64 = 0.0, in Range::NOT_NEGATIVE;
        /// Weight of the router's z-loss.
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
        /// Steps between checkpoints; 0: only at the end.
        checkpoint_every: u64 = 100, in Range::COUNT;
        /// How many of the newest checkpoints are kept, besides the best.
        keep_last: usize = 2, in Range::AT_LEAST_ONE;
        /// Steps in a row with a non-finite loss or gradient that end the run.
        max_bad_steps: u64 = 10, in Range::AT_LEAST_ONE;
        /// Seed of initial weights, order of data, routing noise and samples.
        seed: u64 = 1, in Range::COUNT;
        /// Threads that compute; 0: one on each core.
        threads: usize = 0, in Range::whole(0..=1024);
        /// Device that computes: cpu, cuda (an NVIDIA GPU), cuda:N, or auto: a GPU if there is one.
        #[serde(with = "device_name")]
        device: DeviceChoice = DeviceChoice::Cpu;
        /// With a GPU: moments and f32 weights stay in the host's memory, and weights are updated there.
        ///
        /// In bf16 that leaves 6 of 18 bytes a weight on the GPU (ZeRO-Offload, 2101.06840).
        offload_optimizer: bool = false;
        /// Weights that training leaves as they are, by patterns of names such as "model.embed_tokens.*" or "*.mlp.experts.*": no gradient,
        /// no optimizer state, no weight decay. `moeworks inspect MODEL --sharding` lists names.
        ///
        /// `*` stands for any run of characters.
        freeze: Vec<String> = Vec::new();
    }
}

impl TrainConfig {
    /// Returns the context in which the optimizer updates weights: the host where `offload_optimizer` is set.
    #[must_use]
    pub fn optimizer_context(&self, ctx: &Context) -> Context {
        if self.offload_optimizer { ctx.on_host() } else { ctx.clone() }
    }
}

/// A device as its name.
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
