//! The header of a record: the model, and how its experts were placed.

use std::path::Path;

use moeworks_model::ModelConfig;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::RecordError;

/// The first bytes of every record.
pub(super) const MAGIC: [u8; 8] = *b"MOEROUTE";
/// The version of the format.
pub(super) const VERSION: u16 = 1;
/// The bytes before the header's text: magic, version, zero, length and checksum.
pub(super) const PREFIX_BYTES: usize = 24;
/// The longest header's text.
pub(super) const MAX_HEADER_BYTES: usize = 1 << 20;
/// The most experts and layers.
const MAX_SIZE: usize = 1 << 16;
/// The most experts of all layers together, so that counts of each fit into memory.
const MAX_EXPERTS: usize = 1 << 22;

/// The command that wrote a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecordSource {
    /// Training; blocks are numbered by step.
    Train,
    /// Evaluation; blocks are numbered by window.
    Evaluate,
    /// Generation; blocks are numbered by sequence.
    Generate,
    /// The server; blocks are numbered by sequence.
    Serve,
}

/// The facts that hold for all blocks of a record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordHeader {
    /// The command that wrote the record.
    pub source: RecordSource,
    /// The model's name.
    pub model: String,
    /// The indices of the MoE layers in the model, ascending. An encoder's layers come before the decoder's.
    pub layers: Vec<usize>,
    /// The layers of an encoder, which have other tokens than those of the decoder; 0 without one.
    #[serde(default)]
    pub num_encoder_layers: usize,
    /// E: experts that a token can choose, zero-computation experts included.
    pub num_experts: usize,
    /// Experts that compute, the first of all; only these are placed on ranks.
    pub num_computing: usize,
    /// K: experts of a token as the model's configuration has it. Blocks may have more.
    pub top_k: usize,
    /// The placement of the experts on ranks in its text form, where they were placed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<String>,
    /// Ranks of a node, where the experts were placed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks_per_node: Option<usize>,
}

impl RecordHeader {
    /// Makes the header for a model.
    ///
    /// # Errors
    /// If the model has no MoE layer.
    pub fn new(source: RecordSource, model: &str, config: &ModelConfig) -> Result<Self, RecordError> {
        let layers = config.moe_layer_numbers();
        if layers.is_empty() {
            return Err(RecordError::Dense { model: model.to_owned() });
        }
        Ok(Self {
            source,
            model: model.to_owned(),
            layers,
            num_encoder_layers: config.num_encoder_layers(),
            num_experts: config.moe().num_choosable(),
            num_computing: config.num_experts,
            top_k: config.top_k,
            placement: None,
            ranks_per_node: None,
        })
    }

    /// Returns what is wrong with the sizes, as the end of a sentence.
    pub(super) fn problem(&self) -> Option<String> {
        let Self { layers, num_experts, num_computing, top_k, ranks_per_node, .. } = self;
        let within = |value: usize, what: &str, most: usize| {
            let is_wrong = !(1..=most).contains(&value);
            is_wrong.then(|| format!("has {what} = {value}: must be from 1 to {most}"))
        };
        if !layers.windows(2).all(|pair| pair[0] < pair[1]) {
            return Some("has layers that are not in ascending order".to_owned());
        }
        within(layers.len(), "layers", MAX_SIZE - 1)
            .or_else(|| within(*num_experts, "num_experts", MAX_SIZE - 1))
            .or_else(|| within(layers.len() * num_experts, "layers times num_experts", MAX_EXPERTS))
            .or_else(|| within(*num_computing, "num_computing", *num_experts))
            .or_else(|| within(*top_k, "top_k", MAX_SIZE - 1))
            .or_else(|| ranks_per_node.and_then(|count| within(count, "ranks_per_node", MAX_SIZE)))
    }

    /// Returns the first difference to the model of `other`, as text.
    pub(super) fn difference(&self, other: &Self) -> Option<String> {
        let sizes = |header: &Self| (header.num_experts, header.num_computing, header.top_k);
        if self.layers != other.layers {
            return Some("with other MoE layers".to_owned());
        }
        (sizes(self) != sizes(other)).then(|| format!("of {} experts, {} a token", self.num_experts, self.top_k))
    }

    /// Returns the bytes at the beginning of a file.
    pub(super) fn to_bytes(&self, path: &Path) -> Result<Vec<u8>, RecordError> {
        let wrong = |problem: String| RecordError::Header { path: path.to_owned(), problem };
        if let Some(problem) = self.problem() {
            return Err(wrong(problem));
        }
        let text = serde_json::to_vec(self).map_err(|error| wrong(format!("cannot be written: {error}")))?;
        if text.len() > MAX_HEADER_BYTES {
            return Err(wrong(format!("has {} bytes: must be at most {MAX_HEADER_BYTES}", text.len())));
        }
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend([0; 2]);
        bytes.extend((text.len() as u32).to_le_bytes());
        bytes.extend(xxh3_64(&text).to_le_bytes());
        bytes.extend(text);
        Ok(bytes)
    }
}
