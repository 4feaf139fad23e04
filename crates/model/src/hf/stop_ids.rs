//! The token ids at which a folder's model stops.

use std::path::Path;

use serde_json::Value;

use super::error::LoadError;
use super::load::read_json;
use crate::tokenizer::Tokenizer;

/// Returns the ids that end a text: `eos_token_id` of `generation_config.json` and `config.json`, one or several, and
/// those that the tokenizer knows. A chat model ends an answer with another token than a text.
pub fn stop_ids(dir: &Path, tokenizer: &Tokenizer) -> Result<Vec<u32>, LoadError> {
    let mut ids: Vec<u32> = Vec::new();
    for name in ["generation_config.json", "config.json"] {
        let path = dir.join(name);
        if !path.exists() {
            continue;
        }
        let json = read_json(&path)?;
        let found = match &json["eos_token_id"] {
            Value::Null => Some(Vec::new()),
            Value::Array(many) => many.iter().map(as_id).collect(),
            one => as_id(one).map(|id| vec![id]),
        };
        let reason = || format!("eos_token_id = {}: must be an id or a list of ids", json["eos_token_id"]);
        ids.extend(found.ok_or_else(|| LoadError::Config { path: path.clone(), reason: reason() })?);
    }
    Ok(tokenizer.stop_ids(&ids))
}

fn as_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}
