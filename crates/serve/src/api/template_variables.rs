//! Variables that a request gives to a chat template.

use serde_json::{Map, Value};

use super::fields::Fields;
use super::{ApiError, ErrorKind};

/// The field's name, as other servers have it.
const FIELD: &str = "chat_template_kwargs";
/// Levels of lists and objects at most.
const MAX_DEPTH: usize = 5;
/// Values at most, those inside of others included.
const MAX_VALUES: usize = 128;
/// Bytes of names and texts at most.
const MAX_BYTES: usize = 16 << 10;

/// Names that a template has from elsewhere, or that are arguments of `apply_chat_template` and no variables.
const RESERVED: [&str; 19] = [
    "messages",
    "conversation",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer",
    "tokenizer_kwargs",
    "raise_exception",
    "strftime_now",
    "namespace",
];

/// Takes the variables: those of `chat_template_kwargs`, and `reasoning_effort`.
pub(super) fn take(fields: &mut Fields) -> Result<Map<String, Value>, ApiError> {
    let effort = fields.text("reasoning_effort", 32)?;
    let mut variables = match fields.take(FIELD) {
        None => Map::new(),
        Some(Value::Object(map)) => map,
        Some(other) => return Err(ApiError::field(FIELD, &other, "an object")),
    };
    let is_reserved = |name: &&String| RESERVED.contains(&name.as_str()) || name.ends_with("_token");
    if let Some(name) = variables.keys().find(is_reserved) {
        let message = format!("{FIELD}.{name}: a request cannot set this");
        return Err(ApiError::new(ErrorKind::Invalid, message).of(FIELD));
    }
    let mut size = Size::default();
    variables.iter().for_each(|(name, value)| size.add(name, value, 1));
    if size.depth > MAX_DEPTH || size.num_values > MAX_VALUES || size.bytes > MAX_BYTES {
        let expected = format!("at most {MAX_VALUES} values in {MAX_DEPTH} levels and {MAX_BYTES} bytes");
        return Err(ApiError::new(ErrorKind::Invalid, format!("{FIELD}: must be {expected}")).of(FIELD));
    }
    if let Some(effort) = effort {
        variables.entry("reasoning_effort").or_insert(effort.into());
    }
    Ok(variables)
}

/// The size of values.
#[derive(Debug, Default)]
struct Size {
    depth: usize,
    num_values: usize,
    bytes: usize,
}

impl Size {
    /// Adds a value at a level. The body's bound on levels bounds the recursion.
    fn add(&mut self, name: &str, value: &Value, level: usize) {
        self.num_values += 1;
        self.depth = self.depth.max(level);
        self.bytes += name.len();
        match value {
            Value::String(text) => self.bytes += text.len(),
            Value::Array(values) => values.iter().for_each(|value| self.add("", value, level + 1)),
            Value::Object(map) => map.iter().for_each(|(name, value)| self.add(name, value, level + 1)),
            _ => {}
        }
    }
}
