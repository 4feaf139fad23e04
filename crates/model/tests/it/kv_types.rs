//! Keys and values of a paged cache in other types than that of activations.

use moeworks_model::{
    Decoder, DecoderWeights, KvType, LatentAttention, ModelConfig, PagedKvCache, QkNorm, SequencePart, Variant,
    WantedLogits,
};
use moeworks_ops::{Context, Isa};
use moeworks_tensor::DType;

use crate::common::{model, random_ids, small_config};

const BLOCK_LEN: usize = 8;

/// Models whose rows of keys and values are whole blocks of 32 numbers.
fn configs() -> [(&'static str, ModelConfig); 3] {
    let plain = ModelConfig { num_kv_heads: 2, head_dim: 16, max_seq_len: 1000, ..small_config() };
    let window = Variant { window: 10, full_attention_layers: vec![1], ..Variant::default() };
    let windowed = ModelConfig { variant: window, ..plain.clone() };
    let latent = LatentAttention { query_rank: 7, kv_rank: 24, plain_dim: 4, rotary_dim: 8 };
    let variant = Variant { latent: Some(latent), value_dim: 5, ..Variant::default() };
    let latent = ModelConfig {
        qk_norm: QkNorm::None,
        num_kv_heads: 4,
        head_dim: 12,
        variant,
        max_seq_len: 1000,
        ..small_config()
    };
    [("plain", plain), ("windowed", windowed), ("latent", latent)]
}

/// A model and what its passes are made with.
struct Passes<'a> {
    ctx: &'a Context,
    decoder: &'a Decoder,
    weights: &'a DecoderWeights,
}

impl Passes<'_> {
    /// Passes each text in pieces, all texts together, with keys and values in this type. Returns the logits behind
    /// the last token of each.
    fn last_logits(&self, texts: &[Vec<u32>], piece_lens: &[usize], kv_type: KvType) -> Vec<Vec<f32>> {
        let num_blocks = texts.iter().map(|text| text.len().div_ceil(BLOCK_LEN)).sum();
        let mut cache = PagedKvCache::new(self.decoder.config(), num_blocks, BLOCK_LEN).with_type(kv_type);
        // From the last block to the first, so that none follow each other.
        let mut free: Vec<u32> = (0..num_blocks as u32).collect();
        let mut blocks = |text: &Vec<u32>| free.split_off(free.len() - text.len().div_ceil(BLOCK_LEN));
        let blocks: Vec<Vec<u32>> =
            texts.iter().map(&mut blocks).map(|blocks| blocks.into_iter().rev().collect()).collect();
        let (mut found, mut starts) = (vec![Vec::new(); texts.len()], vec![0; texts.len()]);
        for pass in 0.. {
            let (mut parts, mut owners) = (Vec::new(), Vec::new());
            for (owner, text) in texts.iter().enumerate() {
                let start = starts[owner];
                if start == text.len() {
                    continue;
                }
                let end = (start + piece_lens[(pass + owner) % piece_lens.len()]).min(text.len());
                let (ids, blocks) = (&text[start..end], &blocks[owner][..]);
                parts.push(SequencePart { ids, start, blocks, logits: WantedLogits::Last, ..SequencePart::default() });
                owners.push(owner);
                starts[owner] = end;
            }
            if parts.is_empty() {
                break;
            }
            let logits = self.decoder.forward_ragged(self.ctx, self.weights, &mut cache, &parts, None).unwrap();
            for (owner, row) in owners.into_iter().zip(logits.f32s().chunks(self.decoder.config().vocab_size)) {
                found[owner] = row.to_vec();
            }
        }
        found
    }
}

fn texts() -> Vec<Vec<u32>> {
    [1, 7, 40, 64, 90].iter().enumerate().map(|(seed, &len)| random_ids(50, len, seed as u64)).collect()
}

/// The root of the mean squared difference over that of the expected numbers.
fn relative_error(found: &[Vec<f32>], expected: &[Vec<f32>]) -> f32 {
    let (found, expected) = (found.concat(), expected.concat());
    let sum = |values: &mut dyn Iterator<Item = f32>| values.map(|x| x * x).sum::<f32>();
    let errors = sum(&mut found.iter().zip(&expected).map(|(a, b)| a - b));
    (errors / sum(&mut expected.iter().copied())).sqrt()
}

#[test]
fn logits_with_keys_and_values_of_fewer_bits_stay_near_those_of_f32() {
    let ctx = Context::cpu(2);
    for (name, config) in configs() {
        let (decoder, weights) = model(&ctx, config);
        let passes = Passes { ctx: &ctx, decoder: &decoder, weights: &weights };
        let logits = |kv_type| passes.last_logits(&texts(), &[16, 1, 5], kv_type);
        let exact = logits(KvType::F32);
        assert!(exact == logits(KvType::Activations), "{name}: activations are f32");
        for (kv_type, bound) in [(KvType::Bf16, 5e-3), (KvType::Q8, 1e-2)] {
            let error = relative_error(&logits(kv_type), &exact);
            assert!(error > 0.0 && error < bound, "{name} {kv_type:?}: {error}");
        }
    }
}

#[test]
fn with_batch_invariance_a_text_has_the_same_bits_in_any_company_and_pieces() {
    for isa in Isa::available() {
        let ctx = Context::cpu(2).with_isa(isa).with_batch_invariance(true);
        for (name, config) in configs() {
            let (decoder, exact) = model(&ctx, config);
            for dtype in [DType::F32, DType::BF16] {
                let weights = exact.compute_copy(&ctx, dtype);
                let passes = Passes { ctx: &ctx, decoder: &decoder, weights: &weights };
                for kv_type in [KvType::F32, KvType::Bf16, KvType::Q8] {
                    let together = passes.last_logits(&texts(), &[16, 1, 5], kv_type);
                    for (text, found) in texts().into_iter().zip(together) {
                        let alone = passes.last_logits(&[text], &[90], kv_type);
                        assert!(found == alone[0], "{name} {dtype:?} {isa:?} {kv_type:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_token_takes_the_bytes_that_its_type_says() {
    let [(_, config), _, (_, latent)] = configs();
    let ctx = Context::cpu(1);
    let (decoder, weights) = model(&ctx, config.clone());
    for (kv_type, bytes) in [(KvType::F32, 4 * 64), (KvType::Bf16, 2 * 64), (KvType::Q8, 2 * 34)] {
        let per_token = bytes * config.num_layers;
        assert_eq!(PagedKvCache::bytes_per_token(&config, kv_type.dtype(DType::F32)), per_token);
        let mut cache = PagedKvCache::new(&config, 3, BLOCK_LEN).with_type(kv_type);
        let part = SequencePart { ids: &[1, 2], blocks: &[1], ..SequencePart::default() };
        let _ = decoder.forward_ragged(&ctx, &weights, &mut cache, &[part], None).unwrap();
        assert_eq!(cache.num_bytes(), 3 * BLOCK_LEN * per_token);
    }
    assert_eq!(PagedKvCache::bytes_per_token(&latent, DType::Q8), 34 * latent.num_layers);
}

#[test]
fn rows_that_are_no_whole_blocks_are_refused() {
    let config = ModelConfig { num_kv_heads: 1, head_dim: 16, ..small_config() };
    let error = KvType::Q8.check(&config).unwrap_err().to_string();
    assert!(error.contains("kv_type") && error.contains("16 numbers"), "{error}");
    assert!(KvType::Bf16.check(&config).is_ok());
}

#[test]
fn a_text_goes_on_behind_a_copy_of_a_block() {
    let ctx = Context::cpu(2).with_batch_invariance(true);
    let [(_, config), ..] = configs();
    let (decoder, weights) = model(&ctx, config);
    let ids = random_ids(50, 12, 3);
    let mut cache = PagedKvCache::new(decoder.config(), 4, BLOCK_LEN).with_type(KvType::Q8);
    let mut pass = |range: std::ops::Range<usize>, blocks: &[u32], copies: bool| {
        if copies {
            cache.copy_block(&ctx, 1, 3);
        }
        let (ids, start) = (&ids[range.clone()], range.start);
        let part = SequencePart { ids, start, blocks, logits: WantedLogits::Last, ..SequencePart::default() };
        decoder.forward_ragged(&ctx, &weights, &mut cache, &[part], None).unwrap().f32s().to_vec()
    };
    let _ = pass(0..10, &[0, 1], false);
    let behind_copy = pass(10..12, &[0, 3], true);
    assert!(behind_copy == pass(10..12, &[0, 1], false));
}
