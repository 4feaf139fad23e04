//! OLMoE: norms of queries and keys over the whole projection, which may be cut.

use serde_json::{Map, Value, json};

use crate::config::{ModelConfig, QkNorm};
use crate::hf::config_json::{Keys, shortest};
use crate::hf::family::Family;
use crate::hf::key_table::{DECODER, EXPERTS, KeyTable, refused};
use crate::hf::keys::{Defaults, USUAL};

pub(crate) const FAMILY: Family = Family {
    model_type: "olmoe",
    architecture: "OlmoeForCausalLM",
    layers: &["model.layers."],
    encoder_layers: "",
    rules: &[],
    ignored: &[],
    has_mtp_layers: false,
    keys: KeyTable {
        used: &[DECODER, EXPERTS, &["norm_topk_prob", "attention_bias", "clip_qkv"]],
        harmless: &[],
        refused: &[refused("qk_norm", &["true"]), refused("use_qk_norm", &["true"])],
    },
    read,
    write,
};

fn read(keys: &Keys<'_>) -> Result<ModelConfig, String> {
    let mut config = keys.decoder(&Defaults { norm_eps: 1e-5, ..USUAL })?;
    config.qk_norm = QkNorm::Whole;
    config.variant.qkv_bias = keys.flag("attention_bias")?;
    config.variant.output_bias = config.variant.qkv_bias;
    config.variant.clip_qkv = keys.optional(&["clip_qkv"])?.unwrap_or(0.0);
    if config.num_heads.checked_mul(config.head_dim) != Some(config.width) {
        return Err("head_dim: must be hidden_size over num_attention_heads in this family".to_owned());
    }
    keys.experts(&mut config, "intermediate_size")?;
    config.normalize_weights = keys.flag("norm_topk_prob")?;
    Ok(config)
}

fn write(config: &ModelConfig, map: &mut Map<String, Value>) {
    let clip = config.variant.clip_qkv;
    let json = json!({
        "intermediate_size": config.expert_width,
        "clip_qkv": if clip > 0.0 { shortest(clip) } else { Value::Null },
        "attention_bias": config.variant.qkv_bias,
    });
    super::insert_all(map, json);
}
