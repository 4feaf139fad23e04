//! Opening models, and their answers as text.

use std::ops::ControlFlow;
use std::path::Path;

use moeworks_infer::InferError;
use moeworks_infer::compute::ComputeOptions;
use moeworks_infer::generation::{
    Answer, CachedSequence, End, GenerateRequest, Sampler, SamplingOptions, TokenLimit, TokenLimits, answer,
    max_new_tokens, prompt_ids,
};
use moeworks_infer::open::{LoadedWeights, Model, OpenOptions, Source, WeightFormat, WeightsToCheck};
use moeworks_ops::Context;
use moeworks_tensor::DType;

use crate::common::{byte_model, model_fixture};

/// Returns the most likely answer to a prompt and its pieces, ended after `most` of them.
fn answered(model: &Model, max_new_tokens: usize, stops: &[String], most: usize) -> (Answer, Vec<String>) {
    let prompt = prompt_ids(model, "Line", false).unwrap();
    let request = GenerateRequest { prompt: &prompt, max_new_tokens, stop_ids: &model.stop_ids };
    let mut sampler = Sampler::new(SamplingOptions { seed: 3, ..SamplingOptions::default() }).unwrap();
    let (mut sequence, mut pieces) = (CachedSequence::new(model.decoder.config()), Vec::new());
    let found = answer(model, &mut sequence, &request, &mut sampler, stops, |piece| {
        pieces.push(piece.to_owned());
        if pieces.len() == most { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    (found.unwrap(), pieces)
}

#[test]
fn the_pieces_of_an_answer_are_its_text_up_to_a_stop_text() {
    let model = byte_model();
    let (whole, pieces) = answered(&model, 40, &[], usize::MAX);
    assert_eq!((whole.num_tokens, whole.end, pieces.concat()), (40, End::Limit, whole.text.clone()));
    let stop: String = whole.text.chars().skip(3).take(1).collect();
    let start = whole.text.find(&stop).unwrap();
    let (cut, pieces) = answered(&model, 40, &[stop], usize::MAX);
    assert_eq!((cut.end, &cut.text[..], pieces.concat()), (End::StopText, &whole.text[..start], cut.text.clone()));
    let (ended, _) = answered(&model, 40, &[], 2);
    assert_eq!((ended.num_tokens, ended.end), (2, End::Interrupted));
}

#[test]
fn limits_that_do_not_fit_say_what_would() {
    let model = byte_model();
    let limit = |asked| max_new_tokens(&model, 60, TokenLimits { asked, of_model: Some(2) });
    assert_eq!(limit(None).unwrap(), 2);
    assert_eq!(limit(Some(TokenLimit::Room)).unwrap(), 4);
    let error = limit(Some(TokenLimit::Tokens(5))).unwrap_err();
    assert!(matches!(error, InferError::ManyTokens { asked: 5, context: 64, prompt_len: 60, room: 4 }), "{error}");
    let error = max_new_tokens(&model, 64, TokenLimits::default()).unwrap_err();
    assert!(matches!(error, InferError::LongPrompt { prompt_len: 64, context: 64 }), "{error}");
}

#[test]
fn folders_and_gguf_files_are_opened_in_the_format_that_is_asked_for() {
    let gguf = Source::open(&model_fixture("gguf/olmoe.gguf")).unwrap();
    let LoadedWeights { weights, part_checked, .. } = gguf.load(&Context::cpu(1), WeightsToCheck::All).unwrap();
    assert!(weights.has_blocks() && part_checked.is_none() && gguf.run().is_none());
    let folder = Source::open(&model_fixture("switch")).unwrap();
    for (format, dtype) in [(WeightFormat::F32, DType::F32), (WeightFormat::Bf16, DType::BF16)] {
        let options = OpenOptions { format, check: WeightsToCheck::None };
        let model = Model::open(Context::cpu(1), &folder, options).unwrap();
        assert!(model.weights.are_all(dtype) && model.has_encoder(), "{format:?}");
    }
}

#[test]
fn what_cannot_be_opened_is_one_line() {
    let error = Source::open(Path::new("no/such/model")).err().unwrap().to_string();
    assert!(error.starts_with("no/such/model: no such file or folder") && !error.contains('\n'), "{error}");
    let options = ComputeOptions { threads: 5000, ..ComputeOptions::default() };
    assert!(matches!(options.context().err(), Some(InferError::ManyThreads { threads: 5000, .. })));
    let options = ComputeOptions { threads: 1, expert_cache_bytes: 1, ..ComputeOptions::default() };
    assert!(matches!(options.context().err(), Some(InferError::ExpertCacheWithoutGpu)));
}
