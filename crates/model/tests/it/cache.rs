//! The memory of KV caches: a sliding window keeps only its tokens, latent attention only the latent vectors.

use moeworks_gpu::Gpu;
use moeworks_model::KvCache;
use moeworks_model::{BatchError, LatentAttention, ModelConfig, QkNorm, Variant};
use moeworks_ops::Context;
use moeworks_tensor::DType;
use proptest::prelude::*;

use crate::common::{model, random_ids, small_config};
use crate::decoder::check_cache;

/// Three layers, the second of which has full attention.
fn windowed(window: usize) -> ModelConfig {
    let variant = Variant { window, full_attention_layers: vec![1], ..Variant::default() };
    ModelConfig { variant, max_seq_len: 1000, ..small_config() }
}

/// Heads of 4 plain and 4 rotated elements, values of 5.
fn latent(query_rank: usize, kv_rank: usize) -> ModelConfig {
    let latent = LatentAttention { query_rank, kv_rank, plain_dim: 4, rotary_dim: 4 };
    let variant = Variant { latent: Some(latent), value_dim: 5, ..Variant::default() };
    ModelConfig { qk_norm: QkNorm::None, num_kv_heads: 4, variant, max_seq_len: 1000, ..small_config() }
}

#[test]
fn a_window_moves_along_without_changing_a_logit() {
    for window in [1, 2, 5, 64] {
        check_cache(windowed(window), DType::F32, &[3, 1, 1, 1, 1, 7, 1, 1, 150, 1, 1, 20, 1], 1e-5);
    }
    check_cache(windowed(3), DType::BF16, &[7, 1, 1, 1, 5, 1], 0.05);
}

#[test]
fn narrow_vectors_give_the_logits_of_keys_and_values() {
    for (query_rank, kv_rank) in [(0, 6), (7, 6), (7, 40)] {
        check_cache(latent(query_rank, kv_rank), DType::F32, &[9, 1, 1, 2, 1, 30, 1, 100, 3, 1], 2e-5);
    }
    check_cache(latent(7, 16), DType::BF16, &[7, 1, 1, 1, 5, 1], 0.05);
    let mut both = latent(0, 6);
    both.variant.window = 4;
    check_cache(both, DType::F32, &[9, 1, 1, 1, 1, 1, 30, 1, 1], 2e-5);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn any_pieces_give_the_same(
        window in 1_usize..12, kv_rank in 1_usize..12, pieces in prop::collection::vec(1_usize..20, 1..12),
    ) {
        check_cache(windowed(window), DType::F32, &pieces, 2e-5);
        check_cache(latent(0, kv_rank), DType::F32, &pieces, 5e-5);
    }
}

/// Returns the bytes of a cache after `len` tokens at once and then `len` one by one.
fn bytes(config: ModelConfig, len: usize) -> usize {
    let ctx = Context::cpu(2);
    let (decoder, weights) = model(&ctx, config);
    let ids = random_ids(50, len, 3);
    let mut cache = KvCache::new(decoder.config());
    decoder.forward_cached(&ctx, &weights, &mut cache, &ids, None).unwrap();
    ids.iter().for_each(|&id| drop(decoder.forward_cached(&ctx, &weights, &mut cache, &[id], None).unwrap()));
    assert_eq!(cache.len(), 2 * len);
    cache.num_bytes()
}

#[test]
fn no_more_is_kept_than_is_needed() {
    let row = |config: &ModelConfig| 4 * 2 * config.num_kv_heads * config.head_dim;
    let all = small_config();
    assert_eq!(bytes(ModelConfig { max_seq_len: 1000, ..all.clone() }, 256), 3 * 512 * row(&all));
    // Two of three layers keep at most two windows.
    assert_eq!(bytes(windowed(40), 256), (512 + 2 * 80) * row(&all));
    // A latent vector of 6 and a rotated part of 4 per token and layer.
    assert_eq!(bytes(latent(0, 6), 256), 3 * 512 * 4 * (6 + 4));
}

#[test]
fn a_cache_is_cut_where_the_window_still_reaches() {
    let ctx = Context::cpu(2);
    let (decoder, weights) = model(&ctx, windowed(40));
    let ids = random_ids(50, 200, 3);
    let full = decoder.logits(&ctx, &weights, &ids, 1, None).unwrap();
    let mut cache = KvCache::new(decoder.config());
    decoder.forward_cached(&ctx, &weights, &mut cache, &ids[..100], None).unwrap();
    assert_eq!(cache.truncate(120), 100);
    // After a pass over many tokens all of them are kept.
    assert_eq!(cache.truncate(30), 30);
    for &id in &ids[30..200] {
        decoder.forward_cached(&ctx, &weights, &mut cache, &[id], None).unwrap();
    }
    assert_eq!(cache.truncate(199), 199);
    let logits = decoder.forward_cached(&ctx, &weights, &mut cache, &ids[199..], None).unwrap();
    crate::common::assert_close("logits", logits.f32s(), &full.f32s()[199 * 50..], 1e-5);
    // The tokens in sight of position 20 are gone.
    assert_eq!(cache.truncate(20), 0);
    assert!(cache.is_empty());
    let logits = decoder.forward_cached(&ctx, &weights, &mut cache, &ids, None).unwrap();
    crate::common::assert_close("logits", logits.f32s(), &full.f32s()[199 * 50..], 1e-5);
}

/// Checks that sequences that grow together, by pieces of these lengths, have the logits that each has alone.
fn check_together(ctx: &Context, config: ModelConfig, count: usize, pieces: &[usize], tolerance: f32) {
    let (decoder, weights) = model(ctx, config);
    let texts: Vec<Vec<u32>> = (0..count as u64).map(|i| random_ids(50, pieces.iter().sum(), i)).collect();
    let mut together = KvCache::with_sequences(decoder.config(), count);
    let mut alone: Vec<_> = texts.iter().map(|_| KvCache::new(decoder.config())).collect();
    let mut start = 0;
    for &piece in pieces {
        let of_text = |text: &Vec<u32>| text[start..start + piece].to_vec();
        let ids: Vec<u32> = texts.iter().flat_map(of_text).collect();
        let all = decoder.forward_cached(ctx, &weights, &mut together, &ids, None).unwrap().to_f32_vec();
        assert_eq!((all.len(), together.len()), (count * 50, start + piece));
        for ((cache, text), logits) in alone.iter_mut().zip(&texts).zip(all.chunks(50)) {
            let expected = decoder.forward_cached(ctx, &weights, cache, &of_text(text), None).unwrap().to_f32_vec();
            for (x, y) in logits.iter().zip(expected) {
                let what = format!("{count} sequences of {:?}", decoder.config().variant.latent);
                assert!(
                    (x - y).abs() < tolerance,
                    "{what}, after {start} + {piece} tokens on {}: {x}, {y}",
                    ctx.describe()
                );
            }
        }
        start += piece;
    }
}

#[test]
fn sequences_that_go_on_together_have_the_logits_of_each_alone() {
    let pieces = [5, 1, 1, 4, 1, 60, 1, 1, 3, 1];
    for ctx in [Context::cpu(2), Context::cpu(1)] {
        for count in [1, 2, 9] {
            check_together(&ctx, windowed(40), count, &pieces, 2e-5);
            check_together(&ctx, latent(0, 6), count, &pieces, 5e-5);
        }
    }
    let Ok(gpu) = Gpu::for_a_test() else {
        println!("SKIPPED: sequences together on a GPU: there is none, nor an emulation of one");
        return;
    };
    let ctx = Context::cpu(2).with_gpu(gpu);
    check_together(&ctx, ModelConfig { max_seq_len: 1000, ..small_config() }, 3, &[5, 1, 1, 60, 1, 1], 1e-4);
    // Latent vectors that the GPU attends to, and such as the host does.
    for kv_rank in [6, 260] {
        check_together(&ctx, latent(7, kv_rank), 3, &[5, 1, 1, 60, 1, 1], 1e-4);
    }
}

#[test]
fn sequences_that_go_on_together_are_equally_long() {
    let ctx = Context::cpu(1);
    let (decoder, weights) = model(&ctx, small_config());
    let mut cache = KvCache::with_sequences(decoder.config(), 3);
    let error = decoder.forward_cached(&ctx, &weights, &mut cache, &[1, 2, 3, 4], None).unwrap_err();
    assert_eq!(error.to_string(), "prompt has 4 ids, but 3 sequences of 2 tokens need 6");
    assert_eq!(decoder.forward_cached(&ctx, &weights, &mut cache, &[], None).unwrap_err(), BatchError::Empty);
    assert_eq!((cache.len(), cache.num_sequences()), (0, 3));
}
