//! What a family of `transformers` is to us: its keys and its tensors' names, to and from our own.

use serde_json::{Map, Value};

use super::config_json::{self, Keys};
use super::families::{FAMILIES, OURS};
use super::key_table::KeyTable;
use super::names::Rule;
use crate::config::ModelConfig;

/// A family: one file in `families`.
pub(crate) struct Family {
    /// `model_type` in `config.json`.
    pub(crate) model_type: &'static str,
    /// The class in `architectures`.
    pub(crate) architecture: &'static str,
    /// What stands before a layer's number on disk, `model.layers.` in most; what we write first.
    pub(crate) layers: &'static [&'static str],
    /// The same of an encoder's layers; empty in families without an encoder.
    pub(crate) encoder_layers: &'static str,
    /// Where a tensor's name or form on disk is not the usual one; earlier rules win.
    pub(crate) rules: &'static [Rule],
    /// Endings of tensors on disk that are no weights: buffers that can be computed.
    pub(crate) ignored: &'static [&'static str],
    /// Whether layers behind the last may be on disk, which predict further tokens and take no part.
    pub(crate) has_further_layers: bool,
    /// What is made of the keys of its `config.json`.
    pub(crate) keys: KeyTable,
    /// The configuration from the family's keys.
    pub(crate) read: fn(&Keys<'_>) -> Result<ModelConfig, String>,
    /// The family's keys from the configuration, besides those that [`config_json::write`] writes for all.
    pub(crate) write: fn(&ModelConfig, &mut Map<String, Value>),
}

/// The names of all families, for messages.
pub(crate) fn supported() -> String {
    let names: Vec<&str> = FAMILIES.iter().copied().chain([&OURS]).map(|family| family.model_type).collect();
    names.join(", ")
}

impl Family {
    /// The first family that computes what a model of `config` does.
    pub(crate) fn of(config: &ModelConfig) -> &'static Self {
        FAMILIES.iter().find(|family| family.can_say(config)).copied().unwrap_or(&OURS)
    }

    /// The family of this name.
    pub(crate) fn named(model_type: &str) -> Option<&'static Self> {
        FAMILIES.iter().copied().chain([&OURS]).find(|family| family.model_type == model_type)
    }

    /// Whether a model of `config`, said in this family's keys and read back, computes the same.
    pub(crate) fn can_say(&self, config: &ModelConfig) -> bool {
        let json = config_json::write(self, config, "float32", None);
        let said = json.as_object().map(Keys::new).and_then(|keys| (self.read)(&keys).ok());
        said.is_some_and(|said| said.computed() == config.computed())
    }

    /// Whether a tensor on disk belongs to a layer behind the last of `num_layers`.
    pub(crate) fn is_further_layer(&self, name: &str, num_layers: usize) -> bool {
        let layer = name.strip_prefix(self.layers[0]).and_then(|rest| rest.split('.').next()?.parse().ok());
        self.has_further_layers && layer.is_some_and(|i: usize| i >= num_layers)
    }

    /// Whether `transformers` loads it.
    pub(crate) fn is_known_to_transformers(&self) -> bool {
        self.model_type != OURS.model_type
    }
}
