//! Tables of the keys of a `config.json`. They drive the check of a file and the page of all families.
//!
//! A key is used, harmless (without influence on what a model computes), or refused unless its value switches its
//! feature off. A key in no table is warned of, unless its name shows that it is bookkeeping.

use serde_json::{Map, Value};

use super::blocks::METHOD;
use super::keys::abridged;

/// A key of an unsupported feature: refused unless its value is null or one of those that switch it off.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Refused {
    pub(crate) key: &'static str,
    /// The values that switch the feature off, as JSON.
    pub(crate) off: &'static [&'static str],
}

/// Returns the entry of a key that is refused unless it is null or one of the values `off`.
pub(crate) const fn refused(key: &'static str, off: &'static [&'static str]) -> Refused {
    Refused { key, off }
}

/// The keys of a family.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyTable {
    /// Keys that are used, in groups that families share.
    pub(crate) used: &'static [&'static [&'static str]],
    /// Keys without influence on what a model computes, in addition to [`HARMLESS`].
    pub(crate) harmless: &'static [&'static str],
    /// Refused keys, checked before [`REFUSED`] and before used keys.
    pub(crate) refused: &'static [Refused],
}

/// Keys of every file.
pub(crate) const OF_ALL: &[&str] = &["model_type", "moeworks"];

/// The key of a quantized folder's form, for families that read forms other than ours.
pub(crate) const QUANTIZED: &str = "quantization_config";

/// The keys that [`Keys::decoder`](super::keys::Keys::decoder) reads, for all families with rotary positions.
pub(crate) const DECODER: &[&str] = &[
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "intermediate_size",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
    "initializer_range",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "layer_types",
];

/// The keys of routed experts, which [`Keys::experts`](super::keys::Keys::experts) reads.
pub(crate) const EXPERTS: &[&str] =
    &["num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "experts_per_token"];

const NOTHING: &[&str] = &["false", "0", "[]"];
const FALSE: &[&str] = &["false"];
const ONE: &[&str] = &["1", "false", "0"];
const NULL: &[&str] = &[];

/// Keys of features that a family does not compute, unless it reads them itself.
pub(crate) const REFUSED: &[Refused] = &[
    // Biases.
    refused("attention_bias", NOTHING),
    refused("qkv_bias", NOTHING),
    refused("mlp_bias", NOTHING),
    refused("lm_head_bias", NOTHING),
    refused("use_bias", FALSE),
    refused("bias", FALSE),
    refused("add_bias_linear", FALSE),
    refused("add_qkv_bias", FALSE),
    refused("router_bias", FALSE),
    // Attention.
    refused("clip_qkv", NOTHING),
    refused("use_sliding_window", NOTHING),
    refused("sliding_window", NOTHING),
    refused("sliding_window_size", NOTHING),
    refused("sliding_window_pattern", NOTHING),
    refused("attention_window", NOTHING),
    refused("attention_chunk_size", NOTHING),
    refused("attn_logit_softcapping", NOTHING),
    refused("final_logit_softcapping", NOTHING),
    refused("router_logit_softcapping", NOTHING),
    refused("qk_norm", FALSE),
    refused("use_qk_norm", FALSE),
    refused("qk_layernorm", FALSE),
    refused("use_qk_layernorm", FALSE),
    refused("query_pre_attn_scalar", NULL),
    refused("attention_multiplier", NULL),
    refused("attention_scale", NULL),
    refused("attn_temperature_tuning", FALSE),
    refused("use_bidirectional_attention", FALSE),
    refused("is_causal", &["true"]),
    refused("use_alibi", FALSE),
    refused("alibi", FALSE),
    refused("use_attention_sinks", FALSE),
    refused("q_lora_rank", NOTHING),
    refused("kv_lora_rank", NOTHING),
    refused("v_head_dim", NULL),
    refused("qk_nope_head_dim", NULL),
    refused("qk_rope_head_dim", NULL),
    // Positions.
    refused("rope_interleave", FALSE),
    refused("rotary_pct", ONE_OF_ONE),
    refused("rotary_emb_fraction", ONE_OF_ONE),
    refused("rope_local_base_freq", NULL),
    refused("no_rope_layers", NOTHING),
    refused("no_rope_layer_interval", NOTHING),
    refused("nope_layer_interval", NOTHING),
    refused("mrope_section", NULL),
    refused("position_embedding_type", &["\"rope\"", "\"rotary\""]),
    // Residual stream and logits.
    refused("embedding_multiplier", &["1"]),
    refused("residual_multiplier", &["1"]),
    refused("logits_scaling", &["1"]),
    refused("logit_scale", &["1"]),
    refused("scale_emb", &["1"]),
    refused("scale_depth", NULL),
    refused("dim_model_base", NULL),
    refused("mup_width_multiplier", &["1"]),
    refused("mup_embedding_multiplier", &["1"]),
    refused("mup_attn_multiplier", NULL),
    refused("parallel_attn", FALSE),
    refused("parallel_residual", FALSE),
    refused("use_parallel_residual", FALSE),
    refused("apply_residual_connection_post_layernorm", FALSE),
    // Experts, and which layers have them.
    refused("shared_expert_intermediate_size", NOTHING),
    refused("shared_intermediate_size", NOTHING),
    refused("intermediate_size_mlp", NULL),
    refused("n_shared_experts", NOTHING),
    refused("num_shared_experts", NOTHING),
    refused("mlp_only_layers", NOTHING),
    refused("decoder_sparse_step", ONE),
    refused("first_k_dense_replace", NOTHING),
    refused("moe_layer_freq", ONE),
    refused("moe_layers", NULL),
    refused("moe_layer_interval", ONE),
    refused("moe_layer_start_index", NOTHING),
    refused("moe_every_n_layers", ONE),
    refused("interleave_moe_layer_step", ONE),
    refused("expert_layer_period", ONE),
    refused("expert_layer_offset", NOTHING),
    refused("n_group", ONE),
    refused("topk_group", ONE),
    refused("routed_scaling_factor", &["1"]),
    refused("moe_router_scaling_factor", &["1"]),
    refused("scoring_func", &["\"softmax\""]),
    refused("score_func", &["\"softmax\""]),
    refused("score_function", &["\"softmax\""]),
    refused("topk_method", &["\"greedy\""]),
    refused("swiglu_limit", NULL),
    refused("swiglu_alpha", NULL),
    refused("router_jitter_noise", &["0"]),
    refused("input_jitter_noise", &["0"]),
    refused("expert_capacity", NOTHING),
    // Other kinds of model.
    refused("activation_function", &["\"silu\"", "\"swish\""]),
    refused("hidden_activation", &["\"silu\"", "\"swish\""]),
    refused("is_encoder_decoder", FALSE),
    refused("add_cross_attention", FALSE),
    refused("layers_block_type", NULL),
    refused("hybrid_override_pattern", NULL),
    refused("attn_layer_period", NOTHING),
    refused("attn_type_list", NULL),
    refused("text_config", NULL),
    refused("vision_config", NULL),
    refused("audio_config", NULL),
    // Weights in another form.
    refused("compression_config", NULL),
    refused("quantization", NULL),
];

const ONE_OF_ONE: &[&str] = &["1"];

/// Keys without influence on what a model computes, in addition to those that [`is_bookkeeping`] recognizes by their
/// form.
pub(crate) const HARMLESS: &[&str] = &[
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "attention_dropout",
    "attn_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "embedding_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "dropout",
    "dropout_rate",
    "classifier_dropout",
    "initializer_factor",
    "gradient_checkpointing",
    "output_router_logits",
    "router_aux_loss_coef",
    "router_z_loss_coef",
    "aux_loss_alpha",
    "seq_aux",
    "pretraining_tp",
    "ep_size",
    "num_key_value_groups",
    "is_decoder",
    "tie_encoder_decoder",
    "cross_attention_hidden_size",
    "auto_map",
    "trust_remote_code",
    "name_or_path",
    "tokenizer_class",
    "task_specific_params",
    "finetuning_task",
    "problem_type",
    "id2label",
    "label2id",
    "num_labels",
    "chunk_size_feed_forward",
    "pruned_heads",
    "return_dict",
    "return_dict_in_generate",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "torchscript",
    "use_bfloat16",
    "tf_legacy_loss",
    "residual_in_fp32",
    "use_flash_attn",
    "use_flash_attention",
    "attn_implementation",
    "pad_vocab_size_multiple",
    "mlp_implementation",
    // Settings of generation that older versions kept here.
    "max_length",
    "min_length",
    "do_sample",
    "early_stopping",
    "num_beams",
    "num_beam_groups",
    "diversity_penalty",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "repetition_penalty",
    "length_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids",
    "num_return_sequences",
    "exponential_decay_length_penalty",
    "suppress_tokens",
    "begin_suppress_tokens",
    "remove_invalid_values",
    "prefix",
    "sep_token",
];

/// Returns true if a key is bookkeeping by its form: a tool's own, a version or a token's id.
pub(crate) fn is_bookkeeping(key: &str) -> bool {
    key.starts_with('_')
        || key.starts_with("unsloth")
        || ["_token_id", "_token_ids", "_token", "_token_index", "_version", "_dropout"]
            .iter()
            .any(|end| key.ends_with(end))
}

impl Refused {
    /// Returns true if a value switches the feature off.
    fn is_off(&self, value: &Value) -> bool {
        let text = value.to_string();
        let is = |off: &str| match (value.as_f64(), off.parse::<f64>()) {
            (Some(value), Ok(off)) => value == off,
            _ => text == off,
        };
        value.is_null() || self.off.iter().any(|off| is(off))
    }

    /// Returns the values that are accepted, for a message.
    pub(crate) fn expected(&self) -> String {
        let listed = [self.off, &["absent"]].concat();
        match &*listed {
            [one] => (*one).to_owned(),
            [first @ .., last] => format!("{} or {last}", first.join(", ")),
            [] => String::new(),
        }
    }
}

impl KeyTable {
    /// Returns the used keys of all groups as one list.
    pub(crate) fn used(&self) -> impl Iterator<Item = &'static str> {
        self.used.iter().flat_map(|group| group.iter().copied())
    }

    /// Returns the family's refused keys, then those of [`REFUSED`] that the family neither reads nor ignores.
    pub(crate) fn refused(&self) -> impl Iterator<Item = &'static Refused> {
        let is_free =
            |key: &str| !self.used().any(|used| used == key) && !self.refused.iter().any(|own| own.key == key);
        let harmless = |key: &str| self.harmless.contains(&key);
        self.refused.iter().chain(REFUSED.iter().filter(move |known| is_free(known.key) && !harmless(known.key)))
    }

    /// Checks every key of a file. Fails on a key of an unsupported feature; returns the keys that are in no table.
    pub(crate) fn check(&self, map: &Map<String, Value>) -> Result<Vec<String>, String> {
        for entry in self.refused() {
            if let Some(value) = map.get(entry.key).filter(|value| !entry.is_off(value)) {
                let (key, expected) = (entry.key, entry.expected());
                return Err(format!("{key} = {}: not supported in this family; must be {expected}", abridged(value)));
            }
        }
        let quantized = map.get(QUANTIZED).filter(|value| !value.is_null() && value["quant_method"] != METHOD);
        if let Some(value) = quantized.filter(|_| !self.used().any(|used| used == QUANTIZED)) {
            let advice = "get the model unquantized, or as GGUF";
            return Err(format!("{QUANTIZED} = {}: not supported in this family; {advice}", abridged(value)));
        }
        let is_known = |key: &str| {
            key == QUANTIZED
                || OF_ALL.contains(&key)
                || HARMLESS.contains(&key)
                || is_bookkeeping(key)
                || self.harmless.contains(&key)
                || self.used().any(|used| used == key)
                || self.refused().any(|refused| refused.key == key)
        };
        Ok(map.iter().filter(|(key, value)| !value.is_null() && !is_known(key)).map(|(key, _)| key.clone()).collect())
    }
}

#[cfg(test)]
#[path = "key_table_tests.rs"]
mod tests;
