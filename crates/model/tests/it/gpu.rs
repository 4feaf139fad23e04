//! Traffic between the host and a GPU: lists of tokens, counts and sums, and nothing that grows with the model.

use moeworks_gpu::{Gpu, Traffic};
use moeworks_model::{
    Decoder, DecoderWeights, FeedForwardWeights, GradTarget, KvCache, LatentAttention, ModelConfig, PassOptions,
    QkNorm, Variant,
};
use moeworks_moe::MoeWeights;
use moeworks_ops::Context;
use moeworks_ops::linear::Write;
use moeworks_ops::sampling::{Filters, draw_each};
use moeworks_tensor::DType;

use crate::common::{batch, model, next_ids, random_ids, small_config};

const SEQ_LEN: usize = 16;

/// Returns a context with a GPU or its emulation; prints that there is none otherwise.
fn with_gpu() -> Option<Context> {
    let gpu =
        Gpu::for_a_test().inspect_err(|missing| println!("SKIPPED: what passes to and from a GPU: {missing}")).ok()?;
    Some(Context::cpu(2).with_gpu(gpu))
}

fn traffic(ctx: &Context) -> Traffic {
    ctx.gpu().expect("a GPU").traffic()
}

/// A model with an MoE in each of its two layers; `times` scales every size except those of tokens and experts.
fn config(times: usize) -> ModelConfig {
    let small = small_config();
    ModelConfig {
        vocab_size: 50 * times,
        width: 32 * times,
        expert_width: 24 * times,
        head_dim: 8 * times,
        num_layers: 2,
        moe_every: 1,
        num_experts: 5,
        ..small
    }
}

/// Returns the copies of the second of two equal training steps.
fn of_step(ctx: &Context, config: ModelConfig) -> Traffic {
    let (decoder, weights) = model(ctx, config);
    let ids = random_ids(50, 4 * SEQ_LEN, 1);
    let targets = next_ids(&ids, SEQ_LEN);
    let mut grads = weights.zeros_like(ctx);
    let options = PassOptions { balance_coef: 0.01, z_coef: 0.001, grad_scale: 0.02, ..PassOptions::default() };
    let mut step = |ctx: &Context| {
        let before = traffic(ctx);
        let batch = batch(&ids, &targets, SEQ_LEN);
        decoder
            .forward_backward(ctx, &weights, &[batch], &options, GradTarget::new(Write::Replace, &mut grads))
            .expect("a step")
            .remove(0);
        traffic(ctx).since(&before)
    };
    step(ctx);
    step(ctx)
}

#[test]
fn what_a_training_step_copies_to_and_from_a_gpu_does_not_grow_with_the_model() {
    let Some(ctx) = with_gpu() else { return };
    let (small, large) = (of_step(&ctx, config(1)), of_step(&ctx, config(3)));
    assert_eq!(small, large);
    // For each layer the counts and the sums of scores, logits and choices; once the rows of the loss.
    assert!(small.downloads <= 2 * 4 + 1, "{small:?}");
    // Ids, targets, positions and the order of ids, four bytes per token each; the loss takes three numbers per
    // token.
    let tokens = 4 * SEQ_LEN as u64;
    assert!(small.uploaded_bytes <= 6 * 4 * tokens && small.downloaded_bytes <= 3 * 4 * tokens + 1024, "{small:?}");
}

#[test]
fn nor_does_it_with_latent_attention_or_with_sinks_or_with_queries_that_are_cut() {
    let Some(ctx) = with_gpu() else { return };
    let of = |times: usize, variant: Variant| ModelConfig {
        num_kv_heads: 4,
        qk_norm: QkNorm::None,
        variant: Variant { value_dim: 8 * times, ..variant },
        ..config(times)
    };
    let latent = |times: usize| {
        let sizes = LatentAttention { query_rank: 0, kv_rank: 12 * times, plain_dim: 4 * times, rotary_dim: 4 * times };
        of(times, Variant { latent: Some(sizes), ..Variant::default() })
    };
    let sinks = |times| of(times, Variant { sinks: true, ..Variant::default() });
    let cut = |times| of(times, Variant { clip_qkv: 0.5, ..Variant::default() });
    let copies =
        |traffic: Traffic| (traffic.uploads, traffic.uploaded_bytes, traffic.downloads, traffic.downloaded_bytes);
    let plain = copies(of_step(&ctx, config(1)));
    for config in [&latent as &dyn Fn(usize) -> ModelConfig, &sinks, &cut] {
        for times in [1, 3] {
            assert_eq!(copies(of_step(&ctx, config(times))), plain, "{times}: {:?}", config(1).variant);
        }
    }
}

/// Returns the copies of the third token after a prompt, up to its sampling.
fn of_token(ctx: &Context, decoder: &Decoder, weights: &DecoderWeights) -> Traffic {
    let mut cache = KvCache::new(decoder.config());
    let filters = Filters { temperature: 1.0, top_k: 0, top_p: 0.9, min_p: 0.0 };
    let mut extend = |ids: &[u32]| {
        let before = traffic(ctx);
        let logits = decoder.forward_cached(ctx, weights, &mut cache, ids, None).expect("a token");
        let drawn = draw_each(ctx, &logits, &filters, &[0.5]).wait()[0];
        assert!(drawn.id < 50 && !drawn.has_nan, "{drawn:?}");
        traffic(ctx).since(&before)
    };
    extend(&[1, 2, 3, 4, 5]);
    extend(&[6]);
    extend(&[7])
}

#[test]
fn a_latent_cache_that_the_host_attends_to_does_not_pass_for_each_token() {
    let Some(ctx) = with_gpu() else { return };
    // Rows of 264 numbers, more than the attention kernels support.
    let sizes = LatentAttention { query_rank: 0, kv_rank: 260, plain_dim: 4, rotary_dim: 4 };
    let variant = Variant { latent: Some(sizes), value_dim: 8, ..Variant::default() };
    let config = ModelConfig { num_kv_heads: 4, qk_norm: QkNorm::None, variant, max_seq_len: 500, ..config(1) };
    let (decoder, weights) = model(&ctx, config);
    let mut cache = KvCache::new(decoder.config());
    let mut bytes_of = |ids: &[u32]| {
        let before = traffic(&ctx);
        drop(decoder.forward_cached(&ctx, &weights, &mut cache, ids, None).expect("tokens").to_f32_vec());
        traffic(&ctx).since(&before).downloaded_bytes
    };
    bytes_of(&random_ids(50, 5, 1));
    bytes_of(&[1]);
    let after_few = bytes_of(&[2]);
    bytes_of(&random_ids(50, 300, 2));
    bytes_of(&[1]);
    assert_eq!(bytes_of(&[2]), after_few);
}

#[test]
fn a_decoding_step_waits_for_a_gpu_once() {
    let Some(ctx) = with_gpu() else { return };
    let (decoder, weights) = model(&ctx, config(1));
    let token = of_token(&ctx, &decoder, &weights);
    // The next id comes back with a bit that tells whether there was a NaN. The id and its position go to the GPU;
    // the head's row is known.
    assert_eq!((token.downloads, token.downloaded_bytes), (1, 4), "{token:?}");
    assert!(token.uploads <= 3 && token.uploaded_bytes <= 12, "{token:?}");
}

/// Latent vectors in bf16, with rows that the kernels of other heads support, and wider ones.
#[test]
fn nor_does_it_wait_more_often_with_latent_attention_in_bf16() {
    let Some(ctx) = with_gpu() else { return };
    for kv_rank in [28, 260] {
        let sizes = LatentAttention { query_rank: 0, kv_rank, plain_dim: 4, rotary_dim: 4 };
        let variant = Variant { latent: Some(sizes), value_dim: 8, ..Variant::default() };
        let config = ModelConfig { num_kv_heads: 4, qk_norm: QkNorm::None, variant, ..config(1) };
        let (decoder, weights) = model(&ctx, config);
        let token = of_token(&ctx, &decoder, &weights.compute_copy(&ctx, DType::BF16));
        assert_eq!((token.downloads, token.downloaded_bytes), (1, 4), "{token:?}");
        assert!(token.uploads <= 3 && token.uploaded_bytes <= 12, "{token:?}");
    }
}

#[test]
fn a_decoding_step_is_two_graphs_and_a_draw_from_the_second_on() {
    let Some(ctx) = with_gpu() else { return };
    let (decoder, weights) = model(&ctx, config(1));
    let token = of_token(&ctx, &decoder, &weights);
    assert_eq!((token.launches, token.graphs), (1, 2), "{token:?}");
}

#[test]
fn tokens_from_graphs_have_the_logits_of_a_pass_over_all() {
    let Some(ctx) = with_gpu() else { return };
    let (decoder, weights) = model(&ctx, ModelConfig { max_seq_len: 128, ..config(1) });
    let ids = random_ids(50, 80, 3);
    let mut cache = KvCache::new(decoder.config());
    decoder.forward_cached(&ctx, &weights, &mut cache, &ids[..3], None).expect("a prompt");
    // Beyond 64 tokens, where the cache moves to other memory.
    for len in 4..=ids.len() {
        let next =
            decoder.forward_cached(&ctx, &weights, &mut cache, &ids[len - 1..len], None).expect("a token").to_f32_vec();
        if len % 13 != 0 && len != 65 {
            continue;
        }
        let whole = decoder
            .forward_cached(&ctx, &weights, &mut KvCache::new(decoder.config()), &ids[..len], None)
            .expect("a text");
        for (next, whole) in next.iter().zip(whole.to_f32_vec()) {
            assert!((next - whole).abs() < 1e-4, "after {len} tokens {next} is {whole} in a pass over all");
        }
    }
}

#[test]
fn experts_that_stay_in_the_host_give_the_same_tokens_and_some_are_foreseen() {
    let Some(ctx) = with_gpu() else { return };
    let config = ModelConfig { num_layers: 6, ..config(1) };
    let (decoder, weights) = model(&Context::cpu(2), config.clone());
    let (_, twin) = model(&Context::cpu(2), config.clone());
    let of_expert = |e: &MoeWeights| (e.gate_up.num_bytes() + e.down.num_bytes()) / config.num_experts;
    let FeedForwardWeights::Moe(experts) = &weights.layers[0].feed_forward else { panic!("a layer of experts") };
    // A third of 30 experts fit the cache.
    let gpu = ctx.gpu().expect("a GPU").clone().with_expert_cache(10 * of_expert(experts));
    let with_room = Context::cpu(2).with_gpu(gpu.clone());
    let (mut cache, mut twin_cache) = (KvCache::new(&config), KvCache::new(&config));
    for ids in [&random_ids(50, 20, 3)[..], &[7], &[9], &[7], &[30]] {
        let found = decoder.forward_cached(&with_room, &weights, &mut cache, ids, None).expect("tokens").to_f32_vec();
        let expected = decoder.forward_cached(&ctx, &twin, &mut twin_cache, ids, None).expect("tokens").to_f32_vec();
        assert_eq!(found, expected, "after {ids:?}");
    }
    let stats = gpu.expert_cache_stats().expect("a cache");
    // The prompt went to all experts; each of four tokens went to as many as it may in each layer.
    assert_eq!(stats.hits + stats.misses, (6 * (5 + 4 * config.top_k)) as u64, "{stats:?}");
    assert!(stats.misses >= 30 && stats.prefetch_hits > 0 && stats.prefetches >= stats.prefetch_hits, "{stats:?}");
    for layer in &weights.layers {
        let FeedForwardWeights::Moe(experts) = &layer.feed_forward else { panic!("a layer of experts") };
        assert!(experts.gate_up.is_in_host() && experts.down.is_in_host());
    }
}
