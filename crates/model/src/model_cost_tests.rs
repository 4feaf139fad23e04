use moeworks_plan::Tokens;

use super::*;
use crate::config::{ActivationKind, EncoderConfig, LatentAttention, PositionKind, QkNorm, Variant};

/// OLMoE-1B-7B: 6.92 B parameters, 1.28 B active (2409.02060, table 1 and its checkpoint's index).
#[test]
fn olmoe_has_its_published_size() {
    let config = ModelConfig {
        vocab_size: 50_304,
        width: 2048,
        num_layers: 16,
        num_heads: 16,
        num_kv_heads: 16,
        head_dim: 128,
        qk_norm: QkNorm::Whole,
        num_experts: 64,
        top_k: 8,
        expert_width: 1024,
        normalize_weights: false,
        ..ModelConfig::default()
    };
    let parameters = Parameters::new(&config);
    assert_eq!(parameters.total(), 6_919_161_856);
    assert_eq!((parameters.active() as f64 / 1e7).round(), 128.0);
}

/// Mixtral 8x7B: 46.7 B parameters, 12.9 B active (2401.04088).
#[test]
fn mixtral_has_its_published_size() {
    let config = ModelConfig {
        vocab_size: 32_000,
        width: 4096,
        num_layers: 32,
        num_heads: 32,
        num_kv_heads: 8,
        head_dim: 128,
        qk_norm: QkNorm::None,
        num_experts: 8,
        top_k: 2,
        expert_width: 14_336,
        ..ModelConfig::default()
    };
    let parameters = Parameters::new(&config);
    assert_eq!(parameters.total(), 46_702_792_704);
    assert_eq!((parameters.active() as f64 / 1e8).round(), 129.0);
}

/// Qwen3-235B-A22B trains at 148.3 GFLOP per token at sequence length 4,096 (Megatron-Core MoE report, 2603.07685, by
/// its formula).
#[test]
fn qwen3_235b_costs_its_published_flops() {
    let config = ModelConfig {
        vocab_size: 151_936,
        width: 4096,
        num_layers: 94,
        num_heads: 64,
        num_kv_heads: 4,
        head_dim: 128,
        num_experts: 128,
        top_k: 8,
        expert_width: 1536,
        ..ModelConfig::default()
    };
    let gflops = training_flops_per_token(&config, 4096) / 1e9;
    assert!((gflops - 148.33).abs() < 0.5, "{gflops}");
}

/// DeepSeek-V3: 671 B parameters, 37 B active (2412.19437), with the sizes of its configuration file and without the
/// multi-token-prediction layer, whose 14 B are counted separately there.
#[test]
fn deepseek_v3_has_its_published_size() {
    let latent = LatentAttention { query_rank: 1536, kv_rank: 512, plain_dim: 128, rotary_dim: 64 };
    let config = ModelConfig {
        vocab_size: 129_280,
        width: 7168,
        num_layers: 61,
        num_heads: 128,
        num_kv_heads: 128,
        head_dim: 192,
        qk_norm: QkNorm::None,
        num_experts: 256,
        top_k: 8,
        expert_width: 2048,
        shared_width: 2048,
        dense_width: 18_432,
        variant: Variant {
            latent: Some(latent),
            value_dim: 128,
            dense_layers: vec![0, 1, 2],
            ..ModelConfig::default().variant
        },
        ..ModelConfig::default()
    };
    let parameters = Parameters::new(&config);
    assert_eq!((parameters.total() as f64 / 1e9).round(), 671.0);
    assert_eq!((parameters.active() as f64 / 1e9).round(), 37.0 + 1.0, "with the embedding's 0.9 B");
    assert_eq!(kv_cache_bytes(&config, 1), 61 * (512 + 64) * 4);
}

/// GPT-OSS-20B: 20.91 B parameters, 3.61 B active (its model card, table 1).
#[test]
fn gpt_oss_20b_has_its_published_size_with_all_biases() {
    let config = ModelConfig {
        vocab_size: 201_088,
        width: 2880,
        num_layers: 24,
        num_heads: 64,
        num_kv_heads: 8,
        head_dim: 64,
        qk_norm: QkNorm::None,
        num_experts: 32,
        top_k: 4,
        expert_width: 2880,
        variant: Variant {
            qkv_bias: true,
            output_bias: true,
            sinks: true,
            router_bias: true,
            feed_forward_bias: true,
            ..ModelConfig::default().variant
        },
        ..ModelConfig::default()
    };
    let parameters = Parameters::new(&config);
    assert_eq!((parameters.total() as f64 / 1e7).round(), 2091.0);
    // The card leaves out the embedding, of which a token needs one row.
    let embedding = 201_088 * 2880;
    assert_eq!(((parameters.active() - embedding) as f64 / 1e7).round(), 361.0);
}

#[test]
fn dense_layers_and_shared_experts_are_counted() {
    let config = ModelConfig {
        vocab_size: 100,
        moe_every: 2,
        shared_width: 64,
        activation: ActivationKind::Gelu,
        tie_embeddings: true,
        ..ModelConfig::default()
    };
    let parameters = Parameters::new(&config);
    let part = |name: &str| parameters.parts.iter().find(|part| part.name == name).map_or(0, |part| part.total);
    assert_eq!(part("dense feed-forward"), 2 * 2 * 1024 * 256);
    assert_eq!(part("shared experts"), 2 * 2 * 64 * 256);
    assert_eq!(part("experts"), 2 * 8 * 2 * 512 * 256);
    assert_eq!(part("output projection"), 0);
    assert_eq!(parameters.in_products() - (parameters.active() - part("embedding") - part("norms")), 100 * 256);
}

/// The memory of a step on 4,096 tokens.
fn memory(
    config: &ModelConfig,
    precision: Precision,
    checkpoint_layers: bool,
    expert_gradient_bytes: usize,
) -> RankMemory {
    let workload = Workload { tokens: Tokens::OfEachRank(4096), precision, zero: 0, expert_gradient_bytes };
    memory_on_one_rank(config, &WeightTable::new(config), &workload, checkpoint_layers)
}

#[test]
fn checkpointing_keeps_less_and_bf16_keeps_less() {
    let config = ModelConfig { vocab_size: 256, ..ModelConfig::default() };
    let plain = memory(&config, Precision::F32, false, 4);
    assert!(memory(&config, Precision::F32, true, 4).activations < plain.activations / 2.0);
    assert!(memory(&config, Precision::Bf16, false, 4).activations < plain.activations);
}

#[test]
fn a_rank_alone_holds_all_parameters() {
    let config = ModelConfig { vocab_size: 256, moe_every: 2, ..ModelConfig::default() };
    let parameters = Parameters::new(&config).total() as f64;
    let memory = memory(&config, Precision::Bf16, false, 4);
    assert_eq!([memory.weights, memory.gradients, memory.optimizer], [6.0, 4.0, 8.0].map(|bytes| bytes * parameters));
    assert_eq!(memory.received, 0.0);
}

#[test]
fn gradients_of_experts_in_bf16_take_half_of_theirs() {
    let config = ModelConfig { vocab_size: 256, ..ModelConfig::default() };
    let experts = Parameters::new(&config).experts()[0];
    assert!(experts > 0);
    let [plain, halved] = [4, 2].map(|bytes| memory(&config, Precision::Bf16, false, bytes).total());
    assert_eq!(plain - halved, 2.0 * experts as f64);
}

#[test]
fn frozen_weights_have_neither_gradients_nor_moments() {
    let config = ModelConfig { vocab_size: 256, ..ModelConfig::default() };
    let mut table = WeightTable::new(&config);
    table.freeze(&["*.mlp.experts.*".to_owned(), "model.embed_tokens.*".to_owned()]).unwrap();
    let trained = Parameters::from_table(&config, &table).trainable() as f64;
    let workload =
        Workload { tokens: Tokens::OfEachRank(1), precision: Precision::F32, zero: 0, expert_gradient_bytes: 4 };
    let memory = memory_on_one_rank(&config, &table, &workload, false);
    assert_eq!([memory.gradients.round(), memory.optimizer.round()], [4.0 * trained, 8.0 * trained]);
    assert_eq!(memory.weights, 4.0 * Parameters::new(&config).total() as f64);
}

/// A tree of 8 clusters of 8 experts, two of them open, costs 24 products of the model's width instead of 64.
#[test]
fn a_tree_of_clusters_is_counted_by_those_that_a_token_opens() {
    let mut config =
        ModelConfig { vocab_size: 100, width: 32, num_layers: 2, num_experts: 64, ..ModelConfig::default() };
    let flat = Parameters::new(&config);
    config.router.kind = moeworks_moe::RouterKind::Hierarchical;
    (config.router.schemes.hierarchical.tree, config.router.schemes.hierarchical.beam) = ("8".to_owned(), 2);
    let tree = Parameters::new(&config);
    assert_eq!(routing_flops_per_token(&config), (2 * 24 * 32, 2 * 64 * 32));
    assert_eq!(tree.total() - flat.total(), 2 * 8 * 32);
    assert_eq!(flat.active() - tree.active(), 2 * (64 - 24) * 32);
    assert_eq!(flat.in_products() - tree.in_products(), 2 * (64 - 24) * 32);
}

#[test]
fn what_is_kept_of_a_sequence_depends_on_windows_and_narrow_vectors() {
    let plain = ModelConfig { num_layers: 3, num_kv_heads: 2, head_dim: 8, ..ModelConfig::default() };
    assert_eq!(kv_cache_bytes(&plain, 100), 4 * 3 * 100 * 2 * 2 * 8);
    let mut windowed = plain.clone();
    (windowed.variant.window, windowed.variant.full_attention_layers) = (40, vec![1]);
    assert_eq!(kv_cache_bytes(&windowed, 100), 4 * (100 + 2 * 40) * 2 * 2 * 8);
    assert_eq!(kv_cache_bytes(&windowed, 10), kv_cache_bytes(&plain, 10));
    let mut latent = plain;
    latent.variant.latent = Some(LatentAttention { query_rank: 0, kv_rank: 6, plain_dim: 4, rotary_dim: 4 });
    assert_eq!(kv_cache_bytes(&latent, 100), 4 * 3 * 100 * (6 + 4));
}

/// An encoder of 1 layer and a decoder of 2, all dense, by hand.
#[test]
fn a_source_passes_the_encoder_and_an_answer_the_decoder() {
    let positions = PositionKind::Relative { num_buckets: 8, max_distance: 12 };
    let encoder = EncoderConfig { num_layers: 1, dense_layers: vec![0], start_id: 0 };
    let config = ModelConfig {
        vocab_size: 10,
        width: 4,
        num_layers: 2,
        num_heads: 2,
        num_kv_heads: 2,
        head_dim: 3,
        qk_norm: QkNorm::None,
        num_experts: 0,
        dense_width: 5,
        activation: ActivationKind::Relu,
        tie_embeddings: true,
        variant: Variant { positions, encoder: Some(encoder), ..Variant::default() },
        ..ModelConfig::default()
    };
    let (attention, hidden) = (4 * 4 * 6, 2 * 4 * 5);
    let of_source = attention + hidden + 2 * attention / 2;
    let of_answer = 2 * (attention + attention / 2 + hidden) + 10 * 4;
    let pairs = 7 * 7 + 2 * (3 * 3) / 2 + 2 * 3 * 7;
    let flops = 6 * (7 * of_source + 3 * of_answer + pairs * 2 * (3 + 3));
    let found = training_flops_per_answer_token(&config, 7, 3);
    assert!((3.0 * found - f64::from(flops)).abs() < 1e-6, "{found}, {flops}");
}
