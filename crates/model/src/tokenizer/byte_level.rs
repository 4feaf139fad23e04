//! Byte-level vocabularies: the alphabet, the files made of them, and the tokenizer whose ids are bytes.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{END_OF_TEXT, pretty};

/// Returns the character of each byte in byte-level vocabularies (GPT-2): itself if printable, else one from U+0100
/// on.
pub(super) fn byte_alphabet() -> Vec<char> {
    let mut next = 256;
    let stand_in = |byte: u8| {
        if matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff) {
            char::from(byte)
        } else {
            next += 1;
            char::from_u32(next - 1).unwrap_or(char::REPLACEMENT_CHARACTER)
        }
    };
    (0..=255).map(stand_in).collect()
}

/// Returns the `tokenizer.json` of a byte-level BPE; text is divided into words by GPT-2's rule if `has_words`.
pub(super) fn byte_level_json(
    vocab: &BTreeMap<String, u32>,
    merges: &Value,
    special_id: u32,
    has_words: bool,
) -> String {
    let mut by_id: Vec<(&String, &u32)> = vocab.iter().collect();
    by_id.sort_by_key(|(_, id)| **id);
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": has_words,
    });
    pretty(&json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [{
            "id": special_id, "content": END_OF_TEXT, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        }],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": by_id.into_iter().map(|(token, id)| (token.clone(), Value::from(*id))).collect::<serde_json::Map<_, _>>(),
            "merges": merges,
        },
    }))
}

/// Returns true if each id below 256 is that byte and nothing else affects encoding, which then needs no tokenizer
/// library.
pub(super) fn is_byte_tokenizer(value: &Value, ids: &BTreeMap<String, u32>) -> bool {
    let is_plain = ["normalizer", "post_processor"].iter().all(|part| value.get(part).is_none_or(Value::is_null));
    let model = value.get("model");
    let has_no_merges = model.and_then(|m| m.get("merges")).and_then(Value::as_array).is_some_and(Vec::is_empty);
    let vocab_len = model.and_then(|m| m.get("vocab")).and_then(Value::as_object).map(serde_json::Map::len);
    let pre = value.get("pre_tokenizer");
    let is_byte_level =
        |part: Option<&Value>| part.and_then(|p| p.get("type")).and_then(Value::as_str) == Some("ByteLevel");
    let has_no_prefix = pre.and_then(|p| p.get("add_prefix_space")) == Some(&Value::Bool(false));
    let only_special_added = value
        .get("added_tokens")
        .and_then(Value::as_array)
        .is_none_or(|added| added.iter().all(|token| token.get("special") == Some(&Value::Bool(true))));
    let is_identity = || byte_alphabet().iter().zip(0..).all(|(c, byte)| ids.get(&c.to_string()) == Some(&byte));
    is_plain
        && has_no_merges
        && vocab_len == Some(256)
        && has_no_prefix
        && only_special_added
        && is_byte_level(pre)
        && is_byte_level(value.get("decoder"))
        && is_identity()
}
