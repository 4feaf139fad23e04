//! Switch Transformers (2101.03961): T5's encoder and decoder, with top-1 experts in some feed-forwards. An expert
//! takes `expert_capacity` tokens of a sequence. The others get zero from it, as in transformers from version 5 on
//! (earlier ones passed them through, scaled).

use serde_json::{Map, Value, json};

use crate::config::{ActivationKind, EncoderConfig, ModelConfig, PositionKind, QkNorm};
use crate::hf::config_json::{Keys, shortest};
use crate::hf::family::Family;
use crate::hf::key_table::{KeyTable, refused};
use crate::hf::names::{Form, Rule};

/// Returns a rule for a tensor that is stored whole under another name.
const fn whole(ours: &'static str, name: &'static str) -> Rule {
    Rule { ours, form: Form::Whole(name) }
}

pub(crate) const FAMILY: Family = Family {
    model_type: "switch_transformers",
    architecture: "SwitchTransformersForConditionalGeneration",
    layers: &["decoder.block."],
    encoder_layers: "encoder.block.",
    rules: &[
        whole("model.embed_tokens.weight", "shared.weight"),
        // Untied embeddings; older files store one tensor for both.
        whole("model.encoder.embed_tokens.weight", "encoder.embed_tokens.weight"),
        whole("model.encoder.embed_tokens.weight", "shared.weight"),
        whole("model.decoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
        whole("model.decoder.embed_tokens.weight", "shared.weight"),
        whole(
            "model.encoder.relative_bias.weight",
            "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        ),
        whole("model.relative_bias.weight", "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
        whole("model.encoder.norm.weight", "encoder.final_layer_norm.weight"),
        whole("model.norm.weight", "decoder.final_layer_norm.weight"),
        whole("input_layernorm.weight", "layer.0.layer_norm.weight"),
        whole("self_attn.q_proj.weight", "layer.0.SelfAttention.q.weight"),
        whole("self_attn.k_proj.weight", "layer.0.SelfAttention.k.weight"),
        whole("self_attn.v_proj.weight", "layer.0.SelfAttention.v.weight"),
        whole("self_attn.o_proj.weight", "layer.0.SelfAttention.o.weight"),
        whole("cross_attn_norm.weight", "layer.1.layer_norm.weight"),
        whole("cross_attn.q_proj.weight", "layer.1.EncDecAttention.q.weight"),
        whole("cross_attn.k_proj.weight", "layer.1.EncDecAttention.k.weight"),
        whole("cross_attn.v_proj.weight", "layer.1.EncDecAttention.v.weight"),
        whole("cross_attn.o_proj.weight", "layer.1.EncDecAttention.o.weight"),
        whole("encoder.post_attention_layernorm.weight", "layer.1.layer_norm.weight"),
        whole("encoder.mlp.gate_up_proj", "layer.1.mlp.wi.weight"),
        whole("encoder.mlp.down_proj", "layer.1.mlp.wo.weight"),
        whole("encoder.mlp.gate.weight", "layer.1.mlp.router.classifier.weight"),
        whole("encoder.mlp.gate.bias", "layer.1.mlp.router.classifier.bias"),
        Rule {
            ours: "encoder.mlp.experts.gate_up_proj",
            form: Form::PerExpert(&["layer.1.mlp.experts.expert_{e}.wi.weight"]),
        },
        Rule {
            ours: "encoder.mlp.experts.down_proj",
            form: Form::PerExpert(&["layer.1.mlp.experts.expert_{e}.wo.weight"]),
        },
        whole("post_attention_layernorm.weight", "layer.2.layer_norm.weight"),
        whole("mlp.gate_up_proj", "layer.2.mlp.wi.weight"),
        whole("mlp.down_proj", "layer.2.mlp.wo.weight"),
        whole("mlp.gate.weight", "layer.2.mlp.router.classifier.weight"),
        whole("mlp.gate.bias", "layer.2.mlp.router.classifier.bias"),
        Rule { ours: "mlp.experts.gate_up_proj", form: Form::PerExpert(&["layer.2.mlp.experts.expert_{e}.wi.weight"]) },
        Rule { ours: "mlp.experts.down_proj", form: Form::PerExpert(&["layer.2.mlp.experts.expert_{e}.wo.weight"]) },
    ],
    // Copies of a tied embedding, and `shared.weight` of an untied model, which is unused.
    ignored: &["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "shared.weight"],
    has_mtp_layers: false,
    keys: KeyTable {
        used: &[&[
            "d_model",
            "hidden_size",
            "d_kv",
            "d_ff",
            "num_heads",
            "num_attention_heads",
            "num_layers",
            "num_hidden_layers",
            "num_decoder_layers",
            "vocab_size",
            "num_experts",
            "expert_capacity",
            "dense_act_fn",
            "router_bias",
            "router_jitter_noise",
            "num_sparse_encoder_layers",
            "num_sparse_decoder_layers",
            "encoder_sparse_step",
            "decoder_sparse_step",
            "relative_attention_num_buckets",
            "relative_attention_max_distance",
            "layer_norm_epsilon",
            "n_positions",
            "tie_word_embeddings",
            "decoder_start_token_id",
            "pad_token_id",
        ]],
        // Routers compute in f32 whatever the file says. Padding is not a part of our batches.
        harmless: &[
            "is_encoder_decoder",
            "router_dtype",
            "router_ignore_padding_tokens",
            "add_router_probs",
            "output_past",
        ],
        refused: &[
            refused("router_type", &["\"tokens_masked\""]),
            refused("feed_forward_proj", &["\"relu\""]),
            refused("is_gated_act", &["false"]),
        ],
    },
    read,
    write,
};

/// The sequence length that T5 models are trained with, where the file names none.
const USUAL_LEN: usize = 512;

/// Returns the dense layers by the family's rule: with a step of 1 every layer has experts, otherwise each second of
/// `step` layers.
fn dense_layers(num_layers: usize, step: usize) -> Vec<usize> {
    let is_sparse = |i: usize| step == 1 || (step > 0 && i % step == 1);
    (0..num_layers.min(1 << 14)).filter(|&i| !is_sparse(i)).collect()
}

/// Returns the distance between MoE layers of a stack: its own key, or else one that follows from their number.
fn sparse_step(keys: &Keys<'_>, stack: &str, num_layers: usize) -> Result<usize, String> {
    let num_sparse = keys.optional(&[&format!("num_sparse_{stack}_layers")])?.unwrap_or(3_usize);
    let found = num_layers.checked_div(num_sparse).unwrap_or(num_layers);
    Ok(keys.optional(&[&format!("{stack}_sparse_step")])?.unwrap_or(found))
}

fn read(keys: &Keys<'_>) -> Result<ModelConfig, String> {
    let width: usize = keys.required(&["d_model", "hidden_size"])?;
    let num_heads: usize = keys.required(&["num_heads", "num_attention_heads"])?;
    let encoder_layers: usize = keys.required(&["num_layers", "num_hidden_layers"])?;
    let num_layers: usize = keys.optional(&["num_decoder_layers"])?.unwrap_or(encoder_layers);
    let hidden: usize = keys.required(&["d_ff"])?;
    let mut config = ModelConfig {
        vocab_size: keys.required(&["vocab_size"])?,
        width,
        num_layers,
        num_heads,
        num_kv_heads: num_heads,
        head_dim: keys.required(&["d_kv"])?,
        qk_norm: QkNorm::None,
        num_experts: keys.required(&["num_experts"])?,
        top_k: 1,
        expert_width: hidden,
        dense_width: hidden,
        activation: activation(keys)?,
        normalize_weights: false,
        jitter: keys.optional::<f32>(&["router_jitter_noise"])?.unwrap_or(0.01).into(),
        tie_embeddings: keys.optional(&["tie_word_embeddings"])?.unwrap_or(true),
        norm_eps: keys.optional(&["layer_norm_epsilon"])?.unwrap_or(1e-6),
        max_seq_len: keys.optional(&["n_positions"])?.unwrap_or(USUAL_LEN),
        ..ModelConfig::default()
    };
    let variant = &mut config.variant;
    variant.positions = PositionKind::Relative {
        num_buckets: keys.optional(&["relative_attention_num_buckets"])?.unwrap_or(32),
        max_distance: keys.optional(&["relative_attention_max_distance"])?.unwrap_or(128),
    };
    variant.attention_scale = 1.0;
    if config.tie_embeddings {
        variant.logits_divisor = (width as f32).sqrt();
    }
    variant.router_bias = keys.flag("router_bias")?;
    variant.expert_capacity = keys.optional(&["expert_capacity"])?.unwrap_or(64);
    if variant.expert_capacity == 0 {
        return Err("expert_capacity = 0: must be at least 1, or no token would reach an expert".to_owned());
    }
    variant.dense_layers = dense_layers(num_layers, sparse_step(keys, "decoder", num_layers)?);
    variant.encoder = Some(EncoderConfig {
        num_layers: encoder_layers,
        dense_layers: dense_layers(encoder_layers, sparse_step(keys, "encoder", encoder_layers)?),
        start_id: keys.optional(&["decoder_start_token_id", "pad_token_id"])?.unwrap_or(0),
    });
    Ok(config)
}

fn activation(keys: &Keys<'_>) -> Result<ActivationKind, String> {
    let act: String = keys.optional(&["dense_act_fn"])?.unwrap_or_else(|| "relu".to_owned());
    match act.as_str() {
        "relu" => Ok(ActivationKind::Relu),
        "gelu" => Ok(ActivationKind::Gelu),
        "gelu_new" | "gelu_pytorch_tanh" => Ok(ActivationKind::GeluTanh),
        _ => Err(format!("dense_act_fn = {act:?}: not supported, only relu, gelu and gelu_new")),
    }
}

fn write(config: &ModelConfig, map: &mut Map<String, Value>) {
    super::remove_usual(map);
    for key in ["num_local_experts", "num_experts_per_tok", "norm_topk_prob", "output_router_logits"] {
        map.remove(key);
    }
    // A model without an encoder or relative positions does not read back the same, so it is never written in these
    // keys.
    let none = EncoderConfig { num_layers: 0, dense_layers: Vec::new(), start_id: 0 };
    let encoder = config.variant.encoder.clone().unwrap_or(none);
    let (num_buckets, max_distance) = match config.variant.positions {
        PositionKind::Relative { num_buckets, max_distance } => (num_buckets, max_distance),
        _ => (0, 0),
    };
    let hidden = if config.moe_layers().is_empty() { config.dense_width } else { config.expert_width };
    let json = json!({
        "d_model": config.width,
        "d_kv": config.head_dim,
        "d_ff": hidden,
        "num_heads": config.num_heads,
        "num_experts": config.num_experts,
        "dense_act_fn": match config.activation {
            ActivationKind::Gelu => "gelu",
            ActivationKind::GeluTanh => "gelu_new",
            _ => "relu",
        },
        "layer_norm_epsilon": shortest(config.norm_eps),
        "n_positions": config.max_seq_len,
        "relative_attention_num_buckets": num_buckets,
        "relative_attention_max_distance": max_distance,
        "router_bias": config.variant.router_bias,
        "router_dtype": "float32",
        "router_jitter_noise": shortest(config.jitter.end as f32),
        "expert_capacity": config.variant.expert_capacity,
        "decoder_start_token_id": encoder.start_id,
        "pad_token_id": encoder.start_id,
        "is_encoder_decoder": true,
        "num_layers": encoder.num_layers,
        "num_decoder_layers": config.num_layers,
    });
    super::insert_all(map, json);
    let of_encoder = config.of_encoder().unwrap_or_else(|| config.clone());
    for (stack, config) in [("encoder", &of_encoder), ("decoder", config)] {
        let dense: Vec<usize> = (0..config.num_layers).filter(|&i| !config.is_moe_layer(i)).collect();
        // The step that gives the same dense layers; 0 means that no layer has experts.
        let step = (1..=config.num_layers).find(|&step| dense_layers(config.num_layers, step) == dense).unwrap_or(0);
        map.insert(format!("{stack}_sparse_step"), step.into());
        let num_sparse = config.num_layers.checked_div(step).unwrap_or(config.num_layers + 1);
        map.insert(format!("num_sparse_{stack}_layers"), num_sparse.into());
    }
}
