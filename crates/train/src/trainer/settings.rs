//! The settings of a trainer, for any task.

use moeworks_ops::Context;
use moeworks_tensor::DType;

use crate::lr_schedule::{Decay, LrSchedule};
use crate::optimizer::AdamWConfig;
use crate::rebalance::RebalanceSettings;

/// The settings of a trainer, for any task.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainerSettings {
    /// The total number of optimizer steps.
    pub steps: u64,
    /// Microbatches per step.
    pub grad_accumulation: usize,
    /// The learning rate of each step.
    pub lr: LrSchedule,
    /// The constants of the optimizer.
    pub adamw: AdamWConfig,
    /// The maximum global norm of the gradient; 0 for no clipping.
    pub clip_norm: f64,
    /// Consecutive steps with a non-finite loss or gradient that end the run.
    pub max_bad_steps: u64,
    /// Steps between evaluations; 0 for a single one at the end.
    pub eval_every: u64,
    /// Steps between samples; 0 for none.
    pub sample_every: u64,
    /// Steps between checkpoints; 0 for a single one at the end.
    pub checkpoint_every: u64,
    /// The number of the newest checkpoints that are kept, besides the best.
    pub keep_last: usize,
    /// The seed of the initial weights.
    pub seed: u64,
    /// The type of GEMM operands. With bf16 a copy of the weights is kept besides the f32 weights.
    pub products: DType,
    /// The type of the gradients of routed experts' matrices, f32 or bf16; must be f32 on several ranks.
    pub expert_gradients: DType,
    /// True to update weights in host memory when a GPU computes.
    pub offload_optimizer: bool,
    /// The movement of experts between ranks while training goes on.
    pub rebalance: RebalanceSettings,
}

impl Default for TrainerSettings {
    /// Returns a hundred steps at a constant rate in f32, with a checkpoint and an evaluation at the end.
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
            rebalance: RebalanceSettings::default(),
        }
    }
}

impl TrainerSettings {
    /// Returns the context in which weights are updated.
    pub(super) fn optimizer_context(&self, ctx: &Context) -> Context {
        if self.offload_optimizer { ctx.on_host() } else { ctx.clone() }
    }
}
