//! Tokens that end a text or an answer, recognized by name.
//!
//! Files often name a single end, and not always the one at which a chat model stops. The names are those that
//! llama.cpp knows (`special_eog_ids`).

/// Names that end texts in tokenizers without an `eos_token`, the likeliest first.
pub(super) const TEXT_ENDS: [&str; 6] =
    [super::END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "<|eot_id|>"];

/// Names of tokens at which generation stops.
const ANSWER_ENDS: [&str; 34] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
    "[e~[",
    // Fill-in-the-middle models for code end a file with one of these.
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
    // Cohere's turns.
    "<|END_OF_TURN_TOKEN|>",
];

/// Returns true if a token of this name ends an answer in some family.
pub(crate) fn is_known_end(name: &str) -> bool {
    ANSWER_ENDS.contains(&name)
}

/// Returns the names at which a tokenizer with the tokens `has` stops. In GPT-OSS and Solar `<|end|>` ends one of
/// several messages, and in Gemma 4 and PaddleOCR `</s>` is text, so these are left out.
pub(super) fn known_ends(has: impl Fn(&str) -> bool) -> Vec<&'static str> {
    let has_calls = has("<|call|>") || has("<|calls|>");
    let ends_messages = has_calls && (has("<|return|>") || has("<|flush|>"));
    let is_end = |name: &&str| match *name {
        "<|end|>" => !ends_messages,
        "</s>" => !has("<|tool_response>"),
        _ => true,
    };
    ANSWER_ENDS.into_iter().filter(|name| has(name)).filter(is_end).collect()
}
