//! The configuration of the model in a GGUF file.
//!
//! The header's keys are translated to those of the `transformers` family that the file was converted from, and read
//! by that family's reader. The meaning of a family's keys is thus in one place.

use moeworks_moe::ConfigError;
use serde_json::{Map, Value as Json, json};

use super::adjust::{Adjust, deepseek, gpt_oss, granite_moe, none, phimoe, shortest};
use super::error::GgufError;
use super::value::Value;
use super::{GgufFile, GgufTensor};
use crate::config::{ModelConfig, RopeScaling};
use crate::hf::config_of_keys;

/// An architecture of llama.cpp and its counterpart in `transformers`.
pub(super) struct Architecture {
    /// `general.architecture`.
    pub(super) name: &'static str,
    /// The `model_type` of models without and with experts; none if there are no such models.
    pub(super) dense: Option<&'static str>,
    pub(super) moe: Option<&'static str>,
    /// True if rows of queries and keys are stored so that neighbours rotate together.
    pub(super) has_rotary_neighbours: bool,
    /// True if router weights are normalised unless the file says otherwise.
    pub(super) normalizes: bool,
    /// Keys that it reads besides [`USED`](super::key_table::USED).
    pub(super) own_keys: &'static [&'static str],
    /// Adds the keys that the architecture gives in a way of its own.
    adjust: Adjust,
}

pub(super) const ARCHITECTURES: [Architecture; 9] = [
    Architecture {
        name: "llama",
        dense: Some("llama"),
        moe: Some("mixtral"),
        has_rotary_neighbours: true,
        normalizes: true,
        own_keys: &[],
        adjust: none,
    },
    Architecture {
        name: "qwen3",
        dense: Some("qwen3"),
        moe: None,
        has_rotary_neighbours: false,
        normalizes: true,
        own_keys: &[],
        adjust: none,
    },
    Architecture {
        name: "qwen2moe",
        dense: None,
        moe: Some("qwen2_moe"),
        has_rotary_neighbours: false,
        normalizes: false,
        own_keys: &[],
        adjust: none,
    },
    Architecture {
        name: "qwen3moe",
        dense: None,
        moe: Some("qwen3_moe"),
        has_rotary_neighbours: false,
        normalizes: true,
        own_keys: &[],
        adjust: none,
    },
    Architecture {
        name: "olmoe",
        dense: None,
        moe: Some("olmoe"),
        has_rotary_neighbours: false,
        normalizes: false,
        own_keys: &[],
        adjust: none,
    },
    Architecture {
        name: "gpt-oss",
        dense: None,
        moe: Some("gpt_oss"),
        has_rotary_neighbours: false,
        normalizes: true,
        own_keys: &["attention.sliding_window_pattern"],
        adjust: gpt_oss,
    },
    Architecture {
        name: "granitemoe",
        dense: None,
        moe: Some("granitemoe"),
        has_rotary_neighbours: true,
        normalizes: true,
        own_keys: &["attention.scale", "embedding_scale", "logit_scale", "residual_scale"],
        adjust: granite_moe,
    },
    Architecture {
        name: "deepseek2",
        dense: None,
        moe: Some("deepseek_v2"),
        has_rotary_neighbours: false,
        normalizes: false,
        own_keys: &[
            "attention.key_length_mla",
            "attention.kv_lora_rank",
            "attention.q_lora_rank",
            "attention.value_length_mla",
            "expert_gating_func",
            "expert_group_count",
            "expert_group_used_count",
            "expert_shared_count",
            "expert_weights_scale",
            "leading_dense_block_count",
            "rope.scaling.yarn_log_multiplier",
        ],
        adjust: deepseek,
    },
    Architecture {
        name: "phimoe",
        dense: None,
        moe: Some("phimoe"),
        has_rotary_neighbours: false,
        normalizes: false,
        own_keys: &[],
        adjust: phimoe,
    },
];

/// Returns the names of all architectures, for messages.
pub(super) fn supported() -> String {
    ARCHITECTURES.each_ref().map(|architecture| architecture.name).join(", ")
}

/// Keys after the architecture's name that are sizes, with their names in `config.json`.
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
    /// Returns the file's architecture, if it is supported.
    pub(super) fn known_architecture(&self) -> Result<&'static Architecture, GgufError> {
        let name = self.architecture()?;
        ARCHITECTURES.iter().find(|architecture| architecture.name == name).ok_or_else(|| {
            GgufError::UnknownArchitecture { path: self.path().to_owned(), architecture: name.to_owned() }
        })
    }

    /// Reads the configuration of the model in the file.
    pub fn config(&self) -> Result<ModelConfig, GgufError> {
        self.read_config().map(|(config, _)| config)
    }

    /// Reads the configuration, and lists the keys that are in no table.
    pub(super) fn read_config(&self) -> Result<(ModelConfig, Vec<String>), GgufError> {
        let architecture = self.known_architecture()?;
        let unknown = self.check_keys(architecture)?;
        let keys = self.family_keys(architecture)?;
        let name = format!("the keys of {}", architecture.name);
        let mut config = config_of_keys(&Json::Object(keys)).map_err(|reason| self.wrong_key(&name, reason))?;
        self.rotated_part(architecture, &mut config)?;
        self.stretch_frequencies(architecture, &mut config)?;
        config.validate().map_err(|source: ConfigError| GgufError::Setting { path: self.path().to_owned(), source })?;
        if config.vocab_size == 0 {
            return Err(self.wrong_key("token_embd.weight", "has no rows: the vocabulary must not be empty".into()));
        }
        Ok((config, unknown))
    }

    fn family_keys(&self, architecture: &Architecture) -> Result<Map<String, Json>, GgufError> {
        let mut keys = Map::new();
        let name = |key: &str| format!("{}.{key}", architecture.name);
        for (ours, theirs) in SIZES {
            if let Some(size) =
                self.optional(&name(ours), Value::as_one_usize, "a whole number, the same for all layers")?
            {
                keys.insert(theirs.to_owned(), size.into());
            }
        }
        for (ours, theirs) in [("attention.layer_norm_rms_epsilon", "rms_norm_eps"), ("rope.freq_base", "rope_theta")] {
            if let Some(number) = self.optional(&name(ours), Value::as_f64, "a number")? {
                keys.insert(theirs.to_owned(), json!(shortest(number)));
            }
        }
        let embedding = self.tensor_info("token_embd.weight")?;
        let width = keys.get("hidden_size").and_then(Json::as_u64).map(|width| width as usize);
        if let (Some(width), [rows, cols]) = (width, &embedding.shape[..])
            && *cols != width
        {
            let (path, found) = (self.path().to_owned(), embedding.shape.clone());
            let (tensor, expected) = ("token_embd.weight".to_owned(), vec![*rows, width]);
            return Err(GgufError::WrongShape { path, tensor, found, expected });
        }
        self.check_head(architecture, &mut keys)?;
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
        // Families that always have experts call the experts' width `intermediate_size`.
        let is_alone = !["qwen2_moe", "qwen3_moe", "deepseek_v2"].contains(&model_type);
        if let Some(width) = keys.get("moe_intermediate_size").cloned().filter(|width| is_alone && *width != 0) {
            keys.insert("intermediate_size".to_owned(), width);
        }
        // Older files have no key for the experts' width.
        if !keys.contains_key("moe_intermediate_size")
            && let Some(width) = self.tensors().get("blk.0.ffn_gate_exps.weight").and_then(|gate| gate.shape.get(1))
        {
            keys.insert("moe_intermediate_size".to_owned(), (*width).into());
        }
        Ok(())
    }

    /// Sets a head's width, which defaults to `width / heads`, and checks that values have the same.
    fn check_head(&self, architecture: &Architecture, keys: &mut Map<String, Json>) -> Result<(), GgufError> {
        let (width, heads) = (keys.get("hidden_size"), keys.get("num_attention_heads"));
        let each = width.zip(heads).and_then(|(width, heads)| width.as_u64()?.checked_div(heads.as_u64()?));
        let head = keys.get("head_dim").and_then(Json::as_u64).or(each);
        if let Some(head) = head {
            keys.insert("head_dim".to_owned(), head.into());
        }
        let name = format!("{}.attention.value_length", architecture.name);
        let value = self.optional(&name, Value::as_one_usize, "a whole number, the same for all layers")?;
        match (value, head) {
            // Latent attention has keys of its own for both.
            (Some(value), Some(head)) if value as u64 != head && architecture.moe != Some("deepseek_v2") => {
                Err(self
                    .wrong_key(&name, format!("is {value}: must be {head}, the length of a key, in this architecture")))
            }
            _ => Ok(()),
        }
    }

    /// Returns the factor of cosines and sines, independent of the kind of scaling.
    pub(super) fn amplitude(&self, architecture: &Architecture) -> Result<f64, GgufError> {
        let name = format!("{}.rope.scaling.attn_factor", architecture.name);
        Ok(shortest(self.optional(&name, Value::as_f64, "a number")?.unwrap_or(1.0)))
    }

    fn rope_scaling(&self, architecture: &Architecture) -> Result<Option<Json>, GgufError> {
        let name = |key: &str| format!("{}.rope.{key}", architecture.name);
        let number = |key: &str| self.optional(&name(key), Value::as_f64, "a number");
        // Without a type a factor is linear scaling, also under its old name; 0 stands for an absent key.
        let kind = self.optional(&name("scaling.type"), Value::as_text, "text")?.unwrap_or("linear");
        let factor =
            number("scaling.factor")?.or(number("scale_linear")?).filter(|&factor| factor != 0.0).unwrap_or(1.0);
        let amplitude = self.amplitude(architecture)?;
        let original = self.optional(&name("scaling.original_context_length"), Value::as_usize, "a whole number")?;
        let [beta_fast, beta_slow] = [number("scaling.yarn_beta_fast")?, number("scaling.yarn_beta_slow")?];
        Ok(match kind {
            // The divisors of LongRoPE are tensors.
            "none" | "longrope" => None,
            "linear" if factor == 1.0 => None,
            "linear" => Some(json!({ "rope_type": "linear", "factor": shortest(factor) })),
            "yarn" => {
                let mut scaling = json!({ "rope_type": "yarn", "factor": shortest(factor) });
                if let Some(original) = original {
                    scaling["original_max_position_embeddings"] = json!(original);
                }
                for (beta, theirs) in [(beta_fast, "beta_fast"), (beta_slow, "beta_slow")] {
                    if let Some(beta) = beta {
                        scaling[theirs] = json!(shortest(beta));
                    }
                }
                if amplitude != 1.0 {
                    let grown = if factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 };
                    scaling["attention_factor"] = json!(amplitude * grown);
                }
                Some(scaling)
            }
            other => {
                let reason = format!("is {other:?}: must be \"none\", \"linear\", \"yarn\" or \"longrope\"");
                return Err(self.wrong_key(&name("scaling.type"), reason));
            }
        })
    }

    /// Sets the rotated part of a head.
    fn rotated_part(&self, architecture: &Architecture, config: &mut ModelConfig) -> Result<(), GgufError> {
        let name = format!("{}.rope.dimension_count", architecture.name);
        let dim = self.optional(&name, Value::as_one_usize, "a whole number, the same for all layers")?;
        let Some(dim) = dim.filter(|_| config.variant.latent.is_none()) else { return Ok(()) };
        if dim == config.head_dim {
            return Ok(());
        }
        if architecture.has_rotary_neighbours || dim == 0 || dim > config.head_dim || !dim.is_multiple_of(2) {
            let expected = if architecture.has_rotary_neighbours { "" } else { " or an even number below it" };
            let head = config.head_dim;
            return Err(self.wrong_key(&name, format!("is {dim}: must be {head}, the width of a head{expected}")));
        }
        config.variant.rotary.dim = dim;
        Ok(())
    }

    /// Reads divisors of rotary frequencies that are tensors (Llama 3.1's, and LongRoPE's for short and long
    /// contexts), and an amplitude outside YaRN.
    fn stretch_frequencies(&self, architecture: &Architecture, config: &mut ModelConfig) -> Result<(), GgufError> {
        let rotated = config.variant.latent.map_or(config.head_dim, |latent| latent.rotary_dim);
        let rotary = &mut config.variant.rotary;
        let expected = if rotary.dim > 0 { rotary.dim } else { rotated } / 2;
        let divisors = |name: &str| -> Result<Option<Vec<f64>>, GgufError> {
            let Some(tensor) = self.tensors().get(name) else { return Ok(None) };
            if tensor.shape != [expected] {
                let (path, found) = (self.path().to_owned(), tensor.shape.clone());
                return Err(GgufError::WrongShape { path, tensor: name.to_owned(), found, expected: vec![expected] });
            }
            Ok(Some(self.numbers(tensor)))
        };
        let type_key = format!("{}.rope.scaling.type", architecture.name);
        let is_long = self.optional(&type_key, Value::as_text, "text")? == Some("longrope");
        let amplitude = self.amplitude(architecture)?;
        let [short, long] = FREQUENCIES_BY_LENGTH.map(divisors);
        let (short, long) = match (divisors(FREQUENCIES)?, short?, long?) {
            // The family's keys had the divisors.
            (None, _, _) if matches!(rotary.scaling, RopeScaling::LongRope { .. }) => return Ok(()),
            (None, Some(short), Some(long)) if is_long => (short, long),
            _ if is_long => {
                let missing = FREQUENCIES_BY_LENGTH.join(" and ");
                return Err(
                    self.wrong_key(&type_key, format!("is \"longrope\", but the tensors {missing} are missing"))
                );
            }
            (Some(factors), None, None) => (factors.clone(), factors),
            (None, None, None) if amplitude == 1.0 || matches!(rotary.scaling, RopeScaling::Yarn { .. }) => {
                return Ok(());
            }
            (None, None, None) => (vec![1.0; expected], vec![1.0; expected]),
            _ => {
                let reason = format!("must be \"longrope\" for the tensors {}", FREQUENCIES_BY_LENGTH.join(" and "));
                return Err(self.wrong_key(&type_key, reason));
            }
        };
        let factor = match rotary.scaling {
            RopeScaling::None | RopeScaling::LongRope { .. } => 1.0,
            RopeScaling::Linear { factor } => factor,
            _ => return Err(self.wrong_key(&type_key, format!("is \"yarn\": not supported beside {FREQUENCIES}"))),
        };
        let name = format!("{}.rope.scaling.original_context_length", architecture.name);
        let original = self.optional(&name, Value::as_usize, "a whole number")?.filter(|_| is_long);
        rotary.scaling = RopeScaling::LongRope {
            short_factor: short.iter().map(|x| x * factor).collect(),
            long_factor: long.iter().map(|x| x * factor).collect(),
            short_amplitude: amplitude,
            long_amplitude: amplitude,
            original_len: original.unwrap_or(config.max_seq_len),
        };
        Ok(())
    }

    /// Decodes a small tensor.
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

/// The tensor of divisors of rotary frequencies.
pub(super) const FREQUENCIES: &str = "rope_freqs.weight";

/// The tensors of divisors for short and for long contexts (LongRoPE).
pub(super) const FREQUENCIES_BY_LENGTH: [&str; 2] = ["rope_factors_short.weight", "rope_factors_long.weight"];
