//! Chat templates: conversations rendered as text by a model's own template, within bounds.
//!
//! A template is a Jinja program that comes with a model of any origin. It gets what `transformers` gives it
//! (`apply_chat_template`): `messages`, `add_generation_prompt`, `tools` and `documents` (both none), the names of
//! special tokens, `raise_exception`, `strftime_now` (in UTC), and the methods of Python's strings, lists and dicts;
//! blocks are trimmed in the same way. It can open no file and no other template. It ends after [`MAX_STEPS`] steps,
//! and its text is at most [`MAX_BYTES`] long. Its variables are not bounded: a [`Sandbox`] renders templates in a
//! process with limited memory.
//!
//! A message never becomes a special token, whatever it spells: [`Tokenizer::guard`] marks such spellings before the
//! template sees them, and [`Tokenizer::encode_rendered`] splits the text there.

mod channels;
mod clock;
mod conversation;
mod environment;
mod python;
mod sandbox;

use std::io;
use std::path::{Path, PathBuf};

use moeworks_model::Tokenizer;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use channels::final_message;
pub use conversation::{Conversation, ConversationOptions, Cut, Turn, TurnError, TurnEvent};
pub use sandbox::{Sandbox, SandboxError, serve};

/// The most steps of a template. One for 2,000 messages takes some hundred thousand.
pub const MAX_STEPS: u64 = 5_000_000;

/// The largest rendered text, in bytes.
pub const MAX_BYTES: usize = 16 << 20;

/// The largest template file, in bytes.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// The text.
    pub content: String,
    /// The name of the speaker, for templates that show it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl Message {
    /// Makes a message.
    #[must_use]
    pub fn new(role: &str, content: impl Into<String>) -> Self {
        Self { role: role.to_owned(), content: content.into(), name: None }
    }
}

/// Options of rendering a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RenderOptions {
    /// True if the beginning of an answer is added after the messages.
    pub add_generation_prompt: bool,
    /// Further variables of the template, such as `enable_thinking`. They cannot replace those that it always gets.
    #[serde(default)]
    pub variables: Map<String, Value>,
}

impl Default for RenderOptions {
    fn default() -> Self {
        Self { add_generation_prompt: true, variables: Map::new() }
    }
}

/// A chat template, with the special tokens that it can name.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ChatTemplate {
    source: String,
    tokens: Map<String, Value>,
}

/// An error of a chat template.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// A file cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The file has no template in the expected place.
    #[error("{}: {reason}", path.display())]
    NoTemplate {
        /// The file.
        path: PathBuf,
        /// The problem, with what would be right.
        reason: String,
    },
    /// The template is not valid, fails, or refuses the conversation.
    #[error("the chat template fails{}: {reason}", line.map_or_else(String::new, |line| format!(" in line {line}")))]
    Fails {
        /// The line of the template.
        line: Option<usize>,
        /// The reason.
        reason: String,
    },
    /// The template exceeds the number of steps.
    #[error("the chat template was stopped: it has not ended after {MAX_STEPS} steps")]
    Endless,
    /// The rendered text exceeds the allowed length.
    #[error("the chat template was stopped: its text is longer than {MAX_BYTES} bytes")]
    TooLong,
}

impl ChatTemplate {
    /// Makes a template from its source, for models with this tokenizer.
    #[must_use]
    pub fn new(source: String, tokenizer: &Tokenizer) -> Self {
        let config: Value = serde_json::from_str(tokenizer.config_json()).unwrap_or_default();
        let text = |value: &Value| value.as_str().or_else(|| value.get("content")?.as_str()).map(Value::from);
        let is_token = |name: &str| name.ends_with("_token") && !name.starts_with("add_");
        let tokens = config.as_object().into_iter().flatten().filter(|(name, _)| is_token(name));
        let tokens = tokens.filter_map(|(name, value)| Some((name.clone(), text(value)?))).collect();
        Self { source, tokens }
    }

    /// Reads the template from the file at `path`.
    pub fn from_file(path: &Path, tokenizer: &Tokenizer) -> Result<Self, ChatError> {
        let source = read(path)?.ok_or_else(|| {
            let source = io::Error::from(io::ErrorKind::NotFound);
            ChatError::Io { path: path.to_owned(), source }
        })?;
        Ok(Self::new(source, tokenizer))
    }

    /// Finds the template of a model, if it has one: `chat_template.jinja` in the folder `dir`, otherwise
    /// `chat_template` in the tokenizer's configuration (of several named templates the one named `default`).
    pub fn find(dir: Option<&Path>, tokenizer: &Tokenizer) -> Result<Option<Self>, ChatError> {
        let file = dir.map(|dir| read(&dir.join("chat_template.jinja"))).transpose()?.flatten();
        if let Some(source) = file {
            return Ok(Some(Self::new(source, tokenizer)));
        }
        let config: Value = serde_json::from_str(tokenizer.config_json()).unwrap_or_default();
        let source = match &config["chat_template"] {
            Value::Null => return Ok(None),
            Value::Array(named) => {
                named.iter().find(|entry| entry["name"] == "default").map(|entry| &entry["template"])
            }
            other => Some(other),
        };
        match source.and_then(Value::as_str) {
            Some(source) => Ok(Some(Self::new(source.to_owned(), tokenizer))),
            None => Err(ChatError::NoTemplate {
                path: dir.unwrap_or(Path::new("")).join("tokenizer_config.json"),
                reason: "chat_template must be text, or a list of names and templates with one named \"default\""
                    .into(),
            }),
        }
    }

    /// Returns the source of the template.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a conversation.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String, ChatError> {
        environment::render(&self.source, &self.tokens, messages, options)
    }
}

/// Reads a file; `None` if it does not exist.
fn read(path: &Path) -> Result<Option<String>, ChatError> {
    let io = |source| ChatError::Io { path: path.to_owned(), source };
    match std::fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(io(error)),
        Ok(metadata) if !metadata.is_file() || metadata.len() > MAX_FILE_BYTES => Err(ChatError::NoTemplate {
            path: path.to_owned(),
            reason: format!("must be a regular file of at most {MAX_FILE_BYTES} bytes"),
        }),
        Ok(_) => std::fs::read_to_string(path).map(Some).map_err(io),
    }
}
