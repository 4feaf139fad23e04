//! Passes over sequences of different lengths in a paged cache, and over documents that do not attend to each other.

use moeworks_model::{
    BatchError, Decoder, DecoderWeights, GradTarget, KvCache, LatentAttention, ModelConfig, PagedKvCache, PassOptions,
    PositionKind, QkNorm, SequencePart, TokenBatch, Variant, WantedLogits,
};
use moeworks_ops::linear::Write;
use moeworks_ops::{Context, Isa};
use moeworks_tensor::DType;

use crate::common::{assert_close, model, next_ids, random_ids, small_config};

const BLOCK_LEN: usize = 8;

/// Three layers, two of which have a window.
pub(crate) fn windowed() -> ModelConfig {
    let variant = Variant { window: 10, full_attention_layers: vec![1], ..Variant::default() };
    ModelConfig { variant, max_seq_len: 1000, ..small_config() }
}

/// Latent attention.
fn latent() -> ModelConfig {
    let latent = LatentAttention { query_rank: 7, kv_rank: 6, plain_dim: 4, rotary_dim: 4 };
    let variant = Variant { latent: Some(latent), value_dim: 5, ..Variant::default() };
    ModelConfig { qk_norm: QkNorm::None, num_kv_heads: 4, variant, max_seq_len: 1000, ..small_config() }
}

fn configs() -> [(&'static str, ModelConfig); 3] {
    let plain = ModelConfig { max_seq_len: 1000, qk_norm: QkNorm::Whole, ..small_config() };
    [("plain", plain), ("windowed", windowed()), ("latent", latent())]
}

/// A text that arrives in pieces, one per pass, from some pass on.
struct Text {
    ids: Vec<u32>,
    blocks: Vec<u32>,
    first_pass: usize,
    pieces: Vec<usize>,
}

/// Texts of various lengths in scattered blocks; some begin before others.
fn texts() -> Vec<Text> {
    let pieces: [(usize, &[usize]); 5] = [
        (0, &[1, 1, 1, 1, 1, 1]),
        (0, &[9, 20, 1, 1, 1]),
        (1, &[16, 1, 1, 7]),
        (2, &[70, 1, 1]),
        (0, &[3, 5, 8, 1, 1, 1]),
    ];
    let mut next_block = 0;
    let text = |(index, (first_pass, pieces)): (usize, (usize, &[usize]))| {
        let len: usize = pieces.iter().sum();
        let count = len.div_ceil(BLOCK_LEN) as u32;
        next_block += count;
        // Blocks from last to first, so that none are contiguous.
        let blocks = (next_block - count..next_block).rev().collect();
        Text { ids: random_ids(50, len, index as u64), blocks, first_pass, pieces: pieces.to_vec() }
    };
    pieces.into_iter().enumerate().map(text).collect()
}

/// Returns the logits after each piece of each text, with all texts in common passes.
fn together(ctx: &Context, decoder: &Decoder, weights: &DecoderWeights, texts: &[Text]) -> Vec<Vec<Vec<f32>>> {
    let num_blocks = texts.iter().flat_map(|text| &text.blocks).max().map_or(0, |&block| block as usize + 1);
    let mut cache = PagedKvCache::new(decoder.config(), num_blocks, BLOCK_LEN);
    let mut found = vec![Vec::new(); texts.len()];
    for pass in 0_usize..6 {
        let mut parts = Vec::new();
        let mut owners = Vec::new();
        for (owner, text) in texts.iter().enumerate() {
            let Some(&len) = pass.checked_sub(text.first_pass).and_then(|piece| text.pieces.get(piece)) else {
                continue;
            };
            let start: usize = text.pieces[..pass - text.first_pass].iter().sum();
            let (ids, blocks) = (&text.ids[start..start + len], &text.blocks[..]);
            parts.push(SequencePart { ids, start, blocks, logits: WantedLogits::Last, ..SequencePart::default() });
            owners.push(owner);
        }
        let logits = decoder.forward_ragged(ctx, weights, &mut cache, &parts, None).unwrap();
        for (owner, row) in owners.into_iter().zip(logits.f32s().chunks(50)) {
            found[owner].push(row.to_vec());
        }
    }
    found
}

/// Returns the logits after each piece of a text that is alone in its own cache.
fn alone(ctx: &Context, decoder: &Decoder, weights: &DecoderWeights, text: &Text) -> Vec<Vec<f32>> {
    let mut cache = KvCache::new(decoder.config());
    let piece = |&len: &usize| {
        let start = cache.len();
        let logits = decoder.forward_cached(ctx, weights, &mut cache, &text.ids[start..start + len], None).unwrap();
        logits.f32s().to_vec()
    };
    text.pieces.iter().map(piece).collect()
}

#[test]
fn sequences_of_different_lengths_have_the_logits_that_they_have_alone() {
    let ctx = Context::cpu(2);
    for (name, config) in configs() {
        let (decoder, weights) = model(&ctx, config);
        let texts = texts();
        for (text, found) in texts.iter().zip(together(&ctx, &decoder, &weights, &texts)) {
            let expected = alone(&ctx, &decoder, &weights, text);
            assert_close(name, &found.concat(), &expected.concat(), 2e-5);
        }
    }
}

#[test]
fn with_batch_invariance_they_have_the_same_bits() {
    for isa in Isa::available() {
        let ctx = Context::cpu(2).with_isa(isa).with_batch_invariance(true);
        for (name, config) in configs() {
            let (decoder, exact) = model(&ctx, config);
            for dtype in [DType::F32, DType::BF16] {
                let weights = exact.compute_copy(&ctx, dtype);
                let texts = texts();
                for (text, found) in texts.iter().zip(together(&ctx, &decoder, &weights, &texts)) {
                    assert!(found == alone(&ctx, &decoder, &weights, text), "{name} {dtype:?} {isa:?}");
                }
            }
        }
    }
}

#[test]
fn a_sequence_goes_on_behind_blocks_of_another_and_behind_a_copy() {
    let ctx = Context::cpu(2).with_batch_invariance(true);
    let (decoder, weights) = model(&ctx, windowed());
    let ids = random_ids(50, 20, 3);
    let mut cache = PagedKvCache::new(decoder.config(), 5, BLOCK_LEN);
    let mut last = |ids: &[u32], start: usize, blocks: &[u32], copy: Option<(u32, u32)>| {
        if let Some((from, to)) = copy {
            cache.copy_block(&ctx, from, to);
        }
        let part = SequencePart { ids, start, blocks, logits: WantedLogits::Last, ..SequencePart::default() };
        decoder.forward_ragged(&ctx, &weights, &mut cache, &[part], None).unwrap().f32s().to_vec()
    };
    let first = last(&ids, 0, &[4, 2, 0], None);
    assert!(first == last(&ids[16..], 16, &[4, 2, 3], None), "two shared blocks and one of its own");
    assert!(first == last(&ids[19..], 19, &[4, 2, 1], Some((0, 1))), "the last token again, in a copy");
}

#[test]
fn logits_come_for_the_tokens_that_want_them() {
    let ctx = Context::cpu(2);
    let (decoder, weights) = model(&ctx, small_config());
    let ids = random_ids(50, 12, 3);
    let mut cache = PagedKvCache::new(decoder.config(), 6, BLOCK_LEN);
    let part = |blocks, logits| SequencePart { ids: &ids, start: 0, blocks, logits, ..SequencePart::default() };
    let parts =
        [part(&[0, 1], WantedLogits::None), part(&[2, 3], WantedLogits::All), part(&[4, 5], WantedLogits::Last)];
    let found = decoder.forward_ragged(&ctx, &weights, &mut cache, &parts, None).unwrap();
    let all = decoder.logits(&ctx, &weights, &ids, 1, None).unwrap();
    assert_eq!(found.shape(), [13, 50]);
    assert_close("all", &found.f32s()[..12 * 50], all.f32s(), 2e-5);
    assert_close("last", &found.f32s()[12 * 50..], &all.f32s()[11 * 50..], 2e-5);
}

#[test]
fn parts_that_cannot_be_are_refused() {
    let ctx = Context::cpu(1);
    let (decoder, weights) = model(&ctx, small_config());
    let mut cache = PagedKvCache::new(decoder.config(), 4, BLOCK_LEN);
    let ok =
        SequencePart { ids: &[1, 2], start: 0, blocks: &[0], logits: WantedLogits::Last, ..SequencePart::default() };
    let mut error = |parts: &[SequencePart<'_>]| {
        decoder.forward_ragged(&ctx, &weights, &mut cache, parts, None).unwrap_err().to_string()
    };
    let cases: [(Vec<SequencePart<'_>>, &str); 7] = [
        (vec![], "no token"),
        (vec![SequencePart { ids: &[], ..ok }], "no token"),
        (vec![SequencePart { ids: &[50], ..ok }], "prompt[0] = 50: token ids must be below"),
        (vec![SequencePart { start: 7, ..ok }], "sequence 0 has 1 blocks of 8 tokens, but 9 tokens"),
        (vec![SequencePart { blocks: &[4], ..ok }], "sequence 0: block 4 is not one of the cache's 4"),
        (vec![ok, ok], "sequence 1 writes into block 0, which sequence 0 writes into or reads"),
        (vec![SequencePart { adapter: Some(3), ..ok }], "sequence 0: unknown adapter 3"),
    ];
    for (parts, expected) in cases {
        let found = error(&parts);
        assert!(found.starts_with(expected), "{found}");
    }
    let long = SequencePart { start: 63, blocks: &[0, 1, 2, 3, 0, 1, 2, 3, 3], ..ok };
    assert_eq!(error(&[long]), BatchError::TooLong { len: 65, max_seq_len: 64 }.to_string());
}

/// Three documents in a sequence and two in another.
const SEGMENTS: [usize; 5] = [5, 7, 1, 4, 9];

fn train(
    decoder: &Decoder,
    weights: &DecoderWeights,
    batch: &TokenBatch<'_>,
    write: Write,
    grads: &mut DecoderWeights,
) -> f64 {
    let options = PassOptions { grad_scale: 0.1, ..PassOptions::default() };
    let target = GradTarget::new(write, grads);
    decoder.forward_backward(&Context::cpu(2), weights, &[*batch], &options, target).unwrap()[0].loss_sum
}

#[test]
fn documents_in_one_sequence_give_the_loss_and_gradient_that_they_give_alone() {
    let ctx = Context::cpu(2);
    let with_positions = Variant { positions: PositionKind::Learned, ..Variant::default() };
    let learned = ModelConfig { variant: with_positions, ..small_config() };
    let extra = ("learned positions", learned);
    for (name, config) in configs().into_iter().chain([extra]) {
        let (decoder, weights) = model(&ctx, config);
        let ids = random_ids(50, 26, 9);
        let mut at = 0;
        let documents: Vec<&[u32]> = SEGMENTS
            .iter()
            .map(|&len| {
                at += len;
                &ids[at - len..at]
            })
            .collect();
        let targets: Vec<u32> = documents.iter().flat_map(|ids| next_ids(ids, ids.len())).collect();
        let packed = TokenBatch {
            inputs: &ids,
            targets: &targets,
            num_sequences: 2,
            seq_len: 13,
            segments: &SEGMENTS,
            ..TokenBatch::default()
        };
        let (mut found, mut expected) = (weights.zeros_like(&ctx), weights.zeros_like(&ctx));
        let loss = train(&decoder, &weights, &packed, Write::Replace, &mut found);
        let mut sum = 0.0;
        for inputs in documents {
            let targets = next_ids(inputs, inputs.len());
            let own = TokenBatch {
                inputs,
                targets: &targets,
                num_sequences: 1,
                seq_len: inputs.len(),
                ..TokenBatch::default()
            };
            sum += train(&decoder, &weights, &own, Write::Add, &mut expected);
        }
        assert!((loss - sum).abs() < 1e-5 * sum, "{name}: {loss}, alone {sum}");
        for ((tensor, found), (_, expected)) in found.tensors().into_iter().zip(expected.tensors()) {
            assert_close(&format!("{name}: {tensor}"), found.f32s(), expected.f32s(), 5e-5);
        }
        let whole = TokenBatch { segments: &[], ..packed };
        let other = train(&decoder, &weights, &whole, Write::Replace, &mut found);
        assert!((loss - other).abs() > 1e-4 * loss, "{name}: documents that see each other have another loss");
        let evaluated = decoder.evaluate(&ctx, &weights, &packed, None).unwrap().loss_sum;
        assert!((loss - evaluated).abs() < 1e-5 * loss, "{name}: evaluation {evaluated}, training {loss}");
    }
}
