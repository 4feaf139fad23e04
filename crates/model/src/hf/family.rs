//! A family of `transformers`: the mapping of its keys and tensor names to and from our own.

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
    /// The prefix of a layer's number on disk, `model.layers.` in most families; the first is the one that is
    /// written.
    pub(crate) layers: &'static [&'static str],
    /// The prefix of the number of an encoder's layer; empty in families without an encoder.
    pub(crate) encoder_layers: &'static str,
    /// The tensors whose name or form on disk is not the usual one; earlier rules win.
    pub(crate) rules: &'static [Rule],
    /// Endings of tensors on disk that are not weights, such as buffers that can be computed.
    pub(crate) ignored: &'static [&'static str],
    /// True if the files may have multi-token-prediction layers after the last one, which are kept but not computed.
    pub(crate) has_mtp_layers: bool,
    /// The keys of its `config.json`: used, harmless or refused.
    pub(crate) keys: KeyTable,
    /// Reads the configuration from the family's keys.
    pub(crate) read: fn(&Keys<'_>) -> Result<ModelConfig, String>,
    /// Writes the family's keys, except those that [`config_json::write`] writes for every family.
    pub(crate) write: fn(&ModelConfig, &mut Map<String, Value>),
}

/// Returns the names of all families, for messages.
pub(crate) fn supported() -> String {
    let names: Vec<&str> = FAMILIES.iter().copied().chain([&OURS]).map(|family| family.model_type).collect();
    names.join(", ")
}

impl Family {
    /// Returns the first family that computes what a model of `config` does.
    pub(crate) fn for_config(config: &ModelConfig) -> &'static Self {
        FAMILIES.iter().find(|family| family.can_say(config)).copied().unwrap_or(&OURS)
    }

    /// Returns the family with this `model_type`.
    pub(crate) fn from_model_type(model_type: &str) -> Option<&'static Self> {
        FAMILIES.iter().copied().chain([&OURS]).find(|family| family.model_type == model_type)
    }

    /// Returns true if a model of `config`, written in this family's keys and read back, computes the same function.
    pub(crate) fn can_say(&self, config: &ModelConfig) -> bool {
        let json = config_json::write(self, config, "float32", None);
        let said = json.as_object().map(Keys::new).and_then(|keys| (self.read)(&keys).ok());
        said.is_some_and(|said| said.computed() == config.computed())
    }

    /// Returns true if a tensor on disk belongs to a multi-token-prediction layer, after the last of `num_layers`.
    pub(crate) fn is_mtp_layer(&self, name: &str, num_layers: usize) -> bool {
        let layer = name.strip_prefix(self.layers[0]).and_then(|rest| rest.split('.').next()?.parse().ok());
        self.has_mtp_layers && layer.is_some_and(|i: usize| i >= num_layers)
    }

    /// Returns true if `transformers` loads the family.
    pub(crate) fn is_known_to_transformers(&self) -> bool {
        self.model_type != OURS.model_type
    }
}
