//! `config.json`: writing ours in the words of a family, and reading one.
//!
//! Keys were renamed between versions 4 and 5 of `transformers`; both spellings are written, so that older readers and
//! other programs find theirs, and both are read.

use serde_json::{Map, Value, json};

use super::family::{Family, OURS};
use crate::config::{ActivationKind, ModelConfig};

/// The key of our own configuration.
const OUR_KEY: &str = "moeworks";

/// Keys under which a family computes something that our decoder does not, with the values that switch it off.
const MUST_BE_OFF: [&str; 10] = [
    "attention_bias",
    "qkv_bias",
    "mlp_bias",
    "clip_qkv",
    "use_sliding_window",
    "quantization_config",
    "shared_expert_intermediate_size",
    "n_shared_experts",
    "partial_rotary_factor",
    "attn_logit_softcapping",
];

/// The `config.json` of a model of `config`, with weights of `dtype` (`float32` or `bfloat16`).
pub(super) fn write(family: &Family, config: &ModelConfig, dtype: &str, eos_id: Option<u32>) -> Value {
    let theta = config.rope_theta;
    let mut json = json!({
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": dtype,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": match config.activation {
            ActivationKind::Swiglu => "silu",
            ActivationKind::Gelu => "gelu",
            ActivationKind::Relu => "relu",
        },
        "intermediate_size": config.dense_width,
        "max_position_embeddings": config.max_seq_len,
        "initializer_range": shortest(config.init_std),
        "rms_norm_eps": shortest(config.norm_eps),
        "rope_theta": theta,
        "rope_scaling": null,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": false,
        "attention_dropout": 0.0,
        "use_cache": true,
        "bos_token_id": eos_id,
        "eos_token_id": eos_id,
        "pad_token_id": null,
        OUR_KEY: our_json(config),
    });
    if family.is_moe {
        json["num_experts"] = config.num_experts.into();
        json["num_local_experts"] = config.num_experts.into();
        json["num_experts_per_tok"] = config.top_k.into();
        json[family.expert_width_key] = config.expert_width.into();
        json["norm_topk_prob"] = (config.normalize_weights || !config.softmax_before_topk).into();
        json["output_router_logits"] = false.into();
        json["router_aux_loss_coef"] = 0.001.into();
    }
    if family.has_sparse_step && family.is_moe {
        json["decoder_sparse_step"] = config.moe_every.into();
        json["mlp_only_layers"] = json!([]);
    }
    match family.model_type {
        "olmoe" => json["clip_qkv"] = Value::Null,
        "mixtral" => {
            json["router_jitter_noise"] = shortest(config.jitter);
            json["sliding_window"] = Value::Null;
        }
        "qwen3" | "qwen3_moe" => {
            json["use_sliding_window"] = false.into();
            json["sliding_window"] = Value::Null;
        }
        "llama" => json["mlp_bias"] = false.into(),
        _ => {}
    }
    json
}

/// An f32 with the digits that it needs, where `Value::from` would give those of the f64 nearest to it.
fn shortest(x: f32) -> Value {
    x.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

fn our_json(config: &ModelConfig) -> Value {
    serde_json::to_string(config).ok().and_then(|text| serde_json::from_str(&text).ok()).unwrap_or(Value::Null)
}

/// A `config.json` that cannot be used: its family is not known, or something else, which the text says.
pub(super) enum Fault {
    UnknownFamily(String),
    Other(String),
}

/// The family and the configuration that `json` describes. Not validated yet.
pub(super) fn read(json: &Value) -> Result<(&'static Family, ModelConfig), Fault> {
    let keys = Keys(json.as_object().ok_or_else(|| Fault::Other("not a JSON object".to_owned()))?);
    let model_type: String = keys.required(&["model_type"]).map_err(Fault::Other)?;
    let family = Family::named(&model_type).ok_or(Fault::UnknownFamily(model_type))?;
    let ours: Option<ModelConfig> = keys.optional(&[OUR_KEY]).map_err(Fault::Other)?;
    if family.model_type == OURS.model_type {
        return ours.map(|ours| (family, ours)).ok_or_else(|| Fault::Other(format!("key {OUR_KEY:?} is missing")));
    }
    let theirs = keys.config(family).map_err(Fault::Other)?;
    // Ours has settings that the family's keys cannot say. It counts if it says the same where both speak.
    let agrees = |ours: &ModelConfig| {
        let written = write(family, ours, "", None);
        Family::of(ours).model_type == family.model_type
            && written.as_object().is_some_and(|map| Keys(map).config(family).is_ok_and(|config| config == theirs))
    };
    Ok((family, ours.filter(agrees).unwrap_or(theirs)))
}

struct Keys<'a>(&'a Map<String, Value>);

impl<'a> Keys<'a> {
    /// The first of the keys that is there and not null.
    fn find(&self, names: &[&str]) -> Option<(String, &'a Value)> {
        names.iter().find_map(|name| Some(((*name).to_owned(), self.0.get(*name).filter(|value| !value.is_null())?)))
    }

    fn optional<T: serde::de::DeserializeOwned>(&self, names: &[&str]) -> Result<Option<T>, String> {
        let Some((name, value)) = self.find(names) else { return Ok(None) };
        T::deserialize(value).map(Some).map_err(|error| format!("{name} = {}: {error}", abridged(value)))
    }

    fn required<T: serde::de::DeserializeOwned>(&self, names: &[&str]) -> Result<T, String> {
        self.optional(names)?.ok_or_else(|| format!("key {:?} is missing", names[0]))
    }

    /// The base of the rotary embedding, from the key of version 5 or that of version 4.
    fn rope_theta(&self, family: &Family) -> Result<f64, String> {
        let parameters: Map<String, Value> = self.optional(&["rope_parameters"])?.unwrap_or_default();
        let scaling: Map<String, Value> = self.optional(&["rope_scaling"])?.unwrap_or_default();
        for (key, map) in [("rope_parameters", &parameters), ("rope_scaling", &scaling)] {
            let kind = Keys(map).find(&["rope_type", "type"]);
            if let Some((_, value)) = kind.filter(|(_, value)| value.as_str() != Some("default")) {
                return Err(format!("{key}: rope_type {} is not supported, only \"default\"", abridged(value)));
            }
        }
        let theta = Keys(&parameters).optional(&["rope_theta"])?;
        Ok(theta.or(self.optional(&["rope_theta"])?).unwrap_or(family.default_theta))
    }

    fn config(&self, family: &Family) -> Result<ModelConfig, String> {
        self.check_off()?;
        let width = self.required(&["hidden_size"])?;
        let num_heads: usize = self.required(&["num_attention_heads"])?;
        let head_dim = family.default_head_dim.or_else(|| usize::checked_div(width, num_heads)).unwrap_or(0);
        let mut config = ModelConfig {
            vocab_size: self.required(&["vocab_size"])?,
            width,
            num_layers: self.required(&["num_hidden_layers"])?,
            num_heads,
            num_kv_heads: self.optional(&["num_key_value_heads"])?.unwrap_or(num_heads),
            head_dim: self.optional(&["head_dim"])?.unwrap_or(head_dim),
            qk_norm: family.qk_norm,
            num_experts: 0,
            dense_width: self.required(&["intermediate_size"])?,
            tie_embeddings: self.optional(&["tie_word_embeddings"])?.unwrap_or(false),
            rope_theta: self.rope_theta(family)?,
            norm_eps: self.optional(&["rms_norm_eps"])?.unwrap_or(family.default_eps),
            max_seq_len: self.required(&["max_position_embeddings"])?,
            init_std: self.optional(&["initializer_range"])?.unwrap_or(0.02),
            ..ModelConfig::default()
        };
        if family.is_moe {
            config.num_experts = self.required(&["num_experts", "num_local_experts"])?;
            config.top_k = self.required(&["num_experts_per_tok"])?;
            config.expert_width = self.required(&[family.expert_width_key])?;
            config.normalize_weights = family.always_normalizes || self.optional(&["norm_topk_prob"])?.unwrap_or(false);
            config.jitter = self.optional(&["router_jitter_noise"])?.unwrap_or(0.0);
        }
        if family.has_sparse_step && family.is_moe {
            config.moe_every = self.optional(&["decoder_sparse_step"])?.unwrap_or(1);
            let dense: Vec<usize> = self.optional(&["mlp_only_layers"])?.unwrap_or_default();
            if let Some(layer) = dense.into_iter().find(|&i| i < config.num_layers && config.is_moe_layer(i)) {
                return Err(format!(
                    "mlp_only_layers: layer {layer} is dense against decoder_sparse_step, which is not supported"
                ));
            }
        }
        Ok(config)
    }

    /// Fails if the model computes something that ours does not.
    fn check_off(&self) -> Result<(), String> {
        for key in MUST_BE_OFF {
            let value = self.0.get(key).unwrap_or(&Value::Null);
            let is_off = value.is_null() || *value == Value::Bool(false) || value.as_f64() == Some(0.0);
            let is_whole = key == "partial_rotary_factor" && value.as_f64() == Some(1.0);
            if !is_off && !is_whole {
                return Err(format!("{key} = {}: not supported", abridged(value)));
            }
        }
        let act: Option<String> = self.optional(&["hidden_act"])?;
        if let Some(act) = act.filter(|act| act != "silu") {
            return Err(format!("hidden_act = {act:?}: not supported in this family, only \"silu\""));
        }
        let uses_window = self.0.get("use_sliding_window").is_none_or(|used| *used == Value::Bool(true));
        let window: Option<usize> = self.optional(&["sliding_window"])?;
        let max_seq_len: usize = self.optional(&["max_position_embeddings"])?.unwrap_or(0);
        if let Some(window) = window.filter(|&window| uses_window && window < max_seq_len) {
            return Err(format!(
                "sliding_window = {window}: not supported below max_position_embeddings, {max_seq_len}"
            ));
        }
        let kinds: Vec<String> = self.optional(&["layer_types"])?.unwrap_or_default();
        match kinds.into_iter().find(|kind| kind != "full_attention") {
            Some(kind) => Err(format!("layer_types: {kind:?} is not supported, only \"full_attention\"")),
            None => Ok(()),
        }
    }
}

/// A value for a message, not longer than a line.
fn abridged(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
