//! The families of `transformers` that are read and written, one per file.
//!
//! Names and keys are those of transformers 5.23. `save_pretrained` writes one tensor per expert. In memory, and on
//! disk with `save_original_format=False`, experts are stacked as `mlp.experts.gate_up_proj` and
//! `mlp.experts.down_proj`. Both forms are read.

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

/// All families, in the order in which they are tried for saving.
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

/// Our own family, for models that no other expresses. The whole configuration is under our own key.
pub(crate) const OURS: Family = Family {
    model_type: "moeworks",
    architecture: "MoeworksForCausalLM",
    layers: &["model.layers."],
    encoder_layers: "model.encoder.layers.",
    rules: &[],
    ignored: &[],
    has_mtp_layers: false,
    keys: KeyTable { used: &[], harmless: &[], refused: &[] },
    read: |_| Err("read from its own key".to_owned()),
    write: |config, map| qwen3_moe::write(config, map),
};

/// Adds the keys of the object `json` to `map`.
fn insert_all(map: &mut serde_json::Map<String, serde_json::Value>, json: serde_json::Value) {
    if let serde_json::Value::Object(json) = json {
        map.extend(json);
    }
}

/// Removes the keys that most families share from `map`, for a family with other names for them.
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
