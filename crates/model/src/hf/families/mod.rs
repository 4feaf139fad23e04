//! The families of `transformers` that are read and written, one file each.
//!
//! Names and keys as of transformers 5.23. `save_pretrained` writes one tensor an expert, while in memory (and on disk with
//! `save_original_format=False`) experts are stacked as `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`; both are
//! read.

mod deepseek;
mod gpt2;
mod gpt_oss;
mod granitemoe;
mod llama;
mod mixtral;
mod olmoe;
mod phimoe;
mod qwen2_moe;
mod qwen3;
mod qwen3_moe;
mod switch;

use super::family::Family;
use super::key_table::KeyTable;

/// Every family, the first that fits first.
pub(crate) const FAMILIES: [&Family; 13] = [
    &qwen3_moe::FAMILY,
    &olmoe::FAMILY,
    &mixtral::FAMILY,
    &qwen3::FAMILY,
    &llama::FAMILY,
    &qwen2_moe::FAMILY,
    &granitemoe::FAMILY,
    &gpt_oss::FAMILY,
    &deepseek::V3,
    &deepseek::V2,
    &phimoe::FAMILY,
    &gpt2::FAMILY,
    &switch::FAMILY,
];

/// Ours, for what the others cannot express. The configuration is under our own key, whole.
pub(crate) const OURS: Family = Family {
    model_type: "moeworks",
    architecture: "MoeworksForCausalLM",
    layers: &["model.layers."],
    encoder_layers: "model.encoder.layers.",
    rules: &[],
    ignored: &[],
    has_further_layers: false,
    keys: KeyTable { used: &[], harmless: &[], refused: &[] },
    read: |_| Err("read from its own key".to_owned()),
    write: |config, map| qwen3_moe::write(config, map),
};

/// Sets the keys of `json`, an object, in `map`.
fn extend(map: &mut serde_json::Map<String, serde_json::Value>, json: serde_json::Value) {
    if let serde_json::Value::Object(json) = json {
        map.extend(json);
    }
}

/// Removes the keys that most families share from `map`, for a family that has other words for them.
fn remove_usual(map: &mut serde_json::Map<String, serde_json::Value>) {
    let usual = [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "intermediate_size",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "attention_bias",
        "attention_dropout",
    ];
    for key in usual {
        map.remove(key);
    }
}
