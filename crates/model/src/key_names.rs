//! Translation of our names of settings to those of a file, for error messages.

/// Our name of a setting, and the key of a file.
type KeyName = (&'static str, &'static str);

/// Our names of settings, with the keys of a `config.json`.
pub(crate) const OF_CONFIG_JSON: &[KeyName] = &[
    ("width", "hidden_size"),
    ("num_layers", "num_hidden_layers"),
    ("num_heads", "num_attention_heads"),
    ("num_kv_heads", "num_key_value_heads"),
    ("num_experts", "num_experts (num_local_experts, n_routed_experts)"),
    ("top_k", "num_experts_per_tok"),
    ("expert_width", "moe_intermediate_size (or intermediate_size)"),
    ("shared_width", "shared_expert_intermediate_size (or n_shared_experts)"),
    ("dense_width", "intermediate_size"),
    ("moe_every", "decoder_sparse_step"),
    ("max_seq_len", "max_position_embeddings"),
    ("norm_eps", "rms_norm_eps (layer_norm_epsilon)"),
    ("init_std", "initializer_range"),
    ("router.num_groups", "n_group"),
    ("router.top_groups", "topk_group"),
    ("router.routed_scale", "routed_scaling_factor"),
    ("variant.rotary.scaling", "rope_parameters (rope_scaling)"),
    ("variant.rotary.dim", "partial_rotary_factor"),
    ("variant.clip_qkv", "clip_qkv"),
    ("variant.attention_scale", "attention_multiplier"),
    ("variant.embedding_multiplier", "embedding_multiplier"),
    ("variant.residual_multiplier", "residual_multiplier"),
    ("variant.logits_divisor", "logits_scaling"),
    ("variant.value_dim", "v_head_dim"),
    ("variant.latent.kv_rank", "kv_lora_rank"),
    ("variant.latent.query_rank", "q_lora_rank"),
    ("variant.latent.rotary_dim", "qk_rope_head_dim"),
    ("variant.latent.plain_dim", "qk_nope_head_dim"),
    ("variant.expert_capacity", "expert_capacity"),
    ("variant.positions.num_buckets", "relative_attention_num_buckets"),
    ("variant.positions.max_distance", "relative_attention_max_distance"),
    ("variant.encoder.num_layers", "num_layers"),
    ("variant.encoder.start_id", "decoder_start_token_id"),
];

/// Our names of settings, with the keys of a GGUF header.
pub(crate) const OF_GGUF: &[KeyName] = &[
    ("width", "embedding_length"),
    ("num_layers", "block_count"),
    ("num_heads", "attention.head_count"),
    ("num_kv_heads", "attention.head_count_kv"),
    ("head_dim", "attention.key_length (or embedding_length over attention.head_count)"),
    ("num_experts", "expert_count"),
    ("top_k", "expert_used_count"),
    ("expert_width", "expert_feed_forward_length (or feed_forward_length)"),
    ("shared_width", "expert_shared_feed_forward_length (or expert_shared_count)"),
    ("dense_width", "feed_forward_length"),
    ("max_seq_len", "context_length"),
    ("norm_eps", "attention.layer_norm_rms_epsilon"),
    ("rope_theta", "rope.freq_base"),
    ("router.num_groups", "expert_group_count"),
    ("router.top_groups", "expert_group_used_count"),
    ("router.routed_scale", "expert_weights_scale"),
    ("variant.rotary.scaling", "rope.scaling"),
    ("variant.rotary.dim", "rope.dimension_count"),
    ("variant.attention_scale", "attention.scale"),
    ("variant.embedding_multiplier", "embedding_scale"),
    ("variant.residual_multiplier", "residual_scale"),
    ("variant.logits_divisor", "logit_scale"),
    ("variant.value_dim", "attention.value_length"),
    ("variant.latent.kv_rank", "attention.kv_lora_rank"),
    ("variant.latent.query_rank", "attention.q_lora_rank"),
    ("variant.latent.rotary_dim", "rope.dimension_count"),
    ("variant.latent.plain_dim", "attention.key_length"),
];

/// Replaces our names of settings in a message by the keys of a file.
pub(crate) fn with_file_keys(message: &dyn ToString, words: &[KeyName]) -> String {
    let text = message.to_string();
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
    let mut out = String::with_capacity(text.len());
    for piece in text.split_inclusive(|c: char| !is_part(c)) {
        let end = piece.trim_end_matches(|c: char| !is_part(c));
        let theirs = words.iter().find(|(ours, _)| *ours == end).map_or(end, |(_, theirs)| theirs);
        out.push_str(theirs);
        out.push_str(&piece[end.len()..]);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_replaced_and_nothing_else() {
        let say = |text: &str| with_file_keys(&text, OF_CONFIG_JSON);
        assert_eq!(
            say("num_kv_heads = 3: must divide num_heads, 4"),
            "num_key_value_heads = 3: must divide num_attention_heads, 4"
        );
        assert_eq!(say("a bandwidth of widths, width"), "a bandwidth of widths, hidden_size");
        assert_eq!(say("variant.rotary.scaling = 0: no"), "rope_parameters (rope_scaling) = 0: no");
    }
}
