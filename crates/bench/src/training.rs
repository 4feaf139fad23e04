//! The speed of training a configuration on this machine, measured in a few real steps on random tokens.

use std::time::Instant;

use moeworks_model::model_cost::{memory_on_one_rank, training_flops_per_token};
use moeworks_model::{Decoder, GradTarget, ModelConfig, ParamSet, PassOptions, TokenBatch, WeightTable};
use moeworks_ops::linear::Write;
use moeworks_ops::{Context, MachineOptions, peak};
use moeworks_plan::{Precision, Tokens, Workload};
use moeworks_tensor::{DType, Purpose, Random};
use moeworks_train::config::{ConfigError, RunConfig};
use moeworks_train::optimizer::{AdamWConfig, Optimizer, UpdateScale};
use moeworks_train::{TrainError, context};

use crate::timing::median;

/// The memory that the measurement may use.
const MAX_BYTES: f64 = (2_u64 << 30) as f64;
/// The largest number of floating-point operations of a measured step: about a second on two cores.
const MAX_STEP_FLOPS: f64 = 3e11;
/// The number of timed steps, after one that is not timed.
const TIMED_STEPS: usize = 3;

/// A measured or scaled training speed.
#[derive(Clone, Debug, PartialEq)]
pub struct Speed {
    /// The number of tokens per second.
    pub tokens_per_s: f64,
    /// The share of the machine's measured peak (model FLOPs utilisation).
    pub mfu: f64,
    /// A description of the measurement for the reader.
    pub how: String,
}

/// Trains a few steps of `config`, whose vocabulary size must be set, and returns the speed. A model too large for a
/// short measurement is measured with fewer layers, tokens, words or experts, and its share of the peak is taken for
/// the whole model.
///
/// # Errors
/// [`TrainError`] where the configuration or its device cannot be used.
pub fn tokens_per_second(config: &RunConfig, machine: &MachineOptions) -> Result<Speed, TrainError> {
    let ctx = context(config, None, machine)?;
    let precision = config.train.precision;
    let dtype = if precision.has_bf16_copies() { DType::BF16 } else { DType::F32 };
    let peak_flops = peak::measure(&ctx).flops(dtype);
    let seq_len = config.train.seq_len;
    let (model, num_sequences) = shrink(&config.model, config.train.batch_size, seq_len, precision);
    let seconds = time_steps(&ctx, config, &model, num_sequences)?;
    let measured_flops = training_flops_per_token(&model, seq_len) * (num_sequences * seq_len) as f64;
    let mfu = measured_flops / seconds / peak_flops;
    let tokens_per_s = mfu * peak_flops / training_flops_per_token(&config.model, seq_len);
    let how = if model == config.model {
        format!("{TIMED_STEPS} steps of {num_sequences} sequences measured")
    } else {
        format!(
            "scaled from {TIMED_STEPS} steps with {} of {} layers, {} of {} experts, {num_sequences} sequences",
            model.num_layers, config.model.num_layers, model.num_experts, config.model.num_experts
        )
    };
    Ok(Speed { tokens_per_s, mfu, how })
}

/// Measures the bytes per second that all threads of `config` together read from memory.
///
/// # Errors
/// [`TrainError`] where the device is not there.
pub fn memory_bytes_per_s(config: &RunConfig, machine: &MachineOptions) -> Result<f64, TrainError> {
    Ok(peak::measure(&context(config, None, machine)?).read_bytes_per_s)
}

/// Finds the largest model of the same layer shape, and the number of sequences, within the limits.
fn shrink(config: &ModelConfig, batch_size: usize, seq_len: usize, precision: Precision) -> (ModelConfig, usize) {
    let mut model = config.clone();
    let mut num_sequences = batch_size;
    let fits = |model: &ModelConfig, num_sequences: usize| {
        let tokens = num_sequences * seq_len;
        let workload = Workload { tokens: Tokens::OfEachRank(tokens), precision, zero: 0, expert_gradient_bytes: 4 };
        memory_on_one_rank(model, &WeightTable::new(model), &workload, false).total() <= MAX_BYTES
            && training_flops_per_token(model, seq_len) * tokens as f64 <= MAX_STEP_FLOPS
    };
    while !fits(&model, num_sequences) {
        if num_sequences > 1 && num_sequences * seq_len > 2048 {
            num_sequences /= 2;
        } else if model.num_layers > model.moe_every {
            model.num_layers = (model.num_layers / 2).max(model.moe_every);
        } else if model.vocab_size > 4096 {
            model.vocab_size /= 2;
        } else if model.num_experts > 2 * model.top_k {
            model.num_experts /= 2;
        } else {
            break;
        }
    }
    (model, num_sequences)
}

fn time_steps(
    ctx: &Context,
    config: &RunConfig,
    model: &ModelConfig,
    num_sequences: usize,
) -> Result<f64, ConfigError> {
    let seq_len = config.train.seq_len;
    let decoder = Decoder::new(model.clone())?;
    let at = config.train.optimizer_context(ctx);
    let mut weights = decoder.init(ctx, 0, None);
    let mut compute = config.train.precision.has_bf16_copies().then(|| weights.compute_copy(&at, DType::BF16));
    let mut grads = weights.gradients(ctx, decoder.weight_table(), config.train.expert_gradients.dtype());
    let adamw = AdamWConfig { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let mut optimizer = Optimizer::new(ctx, adamw, decoder.weight_table(), &weights);
    let random = Random::new(0, Purpose::Test, 0);
    let ids: Vec<u32> =
        (0..(num_sequences * seq_len) as u64).map(|i| random.below(i, model.vocab_size as u64) as u32).collect();
    // An encoder reads as many tokens as the decoder predicts.
    let sources = if model.variant.encoder.is_some() { &ids[..] } else { &[] };
    let batch = TokenBatch { sources, inputs: &ids, targets: &ids, num_sequences, seq_len, ..TokenBatch::default() };
    let options = PassOptions { grad_scale: 1.0 / ids.len() as f32, balance_coef: 0.01, ..PassOptions::default() };
    let mut times = Vec::new();
    for _ in 0..=TIMED_STEPS {
        let start = Instant::now();
        let current = compute.as_ref().unwrap_or(&weights);
        // Random ids are in range by construction, so an error here is a bug.
        if let Err(error) =
            decoder.forward_backward(ctx, current, &[batch], &options, GradTarget::new(Write::Replace, &mut grads))
        {
            unreachable!("{error}");
        }
        let scale = UpdateScale { lr: 1e-4, grad_scale: 1.0 };
        let copy = compute.as_mut().map(|copy| copy as &mut dyn ParamSet);
        optimizer.update(&at, scale, &mut weights, &grads, copy);
        ctx.wait();
        times.push(start.elapsed().as_secs_f64());
    }
    Ok(median(times.split_off(1)))
}
