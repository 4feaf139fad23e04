//! Llama, dense (2302.13971).

use serde_json::{Map, Value, json};

use crate::config::ModelConfig;
use crate::hf::config_json::Keys;
use crate::hf::family::Family;
use crate::hf::key_table::{DECODER, KeyTable};
use crate::hf::keys::USUAL;
use crate::hf::names::{Form, Rule};

pub(crate) const FAMILY: Family = Family {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    layers: &["model.layers."],
    encoder_layers: "",
    rules: &[
        Rule { ours: "mlp.gate_up_proj_bias", form: Form::Joined(&["mlp.gate_proj.bias", "mlp.up_proj.bias"]) },
        Rule { ours: "mlp.down_proj_bias", form: Form::Whole("mlp.down_proj.bias") },
    ],
    ignored: &[],
    has_mtp_layers: false,
    keys: KeyTable {
        used: &[DECODER, &["attention_bias", "mlp_bias"]],
        harmless: &["max_window_layers"],
        refused: &[],
    },
    read,
    write,
};

fn read(keys: &Keys<'_>) -> Result<ModelConfig, String> {
    let mut config = keys.decoder(&USUAL)?;
    config.variant.qkv_bias = keys.flag("attention_bias")?;
    config.variant.output_bias = config.variant.qkv_bias;
    config.variant.feed_forward_bias = keys.flag("mlp_bias")?;
    Ok(config)
}

fn write(config: &ModelConfig, map: &mut Map<String, Value>) {
    let variant = &config.variant;
    super::insert_all(map, json!({"attention_bias": variant.qkv_bias, "mlp_bias": variant.feed_forward_bias}));
}
