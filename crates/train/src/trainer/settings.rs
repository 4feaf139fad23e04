//! The settings of a trainer, whatever it trains.

use moeworks_ops::Context;
use moeworks_tensor::DType;

use crate::lr_schedule::{Decay, LrSchedule};
use crate::optimizer::AdamWConfig;

/// The settings of a trainer, whatever it trains.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainerSettings {
    /// Optimizer steps in all.
    pub steps: u64,
    /// Microbatches of a step.
    pub grad_accumulation: usize,
    /// The learning rate of each step.
    pub lr: LrSchedule,
    /// The constants of the optimizer.
    pub adamw: AdamWConfig,
    /// The largest global norm of the gradient; 0 for no clipping.
    pub clip_norm: f64,
    /// Steps with a loss or gradient that is not finite, one after the other, that end the run.
    pub max_bad_steps: u64,
    /// Steps between evaluations; 0 for none but the last.
    pub eval_every: u64,
    /// Steps between samples; 0 for none.
    pub sample_every: u64,
    /// Steps between checkpoints; 0 for none but the last.
    pub checkpoint_every: u64,
    /// The number of the newest checkpoints that are kept, besides the best.
    pub keep_last: usize,
    /// The seed of the first weights.
    pub seed: u64,
    /// The type of the operands of matrix products: of bf16 a copy of the weights is kept beside those in f32.
    pub products: DType,
    /// The type of the gradients of routed experts' matrices, f32 or bf16; on several ranks it is f32.
    pub expert_gradients: DType,
    /// Whether weights are updated in the host's memory where a GPU computes.
    pub offload_optimizer: bool,
}

impl Default for TrainerSettings {
    /// A hundred steps at a constant rate in f32, with a checkpoint and an evaluation at the end.
    fn default() -> Self {
        let steps = 100;
        Self {
            steps,
            grad_accumulation: 1,
            lr: LrSchedule { peak: 1e-3, min_ratio: 1.0, warmup_steps: 0, total_steps: steps, decay: Decay::Constant },
            adamw: AdamWConfig { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 },
            clip_norm: 1.0,
            max_bad_steps: 10,
            eval_every: 0,
            sample_every: 0,
            checkpoint_every: 0,
            keep_last: 2,
            seed: 1,
            products: DType::F32,
            expert_gradients: DType::F32,
            offload_optimizer: false,
        }
    }
}

impl TrainerSettings {
    /// The context in which weights are updated.
    pub(super) fn optimizer_context(&self, ctx: &Context) -> Context {
        if self.offload_optimizer { ctx.on_host() } else { ctx.clone() }
    }
}
