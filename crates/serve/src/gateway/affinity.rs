//! The choice of the replica that is likeliest to have the beginning of a prompt: requests that begin alike go to one
//! replica.

use serde_json::Value;

/// A hash of the beginning of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key([u8; 32]);

impl Key {
    /// The key of a request's body: of the first `num_bytes` bytes of its prompt or of the first messages of its
    /// conversation, with what else keeps requests from sharing keys and values. None if it has neither, or
    /// `num_bytes` is 0.
    pub(crate) fn of_body(body: &[u8], num_bytes: usize) -> Option<Self> {
        if num_bytes == 0 {
            return None;
        }
        let body: Value = serde_json::from_slice(body).ok()?;
        let mut beginning = match (body.get("messages"), body.get("prompt").or(body.get("content"))) {
            (Some(messages), _) => beginning_of_chat(messages)?,
            (None, Some(Value::String(text))) => text.clone(),
            (None, Some(Value::Array(prompts))) => beginning_of_list(prompts, num_bytes)?,
            _ => return None,
        };
        let end = (0..=num_bytes.min(beginning.len())).rev().find(|&end| beginning.is_char_boundary(end));
        beginning.truncate(end.unwrap_or(0));
        let salts = [body.get("model"), body.get("cache_salt")];
        Some(Self::of(&format!("{beginning}\n{salts:?}")))
    }

    /// The key of a text.
    pub(crate) fn of(text: &str) -> Self {
        Self(*blake3::hash(text.as_bytes()).as_bytes())
    }

    /// Returns the indices of `names`, the preferred one first (rendezvous hashing, Thaler and Ravishankar, 1998):
    /// where a replica goes, only what it had moves.
    pub(crate) fn ranked(self, names: &[&str]) -> Vec<usize> {
        let score = |name: &str| *blake3::keyed_hash(&self.0, name.as_bytes()).as_bytes();
        let mut ranked: Vec<_> = names.iter().enumerate().map(|(index, name)| (score(name), index)).collect();
        ranked.sort_unstable_by(|a, b| b.cmp(a));
        ranked.into_iter().map(|(_, index)| index).collect()
    }
}

/// The messages up to the first of a user: they stay as a conversation goes on.
fn beginning_of_chat(messages: &Value) -> Option<String> {
    let messages = messages.as_array()?;
    let count = messages.iter().position(|message| message["role"] == "user").map_or(messages.len(), |index| index + 1);
    let first = messages[..count].iter().map(|message| format!("{}\n{}\n", message["role"], message["content"]));
    Some(first.collect())
}

/// The beginning of the first of several prompts, or of one that is given as tokens.
fn beginning_of_list(prompts: &[Value], num_bytes: usize) -> Option<String> {
    let tokens = match prompts.first()? {
        Value::String(text) => return Some(text.clone()),
        Value::Array(tokens) => tokens,
        _ => prompts,
    };
    // Each token has a digit at least.
    Some(tokens.iter().take(num_bytes).map(|token| format!("{token},")).collect())
}
