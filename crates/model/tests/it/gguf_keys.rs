//! Keys of GGUF headers that change the mathematics: computed as in `transformers`
//! (`tests/fixtures/gguf/make_rotary.py`), or refused by name.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use moeworks_model::Decoder;
use moeworks_model::gguf::{GgufError, GgufFile};
use moeworks_ops::Context;
use moeworks_tensor::DType;
use serde_json::{Value, json};

use crate::common::{assert_close, fixture};
use crate::gguf::path;
use crate::gguf_parts::{Raw, RawTensor, string};

/// Returns a fixture with keys `[name, type, value]` and f32 tensors `[name, numbers]` added to its header, or
/// replaced in it.
pub(crate) fn with(name: &str, keys: &[Value], tensors: &[Value]) -> Result<GgufFile, GgufError> {
    let mut raw = Raw::of(name);
    for key in keys {
        let (name, ty) = (key[0].as_str().unwrap(), key[1].as_u64().unwrap() as u32);
        raw.add_key(name, ty, &bytes(ty, &key[2]));
    }
    for tensor in tensors {
        let numbers: Vec<f32> = serde_json::from_value(tensor[1].clone()).unwrap();
        let dims = [1_u32.to_le_bytes().to_vec(), (numbers.len() as u64).to_le_bytes().to_vec(), vec![0; 4]].concat();
        let info = [string(tensor[0].as_str().unwrap()), dims].concat();
        raw.tensors.push(RawTensor { info, data: numbers.iter().flat_map(|x| x.to_le_bytes()).collect() });
    }
    GgufFile::from_bytes(Path::new("model.gguf"), Arc::new(raw.bytes()))
}

/// Encodes a value of a header: u32, i32, f32, boolean, text, or an array of booleans (9) or of i32 (59).
fn bytes(ty: u32, value: &Value) -> Vec<u8> {
    let list = |of: u32, size: usize, each: &dyn Fn(&Value) -> Vec<u8>| {
        let values = value.as_array().unwrap();
        let mut bytes = [&of.to_le_bytes()[..], &(values.len() as u64).to_le_bytes()].concat();
        values.iter().for_each(|value| bytes.extend(&each(value)[..size]));
        bytes
    };
    match ty {
        4 => (value.as_u64().unwrap() as u32).to_le_bytes().to_vec(),
        6 => (value.as_f64().unwrap() as f32).to_le_bytes().to_vec(),
        7 => vec![u8::from(value.as_bool().unwrap())],
        8 => string(value.as_str().unwrap()),
        9 if value[0].is_boolean() => list(7, 1, &|value| vec![u8::from(value.as_bool().unwrap())]),
        9 => list(5, 4, &|value| (value.as_i64().unwrap() as i32).to_le_bytes().to_vec()),
        _ => unreachable!(),
    }
}

#[test]
fn keys_of_the_rotary_embedding_and_of_windows_are_used_as_elsewhere() {
    let ctx = Context::cpu(2);
    let text = fs::read_to_string(fixture("gguf").join("rotary.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_str(&text).unwrap();
    assert_eq!(cases.len(), 9);
    for case in cases {
        let (name, file) = (case["name"].as_str().unwrap(), case["file"].as_str().unwrap());
        let file_json = fs::read_to_string(path(file).with_extension("json")).unwrap();
        let prompt: Vec<u32> =
            serde_json::from_value(serde_json::from_str::<Value>(&file_json).unwrap()["prompt"].clone()).unwrap();
        let logits: Vec<f32> = serde_json::from_value(case["logits"].clone()).unwrap();
        let model = with(file, case["keys"].as_array().unwrap(), case["tensors"].as_array().unwrap()).unwrap();
        let (config, weights) = model.load_model(&ctx).unwrap_or_else(|error| panic!("{name}: {error}"));
        let decoder = Decoder::new(config).unwrap();
        let found =
            decoder.logits(&ctx, &weights.compute_copy(&ctx, DType::F32), &prompt, 1, None).unwrap().to_f32_vec();
        assert_close(name, &found[found.len() - logits.len()..], &logits, 1e-4);
    }
}

#[test]
fn keys_that_are_not_computed_are_refused_by_name() {
    let ctx = Context::cpu(1);
    let refused = |file: &str, key: &str, ty: u32, value: Value| {
        let arch = GgufFile::open(&path(file)).unwrap().architecture().unwrap().to_owned();
        let key = format!("{arch}.{key}");
        let model = with(file, &[json!([key, ty, value])], &[]).unwrap();
        let error = model.load_model(&ctx).map(|_| ()).expect_err(&key).to_string();
        assert!(error.contains(&key) && !error.contains('\n'), "{error}");
    };
    for (key, value) in [
        ("attn_logit_softcapping", 1.0),
        ("final_logit_softcapping", 2.0),
        ("logit_scale", 3.0),
        ("residual_scale", 0.5),
        ("embedding_scale", 12.0),
        ("attention.scale", 0.3),
        ("attention.clamp_kqv", 8.0),
        ("attention.max_alibi_bias", 8.0),
        ("expert_weights_scale", 2.5),
        ("rope.scaling.yarn_attn_factor", 2.0),
    ] {
        refused("mixtral", key, 6, json!(value));
        refused("qwen3moe", key, 6, json!(value));
    }
    for (key, value) in [
        ("expert_gating_func", 2),
        ("expert_group_count", 2),
        ("expert_shared_count", 1),
        ("leading_dense_block_count", 1),
        ("interleave_moe_layer_step", 2),
        ("attention.value_length", 4),
        ("rope.dimension_count", 4),
        ("nextn_predict_layers", 1),
    ] {
        refused("mixtral", key, 4, json!(value));
    }
    for (key, value) in [("attention.causal", false), ("use_parallel_residual", true), ("swin_norm", true)] {
        refused("llama", key, 7, json!(value));
    }
    refused("llama", "attention.sliding_window_pattern", 9, json!([true, false]));
    refused("llama", "rope.scaling.type", 8, json!("longrope"));
    refused("llama", "rope.scaling.type", 8, json!("su"));
    refused("qwen3moe", "rope.dimension_count", 4, json!(7));
    refused("qwen3moe", "rope.dimension_count", 4, json!(18));
    refused("qwen3moe", "attention.head_count", 9, json!([4, 2]));
    let other = with("llama", &[json!(["general.type", 8, "adapter"])], &[]).unwrap().load_model(&ctx);
    assert!(other.map(|_| ()).unwrap_err().to_string().contains("general.type"));
}

#[test]
fn keys_that_say_that_they_are_off_and_lists_of_equal_numbers_are_taken() {
    let ctx = Context::cpu(1);
    let plain = GgufFile::open(&path("mixtral")).unwrap().config().unwrap();
    for (key, ty, value) in [
        ("attention.head_count", 9, json!([4, 4])),
        ("feed_forward_length", 9, json!([32, 32])),
        ("logit_scale", 6, json!(1.0)),
        ("attention.scale", 6, json!(0.0)),
        ("attention.causal", 7, json!(true)),
        ("expert_gating_func", 4, json!(1)),
        ("expert_feed_forward_length", 4, json!(32)),
        ("attention.value_length", 4, json!(8)),
        ("tensor_data_layout", 8, json!("Meta AI original pth")),
        ("rope.scaling.finetuned", 7, json!(true)),
        ("rope.scaling.factor", 6, json!(1.0)),
        ("some_new_thing", 6, json!(1.0)),
    ] {
        let model = with("mixtral", &[json!([format!("llama.{key}"), ty, value])], &[]).unwrap();
        let (config, _) = model.load_model(&ctx).unwrap_or_else(|error| panic!("{key}: {error}"));
        assert_eq!(config, plain, "{key}");
    }
}
