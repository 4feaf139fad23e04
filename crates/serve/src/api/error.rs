//! Failures of requests, in the form that clients of OpenAI's API read.

use serde_json::{Value, json};

/// The kind of a failure. Each has one status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// A value is wrong.
    Invalid,
    /// A field means something that the server cannot do.
    Unsupported,
    /// A field that is not known.
    UnknownField,
    /// Prompt and answer do not fit in the model's context.
    TooLong,
    /// The key is missing or wrong.
    WrongKey,
    /// The `Host` header names another server.
    WrongHost,
    /// The model is not the one that is served.
    NoModel,
    /// There is nothing at the path.
    NoRoute,
    /// The path does not take the method.
    WrongMethod,
    /// The body did not come in time, or the answer took too long.
    Timeout,
    /// The body is too large.
    LargeBody,
    /// The body is not JSON by its header.
    MediaType,
    /// Too many requests are waiting.
    QueueFull,
    /// The server is at fault.
    Internal,
    /// The server ends.
    Unavailable,
    /// The model is loaded.
    Loading,
}

impl ErrorKind {
    /// The HTTP status.
    #[must_use]
    pub fn status(self) -> u16 {
        match self {
            Self::Invalid | Self::Unsupported | Self::UnknownField | Self::TooLong => 400,
            Self::WrongKey => 401,
            Self::WrongHost => 403,
            Self::NoModel | Self::NoRoute => 404,
            Self::WrongMethod => 405,
            Self::Timeout => 408,
            Self::LargeBody => 413,
            Self::MediaType => 415,
            Self::QueueFull => 429,
            Self::Internal => 500,
            Self::Unavailable | Self::Loading => 503,
        }
    }

    /// The `type` of the error.
    fn type_name(self) -> &'static str {
        match self {
            Self::WrongKey => "authentication_error",
            Self::WrongHost => "permission_error",
            Self::NoModel | Self::NoRoute => "not_found_error",
            Self::QueueFull => "rate_limit_error",
            Self::Internal => "server_error",
            Self::Unavailable | Self::Loading => "service_unavailable_error",
            _ => "invalid_request_error",
        }
    }

    /// The `code` of the error.
    fn code(self) -> &'static str {
        match self {
            Self::Invalid => "invalid_value",
            Self::Unsupported => "unsupported_parameter",
            Self::UnknownField => "unknown_parameter",
            Self::TooLong => "context_length_exceeded",
            Self::WrongKey => "invalid_api_key",
            Self::WrongHost => "host_not_allowed",
            Self::NoModel => "model_not_found",
            Self::NoRoute => "not_found",
            Self::WrongMethod => "method_not_allowed",
            Self::Timeout => "request_timeout",
            Self::LargeBody => "request_too_large",
            Self::MediaType => "unsupported_media_type",
            Self::QueueFull => "queue_full",
            Self::Internal => "internal_error",
            Self::Unavailable => "unavailable",
            Self::Loading => "loading",
        }
    }
}

/// A failure of a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// The kind, which decides the status.
    pub kind: ErrorKind,
    /// The fault and what would be right, on one line.
    pub message: String,
    /// The field that is wrong, if it is one.
    pub param: Option<String>,
}

impl ApiError {
    /// A failure that is not of one field.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        let message: String = message.into();
        // Messages of templates and other crates may have line breaks.
        let message = message.replace(['\n', '\r'], " ");
        Self { kind, message, param: None }
    }

    /// A field with a wrong value; `expected` says what would be right.
    #[must_use]
    pub fn field(name: &str, found: &Value, expected: &str) -> Self {
        Self::new(ErrorKind::Invalid, format!("{name} = {}: must be {expected}", shown(found))).of(name)
    }

    /// The failure with the field that is wrong.
    #[must_use]
    pub fn of(self, param: &str) -> Self {
        Self { param: Some(param.to_owned()), ..self }
    }

    /// The body of the answer.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let Self { kind, message, param } = self;
        json!({"error": {"message": message, "type": kind.type_name(), "param": param, "code": kind.code()}})
    }
}

/// Characters of a value that a message shows.
const MAX_SHOWN: usize = 60;

/// A value as a message shows it: on one line, and not too long.
fn shown(value: &Value) -> String {
    match value {
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
        Value::String(text) => quoted(text),
        other => other.to_string(),
    }
}

/// A text of a client as messages and logs show it: in quotes, with control characters escaped, and not too long.
pub(crate) fn quoted(text: &str) -> String {
    match text.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => format!("{:?}...", &text[..end]),
        None => format!("{text:?}"),
    }
}
