//! Qwen2-MoE: biases on queries, keys and values, a shared expert behind a sigmoid gate, some layers dense.

use serde_json::{Map, Value, json};

use crate::config::ModelConfig;
use crate::hf::config_json::Keys;
use crate::hf::family::Family;
use crate::hf::key_table::{DECODER, EXPERTS, KeyTable};
use crate::hf::keys::{USUAL, layer_types};
use crate::hf::names::{Form, Rule};

pub(crate) const FAMILY: Family = Family {
    model_type: "qwen2_moe",
    architecture: "Qwen2MoeForCausalLM",
    layers: &["model.layers."],
    encoder_layers: "",
    rules: &[
        Rule {
            ours: "mlp.shared_experts.gate_up_proj",
            form: Form::Joined(&["mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"]),
        },
        Rule { ours: "mlp.shared_experts.down_proj", form: Form::Whole("mlp.shared_expert.down_proj.weight") },
    ],
    ignored: &[],
    has_mtp_layers: false,
    keys: KeyTable {
        used: &[
            DECODER,
            EXPERTS,
            &[
                "norm_topk_prob",
                "moe_intermediate_size",
                "qkv_bias",
                "decoder_sparse_step",
                "mlp_only_layers",
                "shared_expert_intermediate_size",
                "sliding_window",
                "use_sliding_window",
                "max_window_layers",
            ],
        ],
        harmless: &[],
        refused: &[],
    },
    read,
    write,
};

fn read(keys: &Keys<'_>) -> Result<ModelConfig, String> {
    let mut config = keys.decoder(&USUAL)?;
    config.variant.qkv_bias = keys.optional(&["qkv_bias"])?.unwrap_or(true);
    keys.experts(&mut config, "moe_intermediate_size")?;
    config.normalize_weights = keys.flag("norm_topk_prob")?;
    keys.sparse_layers(&mut config)?;
    config.shared_width = keys.optional(&["shared_expert_intermediate_size"])?.unwrap_or(5632);
    config.variant.shared_gate = true;
    let window: Option<usize> = keys.optional(&["sliding_window"])?;
    let (is_used, end) = (keys.flag("use_sliding_window")?, keys.optional(&["max_window_layers"])?.unwrap_or(28));
    keys.window(&mut config, window.filter(|_| is_used), |i| i % 2 == 0 && i < end)?;
    Ok(config)
}

fn write(config: &ModelConfig, map: &mut Map<String, Value>) {
    let window = config.variant.window;
    let json = json!({
        "moe_intermediate_size": config.expert_width,
        "shared_expert_intermediate_size": config.shared_width,
        "decoder_sparse_step": config.moe_every,
        "mlp_only_layers": config.variant.dense_layers,
        "qkv_bias": config.variant.qkv_bias,
        "use_sliding_window": window > 0,
        "sliding_window": if window > 0 { json!(window) } else { Value::Null },
        "layer_types": layer_types(config),
    });
    super::insert_all(map, json);
}
