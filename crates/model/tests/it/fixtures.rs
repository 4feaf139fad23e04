//! One training step of tiny checkpoints made by `transformers`: logits, losses and every gradient.

use std::path::Path;

use moeworks_model::hf::{ModelFolder, SaveOptions, load_model, save_model};
use moeworks_model::safetensors::{ModelFiles, SafetensorsFile};
use moeworks_model::{BalanceKind, Decoder, DecoderWeights, GradTarget, KvCache, PassOptions};
use moeworks_ops::Context;
use moeworks_ops::linear::Write;
use moeworks_tensor::{DType, Tensor};
use serde_json::Value;

use crate::common::{assert_close, assert_same_bits, batch, fixture, greedy, next_ids};

/// The tolerance, relative to the largest element of each tensor.
pub(crate) const TOLERANCE: f32 = 1e-4;

pub(crate) fn expected_json(dir: &Path) -> Value {
    let text = std::fs::read_to_string(dir.join("expected.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

pub(crate) fn input_ids(expected: &Value) -> (Vec<u32>, usize) {
    let rows: Vec<Vec<u32>> = serde_json::from_value(expected["input_ids"].clone()).unwrap();
    let seq_len = rows[0].len();
    (rows.concat(), seq_len)
}

/// Compares logits and greedy ids, and the folder written and read again.
fn compare_inference(dir: &Path, model_type: &str) {
    let ctx = Context::cpu(2);
    let (decoder, stored) = compare_logits(&ctx, dir);
    save_and_load(&ctx, &decoder, &stored, dir, model_type);
}

/// Compares logits and greedy ids in f32, whatever the type of the weights. Returns the model and its stored weights.
pub(crate) fn compare_logits(ctx: &Context, dir: &Path) -> (Decoder, DecoderWeights) {
    let (config, stored) = load_model(ctx, dir).unwrap();
    let weights = stored.compute_copy(ctx, DType::F32);
    let expected = expected_json(dir);
    let tensors = SafetensorsFile::open(&dir.join("expected.safetensors")).unwrap();
    let (ids, seq_len) = input_ids(&expected);
    let decoder = Decoder::new(config).unwrap();
    let logits = decoder.logits(ctx, &weights, &ids, ids.len() / seq_len, None).unwrap();
    assert_close("logits", logits.f32s(), tensors.tensor(ctx, "logits").unwrap().f32s(), TOLERANCE);
    compare_greedy(ctx, &decoder, &weights, &expected);
    (decoder, stored)
}

fn compare_greedy(ctx: &Context, decoder: &Decoder, weights: &DecoderWeights, expected: &Value) {
    let ids: Vec<u32> = serde_json::from_value(expected["greedy"].clone()).unwrap();
    let (prompt, wanted) = ids.split_at(5);
    let mut cache = KvCache::new(decoder.config());
    assert_eq!(greedy(ctx, decoder, weights, &mut cache, prompt, wanted.len()), wanted);
}

/// Compares inference as [`compare_inference`] does, and one training step: losses and every gradient.
pub(crate) fn compare_with_transformers(dir: &Path, model_type: &str) {
    compare_inference(dir, model_type);
    compare_training_step(&Context::cpu(2), dir);
}

/// Compares one training step in f32: losses and every gradient.
pub(crate) fn compare_training_step(ctx: &Context, dir: &Path) {
    let (config, weights) = load_model(ctx, dir).unwrap();
    let weights = weights.compute_copy(ctx, DType::F32);
    let expected = expected_json(dir);
    let (ids, seq_len) = input_ids(&expected);
    let targets = next_ids(&ids, seq_len);
    let decoder = Decoder::new(config).unwrap();
    let mut grads = weights.zeros_like(ctx);
    let num_targets = targets.iter().filter(|&&id| id != u32::MAX).count();
    let options = PassOptions {
        balance_coef: expected["aux_coef"].as_f64().unwrap() as f32,
        balance: BalanceKind::Pooled,
        grad_scale: 1.0 / num_targets as f32,
        ..PassOptions::default()
    };
    let step = batch(&ids, &targets, seq_len);
    let stats = decoder
        .forward_backward(ctx, &weights, &[step], &options, GradTarget::new(Write::Replace, &mut grads))
        .unwrap()
        .remove(0);
    assert_eq!(stats.num_targets, num_targets);
    let close = |what: &str, found: f64| assert_as_expected(&expected, what, found);
    close("cross_entropy", stats.mean_loss());
    if options.balance_coef > 0.0 {
        close("aux_loss", stats.balance_loss);
        close("loss", stats.mean_loss() + f64::from(options.balance_coef) * stats.balance_loss);
    }
    compare_gradients(ctx, &grads, &dir.join("grads"));
}

/// Returns a figure of `transformers`.
#[track_caller]
pub(crate) fn assert_as_expected(expected: &Value, what: &str, found: f64) {
    let wanted = expected[what].as_f64().unwrap();
    assert!((found - wanted).abs() < 1e-4 * wanted.abs().max(1e-3), "{what}: {found}, expected {wanted}");
}

/// Compares every gradient. One far smaller than the largest of all has the tolerance of a thirtieth of that.
pub(crate) fn compare_gradients(ctx: &Context, grads: &DecoderWeights, expected: &Path) {
    let (_, wanted) = load_model(ctx, expected).unwrap();
    let largest_of = |tensor: &Tensor| tensor.f32s().iter().fold(0.0_f32, |max, x| max.max(x.abs()));
    let largest = wanted.tensors().iter().map(|(_, tensor)| largest_of(tensor)).fold(0.0, f32::max);
    for ((name, grad), (_, wanted)) in grads.tensors().into_iter().zip(wanted.tensors()) {
        // A bias on keys alone moves all scores of a query alike: its gradient is rounding.
        let is_nothing = wanted.f32s().iter().chain(grad.f32s()).all(|x| x.abs() < 1e-6);
        if !is_nothing {
            let tolerance = TOLERANCE * (largest / 30.0 / largest_of(wanted)).max(1.0);
            assert_close(&name, grad.f32s(), wanted.f32s(), tolerance);
        }
    }
}

/// Checks that a saved folder is read back with the same configuration and bits, is saved again with the same bytes,
/// and keeps every key of the original.
pub(crate) fn save_and_load(ctx: &Context, decoder: &Decoder, weights: &DecoderWeights, dir: &Path, model_type: &str) {
    let temporary = tempfile::tempdir().unwrap();
    let (first, second) = (temporary.path().join("first"), temporary.path().join("second"));
    let origin = ModelFolder::open(dir).unwrap();
    let options = SaveOptions { origin: Some(&origin), ..SaveOptions::default() };
    let saved = save_model(&first, decoder.config(), weights, &options).unwrap();
    assert_eq!((saved.model_type, saved.loads_in_transformers), (model_type, true));
    let (config, loaded) = load_model(ctx, &first).unwrap();
    assert_eq!(config, *decoder.config());
    assert_same_bits(&loaded, weights);
    let keys = |dir: &Path| -> serde_json::Map<String, Value> {
        serde_json::from_str(&std::fs::read_to_string(dir.join("config.json")).unwrap()).unwrap()
    };
    let kept = keys(&first);
    for key in keys(dir).keys().filter(|key| !["quantization_config", "transformers_version"].contains(&key.as_str())) {
        assert!(kept.contains_key(key), "{key} was lost");
    }
    let origin = ModelFolder::open(&first).unwrap();
    let options = SaveOptions { origin: Some(&origin), ..SaveOptions::default() };
    save_model(&second, &config, &loaded, &options).unwrap();
    for file in ["config.json", "model.safetensors", "generation_config.json"] {
        assert_eq!(std::fs::read(first.join(file)).unwrap(), std::fs::read(second.join(file)).unwrap(), "{file}");
    }
}

#[test]
fn qwen3_moe_matches_transformers() {
    compare_with_transformers(&fixture("qwen3_moe"), "qwen3_moe");
}

#[test]
fn qwen3_moe_with_dense_layers_tied_embedding_and_shards_matches_transformers() {
    compare_with_transformers(&fixture("qwen3_moe_sparse"), "qwen3_moe");
}

#[test]
fn olmoe_matches_transformers() {
    compare_with_transformers(&fixture("olmoe"), "olmoe");
}

#[test]
fn mixtral_with_stacked_experts_matches_transformers() {
    compare_with_transformers(&fixture("mixtral"), "mixtral");
}

#[test]
fn qwen3_moe_with_yarn_biases_and_a_window_matches_transformers() {
    compare_with_transformers(&fixture("qwen3_moe_yarn"), "qwen3_moe");
}

#[test]
fn qwen2_moe_matches_transformers() {
    compare_with_transformers(&fixture("qwen2_moe"), "qwen2_moe");
}

#[test]
fn olmoe_with_clipping_and_linear_scaling_matches_transformers() {
    compare_with_transformers(&fixture("olmoe_clip"), "olmoe");
}

#[test]
fn mixtral_with_a_sliding_window_matches_transformers() {
    compare_with_transformers(&fixture("mixtral_sliding"), "mixtral");
}

#[test]
fn dense_llama_with_llama3_scaling_and_biases_matches_transformers() {
    compare_with_transformers(&fixture("llama3"), "llama");
}

#[test]
fn granitemoe_matches_transformers() {
    compare_with_transformers(&fixture("granitemoe"), "granitemoe");
}

#[test]
fn gpt_oss_matches_transformers() {
    compare_with_transformers(&fixture("gpt_oss"), "gpt_oss");
}

#[test]
fn gpt_oss_with_experts_in_blocks_of_four_bit_floats_matches_transformers() {
    compare_inference(&fixture("gpt_oss_mxfp4"), "gpt_oss");
}

#[test]
fn four_bit_floats_are_multiplied_in_blocks_and_written_as_they_were() {
    let (ctx, from, to) = (Context::cpu(2), fixture("gpt_oss_mxfp4"), tempfile::tempdir().unwrap());
    let (config, weights) = load_model(&ctx, &from).unwrap();
    let blocks = weights.tensors().into_iter().filter(|(_, tensor)| tensor.dtype() == DType::Mxfp4);
    let names: Vec<String> = blocks.map(|(name, _)| name).collect();
    assert_eq!(names, ["gate_up_proj", "down_proj"].map(|name| format!("model.layers.0.mlp.experts.{name}")));
    let (ids, seq_len) = input_ids(&expected_json(&from));
    let decoder = Decoder::new(config).unwrap();
    let logits = |weights| decoder.logits(&ctx, weights, &ids, ids.len() / seq_len, None).unwrap();
    // Activations are rounded to eight bits.
    let exact = weights.compute_copy(&ctx, DType::F32);
    assert_close("logits", logits(&weights).f32s(), logits(&exact).f32s(), 0.02);

    let origin = ModelFolder::open(&from).unwrap();
    let options = SaveOptions { origin: Some(&origin), ..SaveOptions::default() };
    save_model(to.path(), decoder.config(), &weights, &options).unwrap();
    let [before, after] = [&*from, to.path()].map(|dir| ModelFiles::open(dir).unwrap());
    for name in names.iter().flat_map(|name| ["blocks", "scales"].map(|part| format!("{name}_{part}"))) {
        let of = |files: &ModelFiles| files.get(&name).unwrap().0.bytes(&name).unwrap().to_vec();
        assert_eq!(of(&before), of(&after), "{name}");
    }
}

#[test]
fn deepseek_v2_matches_transformers() {
    compare_with_transformers(&fixture("deepseek_v2"), "deepseek_v2");
}

#[test]
fn deepseek_v3_matches_transformers() {
    compare_with_transformers(&fixture("deepseek_v3"), "deepseek_v3");
}

#[test]
fn deepseek_v3_in_eight_bit_blocks_matches_transformers() {
    compare_inference(&fixture("deepseek_v3_fp8"), "deepseek_v3");
}

#[test]
fn qwen3_moe_in_eight_bit_blocks_matches_transformers() {
    compare_inference(&fixture("qwen3_moe_fp8"), "qwen3_moe");
}

#[test]
fn phimoe_matches_transformers() {
    compare_with_transformers(&fixture("phimoe"), "phimoe");
}

#[test]
fn dense_gpt2_matches_transformers() {
    compare_with_transformers(&fixture("gpt2"), "gpt2");
}

#[test]
fn dense_qwen3_matches_transformers() {
    compare_with_transformers(&fixture("qwen3"), "qwen3");
}

#[test]
fn dense_llama_matches_transformers() {
    compare_with_transformers(&fixture("llama"), "llama");
}

#[test]
fn a_checkpoint_converted_to_bf16_gives_nearly_the_same_logits() {
    let ctx = Context::cpu(2);
    let (config, weights) = load_model(&ctx, &fixture("qwen3_moe_sparse")).unwrap();
    let (ids, seq_len) = input_ids(&expected_json(&fixture("qwen3_moe_sparse")));
    let decoder = Decoder::new(config).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let half = weights.compute_copy(&ctx, DType::BF16);
    save_model(dir.path(), decoder.config(), &half, &SaveOptions::default()).unwrap();
    let (_, loaded) = load_model(&ctx, dir.path()).unwrap();
    assert_same_bits(&loaded, &half);
    let logits = |weights| decoder.logits(&ctx, weights, &ids, ids.len() / seq_len, None).unwrap();
    assert_close("logits", logits(&loaded).f32s(), logits(&weights).f32s(), 0.1);
}
