//! The options of a pass and of the trainer, from the configuration of a run.

use moeworks_model::{BalanceKind, PassOptions, PassOrder, RouterNoise};
use moeworks_moe::{EntropyRule, Ramp};
use moeworks_tensor::DType;

use crate::config::{RebalanceMode, RunConfig, ScheduleKind};
use crate::error::TrainError;
use crate::lr_schedule::{Decay, LrSchedule};
use crate::optimizer::AdamWConfig;
use crate::parallel::rebalance_target;
use crate::rebalance::{RebalanceSettings, RebalanceSource};
use crate::task::Microbatch;
use crate::trainer::TrainerSettings;

/// Returns the options of a training pass of a step with so many targets.
pub(crate) fn pass_options(config: &RunConfig, num_targets: usize, batch: Microbatch) -> PassOptions {
    let train = &config.train;
    let num_micro = batch.num;
    let share = |coefficient: &Ramp| (coefficient.at(batch.progress) / num_micro as f64) as f32;
    let most = (config.model.moe().num_choosable().max(1) as f64).ln();
    PassOptions {
        balance: train.balance,
        balance_coef: if train.balance == BalanceKind::None { 0.0 } else { share(&train.balance_coef) },
        device_coef: share(&train.device_coef),
        communication_coef: share(&train.communication_coef),
        sequence_coef: share(&train.sequence_coef),
        importance_coef: share(&train.importance_coef),
        load_coef: share(&train.load_coef),
        entropy: EntropyRule {
            local: share(&train.local_entropy_coef),
            global: share(&train.global_entropy_coef),
            min_entropy: if train.min_entropy == 0.0 { most } else { train.min_entropy },
        },
        l1_scale: 1.0 / num_micro as f32,
        z_coef: share(&train.z_coef),
        progress: batch.progress,
        first_token: 0,
        noise: Some(RouterNoise { seed: train.seed, step: batch.number() }),
        checkpoint_layers: train.checkpoint_layers,
        order: PassOrder::default(),
        grad_scale: 1.0 / num_targets as f32,
    }
}

/// Returns the settings of the trainer.
///
/// # Errors
/// If experts are to move to the placement of a file that is invalid or of another model.
pub(super) fn trainer_settings(config: &RunConfig) -> Result<TrainerSettings, TrainError> {
    let train = &config.train;
    Ok(TrainerSettings {
        steps: train.steps,
        grad_accumulation: train.grad_accumulation,
        lr: lr_schedule(config),
        adamw: AdamWConfig { beta1: train.beta1, beta2: train.beta2, eps: train.eps, weight_decay: train.weight_decay },
        clip_norm: train.clip_norm,
        max_bad_steps: train.max_bad_steps,
        eval_every: train.eval_every,
        sample_every: train.sample_every,
        checkpoint_every: train.checkpoint_every,
        keep_last: train.keep_last,
        seed: train.seed,
        products: if train.precision.has_bf16_copies() { DType::BF16 } else { DType::F32 },
        expert_gradients: train.expert_gradients.dtype(),
        offload_optimizer: train.offload_optimizer,
        rebalance: rebalance_settings(config)?,
    })
}

fn rebalance_settings(config: &RunConfig) -> Result<RebalanceSettings, TrainError> {
    let rebalance = &config.rebalance;
    let source = match (&rebalance.mode, rebalance_target(config)?) {
        (_, Some(placements)) => RebalanceSource::File { placements, at_step: rebalance.at_step },
        (RebalanceMode::Online, _) => RebalanceSource::Online,
        _ => RebalanceSource::Off,
    };
    Ok(RebalanceSettings {
        source,
        every: rebalance.every,
        spare: rebalance.spare,
        policies: rebalance.policy.policies(),
        max_moves: rebalance.max_moves,
        min_gain: rebalance.min_gain,
        bytes_per_step: rebalance.bytes_per_step,
        max_pause: rebalance.max_pause,
    })
}

fn lr_schedule(config: &RunConfig) -> LrSchedule {
    let train = &config.train;
    LrSchedule {
        peak: train.lr,
        min_ratio: train.min_lr_ratio,
        warmup_steps: train.warmup_steps,
        total_steps: train.steps,
        decay: match train.schedule {
            ScheduleKind::Cosine => Decay::Cosine,
            ScheduleKind::Wsd => Decay::Wsd { decay_steps: (train.decay_fraction * train.steps as f64).round() as u64 },
            ScheduleKind::Constant => Decay::Constant,
        },
    }
}
