//! Tables of the keys of a GGUF header, like those of `hf/key_table.rs` for `config.json`.
//!
//! The keys are those of llama.cpp (`gguf-py/gguf/constants.py`), after the architecture's name. A key that llama.cpp
//! reads for other architectures only is refused unless its value switches its feature off: llama.cpp ignores it, but
//! the file asks for it.

use std::collections::BTreeSet;
use std::fmt::Write;

use super::GgufFile;
use super::config::{ARCHITECTURES, Architecture};
use super::error::GgufError;
use super::value::Value;
use crate::hf::list;

/// A key that is refused unless its value is one of the numbers `off`; a boolean counts as 0 or 1.
struct Refused {
    key: &'static str,
    off: &'static [f64],
}

const fn refused(key: &'static str, off: &'static [f64]) -> Refused {
    Refused { key, off }
}

/// Keys that every architecture uses.
pub(super) const USED: &[&str] = &[
    "embedding_length",
    "block_count",
    "context_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "expert_weights_norm",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
];

/// Keys without influence on what a model computes.
const HARMLESS: &[&str] =
    &["vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "embedding_length_out", "decoder_start_token_id"];

/// Keys that are refused unless an architecture uses them.
const REFUSED: &[Refused] = &[
    refused("attention.scale", &[0.0]),
    refused("attention.output_scale", &[0.0, 1.0]),
    refused("attention.clamp_kqv", &[0.0]),
    refused("attention.max_alibi_bias", &[0.0]),
    refused("attention.causal", &[1.0]),
    refused("attention.layer_norm_epsilon", &[]),
    refused("attention.group_norm_epsilon", &[]),
    refused("attention.group_norm_groups", &[]),
    refused("attention.q_lora_rank", &[0.0]),
    refused("attention.kv_lora_rank", &[0.0]),
    refused("attention.key_length_mla", &[0.0]),
    refused("attention.value_length_mla", &[0.0]),
    refused("attention.key_length_swa", &[]),
    refused("attention.value_length_swa", &[]),
    refused("attention.sliding_window_pattern", &[]),
    refused("attention.shared_kv_layers", &[0.0]),
    refused("attention.temperature_length", &[0.0]),
    refused("attention.temperature_scale", &[0.0]),
    refused("attention.relative_buckets_count", &[0.0]),
    refused("attention.indexer.head_count", &[0.0]),
    refused("attention.indexer.key_length", &[0.0]),
    refused("attention.indexer.top_k", &[0.0]),
    refused("full_attention_interval", &[0.0, 1.0]),
    refused("attn_logit_softcapping", &[0.0]),
    refused("final_logit_softcapping", &[0.0]),
    refused("router_logit_softcapping", &[0.0]),
    refused("logit_scale", &[0.0, 1.0]),
    refused("residual_scale", &[0.0, 1.0]),
    refused("embedding_scale", &[0.0, 1.0]),
    refused("use_parallel_residual", &[0.0]),
    refused("swin_norm", &[0.0]),
    refused("rescale_every_n_layers", &[0.0]),
    refused("pooling_type", &[0.0]),
    refused("activation_sparsity_scale", &[]),
    refused("embedding_length_per_layer_input", &[0.0]),
    refused("altup.active_idx", &[]),
    refused("altup.num_inputs", &[]),
    refused("swiglu_clamp_exp", &[]),
    refused("swiglu_clamp_shexp", &[]),
    refused("rope.dimension_count_swa", &[]),
    refused("rope.dimension_sections", &[]),
    refused("rope.freq_base_swa", &[]),
    refused("rope.scaling.alpha", &[0.0, 1.0]),
    refused("rope.scaling.yarn_ext_factor", &[-1.0]),
    refused("rope.scaling.yarn_attn_factor", &[1.0]),
    refused("rope.scaling.yarn_log_multiplier", &[0.0]),
    refused("leading_dense_block_count", &[0.0]),
    refused("expert_shared_count", &[0.0]),
    refused("expert_chunk_feed_forward_length", &[0.0]),
    refused("expert_weights_scale", &[0.0, 1.0]),
    refused("expert_gating_func", &[0.0, 1.0]),
    refused("expert_group_count", &[0.0, 1.0]),
    refused("expert_group_used_count", &[0.0, 1.0]),
    refused("expert_group_scale", &[0.0, 1.0]),
    refused("experts_per_group", &[0.0]),
    refused("interleave_moe_layer_step", &[0.0, 1.0]),
    refused("moe_every_n_layers", &[0.0, 1.0]),
    refused("moe_latent_size", &[0.0]),
    refused("nextn_predict_layers", &[0.0]),
    refused("n_deepstack_layers", &[0.0]),
    refused("decoder_block_count", &[0.0]),
    refused("token_shift_count", &[0.0]),
];

/// The gating function 3, softmax over the chosen experts, equals the normalised softmax over all.
const NORMALIZED_GATING: Refused = refused("expert_gating_func", &[0.0, 1.0, 3.0]);

impl Architecture {
    /// Returns the keys that the architecture reads.
    fn used(&self) -> impl Iterator<Item = &'static str> {
        USED.iter().chain(self.own_keys).copied()
    }

    fn refused(&self) -> impl Iterator<Item = &'static Refused> {
        REFUSED.iter().filter(|known| !self.own_keys.contains(&known.key)).map(|known| {
            let is_normalized = known.key == NORMALIZED_GATING.key && self.normalizes;
            if is_normalized { &NORMALIZED_GATING } else { known }
        })
    }
}

impl GgufFile {
    /// Checks every key of the architecture. Fails on a key of an unsupported feature; returns the keys that are in
    /// no table.
    pub(super) fn check_keys(&self, architecture: &Architecture) -> Result<Vec<String>, GgufError> {
        if let Some(kind) = self.optional("general.type", Value::as_text, "text")?.filter(|kind| *kind != "model") {
            return Err(self.wrong_key("general.type", format!("is {kind:?}: must be \"model\"")));
        }
        let prefix = format!("{}.", architecture.name);
        let named = self.keys().iter().filter_map(|(key, value)| Some((key.strip_prefix(&prefix)?, value)));
        let mut unknown = Vec::new();
        for (key, value) in named {
            if let Some(entry) = architecture.refused().find(|entry| entry.key == key) {
                if !is_off(value, entry.off) {
                    return Err(self.wrong_key(&format!("{prefix}{key}"), not_supported(value, entry.off)));
                }
            } else if !architecture.used().any(|used| used == key) && !HARMLESS.contains(&key) {
                unknown.push(format!("{prefix}{key}"));
            }
        }
        Ok(unknown)
    }
}

fn not_supported(value: &Value, off: &[f64]) -> String {
    let off: Vec<String> = off.iter().map(f64::to_string).chain(["absent".to_owned()]).collect();
    format!("is {}: not supported in this architecture; must be {}", shown(value), off.join(" or "))
}

fn shown(value: &Value) -> String {
    match value {
        Value::Bool(x) => x.to_string(),
        Value::Text(text) => format!("{:?}", text.chars().take(40).collect::<String>()),
        value => value.as_f64().map_or_else(|| "a list".to_owned(), |x| super::adjust::shortest(x).to_string()),
    }
}

/// Returns true if a value, or every value of a list, is one of the numbers `off`.
fn is_off(value: &Value, off: &[f64]) -> bool {
    match value {
        Value::Bool(x) => off.contains(&f64::from(u8::from(*x))),
        Value::Numbers(numbers) => (0..numbers.len()).all(|i| numbers.get(i).is_some_and(|x| is_off(&x, off))),
        value => value.as_f64().is_some_and(|x| off.contains(&x)),
    }
}

/// Returns the names of a family's architectures.
pub(crate) fn architectures_of(model_type: &str) -> Vec<&'static str> {
    let is_its = |known: &&Architecture| {
        let v3 = known.moe == Some("deepseek_v2") && model_type == "deepseek_v3";
        known.moe == Some(model_type) || known.dense == Some(model_type) || v3
    };
    ARCHITECTURES.iter().filter(is_its).map(|known| known.name).collect()
}

/// Returns the part of the page of families about GGUF files.
pub(crate) fn keys_page() -> String {
    let mut page = String::new();
    let _ = writeln!(page, "## GGUF files\n");
    let _ = writeln!(
        page,
        "Keys with another prefix than the architecture's name are about the file or its tokenizer. After that prefix:\n"
    );
    let _ = writeln!(page, "Used in every architecture: {}.\n", list(USED));
    let _ = writeln!(page, "Without influence: {}.\n", list(HARMLESS));
    let one = |entry: &Refused| {
        let off: Vec<String> = entry.off.iter().map(f64::to_string).collect();
        if off.is_empty() { format!("`{}`", entry.key) } else { format!("`{}` ({})", entry.key, off.join(", ")) }
    };
    let refusals: Vec<String> = REFUSED.iter().map(one).collect();
    let _ = writeln!(
        page,
        "Refused unless the architecture uses them, or they are absent or have a value given here: {}.\n",
        refusals.join(", ")
    );
    let _ = writeln!(page, "| architecture | model_type | also used |\n| --- | --- | --- |");
    for known in &ARCHITECTURES {
        let types: BTreeSet<&str> = known.dense.into_iter().chain(known.moe).collect();
        let types: Vec<&str> = types.into_iter().collect();
        let _ = writeln!(page, "| `{}` | {} | {} |", known.name, list(&types), list(known.own_keys));
    }
    let _ = writeln!(page, "\nElement types: {}.", super::GgmlType::supported());
    page
}
