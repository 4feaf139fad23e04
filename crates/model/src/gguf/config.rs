//! The model that a GGUF header describes, said in the keys of the family of `transformers` that it was converted from:
//! so that what a family means stands in one place.

use moeworks_moe::ConfigError;
use serde_json::{Map, Value as Json, json};

use super::adjust::{Adjust, deepseek, gpt_oss, granite_moe, none, phimoe, shortest};
use super::error::GgufError;
use super::value::Value;
use super::{GgufFile, GgufTensor};
use crate::config::{ModelConfig, RopeScaling};
use crate::hf::config_of_keys;

/// An architecture of llama.cpp, and what it is called elsewhere.
pub(super) struct Architecture {
    /// `general.architecture`.
    name: &'static str,
    /// `model_type` of models without and with experts; none where there are none.
    dense: Option<&'static str>,
    moe: Option<&'static str>,
    /// Whether rows of queries and keys are stored so that neighbours rotate together.
    pub(super) has_rotary_neighbours: bool,
    /// Whether router weights are normalised where the file does not say.
    normalizes: bool,
    /// Adds to the keys what the architecture says in its own way.
    adjust: Adjust,
}

const ARCHITECTURES: [Architecture; 9] = [
    Architecture {
        name: "llama",
        dense: Some("llama"),
        moe: Some("mixtral"),
        has_rotary_neighbours: true,
        normalizes: true,
        adjust: none,
    },
    Architecture {
        name: "qwen3",
        dense: Some("qwen3"),
        moe: None,
        has_rotary_neighbours: false,
        normalizes: true,
        adjust: none,
    },
    Architecture {
        name: "qwen2moe",
        dense: None,
        moe: Some("qwen2_moe"),
        has_rotary_neighbours: false,
        normalizes: false,
        adjust: none,
    },
    Architecture {
        name: "qwen3moe",
        dense: None,
        moe: Some("qwen3_moe"),
        has_rotary_neighbours: false,
        normalizes: true,
        adjust: none,
    },
    Architecture {
        name: "olmoe",
        dense: None,
        moe: Some("olmoe"),
        has_rotary_neighbours: false,
        normalizes: false,
        adjust: none,
    },
    Architecture {
        name: "gpt-oss",
        dense: None,
        moe: Some("gpt_oss"),
        has_rotary_neighbours: false,
        normalizes: true,
        adjust: gpt_oss,
    },
    Architecture {
        name: "granitemoe",
        dense: None,
        moe: Some("granitemoe"),
        has_rotary_neighbours: true,
        normalizes: true,
        adjust: granite_moe,
    },
    Architecture {
        name: "deepseek2",
        dense: None,
        moe: Some("deepseek_v2"),
        has_rotary_neighbours: false,
        normalizes: false,
        adjust: deepseek,
    },
    Architecture {
        name: "phimoe",
        dense: None,
        moe: Some("phimoe"),
        has_rotary_neighbours: false,
        normalizes: false,
        adjust: phimoe,
    },
];

/// The names of all architectures, for messages.
pub(super) fn supported() -> String {
    ARCHITECTURES.each_ref().map(|architecture| architecture.name).join(", ")
}

/// Keys behind the architecture's name that are sizes, with their names in `config.json`.
const SIZES: [(&str, &str); 10] = [
    ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.key_length", "head_dim"),
    ("context_length", "max_position_embeddings"),
    ("feed_forward_length", "intermediate_size"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
];

impl GgufFile {
    /// The file's architecture, if it is one that is known.
    pub(super) fn known_architecture(&self) -> Result<&'static Architecture, GgufError> {
        let name = self.architecture()?;
        ARCHITECTURES.iter().find(|architecture| architecture.name == name).ok_or_else(|| {
            GgufError::UnknownArchitecture { path: self.path().to_owned(), architecture: name.to_owned() }
        })
    }

    /// The configuration of the model in the file.
    pub fn config(&self) -> Result<ModelConfig, GgufError> {
        let architecture = self.known_architecture()?;
        let keys = self.family_keys(architecture)?;
        let name = format!("the keys of {}", architecture.name);
        let mut config = config_of_keys(&Json::Object(keys)).map_err(|reason| self.wrong_key(&name, reason))?;
        self.stretch_frequencies(&mut config)?;
        config.validate().map_err(|source: ConfigError| GgufError::Setting { path: self.path().to_owned(), source })?;
        if config.vocab_size == 0 {
            return Err(self.wrong_key("token_embd.weight", "has no rows: the vocabulary must not be empty".into()));
        }
        Ok(config)
    }

    fn family_keys(&self, architecture: &Architecture) -> Result<Map<String, Json>, GgufError> {
        let mut keys = Map::new();
        let name = |key: &str| format!("{}.{key}", architecture.name);
        for (ours, theirs) in SIZES {
            if let Some(size) = self.optional(&name(ours), Value::as_usize, "a whole number")? {
                keys.insert(theirs.to_owned(), size.into());
            }
        }
        for (ours, theirs) in [("attention.layer_norm_rms_epsilon", "rms_norm_eps"), ("rope.freq_base", "rope_theta")] {
            if let Some(number) = self.optional(&name(ours), Value::as_f64, "a number")? {
                keys.insert(theirs.to_owned(), json!(shortest(number)));
            }
        }
        let embedding = self.tensor_info("token_embd.weight")?;
        keys.insert("vocab_size".to_owned(), embedding.shape.first().copied().unwrap_or(0).into());
        keys.insert("tie_word_embeddings".to_owned(), json!(!self.tensors().contains_key("output.weight")));
        keys.insert("attention_bias".to_owned(), json!(self.tensors().contains_key("blk.0.attn_output.bias")));
        keys.insert("hidden_act".to_owned(), json!("silu"));
        self.add_experts(architecture, &mut keys)?;
        if let Some(window) = self.optional(&name("attention.sliding_window"), Value::as_usize, "a whole number")? {
            keys.insert("sliding_window".to_owned(), if window > 0 { json!(window) } else { Json::Null });
        }
        if let Some(scaling) = self.rope_scaling(architecture)? {
            keys.insert("rope_scaling".to_owned(), scaling);
        }
        (architecture.adjust)(self, &mut keys)?;
        Ok(keys)
    }

    fn add_experts(&self, architecture: &Architecture, keys: &mut Map<String, Json>) -> Result<(), GgufError> {
        let name = |key: &str| format!("{}.{key}", architecture.name);
        let count = self.optional(&name("expert_count"), Value::as_usize, "a whole number")?.unwrap_or(0);
        let model_type = if count > 0 { architecture.moe } else { architecture.dense };
        let model_type = model_type.ok_or_else(|| {
            let expected = if count > 0 { "must be 0: this architecture has no experts" } else { "must be at least 1" };
            self.wrong_key(&name("expert_count"), format!("is {count}: {expected}"))
        })?;
        keys.insert("model_type".to_owned(), model_type.into());
        if count == 0 {
            return Ok(());
        }
        keys.insert("num_experts".to_owned(), count.into());
        keys.insert("num_local_experts".to_owned(), count.into());
        let normalizes = self.optional(&name("expert_weights_norm"), Value::as_bool, "a truth value")?;
        keys.insert("norm_topk_prob".to_owned(), normalizes.unwrap_or(architecture.normalizes).into());
        // Older files give the experts' width by their tensors alone.
        if !keys.contains_key("moe_intermediate_size")
            && let Some(width) = self.tensors().get("blk.0.ffn_gate_exps.weight").and_then(|gate| gate.shape.get(1))
        {
            keys.insert("moe_intermediate_size".to_owned(), (*width).into());
        }
        Ok(())
    }

    fn rope_scaling(&self, architecture: &Architecture) -> Result<Option<Json>, GgufError> {
        let name = |key: &str| format!("{}.rope.scaling.{key}", architecture.name);
        let number = |key: &str| self.optional(&name(key), Value::as_f64, "a number");
        let kind = self.optional(&name("type"), Value::as_text, "text")?.unwrap_or("none");
        let factor = number("factor")?.unwrap_or(1.0);
        let original = number("original_context_length")?;
        Ok(match kind {
            // The architecture has the divisors as tensors.
            "none" | "longrope" => None,
            "linear" => Some(json!({ "rope_type": "linear", "factor": factor })),
            "yarn" => {
                let mut scaling = json!({ "rope_type": "yarn", "factor": factor });
                if let Some(original) = original {
                    scaling["original_max_position_embeddings"] = json!(original as u64);
                }
                for (key, theirs) in [("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")] {
                    if let Some(beta) = number(key)? {
                        scaling[theirs] = json!(beta);
                    }
                }
                Some(scaling)
            }
            other => {
                let reason = format!("is {other:?}: must be \"none\", \"linear\" or \"yarn\"");
                return Err(self.wrong_key(&name("type"), reason));
            }
        })
    }

    /// Llama 3.1's stretched frequencies come as a tensor of divisors.
    fn stretch_frequencies(&self, config: &mut ModelConfig) -> Result<(), GgufError> {
        let Some(tensor) = self.tensors().get(FREQUENCIES) else { return Ok(()) };
        let expected = vec![config.head_dim / 2];
        if tensor.shape != expected {
            let (path, found) = (self.path().to_owned(), tensor.shape.clone());
            return Err(GgufError::WrongShape { path, tensor: FREQUENCIES.to_owned(), found, expected });
        }
        let factors = self.numbers(tensor);
        config.variant.rotary.scaling = RopeScaling::LongRope {
            short_factor: factors.clone(),
            long_factor: factors,
            short_amplitude: 1.0,
            long_amplitude: 1.0,
            original_len: config.max_seq_len,
        };
        Ok(())
    }

    /// A small tensor's numbers.
    pub(super) fn numbers(&self, tensor: &GgufTensor) -> Vec<f64> {
        let mut numbers = vec![0.0; tensor.shape.iter().product()];
        tensor.ty.decode(self.bytes(tensor), &mut numbers);
        numbers.into_iter().map(f64::from).collect()
    }

    pub(super) fn tensor_info(&self, name: &str) -> Result<&GgufTensor, GgufError> {
        self.tensors()
            .get(name)
            .ok_or_else(|| GgufError::MissingTensor { path: self.path().to_owned(), tensor: name.to_owned() })
    }
}

/// The divisors of rotary frequencies.
pub(super) const FREQUENCIES: &str = "rope_freqs.weight";

/// The same for short and for long contexts.
pub(super) const FREQUENCIES_BY_LENGTH: [&str; 2] = ["rope_factors_short.weight", "rope_factors_long.weight"];
