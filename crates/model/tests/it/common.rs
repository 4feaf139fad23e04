//! Helpers that several tests share.

use std::path::{Path, PathBuf};

use moeworks_model::{Decoder, DecoderWeights, KvCache, TokenBatch};
use moeworks_ops::Context;
use moeworks_ops::head_loss::IGNORE;

pub(crate) use crate::small_model::{model, random_ids, small_config};

/// Returns the next id of each id in its sequence; none for the last.
pub(crate) fn next_ids(inputs: &[u32], seq_len: usize) -> Vec<u32> {
    let next = |sequence: &[u32]| sequence[1..].iter().copied().chain([IGNORE]).collect::<Vec<_>>();
    inputs.chunks(seq_len).flat_map(next).collect()
}

pub(crate) fn batch<'a>(inputs: &'a [u32], targets: &'a [u32], seq_len: usize) -> TokenBatch<'a> {
    TokenBatch { inputs, targets, num_sequences: inputs.len() / seq_len, seq_len, ..TokenBatch::default() }
}

/// Returns the likeliest ids after `first`, one by one.
pub(crate) fn greedy(
    ctx: &Context,
    decoder: &Decoder,
    weights: &DecoderWeights,
    cache: &mut KvCache,
    first: &[u32],
    count: usize,
) -> Vec<u32> {
    let mut ids = Vec::new();
    let mut next = first.to_vec();
    while ids.len() < count {
        let logits = decoder.forward_cached(ctx, weights, cache, &next, None).unwrap();
        let logits = logits.f32s();
        let likeliest = (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
        ids.push(likeliest as u32);
        next = vec![likeliest as u32];
    }
    ids
}

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Fails unless `found` is `expected` up to `tolerance` of the largest expected magnitude.
pub(crate) fn assert_close(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    let scale = expected.iter().fold(1e-6_f32, |max, x| max.max(x.abs()));
    for (i, (&a, &b)) in found.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= tolerance * scale, "{what}[{i}]: {a}, expected {b} (largest {scale})");
    }
}

/// Fails unless both have the same tensors with the same bytes.
pub(crate) fn assert_same_bits(a: &DecoderWeights, b: &DecoderWeights) {
    for ((name, a), (other, b)) in a.tensors().into_iter().zip(b.tensors()) {
        assert_eq!((&name, a.shape(), a.dtype()), (&other, b.shape(), b.dtype()));
        assert!(a.bytes() == b.bytes(), "{name} differs");
    }
}
