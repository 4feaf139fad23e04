//! Generation on a GPU, or its emulation.

use std::ops::ControlFlow;

use moeworks_gpu::Gpu;
use moeworks_infer::generation::{
    CachedSequence, GenerateRequest, Generated, ModelRef, Sampler, SamplingOptions, StopReason, generate,
};
use moeworks_model::{Decoder, DecoderWeights, KvCache, ModelConfig};
use moeworks_ops::Context;

use crate::common::{model, small_config};

/// Returns a context with a GPU or its emulation; prints a line if there is none.
fn with_gpu() -> Option<Context> {
    let gpu = Gpu::for_a_test().inspect_err(|missing| println!("SKIPPED: generation on a GPU: {missing}")).ok()?;
    Some(Context::cpu(2).with_gpu(gpu))
}

/// Returns a model with an MoE in each of its two layers.
fn config() -> ModelConfig {
    ModelConfig { num_layers: 2, moe_every: 1, ..small_config() }
}

/// Returns the tokens after a prompt, generated so that the host knows each before the next step begins.
fn one_by_one(ctx: &Context, decoder: &Decoder, weights: &DecoderWeights, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut cache = KvCache::new(decoder.config());
    let mut sampler = Sampler::new(SamplingOptions::default()).expect("options");
    let mut logits = decoder.forward_cached(ctx, weights, &mut cache, prompt, None).expect("a prompt");
    let mut next = || {
        let id = sampler.sample(ctx, &logits).id;
        logits = decoder.forward_cached(ctx, weights, &mut cache, &[id], None).expect("a token");
        id
    };
    (0..count).map(|_| next()).collect()
}

#[test]
fn a_step_that_began_before_its_token_was_known_is_taken_back_where_the_text_had_ended() {
    let Some(ctx) = with_gpu() else { return };
    let (decoder, weights) = model(&ctx, config());
    let model = ModelRef { ctx: &ctx, decoder: &decoder, weights: &weights };
    assert!(decoder.can_run_ahead(&ctx) && !decoder.can_run_ahead(&ctx.on_host()));
    let write = |sequence: &mut CachedSequence, prompt: &[u32], stop_ids: &[u32]| {
        let mut sampler = Sampler::new(SamplingOptions::default()).expect("options");
        let request = GenerateRequest { prompt, max_new_tokens: 6, stop_ids };
        generate(model, sequence, &request, &mut sampler, |_| ControlFlow::Continue(())).expect("a text")
    };
    let prompt = [1, 2, 3];
    let all = one_by_one(&ctx, &decoder, &weights, &prompt, 6);
    let last = all.iter().position(|id| *id == all[2]).expect("one of them");
    for (stop_ids, text, reason) in
        [(&all[2..3], &all[..=last], StopReason::StopId), (&[], &all[..], StopReason::MaxTokens)]
    {
        let mut sequence = CachedSequence::new(decoder.config());
        let expected = Generated { ids: text.to_vec(), reason };
        assert_eq!(write(&mut sequence, &prompt, stop_ids), expected);
        assert_eq!(sequence.ids(), [&prompt[..], &text[..text.len() - 1]].concat());
        // The cache holds the keys of these ids.
        let longer = [&prompt[..], text, &[7]].concat();
        let expected = one_by_one(&ctx, &decoder, &weights, &longer, 6);
        assert_eq!(write(&mut sequence, &longer, &[]).ids, expected, "behind {text:?}");
    }
}
