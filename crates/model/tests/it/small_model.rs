//! A small model and ids, for the tests of models and of inference.

use moeworks_model::{Decoder, DecoderWeights, ModelConfig};
use moeworks_ops::Context;
use moeworks_tensor::{Purpose, Random};

/// A small MoE model with most features switched on.
pub(crate) fn small_config() -> ModelConfig {
    ModelConfig {
        vocab_size: 50,
        width: 32,
        num_layers: 3,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 8,
        num_experts: 5,
        top_k: 2,
        expert_width: 24,
        moe_every: 2,
        dense_width: 40,
        max_seq_len: 64,
        init_std: 0.1,
        ..ModelConfig::default()
    }
}

pub(crate) fn model(ctx: &Context, config: ModelConfig) -> (Decoder, DecoderWeights) {
    let decoder = Decoder::new(config).unwrap();
    let weights = decoder.init(ctx, 7, None);
    (decoder, weights)
}

/// Returns random ids below `vocab_size`.
pub(crate) fn random_ids(vocab_size: usize, len: usize, seed: u64) -> Vec<u32> {
    let random = Random::new(seed, Purpose::Test, 0);
    (0..len as u64).map(|i| random.below(i, vocab_size as u64) as u32).collect()
}
