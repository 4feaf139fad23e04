//! Sequences of different lengths in one pass, with keys and values in blocks: what a server does each turn.
//!
//! `cargo run --release --example many_sequences`

use std::error::Error;

use moeworks_model::{Decoder, DecoderWeights, ModelConfig, PagedKvCache, SequencePart, WantedLogits};
use moeworks_ops::Context;

const BLOCK_LEN: usize = 16;
const NEW_TOKENS: usize = 8;

/// A sequence: its tokens, how many of them have keys and values in the cache, and its blocks there.
struct Sequence {
    ids: Vec<u32>,
    cached: usize,
    blocks: Vec<u32>,
}

/// A small model with random weights.
fn model(ctx: &Context) -> Result<(Decoder, DecoderWeights), Box<dyn Error>> {
    let config = ModelConfig {
        vocab_size: 100,
        width: 64,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 16,
        num_experts: 8,
        top_k: 2,
        expert_width: 48,
        max_seq_len: 64,
        init_std: 0.2,
        ..ModelConfig::default()
    };
    let decoder = Decoder::new(config)?;
    let weights = decoder.init(ctx, /* seed */ 1, None);
    Ok((decoder, weights))
}

/// Continues the prompts greedily, all of them in the same passes. Returns each prompt with its new tokens.
pub(crate) fn complete(prompts: &[Vec<u32>]) -> Result<Vec<Vec<u32>>, Box<dyn Error>> {
    // A sequence gets the same bits whatever else is in the pass.
    let ctx = Context::cpu_all_cores().with_batch_invariance(true);
    let (decoder, weights) = model(&ctx)?;
    let vocab_size = decoder.config().vocab_size;
    let per_sequence = 64 / BLOCK_LEN as u32;
    let num_blocks = prompts.len() * per_sequence as usize;
    let mut cache = PagedKvCache::new(decoder.config(), num_blocks, BLOCK_LEN);
    // A server hands blocks out as they are needed; here each sequence has all of its own.
    let sequence = |(i, ids): (u32, &Vec<u32>)| Sequence {
        ids: ids.clone(),
        cached: 0,
        blocks: (i * per_sequence..(i + 1) * per_sequence).collect(),
    };
    let mut sequences: Vec<Sequence> = (0..).zip(prompts).map(sequence).collect();
    for _ in 0..NEW_TOKENS {
        // The first turn passes whole prompts, later ones a token of each.
        let part_of = sequences.iter().map(|sequence| SequencePart {
            ids: &sequence.ids[sequence.cached..],
            start: sequence.cached,
            blocks: &sequence.blocks,
            logits: WantedLogits::Last,
            ..SequencePart::default()
        });
        let parts: Vec<SequencePart<'_>> = part_of.collect();
        let logits = decoder.forward_ragged(&ctx, &weights, &mut cache, &parts, None)?;
        for (sequence, logits) in sequences.iter_mut().zip(logits.f32s().chunks(vocab_size)) {
            let likeliest = (0..vocab_size).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).expect("a vocabulary");
            sequence.cached = sequence.ids.len();
            sequence.ids.push(likeliest as u32);
        }
    }
    Ok(sequences.into_iter().map(|sequence| sequence.ids).collect())
}

#[allow(dead_code)] // the test calls `complete`
fn main() -> Result<(), Box<dyn Error>> {
    for ids in complete(&[vec![1, 2, 3], (10..40).collect(), vec![99]])? {
        println!("{ids:?}");
    }
    Ok(())
}
