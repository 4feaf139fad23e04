//! What a run is set up with, as functions of its configuration.

use moeworks_model::Tokenizer;
use moeworks_model::account::shape;
use moeworks_ops::Context;
use moeworks_ops::cuda::GpuError;
use moeworks_plan::{Tokens, Workload, rank_memory};

use crate::config::{ConfigError, GradientType, Precision, RunConfig, ScheduleKind};
use crate::error::TrainError;
use crate::optimizer::AdamWConfig;
use crate::ranks::Ranks;
use crate::schedule::{Decay, Schedule};

/// The model's vocabulary: the tokenizer's, unless a larger one is set.
pub(crate) fn vocab_size(config: &RunConfig, tokenizer: &Tokenizer) -> Result<usize, ConfigError> {
    let (given, needed) = (config.model.vocab_size, tokenizer.vocab_size());
    if given == 0 {
        return Ok(needed);
    }
    if given < needed {
        return Err(ConfigError::Value {
            origin: String::new(),
            setting: "model.vocab_size".to_owned(),
            value: given.to_string(),
            expected: format!("must be 0 (the tokenizer's size) or at least the tokenizer's size, {needed}"),
        });
    }
    Ok(given)
}

/// Refuses a model whose training state cannot fit, before the system ends the program for it. Activations are not counted:
/// they are an estimate, and checkpointing bounds them.
pub(crate) fn check_memory(config: &RunConfig, ranks: Option<&Ranks>) -> Result<(), TrainError> {
    let is_bf16 = config.train.precision.has_bf16_copies();
    let precision = config.train.precision.kept();
    let workload = Workload { tokens: Tokens::OfEachRank(0), precision, zero: config.parallel.zero };
    let shape = shape(&config.model, config.train.seq_len, is_bf16);
    let of_rank = rank_memory(&shape, &workload, &config.parallel.layout()).state();
    // On one rank, gradients of experts may be half as long.
    let experts = shape.expert_params * (shape.num_experts * shape.num_moe_layers) as u64;
    let of_experts = if config.train.expert_gradients == GradientType::Bf16 { 2 * experts } else { 0 };
    let needed_bytes = (of_rank * ranks.map_or(1, Ranks::num_neighbours) as f64) as u64 - of_experts;
    match machine_bytes() {
        Some(machine_bytes) if needed_bytes > machine_bytes => Err(TrainError::Memory { needed_bytes, machine_bytes }),
        _ => Ok(()),
    }
}

/// The machine's memory, where the system says so in `/proc/meminfo`.
#[must_use]
pub fn machine_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemTotal:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// A context with the device and the threads that the configuration asks for: of all cores a rank takes its share of those of its node.
pub(crate) fn context(config: &RunConfig, ranks: Option<&Ranks>) -> Result<Context, GpuError> {
    let ctx = match (config.train.threads, ranks) {
        (0, None) => Context::cpu_all_cores(),
        (0, Some(ranks)) => Context::cpu((ranks.num_cores() as usize).max(1)),
        (threads, _) => Context::cpu(threads),
    };
    // The ranks of a node share its GPUs out.
    let device = ranks.map_or(config.train.device, |ranks| config.train.device.later(ranks.place_on_node()));
    let (ctx, missing) = ctx.on_device(device)?;
    if let Some(missing) = missing {
        tracing::warn!("train.device = auto computes on the processor: {missing}");
    }
    Ok(ctx.with_fp8_experts(config.train.precision == Precision::Fp8))
}

pub(crate) fn adamw_config(config: &RunConfig) -> AdamWConfig {
    let train = &config.train;
    AdamWConfig { beta1: train.beta1, beta2: train.beta2, eps: train.eps, weight_decay: train.weight_decay }
}

pub(crate) fn schedule(config: &RunConfig) -> Schedule {
    let train = &config.train;
    Schedule {
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
