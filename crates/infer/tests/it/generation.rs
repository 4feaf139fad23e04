//! Sampling, generation and text as it comes.

use std::ops::ControlFlow;

use moeworks_infer::generation::{
    CachedSequence, GenerateRequest, Generated, LogitRules, ModelRef, Sampler, SamplingOptions, StopReason, TextStream,
    TokenBias,
};
use moeworks_model::{BatchError, Tokenizer};
use moeworks_ops::Context;
use moeworks_tensor::Tensor;

use crate::common::{model, random_ids, small_config};

const LOGITS: [f32; 5] = [1.0, 3.0, 2.0, -1.0, 3.0];

/// Returns the number of times that each token is drawn in `count` draws.
fn draw(options: SamplingOptions, logits: &[f32], count: usize) -> Vec<usize> {
    let (ctx, mut sampler) = (Context::cpu(1), Sampler::new(options).unwrap());
    let logits = Tensor::from_slice(ctx.pool(), &[logits.len()], logits);
    let mut counts = vec![0; logits.len()];
    for _ in 0..count {
        counts[sampler.sample(&ctx, &logits).id as usize] += 1;
    }
    counts
}

/// Generates with a new sequence.
fn generate(
    model: ModelRef<'_>,
    request: &GenerateRequest<'_>,
    sampler: &mut Sampler,
    on_token: impl FnMut(u32) -> ControlFlow<()>,
) -> Result<Generated, BatchError> {
    let mut sequence = CachedSequence::new(model.decoder.config());
    moeworks_infer::generation::generate(model, &mut sequence, request, sampler, on_token)
}

#[test]
fn temperature_zero_takes_the_most_likely_and_the_lowest_id_of_equals() {
    let greedy = SamplingOptions { temperature: 0.0, ..SamplingOptions::default() };
    assert_eq!(draw(greedy, &LOGITS, 10), [0, 10, 0, 0, 0]);
}

#[test]
fn tokens_are_drawn_as_often_as_they_are_likely() {
    let count = 40_000;
    for temperature in [0.5_f64, 1.0, 2.0] {
        let options = SamplingOptions { temperature: temperature as f32, seed: 3, ..SamplingOptions::default() };
        let weights: Vec<f64> = LOGITS.iter().map(|&l| (f64::from(l) / temperature).exp()).collect();
        let total: f64 = weights.iter().sum();
        for (found, weight) in draw(options, &LOGITS, count).into_iter().zip(weights) {
            let p = weight / total;
            let deviation = (p * (1.0 - p) * count as f64).sqrt();
            assert!((found as f64 - p * count as f64).abs() < 5.0 * deviation, "{temperature}: {found}, expected {p}");
        }
    }
}

#[test]
fn filters_leave_the_tokens_that_they_should() {
    let drawn = |options: SamplingOptions| {
        let counts = draw(SamplingOptions { temperature: 5.0, ..options }, &LOGITS, 2000);
        counts.iter().map(|&count| count > 0).collect::<Vec<_>>()
    };
    let all = SamplingOptions::default();
    assert_eq!(drawn(all), [true; 5]);
    assert_eq!(drawn(SamplingOptions { top_k: 1, ..all }), [false, true, false, false, false]);
    assert_eq!(drawn(SamplingOptions { top_k: 3, ..all }), [false, true, true, false, true]);
    assert_eq!(drawn(SamplingOptions { top_k: 9, ..all }), [true; 5]);
    // At temperature 5 the shares are .17, .26, .21, .11, .26, and relative to the largest .67, 1, .82, .45, 1.
    assert_eq!(drawn(SamplingOptions { top_p: 0.25, ..all }), [false, true, false, false, false]);
    assert_eq!(drawn(SamplingOptions { top_p: 0.4, ..all }), [false, true, false, false, true]);
    assert_eq!(drawn(SamplingOptions { top_p: 0.6, ..all }), [false, true, true, false, true]);
    assert_eq!(drawn(SamplingOptions { min_p: 0.5, ..all }), [true, true, true, false, true]);
    assert_eq!(drawn(SamplingOptions { min_p: 1.0, ..all }), [false, true, false, false, true]);
}

#[test]
fn a_nucleus_of_hundreds_is_the_fewest_tokens_with_their_share() {
    let logits: Vec<f32> = (0..1500).map(|i| -((i * 7919 % 1500) as f32) / 200.0).collect();
    let total: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
    let mut order: Vec<usize> = (0..1500).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    let mut sum = 0.0;
    let is_before = |i: &&usize| {
        let is_needed = sum < 0.9 * total;
        sum += f64::from(logits[**i]).exp();
        is_needed
    };
    let nucleus: Vec<usize> = order.iter().take_while(is_before).copied().collect();
    assert!((300..700).contains(&nucleus.len()), "{} tokens", nucleus.len());
    let counts = draw(SamplingOptions { top_p: 0.9, ..SamplingOptions::default() }, &logits, 20_000);
    let drawn: Vec<usize> = (0..1500).filter(|&i| counts[i] > 0).collect();
    assert!(drawn.iter().all(|i| nucleus.contains(i)), "one outside the nucleus");
    // Even the least likely one is expected ten times.
    assert_eq!(drawn.len(), nucleus.len());
}

#[test]
fn the_seed_decides_what_is_drawn() {
    let ids = |seed| {
        let (ctx, options) = (Context::cpu(1), SamplingOptions { seed, ..SamplingOptions::default() });
        let (mut sampler, logits) = (Sampler::new(options).unwrap(), Tensor::from_slice(ctx.pool(), &[5], &LOGITS));
        (0..50).map(|_| sampler.sample(&ctx, &logits).id).collect::<Vec<_>>()
    };
    assert_eq!(ids(1), ids(1));
    assert_ne!(ids(1), ids(2));
}

#[test]
fn a_bias_moves_a_token_and_ends_do_not_come_before_their_time() {
    let (ctx, greedy) = (Context::cpu(1), SamplingOptions { temperature: 0.0, ..SamplingOptions::default() });
    let logits = Tensor::from_slice(ctx.pool(), &[4], &[1.0, 2.0, 3.0, 0.0]);
    let drawn = |rules: LogitRules| {
        let mut sampler = Sampler::new(greedy).unwrap().with_rules(rules);
        assert!(sampler.counts_tokens());
        sampler.begin(&[2]);
        (0..3).map(|_| sampler.sample(&ctx, &logits).id).collect::<Vec<_>>()
    };
    let biases = vec![TokenBias { id: 3, bias: 50.0 }, TokenBias { id: 99, bias: 100.0 }];
    assert_eq!(drawn(LogitRules { biases, ..LogitRules::default() }), [3, 3, 3]);
    assert_eq!(drawn(LogitRules { end_ids: vec![2], min_tokens: 2, ..LogitRules::default() }), [1, 1, 2]);
    assert!(LogitRules { min_tokens: 2, ..LogitRules::default() }.are_none());
}

#[test]
fn logits_that_are_no_numbers_are_never_drawn() {
    let bad = [f32::NAN, 0.0, f32::NEG_INFINITY, -5.0, f32::NAN];
    let counts = draw(SamplingOptions::default(), &bad, 1000);
    assert_eq!((counts[0], counts[2], counts[4]), (0, 0, 0));
    assert_eq!(draw(SamplingOptions::default(), &[0.0, f32::INFINITY, 9.0], 10), [0, 10, 0]);
    assert_eq!(draw(SamplingOptions::default(), &[f32::NAN; 3], 3), [3, 0, 0]);
    let tiny = SamplingOptions { temperature: 1e-30, ..SamplingOptions::default() };
    assert_eq!(draw(tiny, &LOGITS, 100)[2], 0);
}

#[test]
fn options_out_of_range_are_refused() {
    let all = SamplingOptions::default();
    for (setting, options) in [
        ("temperature", SamplingOptions { temperature: -1.0, ..all }),
        ("temperature", SamplingOptions { temperature: f32::NAN, ..all }),
        ("top_p", SamplingOptions { top_p: 0.0, ..all }),
        ("top_p", SamplingOptions { top_p: 1.1, ..all }),
        ("min_p", SamplingOptions { min_p: -0.1, ..all }),
        ("min_p", SamplingOptions { min_p: f32::NAN, ..all }),
    ] {
        assert_eq!(Sampler::new(options).unwrap_err().setting, setting);
    }
}

#[test]
fn generation_goes_on_as_full_passes_would() {
    let ctx = Context::cpu(2);
    let (decoder, weights) = model(&ctx, small_config());
    let prompt = random_ids(50, 5, 1);
    let request = GenerateRequest { prompt: &prompt, max_new_tokens: 12, stop_ids: &[] };
    let greedy = SamplingOptions { temperature: 0.0, ..SamplingOptions::default() };
    let mut sampler = Sampler::new(greedy).unwrap();
    let mut seen = Vec::new();
    let on_token = |id| {
        seen.push(id);
        ControlFlow::Continue(())
    };
    let Generated { ids, reason } =
        generate(ModelRef { ctx: &ctx, decoder: &decoder, weights: &weights }, &request, &mut sampler, on_token)
            .unwrap();
    assert_eq!((ids.len(), reason, &ids), (12, StopReason::MaxTokens, &seen));
    let mut all = prompt;
    for id in ids {
        let logits = decoder.logits(&ctx, &weights, &all, 1, None).unwrap();
        let last = Tensor::from_slice(ctx.pool(), &[50], &logits.f32s()[(all.len() - 1) * 50..]);
        assert_eq!(sampler.sample(&ctx, &last).id, id);
        all.push(id);
    }
}

#[test]
fn generation_ends_when_told() {
    let ctx = Context::cpu(2);
    let (decoder, weights) = model(&ctx, small_config());
    let run = |max_new_tokens, stop_ids: &[u32], flow| {
        let mut sampler = Sampler::new(SamplingOptions::default()).unwrap();
        let request = GenerateRequest { prompt: &[1, 2], max_new_tokens, stop_ids };
        generate(ModelRef { ctx: &ctx, decoder: &decoder, weights: &weights }, &request, &mut sampler, |_| flow)
    };
    let generated = |ids: &[u32], reason| Generated { ids: ids.to_vec(), reason };
    let go_on = ControlFlow::Continue(());
    let free = run(20, &[], go_on).unwrap().ids;
    let first = free.iter().position(|&id| id == free[7]).unwrap();
    assert_eq!(run(20, &[free[7]], go_on).unwrap(), generated(&free[..=first], StopReason::StopId));
    assert_eq!(run(20, &[], ControlFlow::Break(())).unwrap(), generated(&free[..1], StopReason::Asked));
    assert_eq!(run(0, &[], go_on).unwrap(), generated(&[], StopReason::MaxTokens));
    assert_eq!(run(62, &[], go_on).unwrap().ids.len(), 62);
    assert_eq!(run(63, &[], go_on).unwrap_err(), BatchError::TooLong { len: 65, max_seq_len: 64 });
    assert!(matches!(run(usize::MAX, &[], go_on).unwrap_err(), BatchError::TooLong { .. }));
    let empty = GenerateRequest { prompt: &[], max_new_tokens: 3, stop_ids: &[] };
    let mut sampler = Sampler::new(SamplingOptions::default()).unwrap();
    assert_eq!(
        generate(ModelRef { ctx: &ctx, decoder: &decoder, weights: &weights }, &empty, &mut sampler, |_| go_on)
            .unwrap_err(),
        BatchError::Empty
    );
}

#[test]
fn text_comes_in_whole_characters() {
    let tokenizer = Tokenizer::bytes();
    for text in ["plain", "Grüße, 世界 \u{1f980}!", "a\u{0}b", "e\u{301}", ""] {
        let mut stream = TextStream::new(&tokenizer);
        let mut shown = String::new();
        for id in tokenizer.encode(text).unwrap() {
            let piece = stream.push(id).unwrap();
            assert!(!piece.contains('\u{fffd}'), "{piece:?}");
            shown += &piece;
        }
        assert_eq!(shown, text);
        assert_eq!(stream.finish().unwrap(), "");
    }
}

#[test]
fn broken_text_is_shown_as_replacement_characters_and_does_not_pile_up() {
    let tokenizer = Tokenizer::bytes();
    let mut stream = TextStream::new(&tokenizer);
    let mut shown = String::new();
    for id in std::iter::repeat_n(0xff, 1000) {
        shown += &stream.push(id).unwrap();
    }
    assert_eq!(shown.chars().count(), 999);
    assert!(shown.chars().all(|c| c == '\u{fffd}'));
    for id in "世".bytes() {
        shown += &stream.push(u32::from(id)).unwrap();
    }
    assert!(shown.ends_with("\u{fffd}世") && shown.chars().count() == 1001);
    let mut stream = TextStream::new(&tokenizer);
    let pieces: Vec<String> = [b'a', 0xe4, 0xb8].iter().map(|&id| stream.push(u32::from(id)).unwrap()).collect();
    assert_eq!(pieces, ["a", "", ""]);
    assert_eq!(stream.finish().unwrap(), "\u{fffd}");
}

#[test]
fn weights_that_are_no_numbers_are_named() {
    let ctx = Context::cpu(1);
    let (decoder, mut weights) = model(&ctx, small_config());
    assert_eq!(weights.first_not_finite(&ctx), None);
    let name = "model.layers.1.mlp.experts.down_proj";
    let (_, tensor) = weights.tensors_mut().into_iter().find(|(other, _)| other == name).unwrap();
    tensor.f32s_mut().fill(f32::NAN);
    let request = GenerateRequest { prompt: &[1, 2], max_new_tokens: 3, stop_ids: &[] };
    let mut sampler = Sampler::new(SamplingOptions::default()).unwrap();
    let go_on = |_| ControlFlow::Continue(());
    let error = generate(ModelRef { ctx: &ctx, decoder: &decoder, weights: &weights }, &request, &mut sampler, go_on)
        .unwrap_err();
    assert_eq!(error, BatchError::NotANumber);
    assert_eq!(weights.first_not_finite(&ctx).as_deref(), Some(name));
}
