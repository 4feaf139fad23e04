//! Reading and writing `config.json` in the keys of a family.
//!
//! Keys were renamed between versions 4 and 5 of `transformers`. Both spellings are read, and both are written so
//! that older readers find theirs. Unknown keys are not handled here: [`save_model`](super::save_model) copies them
//! from the folder that the model came from.

use moeworks_moe::ScoreOrder;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::families::OURS;
use super::family::Family;
pub(crate) use super::keys::Keys;
use super::rope_json;
use crate::config::{ActivationKind, ModelConfig};

/// The key of our own configuration.
pub(super) const OUR_KEY: &str = "moeworks";

/// Returns the `config.json` of a model of `config` whose weights are of `dtype` (`float32` or `bfloat16`).
pub(super) fn write(family: &Family, config: &ModelConfig, dtype: &str, eos_id: Option<u32>) -> Value {
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
            ActivationKind::Swiglu | ActivationKind::ClampedSwiglu { .. } => "silu",
            ActivationKind::Gelu => "gelu",
            ActivationKind::GeluTanh => "gelu_pytorch_tanh",
            ActivationKind::Relu => "relu",
        },
        "intermediate_size": config.dense_width,
        "max_position_embeddings": config.max_seq_len,
        "initializer_range": shortest(config.init_std),
        "rms_norm_eps": shortest(config.norm_eps),
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": false,
        "attention_dropout": 0.0,
        "use_cache": true,
        "bos_token_id": eos_id,
        "eos_token_id": eos_id,
        "pad_token_id": null,
        OUR_KEY: our_json(config),
    });
    if let Some(map) = json.as_object_mut() {
        rope_json::write(config, map);
        if config.num_experts > 0 {
            write_experts(config, map);
        }
        (family.write)(config, map);
    }
    json
}

/// The keys of MoE layers that most families share.
fn write_experts(config: &ModelConfig, map: &mut Map<String, Value>) {
    map.insert("num_experts".into(), config.num_experts.into());
    map.insert("num_local_experts".into(), config.num_experts.into());
    map.insert("num_experts_per_tok".into(), config.top_k.into());
    let normalizes = config.normalize_weights || config.score_order == ScoreOrder::TopKThenSoftmax;
    map.insert("norm_topk_prob".into(), normalizes.into());
    map.insert("output_router_logits".into(), false.into());
    map.insert("router_aux_loss_coef".into(), 0.001.into());
}

/// Returns `x` with the fewest digits that give the same f32; `Value::from` would give those of the nearest f64.
pub(super) fn shortest(x: f32) -> Value {
    x.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

fn our_json(config: &ModelConfig) -> Value {
    serde_json::to_string(config).ok().and_then(|text| serde_json::from_str(&text).ok()).unwrap_or(Value::Null)
}

/// A `config.json` that cannot be used.
pub(super) enum Fault {
    UnknownFamily(String),
    Other(String),
}

/// Reads the configuration from the keys of a `config.json`.
pub(crate) fn config_of_keys(json: &Value) -> Result<ModelConfig, String> {
    read(json).map(|read| read.config).map_err(|fault| match fault {
        Fault::UnknownFamily(model_type) => format!("unsupported model_type {model_type:?}"),
        Fault::Other(reason) => reason,
    })
}

/// The content of a `config.json`.
pub(super) struct ConfigFile {
    pub(super) family: &'static Family,
    /// Not validated yet.
    pub(super) config: ModelConfig,
    /// Keys that are in no table.
    pub(super) unknown_keys: Vec<String>,
}

pub(super) fn read(json: &Value) -> Result<ConfigFile, Fault> {
    let keys = Keys::new(json.as_object().ok_or_else(|| Fault::Other("not a JSON object".to_owned()))?);
    let model_type: String = keys.required(&["model_type"]).map_err(Fault::Other)?;
    let family = Family::from_model_type(&model_type).ok_or(Fault::UnknownFamily(model_type))?;
    let ours: Option<ModelConfig> = ours(json).map_err(Fault::Other)?;
    if family.model_type == OURS.model_type {
        let config = ours.ok_or_else(|| Fault::Other(format!("key {OUR_KEY:?} is missing")))?;
        return Ok(ConfigFile { family, config, unknown_keys: Vec::new() });
    }
    let theirs = (family.read)(&keys).map_err(Fault::Other)?;
    let unknown_keys = keys.check(&family.keys).map_err(Fault::Other)?;
    // Our own configuration has settings that the family's keys lack. It is used if it agrees with them on the
    // others.
    let agrees = |ours: &ModelConfig| {
        let written = write(family, ours, "", None);
        let said = written.as_object().map(Keys::new).and_then(|keys| (family.read)(&keys).ok());
        ours.computed() == theirs.computed() && said.is_some_and(|said| said == theirs)
    };
    Ok(ConfigFile { family, config: ours.filter(agrees).unwrap_or(theirs), unknown_keys })
}

/// Returns our own configuration, if the file has it.
fn ours(json: &Value) -> Result<Option<ModelConfig>, String> {
    let value = json.get(OUR_KEY).filter(|value| !value.is_null());
    value.map(|value| ModelConfig::deserialize(value).map_err(|error| format!("{OUR_KEY}: {error}"))).transpose()
}
