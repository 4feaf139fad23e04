//! Batch invariance of whole models: a token's logits have the same bits alone, in a batch, and in any division of
//! its text into passes.

use moeworks_model::{Decoder, DecoderWeights, KvCache, LatentAttention, ModelConfig, QkNorm, Variant, WeightRole};
use moeworks_moe::ScoreOrder;
use moeworks_ops::{Context, Isa, quantized};
use moeworks_tensor::DType;

use crate::common::{model, random_ids};

fn invariant_contexts() -> impl Iterator<Item = Context> {
    Isa::available().into_iter().map(|isa| Context::cpu(2).with_isa(isa).with_batch_invariance(true))
}

/// A model with OLMoE's kind of layers, wide enough for weights in blocks of 32.
fn olmoe() -> ModelConfig {
    ModelConfig {
        vocab_size: 200,
        width: 64,
        num_layers: 2,
        num_heads: 2,
        num_kv_heads: 2,
        head_dim: 32,
        qk_norm: QkNorm::Whole,
        num_experts: 16,
        top_k: 4,
        expert_width: 32,
        score_order: ScoreOrder::SoftmaxThenTopK,
        normalize_weights: false,
        tie_embeddings: false,
        max_seq_len: 2000,
        init_std: 0.1,
        ..ModelConfig::default()
    }
}

/// A model with grouped query heads, a window in the first layer, a shared expert and a dense layer.
fn windowed() -> ModelConfig {
    let variant = Variant { window: 40, full_attention_layers: vec![1], dense_layers: vec![0], ..Variant::default() };
    ModelConfig { num_kv_heads: 1, shared_width: 32, dense_width: 64, variant, ..olmoe() }
}

/// A model with latent attention, which otherwise up-projects keys and values depending on the number of queries.
fn latent() -> ModelConfig {
    let latent = LatentAttention { query_rank: 32, kv_rank: 32, plain_dim: 16, rotary_dim: 16 };
    let variant = Variant { latent: Some(latent), value_dim: 32, ..Variant::default() };
    ModelConfig { qk_norm: QkNorm::None, variant, ..olmoe() }
}

fn configs() -> [(&'static str, ModelConfig); 3] {
    [("olmoe", olmoe()), ("windowed", windowed()), ("latent", latent())]
}

/// Weights with matrices of a type; the embedding is never in blocks.
fn in_type(ctx: &Context, exact: &DecoderWeights, dtype: DType) -> DecoderWeights {
    if !dtype.is_quantized() {
        return exact.compute_copy(ctx, dtype);
    }
    let mut weights = exact.compute_copy(ctx, DType::F32);
    let roles = weights.roles();
    for ((_, tensor), role) in weights.tensors_mut().into_iter().zip(roles) {
        if role.is_product() && role != WeightRole::Embedding {
            *tensor = quantized::quantize(ctx, tensor, dtype);
        }
    }
    weights
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// Returns the logits after each piece of a text.
fn logits_in_pieces(
    ctx: &Context,
    decoder: &Decoder,
    weights: &DecoderWeights,
    ids: &[u32],
    pieces: &[usize],
) -> Vec<Vec<u32>> {
    let mut cache = KvCache::new(decoder.config());
    let mut of_piece = |&len: &usize| {
        let start = cache.len();
        bits(decoder.forward_cached(ctx, weights, &mut cache, &ids[start..start + len], None).expect("a piece").f32s())
    };
    pieces.iter().map(&mut of_piece).collect()
}

#[test]
fn a_text_has_the_same_logits_in_any_pieces() {
    let pieces: [&[usize]; 2] = [&[3, 1, 17, 1, 1, 250, 16, 1, 12, 8], &[290, 20]];
    let ids = random_ids(200, pieces[0].iter().sum(), 3);
    for ctx in invariant_contexts() {
        for (name, config) in configs() {
            let (decoder, exact) = model(&ctx, config);
            for dtype in [DType::F32, DType::BF16, DType::Q4] {
                let weights = in_type(&ctx, &exact, dtype);
                let one_by_one = logits_in_pieces(&ctx, &decoder, &weights, &ids, &vec![1; ids.len()]);
                for pieces in pieces {
                    let mut end = 0;
                    for (len, found) in pieces.iter().zip(logits_in_pieces(&ctx, &decoder, &weights, &ids, pieces)) {
                        end += len;
                        assert!(
                            found == one_by_one[end - 1],
                            "{name} {dtype:?} {:?}: token {end} in {pieces:?}",
                            ctx.isa()
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_text_has_the_same_logits_alone_and_in_any_batch() {
    const LEN: usize = 9;
    let ids = random_ids(200, 17 * LEN, 5);
    for ctx in invariant_contexts() {
        for (name, config) in configs() {
            let (decoder, exact) = model(&ctx, config);
            for dtype in [DType::F32, DType::BF16, DType::Q4] {
                let weights = in_type(&ctx, &exact, dtype);
                let alone = logits_in_pieces(&ctx, &decoder, &weights, &ids, &[LEN - 2, 1, 1]);
                for count in [4, 12, 16, 17] {
                    let mut cache = KvCache::with_sequences(decoder.config(), count);
                    for (step, expected) in [0..LEN - 2, LEN - 2..LEN - 1, LEN - 1..LEN].into_iter().zip(&alone) {
                        let batch: Vec<u32> =
                            ids.chunks(LEN).take(count).flat_map(|ids| ids[step.clone()].to_vec()).collect();
                        let logits = decoder.forward_cached(&ctx, &weights, &mut cache, &batch, None).expect("a step");
                        let first = bits(&logits.f32s()[..expected.len()]);
                        assert!(
                            first == *expected,
                            "{name} {dtype:?} {:?}: tokens {step:?} among {count} texts",
                            ctx.isa()
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_full_pass_has_the_logits_of_a_text_token_by_token() {
    let ids = random_ids(200, 40, 4);
    for ctx in invariant_contexts() {
        for (name, config) in configs().into_iter().filter(|(name, _)| *name != "latent") {
            let (decoder, exact) = model(&ctx, config);
            for dtype in [DType::F32, DType::BF16] {
                let weights = in_type(&ctx, &exact, dtype);
                let full = decoder.logits(&ctx, &weights, &ids, 1, None).expect("a text");
                let one_by_one = logits_in_pieces(&ctx, &decoder, &weights, &ids, &vec![1; ids.len()]);
                let found: Vec<Vec<u32>> = full.f32s().chunks(200).map(bits).collect();
                assert!(found == one_by_one, "{name} {dtype:?} {:?}", ctx.isa());
            }
        }
    }
}
