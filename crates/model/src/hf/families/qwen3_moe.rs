//! Qwen3-MoE: norms of queries and keys in each head, some layers dense.

use serde_json::{Map, Value, json};

use crate::config::{ModelConfig, QkNorm};
use crate::hf::config_json::Keys;
use crate::hf::family::Family;
use crate::hf::fp8;
use crate::hf::key_table::{DECODER, EXPERTS, KeyTable, QUANTIZED, refused};
use crate::hf::keys::USUAL;

pub(crate) const FAMILY: Family = Family {
    model_type: "qwen3_moe",
    architecture: "Qwen3MoeForCausalLM",
    layers: &["model.layers."],
    encoder_layers: "",
    rules: &[],
    ignored: &[],
    has_mtp_layers: false,
    keys: KeyTable {
        used: &[
            DECODER,
            EXPERTS,
            &[
                "norm_topk_prob",
                "moe_intermediate_size",
                "attention_bias",
                "decoder_sparse_step",
                "mlp_only_layers",
                "sliding_window",
                "use_sliding_window",
            ],
            &[QUANTIZED],
        ],
        harmless: &["max_window_layers"],
        refused: &[refused("qk_norm", &["true"]), refused("use_qk_norm", &["true"])],
    },
    read,
    write,
};

fn read(keys: &Keys<'_>) -> Result<ModelConfig, String> {
    let mut config = keys.decoder(&USUAL)?;
    keys.quantized(fp8::METHOD)?;
    config.qk_norm = QkNorm::Head;
    config.variant.qkv_bias = keys.flag("attention_bias")?;
    config.variant.output_bias = config.variant.qkv_bias;
    keys.experts(&mut config, "moe_intermediate_size")?;
    config.normalize_weights = keys.flag("norm_topk_prob")?;
    keys.sparse_layers(&mut config)?;
    let window: Option<usize> = keys.optional(&["sliding_window"])?;
    let is_used = keys.flag("use_sliding_window")?;
    keys.window(&mut config, window.filter(|_| is_used), |_| true)?;
    Ok(config)
}

pub(crate) fn write(config: &ModelConfig, map: &mut Map<String, Value>) {
    let window = config.variant.window;
    let json = json!({
        "moe_intermediate_size": config.expert_width,
        "decoder_sparse_step": config.moe_every,
        "mlp_only_layers": config.variant.dense_layers,
        "attention_bias": config.variant.qkv_bias,
        "use_sliding_window": window > 0,
        "sliding_window": if window > 0 { json!(window) } else { Value::Null },
    });
    super::insert_all(map, json);
}
