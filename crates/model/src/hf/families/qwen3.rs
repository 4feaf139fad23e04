//! Qwen3, dense: norms of queries and keys in each head, a sliding window in later layers.

use serde_json::{Map, Value, json};

use crate::config::{ModelConfig, QkNorm};
use crate::hf::config_json::Keys;
use crate::hf::family::Family;
use crate::hf::fp8;
use crate::hf::key_table::{DECODER, KeyTable, QUANTIZED, refused};
use crate::hf::keys::{Defaults, USUAL, layer_types};

pub(crate) const FAMILY: Family = Family {
    model_type: "qwen3",
    architecture: "Qwen3ForCausalLM",
    layers: &["model.layers."],
    encoder_layers: "",
    rules: &[],
    ignored: &[],
    has_mtp_layers: false,
    keys: KeyTable {
        used: &[
            DECODER,
            &["attention_bias", "sliding_window", "use_sliding_window", "max_window_layers"],
            &[QUANTIZED],
        ],
        harmless: &[],
        refused: &[refused("qk_norm", &["true"]), refused("use_qk_norm", &["true"])],
    },
    read,
    write,
};

fn read(keys: &Keys<'_>) -> Result<ModelConfig, String> {
    let mut config = keys.decoder(&Defaults { head_dim: Some(128), ..USUAL })?;
    keys.quantized(fp8::METHOD)?;
    config.qk_norm = QkNorm::Head;
    config.variant.qkv_bias = keys.flag("attention_bias")?;
    config.variant.output_bias = config.variant.qkv_bias;
    let window: Option<usize> = keys.optional(&["sliding_window"])?;
    let (is_used, first) = (keys.flag("use_sliding_window")?, keys.optional(&["max_window_layers"])?.unwrap_or(28));
    keys.window(&mut config, window.filter(|_| is_used), |i| i >= first)?;
    Ok(config)
}

fn write(config: &ModelConfig, map: &mut Map<String, Value>) {
    let window = config.variant.window;
    let json = json!({
        "attention_bias": config.variant.qkv_bias,
        "use_sliding_window": window > 0,
        "sliding_window": if window > 0 { json!(window) } else { Value::Null },
        "layer_types": layer_types(config),
    });
    super::insert_all(map, json);
}
