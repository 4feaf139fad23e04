//! GPT-2's older tokenizer files: a vocabulary and its merges.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::byte_level::byte_level_json;
use super::{END_OF_TEXT, MAX_ID, TokenizerError, read_text};

/// Builds the `tokenizer.json` of a vocabulary and its merges. These files do not give the division into words, so
/// only GPT-2's class, the default, is accepted.
pub(super) fn gpt2_json(
    [vocab_path, merges_path]: &[PathBuf; 2],
    config: Option<&str>,
) -> Result<String, TokenizerError> {
    let invalid = |path: &Path, reason: String| TokenizerError::Invalid { origin: path.display().to_string(), reason };
    let config: Value = config.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    let class = config["tokenizer_class"].as_str().unwrap_or("GPT2Tokenizer");
    if !["GPT2Tokenizer", "GPT2TokenizerFast"].contains(&class) {
        return Err(invalid(
            vocab_path,
            format!("a {class} needs a tokenizer.json; only GPT-2's tokenizer is read from this file"),
        ));
    }
    let vocab: BTreeMap<String, u32> =
        serde_json::from_str(&read_text(vocab_path)?).map_err(|error| invalid(vocab_path, error.to_string()))?;
    let end = vocab.get(END_OF_TEXT).copied().filter(|&id| u64::from(id) < MAX_ID);
    let end =
        end.ok_or_else(|| invalid(vocab_path, format!("it must have {END_OF_TEXT:?}, with an id below {MAX_ID}")))?;
    let text = read_text(merges_path)?;
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with("#version"));
    let merges: Option<Value> =
        lines.map(|line| line.split_once(' ').map(|(left, right)| json!([left, right]))).collect();
    let merges = merges.ok_or_else(|| invalid(merges_path, "a line must be two tokens and a space".to_owned()))?;
    Ok(byte_level_json(&vocab, &merges, end, true))
}
