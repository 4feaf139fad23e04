//! Granite-MoE: stacked experts, softmax over the chosen logits, multipliers on embeddings, attention, residuals and
//! logits.

use moeworks_moe::ScoreOrder;
use serde_json::{Map, Value, json};

use crate::config::ModelConfig;
use crate::hf::config_json::{Keys, shortest};
use crate::hf::family::Family;
use crate::hf::key_table::{DECODER, EXPERTS, KeyTable, refused};
use crate::hf::keys::USUAL;
use crate::hf::names::{Form, Rule};

pub(crate) const FAMILY: Family = Family {
    model_type: "granitemoe",
    architecture: "GraniteMoeForCausalLM",
    layers: &["model.layers."],
    encoder_layers: "",
    rules: &[
        Rule { ours: "mlp.gate.weight", form: Form::Whole("block_sparse_moe.router.layer.weight") },
        Rule { ours: "mlp.experts.gate_up_proj", form: Form::Whole("block_sparse_moe.input_linear.weight") },
        Rule { ours: "mlp.experts.down_proj", form: Form::Whole("block_sparse_moe.output_linear.weight") },
        // Experts stacked, as `transformers` writes them with `save_original_format=False`.
        Rule { ours: "mlp.gate.weight", form: Form::Whole("block_sparse_moe.router.weight") },
        Rule { ours: "mlp.experts.gate_up_proj", form: Form::Whole("block_sparse_moe.experts.gate_up_proj") },
        Rule { ours: "mlp.experts.down_proj", form: Form::Whole("block_sparse_moe.experts.down_proj") },
    ],
    ignored: &[],
    has_mtp_layers: false,
    keys: KeyTable {
        used: &[
            DECODER,
            EXPERTS,
            &[
                "attention_bias",
                "attention_multiplier",
                "embedding_multiplier",
                "residual_multiplier",
                "logits_scaling",
            ],
        ],
        harmless: &[],
        refused: &[refused("norm_topk_prob", &["true"]), refused("normalization_function", &["\"rmsnorm\""])],
    },
    read,
    write,
};

fn read(keys: &Keys<'_>) -> Result<ModelConfig, String> {
    let mut config = keys.decoder(&USUAL)?;
    config.variant.qkv_bias = keys.flag("attention_bias")?;
    config.variant.output_bias = config.variant.qkv_bias;
    keys.experts(&mut config, "intermediate_size")?;
    config.score_order = ScoreOrder::TopKThenSoftmax;
    config.normalize_weights = true;
    config.variant.attention_scale = keys.multiplier("attention_multiplier")?;
    config.variant.embedding_multiplier = keys.multiplier("embedding_multiplier")?;
    config.variant.residual_multiplier = keys.multiplier("residual_multiplier")?;
    config.variant.logits_divisor = keys.multiplier("logits_scaling")?;
    Ok(config)
}

fn write(config: &ModelConfig, map: &mut Map<String, Value>) {
    let variant = &config.variant;
    let json = json!({
        "intermediate_size": config.expert_width,
        "attention_bias": variant.qkv_bias,
        "attention_multiplier": shortest(config.attention_scale()),
        "embedding_multiplier": shortest(variant.embedding_multiplier),
        "residual_multiplier": shortest(variant.residual_multiplier),
        "logits_scaling": shortest(variant.logits_divisor),
    });
    super::insert_all(map, json);
}
