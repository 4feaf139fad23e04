//! Typed access to the keys of a `config.json`, under their current and older names.

use std::cell::RefCell;
use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::blocks::METHOD;
use super::key_table::KeyTable;
use super::rope_json;
use crate::config::{ActivationKind, ModelConfig};

/// The keys of a `config.json`, with a record of which were asked for.
pub(crate) struct Keys<'a> {
    map: &'a Map<String, Value>,
    asked: RefCell<BTreeSet<String>>,
    /// Nested keys that were not asked for.
    unused: RefCell<Vec<String>>,
}

/// The values that a family assumes for absent keys.
pub(crate) struct Defaults {
    pub(crate) norm_eps: f32,
    pub(crate) rope_theta: f64,
    /// None for hidden_size / num_attention_heads.
    pub(crate) head_dim: Option<usize>,
}

/// The defaults of most families.
pub(crate) const USUAL: Defaults = Defaults { norm_eps: 1e-6, rope_theta: 10_000.0, head_dim: None };

impl<'a> Keys<'a> {
    pub(crate) fn new(map: &'a Map<String, Value>) -> Self {
        Self { map, asked: RefCell::default(), unused: RefCell::default() }
    }

    /// Returns the keys that were asked for.
    pub(crate) fn asked(&self) -> BTreeSet<String> {
        self.asked.borrow().clone()
    }

    /// Records a nested key that is not used.
    pub(super) fn note_unused(&self, key: String) {
        self.unused.borrow_mut().push(key);
    }

    /// Returns the first of the keys that is present and not null.
    fn find(&self, names: &[&str]) -> Option<(String, &'a Value)> {
        self.asked.borrow_mut().extend(names.iter().map(|name| (*name).to_owned()));
        names.iter().find_map(|name| Some(((*name).to_owned(), self.map.get(*name).filter(|value| !value.is_null())?)))
    }

    pub(crate) fn optional<T: serde::de::DeserializeOwned>(&self, names: &[&str]) -> Result<Option<T>, String> {
        let Some((name, value)) = self.find(names) else { return Ok(None) };
        T::deserialize(value)
            .map(Some)
            .map_err(|_| format!("{name} = {}: must be {}", abridged(value), expected::<T>()))
    }

    pub(crate) fn required<T: serde::de::DeserializeOwned>(&self, names: &[&str]) -> Result<T, String> {
        self.optional(names)?.ok_or_else(|| format!("key {:?} is missing", names[0]))
    }

    /// Returns a key's value; null gives none, and an absent key gives `default`.
    pub(crate) fn optional_or_null(&self, name: &str, default: usize) -> Result<Option<usize>, String> {
        if self.map.contains_key(name) { self.optional(&[name]) } else { Ok(Some(default)) }
    }

    /// Returns a boolean key; false if absent.
    pub(crate) fn flag(&self, name: &str) -> Result<bool, String> {
        Ok(self.optional(&[name])?.unwrap_or(false))
    }

    /// Returns a numeric key; 1 if absent.
    pub(crate) fn multiplier(&self, name: &str) -> Result<f32, String> {
        Ok(self.optional(&[name])?.unwrap_or(1.0))
    }

    /// Reads the keys that all families with rotary positions share: a model without experts whose dense width is
    /// `intermediate_size`.
    pub(crate) fn decoder(&self, defaults: &Defaults) -> Result<ModelConfig, String> {
        let act: Option<String> = self.optional(&["hidden_act"])?;
        if let Some(act) = act.filter(|act| act != "silu") {
            return Err(format!("hidden_act = {act:?}: not supported in this family, only \"silu\""));
        }
        let width = self.required(&["hidden_size"])?;
        let num_heads: usize = self.required(&["num_attention_heads"])?;
        let head_dim = defaults.head_dim.or_else(|| usize::checked_div(width, num_heads)).unwrap_or(0);
        let mut config = ModelConfig {
            vocab_size: self.required(&["vocab_size"])?,
            width,
            num_layers: self.required(&["num_hidden_layers"])?,
            num_heads,
            num_kv_heads: self.optional(&["num_key_value_heads"])?.unwrap_or(num_heads),
            head_dim: self.optional(&["head_dim"])?.unwrap_or(head_dim),
            qk_norm: crate::config::QkNorm::None,
            num_experts: 0,
            dense_width: self.required(&["intermediate_size"])?,
            activation: ActivationKind::Swiglu,
            tie_embeddings: self.flag("tie_word_embeddings")?,
            norm_eps: self.optional(&["rms_norm_eps"])?.unwrap_or(defaults.norm_eps),
            max_seq_len: self.required(&["max_position_embeddings"])?,
            init_std: self.optional(&["initializer_range"])?.unwrap_or(0.02),
            ..ModelConfig::default()
        };
        rope_json::read(self, defaults.rope_theta, &mut config)?;
        Ok(config)
    }

    /// Reads the routed experts, whose width is under `width_key`.
    pub(crate) fn experts(&self, config: &mut ModelConfig, width_key: &str) -> Result<(), String> {
        config.num_experts = self.required(&["num_experts", "num_local_experts", "n_routed_experts"])?;
        config.top_k = self.required(&["num_experts_per_tok", "experts_per_token"])?;
        config.expert_width = self.required(&[width_key])?;
        Ok(())
    }

    /// Reads which layers have experts: `decoder_sparse_step` and `mlp_only_layers` (Qwen).
    pub(crate) fn sparse_layers(&self, config: &mut ModelConfig) -> Result<(), String> {
        config.moe_every = self.optional(&["decoder_sparse_step"])?.unwrap_or(1);
        let dense: Vec<usize> = self.optional(&["mlp_only_layers"])?.unwrap_or_default();
        config.variant.dense_layers = dense.into_iter().filter(|&i| config.is_moe_layer(i)).collect();
        Ok(())
    }

    /// Reads the sliding window of `window` keys. It applies in the layers that `layer_types` names, or if that key
    /// is absent, in those for which `is_sliding` is true.
    pub(crate) fn window(
        &self,
        config: &mut ModelConfig,
        window: Option<usize>,
        is_sliding: impl Fn(usize) -> bool,
    ) -> Result<(), String> {
        let kinds: Option<Vec<String>> = self.optional(&["layer_types"])?;
        for kind in kinds.iter().flatten() {
            if !["full_attention", "sliding_attention"].contains(&kind.as_str()) {
                let known = "only \"full_attention\" and \"sliding_attention\"";
                return Err(format!("layer_types: {kind:?} is not supported, {known}"));
            }
        }
        let is_full = |i: &usize| match &kinds {
            Some(kinds) => kinds.get(*i).is_none_or(|kind| kind == "full_attention"),
            None => !is_sliding(*i),
        };
        let Some(window) = window.filter(|&window| window > 0) else {
            return if kinds.iter().flatten().any(|kind| kind != "full_attention") {
                Err("layer_types: \"sliding_attention\" without a sliding_window in use".to_owned())
            } else {
                Ok(())
            };
        };
        let full: Vec<usize> = (0..config.num_layers.min(1 << 14)).filter(is_full).collect();
        if full.len() < config.num_layers {
            config.variant.window = window;
            config.variant.full_attention_layers = full;
        }
        Ok(())
    }

    /// Returns true if the file says anything about the rotary embedding except its base.
    pub(crate) fn has_rope(&self) -> bool {
        self.find(&["rope_parameters", "rope_scaling"]).is_some()
    }

    /// Fails if the weights are quantized by a method other than `known` and ours.
    pub(crate) fn quantized(&self, known: &str) -> Result<(), String> {
        let Some((key, value)) = self.find(&["quantization_config"]) else { return Ok(()) };
        match value.get("quant_method").and_then(Value::as_str) {
            Some(method) if method == known || method == METHOD => Ok(()),
            _ => Err(format!(
                "{key} = {}: not supported in this family, only {known:?}; get the model unquantized, or as GGUF",
                abridged(value)
            )),
        }
    }

    /// Fails if the file asks for something that the family does not compute. Returns the keys that are in no table.
    pub(crate) fn check(&self, table: &KeyTable) -> Result<Vec<String>, String> {
        let has_kinds = table.used().any(|key| key == LAYER_TYPES);
        if has_kinds && !self.asked.borrow().contains(LAYER_TYPES) {
            let kinds: Vec<String> = self.optional(&[LAYER_TYPES])?.unwrap_or_default();
            if let Some(kind) = kinds.iter().find(|kind| *kind != "full_attention") {
                return Err(format!("layer_types: {kind:?} is not supported in this family, only \"full_attention\""));
            }
        }
        let mut unknown = table.check(self.map)?;
        unknown.extend(self.unused.borrow().iter().cloned());
        Ok(unknown)
    }
}

const LAYER_TYPES: &str = "layer_types";

/// Names a type of value for a message.
fn expected<T>() -> &'static str {
    match std::any::type_name::<T>() {
        "usize" | "u32" | "u64" => "a whole number of at least 0",
        "f32" | "f64" => "a number",
        "bool" => "true or false",
        "alloc::string::String" => "a text",
        name if name.contains("Vec<usize>") => "a list of whole numbers",
        name if name.contains("Vec<f64>") => "a list of numbers",
        name if name.contains("Vec<alloc::string::String>") => "a list of texts",
        name if name.contains("Map") => "an object",
        _ => "something else",
    }
}

/// Returns a value as text for a message, cut after 60 characters.
pub(super) fn abridged(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// Returns the value of `layer_types` of a model of `config`.
pub(crate) fn layer_types(config: &ModelConfig) -> Value {
    let kind = |i| if config.window(i).is_some() { "sliding_attention" } else { "full_attention" };
    (0..config.num_layers).map(kind).collect()
}
