//! Many answers at once, with small models.

use std::collections::HashMap;
use std::path::Path;

use moeworks_infer::generation::{
    CachedSequence, End, GenerateRequest, Sampler, SamplingOptions, StopReason, generate,
};
use moeworks_infer::open::Model;
use moeworks_model::hf::load_model;
use moeworks_model::{Decoder, KvType, ModelConfig, PagedKvCache, TokenBatch, Tokenizer};
use moeworks_ops::Context;
use moeworks_serve::{Counts, Engine, EngineError, Limits, Output, Refused, Request, SequenceId, WantedLogprobs};
use moeworks_tensor::DType;

/// A small model of a family, whose tokens are shown as bytes and of which one ends a text.
pub(crate) fn model(name: &str) -> Model {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures").join(name);
    let ctx = Context::cpu(2).with_batch_invariance(true);
    let (config, weights) = load_model(&ctx, &path).unwrap();
    let (decoder, tokenizer) = (Decoder::new(config).unwrap(), Tokenizer::bytes());
    Model { ctx, decoder, weights, tokenizer, stop_ids: vec![6], part_checked: None }
}

pub(crate) fn limits() -> Limits {
    Limits { num_blocks: 64, block_len: 4, turn_tokens: 24, max_running: 8, ..Limits::default() }
}

/// Prompts of different lengths, some of which begin alike.
fn prompt(index: usize) -> Vec<u32> {
    let shared = [5, 9, 2, 11, 7, 3, 8, 1, 4];
    let own = (0..index % 5).map(|i| (index * 7 + i * 3) as u32 % 40);
    shared[..index % 10].iter().copied().chain(own).chain([index as u32 % 13]).collect()
}

fn options(index: usize) -> SamplingOptions {
    let temperature = if index.is_multiple_of(2) { 0.0 } else { 0.9 };
    SamplingOptions { temperature, seed: index as u64, ..SamplingOptions::default() }
}

pub(crate) fn request(index: usize) -> Request {
    Request {
        prompt: prompt(index),
        max_new_tokens: 3 + index % 9,
        sampler: Sampler::new(options(index)).unwrap(),
        stops: Vec::new(),
        stop_ids: vec![6],
        priority: 0,
        shows_special: false,
        salt: Vec::new(),
        experts_from: None,
        logprobs: None,
    }
}

/// The tokens of a request that is alone, by `generate`.
fn alone(model: &Model, index: usize) -> Vec<u32> {
    let mut sequence = CachedSequence::new(model.decoder.config());
    let Request { prompt, max_new_tokens, mut sampler, .. } = request(index);
    let request = GenerateRequest { prompt: &prompt, max_new_tokens, stop_ids: &model.stop_ids };
    let generated =
        generate(model.as_model_ref(), &mut sequence, &request, &mut sampler, |_| std::ops::ControlFlow::Continue(()))
            .unwrap();
    assert_ne!(generated.reason, StopReason::Asked);
    generated.ids
}

/// Makes turns until all is done. Returns each request's tokens and end.
fn run(engine: &mut Engine<'_>) -> HashMap<SequenceId, (Vec<u32>, Option<End>)> {
    let mut answers: HashMap<SequenceId, (Vec<u32>, Option<End>)> = HashMap::new();
    while engine.has_requests() {
        for output in engine.turn().unwrap() {
            let answer = answers.entry(output.sequence).or_default();
            answer.0.push(output.token);
            answer.1 = output.end;
        }
    }
    answers
}

#[test]
fn answers_among_others_are_those_that_requests_get_alone() {
    for name in ["olmoe", "deepseek_v2", "gpt_oss"] {
        let model = model(name);
        // Enough blocks, and so few that some are preempted.
        for (num_blocks, block_len) in [(64, 4), (40, 1)] {
            let mut engine = Engine::new(&model, Limits { num_blocks, block_len, ..limits() }).unwrap();
            let ids: Vec<SequenceId> = (0..30).map(|index| engine.add(request(index)).unwrap()).collect();
            let answers = run(&mut engine);
            for (index, id) in ids.iter().enumerate() {
                let (tokens, end) = &answers[id];
                assert_eq!(*tokens, alone(&model, index), "{name}: request {index}");
                assert!(end.is_some());
            }
            let Counts { free_blocks, preemptions, prefix_hits, .. } = engine.counts();
            assert_eq!((free_blocks, preemptions > 0), (num_blocks, block_len == 1), "{name}");
            assert!(prefix_hits > 0, "beginnings are shared");
        }
    }
}

#[test]
fn a_stop_text_ends_an_answer_before_it() {
    let model = model("olmoe");
    let mut engine = Engine::new(&model, limits()).unwrap();
    let whole = |engine: &mut Engine<'_>, stops: Vec<String>| {
        engine.add(Request { max_new_tokens: 30, stops, stop_ids: Vec::new(), ..request(0) }).unwrap();
        let mut text = String::new();
        let mut end = None;
        while engine.has_requests() {
            for output in engine.turn().unwrap() {
                text += &output.text;
                end = output.end;
            }
        }
        (text, end)
    };
    let (text, end) = whole(&mut engine, Vec::new());
    assert_eq!(end, Some(End::Limit));
    let middle = text.chars().nth(text.chars().count() / 2).unwrap();
    let (before, end) = whole(&mut engine, vec![middle.to_string()]);
    assert_eq!((before.as_str(), end), (&text[..text.find(middle).unwrap()], Some(End::StopText)));
}

#[test]
fn a_cancelled_request_leaves_no_block() {
    let model = model("olmoe");
    let mut engine = Engine::new(&model, limits()).unwrap();
    let ids: Vec<SequenceId> = (0..6).map(|index| engine.add(request(index)).unwrap()).collect();
    engine.turn().unwrap();
    let num_cancelled = ids.into_iter().filter(|&id| engine.cancel(id)).count();
    assert!(num_cancelled >= 4, "one or two may have ended");
    assert!(!engine.has_requests());
    assert_eq!(engine.counts().free_blocks, 64);
    assert!(engine.turn().unwrap().is_empty());
}

#[test]
fn requests_that_do_not_fit_are_refused() {
    let model = model("olmoe");
    let mut engine = Engine::new(&model, Limits { num_blocks: 2, ..limits() }).unwrap();
    let refused = |engine: &mut Engine<'_>, request| engine.add(request).unwrap_err();
    let empty = refused(&mut engine, Request { prompt: Vec::new(), ..request(0) });
    assert!(matches!(empty, EngineError::Refused(Refused::EmptyPrompt)), "{empty}");
    let long = refused(&mut engine, Request { max_new_tokens: 40, ..request(0) });
    assert!(matches!(long, EngineError::Refused(Refused::TooLong { .. })), "{long}");
    let context = refused(&mut engine, Request { max_new_tokens: usize::MAX, ..request(0) });
    assert!(context.to_string().contains("the model is made for at most"), "{context}");
    let wrong = refused(&mut engine, Request { prompt: vec![4_000_000], ..request(0) });
    assert!(wrong.to_string().contains("must be below the vocabulary's size"), "{wrong}");
}

/// The loss of a model on a text, added up over all its tokens but the first.
fn loss(model: &Model, text: &[u32]) -> f64 {
    let (inputs, targets) = (&text[..text.len() - 1], &text[1..]);
    let batch = TokenBatch { inputs, targets, num_sequences: 1, seq_len: inputs.len(), ..TokenBatch::default() };
    model.decoder.evaluate(&model.ctx, &model.weights, &batch, None).unwrap().loss_sum
}

#[test]
fn log_probabilities_are_those_of_an_evaluation() {
    let logprobs = Some(WantedLogprobs { num_top: 3, of_prompt: true });
    for (name, num_blocks) in [("olmoe", 64), ("deepseek_v2", 64), ("olmoe", 8)] {
        let model = model(name);
        // Prompts come in pieces, and with few blocks some are computed twice.
        let limits = Limits { num_blocks, turn_tokens: 8, ..limits() };
        let mut engine = Engine::new(&model, limits).unwrap();
        let new = |index: usize| Request {
            logprobs,
            prompt: text(index),
            max_new_tokens: 9,
            stop_ids: vec![],
            ..request(index)
        };
        let ids: Vec<SequenceId> = (0..6).map(|index| engine.add(new(index)).unwrap()).collect();
        let mut outputs: Vec<Output> = Vec::new();
        while engine.has_requests() {
            outputs.extend(engine.turn().unwrap());
        }
        assert_eq!(engine.counts().preemptions > 0, num_blocks == 8);
        for (index, id) in ids.into_iter().enumerate() {
            let own: Vec<&Output> = outputs.iter().filter(|output| output.sequence == id).collect();
            let of_prompt = own[0].prompt.as_ref().unwrap().logprobs.iter();
            let all: Vec<_> = of_prompt.chain(own.iter().map(|output| output.logprobs.as_ref().unwrap())).collect();
            let whole: Vec<u32> = text(index).into_iter().chain(own.iter().map(|output| output.token)).collect();
            assert!(all.iter().map(|one| one.token.id).eq(whole[1..].iter().copied()), "{name}");
            assert!(own[1..].iter().all(|output| output.prompt.is_none()));
            let sum: f64 = all.iter().map(|one| f64::from(one.token.logprob)).sum();
            let expected = loss(&model, &whole);
            assert!((sum + expected).abs() < 1e-4 * expected, "{name}: {sum} and {expected}");
            // A greedy answer has the likeliest tokens.
            let is_greedy = index.is_multiple_of(2);
            assert!(!is_greedy || own.iter().all(|one| one.logprobs.as_ref().unwrap().top[0].id == one.token));
        }
    }
}

/// A prompt of some length.
fn text(index: usize) -> Vec<u32> {
    (0..12 + index).map(|i| ((i * 7 + index * 3) % 40) as u32).collect()
}

#[test]
fn keys_and_values_take_the_bytes_of_the_type_of_activations() {
    for name in ["olmoe", "deepseek_v2"] {
        for dtype in [DType::F32, DType::BF16] {
            let mut model = model(name);
            model.weights = model.weights.compute_copy(&model.ctx, dtype);
            let mut engine = Engine::new(&model, limits()).unwrap();
            engine.add(request(0)).unwrap();
            engine.turn().unwrap();
            let activations = model.weights.compute_dtype().of_activations();
            let of_token = PagedKvCache::bytes_per_token(model.decoder.config(), activations);
            assert_eq!(engine.num_cache_bytes(), of_token * 64 * 4, "{name} {dtype:?}");
        }
    }
}

/// A model with random weights whose keys and values of a token are whole blocks of 32 numbers.
fn wide_model() -> Model {
    let (ctx, tokenizer) = (Context::cpu(2).with_batch_invariance(true), Tokenizer::bytes());
    let config = ModelConfig {
        vocab_size: 64,
        width: 32,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 16,
        num_experts: 4,
        top_k: 2,
        expert_width: 16,
        max_seq_len: 200,
        ..ModelConfig::default()
    };
    let decoder = Decoder::new(config).unwrap();
    let weights = decoder.init(&ctx, 7, None);
    Model { ctx, decoder, weights, tokenizer, stop_ids: vec![6], part_checked: None }
}

#[test]
fn with_keys_and_values_in_8_bits_answers_among_others_are_those_of_an_engine_alone() {
    let model = wide_model();
    // Enough blocks, and so few that some are preempted.
    for num_blocks in [64, 20] {
        let limits = Limits { num_blocks, ..limits() };
        let engine = || Engine::with_kv_type(&model, limits, KvType::Q8).unwrap();
        let mut together = engine();
        let ids: Vec<SequenceId> = (0..20).map(|index| together.add(request(index)).unwrap()).collect();
        let found = run(&mut together);
        for (index, id) in ids.into_iter().enumerate() {
            let mut alone = engine();
            let own = alone.add(request(index)).unwrap();
            assert_eq!(found[&id], run(&mut alone)[&own], "{index}");
        }
        let of_token = PagedKvCache::bytes_per_token(model.decoder.config(), DType::Q8);
        assert_eq!((of_token, together.num_cache_bytes()), (2 * 2 * 34, of_token * num_blocks * 4));
    }
}

#[test]
fn a_model_whose_keys_are_no_whole_blocks_is_refused_in_8_bits() {
    let model = model("olmoe");
    let error = Engine::with_kv_type(&model, limits(), KvType::Q8).err().unwrap().to_string();
    assert!(error.contains("kv_type") && error.contains("whole blocks of 32"), "{error}");
}
