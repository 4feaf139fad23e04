//! Requests and answers of the API as plain values: reading them, their bounds, and what is wrong with them.
//!
//! Nothing here knows of HTTP, threads or models. A field that changes an answer is used, or refused with its name; the lists of fields
//! that are accepted and change nothing are in `common.rs`.

mod chat;
mod common;
mod completion;
mod error;
mod fields;
mod json;
mod line;
mod messages;
mod routed_experts;
mod sampling;
mod template_variables;
mod texts;

pub use chat::{ChatPrompt, ChatRequest};
pub use common::{Common, MAX_CHOICES};
pub use completion::{CompletionRequest, Prompt, PromptOptions};
pub(crate) use error::quoted;
pub use error::{ApiError, ErrorKind};
pub use json::MAX_DEPTH;
pub use line::{Line, LinePrompt};
pub use routed_experts::ExpertsFrom;
pub use sampling::Sampling;
pub use texts::{DetokenizeRequest, TokenizeRequest, TokenizeText};

#[cfg(test)]
mod tests;
