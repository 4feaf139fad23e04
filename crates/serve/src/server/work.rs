//! The engine as the server sees it.

use moeworks_infer::generation::{End, Sampler};

use crate::api::{ApiError, ErrorKind};
use crate::scheduler::{Counts, Refused, SequenceId};

/// A request for an answer.
#[derive(Debug)]
pub struct Request {
    /// The tokens to go on from.
    pub prompt: Vec<u32>,
    /// Tokens to generate at most.
    pub max_new_tokens: usize,
    /// Draws the tokens, with settings and a seed of this request.
    pub sampler: Sampler,
    /// Texts that end the answer and are not part of it.
    pub stops: Vec<String>,
    /// Whether the answer goes on behind the model's stop tokens.
    pub ignores_stop_ids: bool,
    /// Lower ones are served first.
    pub priority: i32,
    /// Requests of different salts share no keys and values.
    pub salt: Vec<u8>,
}

/// The part of a turn that belongs to one answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// The request's sequence.
    pub sequence: SequenceId,
    /// The token.
    pub token: u32,
    /// The text that is certain with it; a character of several tokens comes with its last one.
    pub text: String,
    /// Says why the answer is complete, if it is.
    pub end: Option<End>,
}

/// A failure of the engine.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The request is not taken.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The model fails.
    #[error(transparent)]
    Model(#[from] moeworks_infer::InferError),
}

/// An engine that answers many requests at once, turn by turn.
pub trait TurnEngine {
    /// Takes a request, which waits for its first turn.
    ///
    /// # Errors
    /// If it does not fit, or too many wait.
    fn add(&mut self, request: Request) -> Result<SequenceId, EngineError>;

    /// Drops a request; its blocks are free at once. Returns whether it was here.
    fn cancel(&mut self, id: SequenceId) -> bool;

    /// Makes a turn.
    ///
    /// # Errors
    /// If the model fails. Its requests are still there.
    fn turn(&mut self) -> Result<Vec<Output>, EngineError>;

    /// Whether a request is waiting or running.
    fn has_requests(&self) -> bool;

    /// Counts of what is waiting and running, for metrics.
    fn counts(&self) -> Counts;
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let kind = match &error {
            EngineError::Refused(Refused::QueueFull { .. }) => ErrorKind::QueueFull,
            EngineError::Refused(Refused::TooLong { .. }) => ErrorKind::TooLong,
            EngineError::Refused(_) => ErrorKind::Invalid,
            EngineError::Model(_) => ErrorKind::Internal,
        };
        Self::new(kind, error.to_string())
    }
}
