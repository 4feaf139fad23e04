//! One training step of tiny checkpoints made by `transformers`: logits, losses and every gradient.

use moeworks_model::hf::{SaveOptions, load_model, save_model};
use moeworks_model::safetensors::SafetensorsFile;
use moeworks_model::{BalanceKind, Decoder, DecoderWeights, PassOptions};
use moeworks_ops::Context;
use moeworks_ops::linear::Write;
use moeworks_tensor::DType;
use serde_json::Value;

use crate::common::{assert_close, assert_same_bits, batch, fixture, next_ids};

/// The tolerance, relative to the largest element of each tensor.
const TOLERANCE: f32 = 1e-4;

fn expected_json(name: &str) -> Value {
    let text = std::fs::read_to_string(fixture(name).join("expected.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn input_ids(expected: &Value) -> (Vec<u32>, usize) {
    let rows: Vec<Vec<u32>> = serde_json::from_value(expected["input_ids"].clone()).unwrap();
    let seq_len = rows[0].len();
    (rows.concat(), seq_len)
}

/// The gradient under our name: what transformers keeps apart in dense layers is joined.
fn expected_grad(ctx: &Context, file: &SafetensorsFile, name: &str) -> Vec<f32> {
    let get = |name: &str| file.tensor(ctx, &format!("grad.{name}")).unwrap().to_f32_vec();
    match (name.strip_suffix("mlp.gate_up_proj"), name.strip_suffix("mlp.down_proj")) {
        (Some(layer), _) => {
            [get(&format!("{layer}mlp.gate_proj.weight")), get(&format!("{layer}mlp.up_proj.weight"))].concat()
        }
        (_, Some(layer)) => get(&format!("{layer}mlp.down_proj.weight")),
        _ => get(name),
    }
}

fn compare_with_transformers(name: &str, model_type: &str) {
    let ctx = Context::cpu(2);
    let (config, weights) = load_model(&ctx, &fixture(name)).unwrap();
    let expected = expected_json(name);
    let tensors = SafetensorsFile::open(&fixture(name).join("expected.safetensors")).unwrap();
    let (ids, seq_len) = input_ids(&expected);
    let targets = next_ids(&ids, seq_len);
    let decoder = Decoder::new(config.clone()).unwrap();

    let logits = decoder.logits(&ctx, &weights, &ids, ids.len() / seq_len).unwrap();
    assert_close("logits", logits.f32s(), tensors.tensor(&ctx, "logits").unwrap().f32s(), TOLERANCE);

    let mut grads = weights.zeros_like(&ctx);
    let num_targets = targets.iter().filter(|&&id| id != u32::MAX).count();
    let options = PassOptions {
        balance_coef: expected["aux_coef"].as_f64().unwrap() as f32,
        balance: BalanceKind::Pooled,
        grad_scale: 1.0 / num_targets as f32,
        ..PassOptions::default()
    };
    let step = batch(&ids, &targets, seq_len);
    let stats = decoder.forward_backward(&ctx, &weights, &step, &options, Write::Replace, &mut grads).unwrap();
    assert_eq!(stats.num_targets, num_targets);
    let close = |what: &str, found: f64| {
        let wanted = expected[what].as_f64().unwrap();
        assert!((found - wanted).abs() < 1e-4 * wanted.abs().max(1e-3), "{what}: {found}, expected {wanted}");
    };
    close("cross_entropy", stats.mean_loss());
    close("aux_loss", stats.balance_loss);
    close("loss", stats.mean_loss() + f64::from(options.balance_coef) * stats.balance_loss);
    for (name, grad) in grads.tensors() {
        assert_close(&name, grad.f32s(), &expected_grad(&ctx, &tensors, &name), TOLERANCE);
    }

    save_and_load(&ctx, &decoder, &weights, model_type);
}

/// What is written is read back with the same configuration and the same bits, and written again with the same bytes.
fn save_and_load(ctx: &Context, decoder: &Decoder, weights: &DecoderWeights, model_type: &str) {
    let dir = tempfile::tempdir().unwrap();
    let (first, second) = (dir.path().join("first"), dir.path().join("second"));
    let saved = save_model(&first, decoder.config(), weights, &SaveOptions::default()).unwrap();
    assert_eq!((saved.model_type, saved.loads_in_transformers), (model_type, true));
    let (config, loaded) = load_model(ctx, &first).unwrap();
    assert_eq!(config, *decoder.config());
    assert_same_bits(&loaded, weights);
    save_model(&second, &config, &loaded, &SaveOptions::default()).unwrap();
    for file in ["config.json", "model.safetensors", "generation_config.json"] {
        assert_eq!(std::fs::read(first.join(file)).unwrap(), std::fs::read(second.join(file)).unwrap(), "{file}");
    }
}

#[test]
fn qwen3_moe_matches_transformers() {
    compare_with_transformers("qwen3_moe", "qwen3_moe");
}

#[test]
fn qwen3_moe_with_dense_layers_tied_embedding_and_shards_matches_transformers() {
    compare_with_transformers("qwen3_moe_sparse", "qwen3_moe");
}

#[test]
fn olmoe_matches_transformers() {
    compare_with_transformers("olmoe", "olmoe");
}

#[test]
fn mixtral_with_stacked_experts_matches_transformers() {
    compare_with_transformers("mixtral", "mixtral");
}

#[test]
fn dense_qwen3_matches_transformers() {
    compare_with_transformers("qwen3", "qwen3");
}

#[test]
fn dense_llama_matches_transformers() {
    compare_with_transformers("llama", "llama");
}

#[test]
fn a_checkpoint_converted_to_bf16_gives_nearly_the_same_logits() {
    let ctx = Context::cpu(2);
    let (config, weights) = load_model(&ctx, &fixture("qwen3_moe_sparse")).unwrap();
    let (ids, seq_len) = input_ids(&expected_json("qwen3_moe_sparse"));
    let decoder = Decoder::new(config).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let half = weights.compute_copy(&ctx, DType::BF16);
    save_model(dir.path(), decoder.config(), &half, &SaveOptions::default()).unwrap();
    let (_, loaded) = load_model(&ctx, dir.path()).unwrap();
    assert_same_bits(&loaded, &half);
    let logits = |weights| decoder.logits(&ctx, weights, &ids, ids.len() / seq_len).unwrap();
    assert_close("logits", logits(&loaded).f32s(), logits(&weights).f32s(), 0.1);
}
