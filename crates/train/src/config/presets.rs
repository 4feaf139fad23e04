//! Named starting points: model shapes that work according to the literature, with suitable training settings.

use moeworks_model::{ActivationKind, ModelConfig, QkNorm};
use moeworks_moe::{Ramp, ScoreOrder};

use super::{ConfigError, RunConfig, TokenizerChoice, TrainConfig};

/// The names of the presets with a description of each.
pub const PRESETS: [(&str, &str); 5] = [
    ("tiny", "the default: 14 M parameters, bytes, minutes on two cores"),
    ("small", "53 M parameters, BPE, hours on a laptop"),
    ("olmoe-like", "OLMoE's shape made small: 64 experts, eight a token, no shared expert"),
    ("switch-like", "Switch Transformer's rules: one expert a token, capacity 1.25, an MoE in every second layer"),
    ("deepseek-like", "DeepSeek-MoE's shape made small: 64 narrow experts, six a token, and shared ones"),
];

/// Returns the configuration of a preset; `tiny` without a name.
pub(super) fn preset(name: Option<&str>) -> Result<RunConfig, ConfigError> {
    let (model, train, bpe) = match name {
        None | Some("tiny") => return Ok(RunConfig::default()),
        Some("small") => small(),
        Some("olmoe-like") => olmoe_like(),
        Some("switch-like") => switch_like(),
        Some("deepseek-like") => deepseek_like(),
        Some(other) => {
            let known: Vec<&str> = PRESETS.iter().map(|(name, _)| *name).collect();
            return Err(ConfigError::Preset { name: other.into(), known: known.join(", ") });
        }
    };
    let mut config = RunConfig { model, train, ..RunConfig::default() };
    if bpe > 0 {
        config.data.tokenizer = TokenizerChoice::Bpe;
        config.data.bpe_vocab_size = bpe;
    }
    Ok(config)
}

/// Returns training settings for runs of hours rather than minutes.
fn long_run() -> TrainConfig {
    TrainConfig {
        steps: 4000,
        seq_len: 512,
        batch_size: 8,
        grad_accumulation: 2,
        lr: 6e-4,
        warmup_steps: 200,
        eval_every: 250,
        eval_batches: 16,
        sample_every: 500,
        checkpoint_every: 500,
        ..TrainConfig::default()
    }
}

fn small() -> (ModelConfig, TrainConfig, usize) {
    let model = ModelConfig {
        width: 384,
        num_layers: 8,
        num_heads: 6,
        num_kv_heads: 2,
        head_dim: 64,
        num_experts: 8,
        top_k: 2,
        expert_width: 640,
        tie_embeddings: true,
        max_seq_len: 2048,
        ..ModelConfig::default()
    };
    (model, long_run(), 8192)
}

/// Muennighoff et al., "OLMoE", 2409.02060: softmax before the choice, weights not normalised, norms over the whole
/// query and key projections, balance 0.01 and z-loss 0.001.
fn olmoe_like() -> (ModelConfig, TrainConfig, usize) {
    let model = ModelConfig {
        width: 512,
        num_layers: 8,
        num_heads: 8,
        num_kv_heads: 8,
        head_dim: 64,
        qk_norm: QkNorm::Whole,
        num_experts: 64,
        top_k: 8,
        expert_width: 256,
        score_order: ScoreOrder::SoftmaxThenTopK,
        normalize_weights: false,
        norm_eps: 1e-5,
        max_seq_len: 4096,
        ..ModelConfig::default()
    };
    let train = TrainConfig { lr: 4e-4, ..long_run() };
    (model, train, 8192)
}

/// Fedus, Zoph & Shazeer, "Switch Transformers", 2101.03961: the probability itself is the weight, jitter 1e-2,
/// balance 0.01 and no z-loss.
fn switch_like() -> (ModelConfig, TrainConfig, usize) {
    let model = ModelConfig {
        width: 384,
        num_layers: 8,
        num_heads: 6,
        num_kv_heads: 6,
        head_dim: 64,
        qk_norm: QkNorm::None,
        num_experts: 16,
        top_k: 1,
        expert_width: 1536,
        moe_every: 2,
        dense_width: 1536,
        activation: ActivationKind::Relu,
        score_order: ScoreOrder::SoftmaxThenTopK,
        normalize_weights: false,
        capacity_factor: 1.25,
        jitter: Ramp::constant(1e-2),
        tie_embeddings: true,
        max_seq_len: 2048,
        ..ModelConfig::default()
    };
    let train = TrainConfig { z_coef: Ramp::constant(0.0), ..long_run() };
    (model, train, 8192)
}

/// Dai et al., "DeepSeekMoE", 2401.06066: many narrow experts, and two of them shared by all tokens.
fn deepseek_like() -> (ModelConfig, TrainConfig, usize) {
    let model = ModelConfig {
        width: 512,
        num_layers: 8,
        num_heads: 8,
        num_kv_heads: 8,
        head_dim: 64,
        num_experts: 64,
        top_k: 6,
        expert_width: 176,
        shared_width: 352,
        score_order: ScoreOrder::SoftmaxThenTopK,
        normalize_weights: false,
        max_seq_len: 4096,
        ..ModelConfig::default()
    };
    let train =
        TrainConfig { lr: 4.2e-4, balance_coef: Ramp::constant(0.001), z_coef: Ramp::constant(0.0), ..long_run() };
    (model, train, 8192)
}
