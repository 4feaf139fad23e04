//! The setup of a run from its configuration: its context, its vocabulary, and a check of its memory.

use moeworks_gpu::{Gpu, GpuError};
use moeworks_infer::system::System;
use moeworks_model::model_cost::{Kept, shape};
use moeworks_model::{Tokenizer, WeightTable};
use moeworks_ops::{Context, MachineOptions};
use moeworks_plan::{RankMemory, Tokens, Workload, rank_memory};

use crate::config::{ConfigError, Precision, RunConfig, TrainConfig};
use crate::error::TrainError;
use crate::parallel::Ranks;

/// Returns the model's vocabulary size: the tokenizer's, unless a larger one is set.
pub(super) fn vocab_size(config: &RunConfig, tokenizer: &Tokenizer) -> Result<usize, ConfigError> {
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

/// Refuses a model whose training state cannot fit, before the system or the driver kills the program. Activations
/// are not counted, because they are an estimate and checkpointing bounds them.
pub(crate) fn check_memory(ctx: &Context, config: &RunConfig, ranks: Option<&Ranks>) -> Result<(), TrainError> {
    let of_rank = state_of_rank(config);
    let needed_bytes = (of_rank.state() * ranks.map_or(1, Ranks::num_neighbours) as f64) as u64;
    if let Some(machine_bytes) = machine_bytes().filter(|&machine_bytes| needed_bytes > machine_bytes) {
        return Err(TrainError::Memory { needed_bytes, machine_bytes });
    }
    let needed_bytes = bytes_on_gpu(config, &of_rank) as u64;
    match ctx.gpu().and_then(Gpu::memory_bytes) {
        Some(gpu_bytes) if needed_bytes > gpu_bytes => Err(TrainError::GpuMemory { needed_bytes, gpu_bytes }),
        _ => Ok(()),
    }
}

/// Returns the memory that persists between steps on the fullest rank.
fn state_of_rank(config: &RunConfig) -> RankMemory {
    let TrainConfig { precision, checkpoint_layers, expert_gradients, seq_len, .. } = config.train;
    let workload = Workload {
        tokens: Tokens::OfEachRank(0),
        precision,
        zero: config.parallel.zero,
        expert_gradient_bytes: expert_gradients.bytes(),
    };
    // Settings without a valid table are refused when a run starts.
    let table = config.weight_table().unwrap_or_else(|_| WeightTable::new(&config.model));
    let shape = shape(&config.model, &table, seq_len, Kept { precision, checkpoint_layers });
    // The fullest stage group is one that spreads its experts over the fewest ranks.
    let layouts = (0..config.parallel.pp).map(|pp_rank| config.parallel.layout_of_stage_group(pp_rank));
    let layout = layouts.min_by_key(|layout| layout.ep).unwrap_or_else(|| config.parallel.layout());
    rank_memory(&shape, &workload, &layout)
}

/// Returns the part of that on a GPU: without the optimizer these are the gradients and the weights that GEMMs read.
fn bytes_on_gpu(config: &RunConfig, of_rank: &RankMemory) -> f64 {
    if !config.train.offload_optimizer {
        return of_rank.state();
    }
    let precision = config.train.precision;
    let read = precision.bytes() as f64 / precision.weight_bytes() as f64;
    of_rank.weights * read + of_rank.gradients
}

/// Returns the memory that this process may use, of the machine or of its container, if the system reports it.
#[must_use]
pub fn machine_bytes() -> Option<u64> {
    System::default().usable_memory_bytes()
}

/// Returns a context with the configuration's device and threads. With `train.threads = 0` a rank uses its share of
/// its node's cores.
///
/// # Errors
/// [`GpuError`] if the device is not available.
pub fn context(config: &RunConfig, ranks: Option<&Ranks>, machine: &MachineOptions) -> Result<Context, GpuError> {
    let ctx = match (config.train.threads, ranks) {
        (0, None) => Context::cpu_all_cores(),
        (0, Some(ranks)) => Context::cpu((ranks.num_cores() as usize).max(1)),
        (threads, _) => Context::cpu(threads),
    };
    // The ranks of a node take its GPUs in turn.
    let device = config.train.device;
    let device = ranks.map_or(device, |ranks| device.later(ranks.place_on_node(), &machine.gpu));
    let (ctx, missing) = ctx.on_device(device, machine)?;
    if let Some(missing) = missing {
        tracing::warn!("train.device = auto computes on the processor: {missing}");
    }
    Ok(ctx.with_fp8_experts(config.train.precision == Precision::Fp8))
}

#[cfg(test)]
mod tests {
    use moeworks_model::model_cost::Parameters;

    use super::*;
    use crate::config::GradientType;

    #[test]
    fn of_18_bytes_a_weight_6_are_on_a_gpu_without_the_optimizer_and_2_less_with_gradients_of_experts_in_bf16() {
        let mut config = RunConfig::default();
        config.model.vocab_size = 300;
        config.train.precision = Precision::Bf16;
        let parameters = Parameters::new(&config.model);
        let bytes_a_weight = |config: &RunConfig| {
            let bytes = bytes_on_gpu(config, &state_of_rank(config));
            let of_experts = parameters.experts()[0] as f64;
            (bytes / parameters.total() as f64, (18.0 * parameters.total() as f64 - bytes) / of_experts)
        };
        assert_eq!(bytes_a_weight(&config), (18.0, 0.0));
        config.train.offload_optimizer = true;
        assert_eq!(bytes_a_weight(&config).0, 6.0);
        config.train.offload_optimizer = false;
        config.train.expert_gradients = GradientType::Bf16;
        assert_eq!(bytes_a_weight(&config).1, 2.0);
    }
}
