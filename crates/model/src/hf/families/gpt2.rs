//! GPT-2, dense: learned positions, layer norms, GELU, biases. Matrices are transposed on disk, and queries, keys and
//! values are one matrix.

use serde_json::{Map, Value, json};

use crate::config::{ActivationKind, ModelConfig, NormKind, PositionKind, QkNorm};
use crate::hf::config_json::{Keys, shortest};
use crate::hf::family::Family;
use crate::hf::key_table::{KeyTable, refused};
use crate::hf::names::{Form, Rule};

pub(crate) const FAMILY: Family = Family {
    model_type: "gpt2",
    architecture: "GPT2LMHeadModel",
    // The published files have names without the prefix `transformer.`.
    layers: &["transformer.h.", "h."],
    encoder_layers: "",
    rules: &[
        Rule { ours: "model.embed_tokens.weight", form: Form::Whole("transformer.wte.weight") },
        Rule { ours: "model.embed_tokens.weight", form: Form::Whole("wte.weight") },
        Rule { ours: "model.embed_positions.weight", form: Form::Whole("transformer.wpe.weight") },
        Rule { ours: "model.embed_positions.weight", form: Form::Whole("wpe.weight") },
        Rule { ours: "model.norm.weight", form: Form::Whole("transformer.ln_f.weight") },
        Rule { ours: "model.norm.weight", form: Form::Whole("ln_f.weight") },
        Rule { ours: "model.norm.bias", form: Form::Whole("transformer.ln_f.bias") },
        Rule { ours: "model.norm.bias", form: Form::Whole("ln_f.bias") },
        Rule { ours: "input_layernorm.weight", form: Form::Whole("ln_1.weight") },
        Rule { ours: "input_layernorm.bias", form: Form::Whole("ln_1.bias") },
        Rule { ours: "post_attention_layernorm.weight", form: Form::Whole("ln_2.weight") },
        Rule { ours: "post_attention_layernorm.bias", form: Form::Whole("ln_2.bias") },
        Rule { ours: "self_attn.q_proj.weight", form: Form::Third { name: "attn.c_attn.weight", index: 0 } },
        Rule { ours: "self_attn.k_proj.weight", form: Form::Third { name: "attn.c_attn.weight", index: 1 } },
        Rule { ours: "self_attn.v_proj.weight", form: Form::Third { name: "attn.c_attn.weight", index: 2 } },
        Rule { ours: "self_attn.q_proj.bias", form: Form::Third { name: "attn.c_attn.bias", index: 0 } },
        Rule { ours: "self_attn.k_proj.bias", form: Form::Third { name: "attn.c_attn.bias", index: 1 } },
        Rule { ours: "self_attn.v_proj.bias", form: Form::Third { name: "attn.c_attn.bias", index: 2 } },
        Rule { ours: "self_attn.o_proj.weight", form: Form::Transposed("attn.c_proj.weight") },
        Rule { ours: "self_attn.o_proj.bias", form: Form::Whole("attn.c_proj.bias") },
        Rule { ours: "mlp.gate_up_proj", form: Form::Transposed("mlp.c_fc.weight") },
        Rule { ours: "mlp.gate_up_proj_bias", form: Form::Whole("mlp.c_fc.bias") },
        Rule { ours: "mlp.down_proj", form: Form::Transposed("mlp.c_proj.weight") },
        Rule { ours: "mlp.down_proj_bias", form: Form::Whole("mlp.c_proj.bias") },
    ],
    // Causal masks, which older versions stored.
    ignored: &[".attn.bias", ".attn.masked_bias"],
    has_mtp_layers: false,
    keys: KeyTable {
        used: &[&[
            "activation_function",
            "n_embd",
            "hidden_size",
            "n_head",
            "num_attention_heads",
            "n_layer",
            "num_hidden_layers",
            "n_inner",
            "n_positions",
            "max_position_embeddings",
            "n_ctx",
            "layer_norm_epsilon",
            "vocab_size",
            "tie_word_embeddings",
            "initializer_range",
        ]],
        harmless: &[
            "n_special",
            "predict_special_tokens",
            "reorder_and_upcast_attn",
            "summary_type",
            "summary_use_proj",
            "summary_activation",
            "summary_proj_to_labels",
            "summary_first_dropout",
        ],
        refused: &[refused("scale_attn_weights", &["true"]), refused("scale_attn_by_inverse_layer_idx", &["false"])],
    },
    read,
    write,
};

/// The names under which `transformers` has the one activation.
const GELU_TANH: [&str; 3] = ["gelu_new", "gelu_pytorch_tanh", "gelu_fast"];

fn read(keys: &Keys<'_>) -> Result<ModelConfig, String> {
    let act: String = keys.optional(&["activation_function"])?.unwrap_or_else(|| GELU_TANH[0].to_owned());
    let activation = match act.as_str() {
        act if GELU_TANH.contains(&act) => ActivationKind::GeluTanh,
        "gelu" => ActivationKind::Gelu,
        "relu" => ActivationKind::Relu,
        _ => return Err(format!("activation_function = {act:?}: not supported, only gelu_new, gelu and relu")),
    };
    let width: usize = keys.required(&["n_embd", "hidden_size"])?;
    let num_heads: usize = keys.required(&["n_head", "num_attention_heads"])?;
    let mut config = ModelConfig {
        vocab_size: keys.required(&["vocab_size"])?,
        width,
        num_layers: keys.required(&["n_layer", "num_hidden_layers"])?,
        num_heads,
        num_kv_heads: num_heads,
        head_dim: width.checked_div(num_heads).unwrap_or(0),
        qk_norm: QkNorm::None,
        num_experts: 0,
        dense_width: keys.optional(&["n_inner"])?.unwrap_or(width.saturating_mul(4)),
        activation,
        tie_embeddings: keys.optional(&["tie_word_embeddings"])?.unwrap_or(true),
        norm_eps: keys.optional(&["layer_norm_epsilon"])?.unwrap_or(1e-5),
        max_seq_len: keys.required(&["n_positions", "max_position_embeddings", "n_ctx"])?,
        init_std: keys.optional(&["initializer_range"])?.unwrap_or(0.02),
        ..ModelConfig::default()
    };
    config.variant.norm = NormKind::Layer;
    config.variant.positions = PositionKind::Learned;
    config.variant.qkv_bias = true;
    config.variant.output_bias = true;
    config.variant.feed_forward_bias = true;
    Ok(config)
}

fn write(config: &ModelConfig, map: &mut Map<String, Value>) {
    super::remove_usual(map);
    let json = json!({
        "n_embd": config.width,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.dense_width,
        "n_positions": config.max_seq_len,
        "layer_norm_epsilon": shortest(config.norm_eps),
        "activation_function": match config.activation {
            ActivationKind::Gelu => "gelu",
            ActivationKind::Relu => "relu",
            _ => GELU_TANH[0],
        },
        "scale_attn_weights": true,
        "scale_attn_by_inverse_layer_idx": false,
        "reorder_and_upcast_attn": false,
    });
    super::insert_all(map, json);
}
