//! Evaluation on tokens, by a model with random weights.

use std::ops::ControlFlow;

use moeworks_infer::InferError;
use moeworks_infer::data::{IGNORE, TokenStore};
use moeworks_infer::evaluation::{Evaluation, EvaluationOptions, evaluate};
use moeworks_infer::open::Model;
use moeworks_model::TokenBatch;

use crate::common::{byte_model, random_ids};

/// Evaluates windows of eight tokens, `max_sequences` at most.
fn evaluated(model: &Model, tokens: &[u32], max_sequences: usize) -> Evaluation {
    let options = EvaluationOptions { seq_len: Some(8), max_sequences };
    let tokens = TokenStore::from(tokens.to_vec());
    evaluate(model, &tokens, options, |_| ControlFlow::Continue(())).unwrap()
}

#[test]
fn figures_are_those_of_the_decoder_on_the_same_windows() {
    let model = byte_model();
    let ids = random_ids(256, 25, 1);
    let found = evaluated(&model, &ids, 0);
    let batch =
        TokenBatch { inputs: &ids[..24], targets: &ids[1..], num_sequences: 3, seq_len: 8, ..TokenBatch::default() };
    let expected = model.decoder.evaluate(&model.ctx, &model.weights, &batch, None).unwrap();
    assert!(batch.targets.iter().all(|&id| id != IGNORE));
    assert_eq!((found.stats.num_targets, found.stats.num_correct), (24, expected.num_correct));
    assert_eq!(found.loss().to_bits(), expected.mean_loss().to_bits());
    assert_eq!(found.perplexity(), found.loss().exp());
    // A token is a byte here, and all but the first are targets.
    let bits = found.loss() / std::f64::consts::LN_2 * 24.0 / 25.0;
    assert!((found.bits_per_byte().unwrap() - bits).abs() < 1e-12, "{found:?}");
}

#[test]
fn an_evaluation_ends_at_a_limit_or_where_its_listener_says() {
    let model = byte_model();
    let ids = random_ids(256, 81, 2);
    assert_eq!(evaluated(&model, &ids, 3).stats.num_targets, 24);
    let mut seen = Vec::new();
    let options = EvaluationOptions { seq_len: Some(8), max_sequences: 5 };
    let result = evaluate(&model, &TokenStore::from(ids), options, |progress| {
        seen.push((progress.num_tokens_done, progress.num_tokens));
        if seen.len() == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert_eq!((result.unwrap().stats.num_targets, seen), (16, vec![(8, 81), (16, 81)]));
}

#[test]
fn windows_and_texts_that_cannot_be_evaluated_are_refused() {
    let model = byte_model();
    let fail = |seq_len, num_tokens| {
        let options = EvaluationOptions { seq_len: Some(seq_len), max_sequences: 0 };
        let tokens = TokenStore::from(vec![1; num_tokens]);
        evaluate(&model, &tokens, options, |_| ControlFlow::Continue(())).unwrap_err()
    };
    assert!(matches!(fail(0, 9), InferError::SeqLen { seq_len: 0, least: 1, longest: 64 }));
    assert!(matches!(fail(65, 9), InferError::SeqLen { seq_len: 65, .. }));
    assert!(matches!(fail(8, 1), InferError::FewTokens { num_tokens: 1 }));
}
