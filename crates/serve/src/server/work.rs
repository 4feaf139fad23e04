//! The engine as the server sees it.

use std::sync::Arc;

use crate::api::{ApiError, ErrorKind};
use crate::engine::{Engine, EngineError, Output, Request};
use crate::experts::ExpertLoad;
use crate::scheduler::{Counts, Refused, SequenceId};

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

    /// Returns whether a request is waiting or running.
    fn has_requests(&self) -> bool;

    /// Counts of what is waiting and running, for metrics.
    fn counts(&self) -> Counts;

    /// Why it cannot make any more turns, if it cannot: a rank of the model was lost.
    fn lost(&self) -> Option<String> {
        None
    }

    /// The tokens that each expert computes; none for a model without experts.
    fn expert_load(&self) -> Option<Arc<ExpertLoad>> {
        None
    }
}

impl TurnEngine for Engine<'_> {
    fn add(&mut self, request: Request) -> Result<SequenceId, EngineError> {
        Engine::add(self, request)
    }

    fn cancel(&mut self, id: SequenceId) -> bool {
        Engine::cancel(self, id)
    }

    fn turn(&mut self) -> Result<Vec<Output>, EngineError> {
        Engine::turn(self)
    }

    fn has_requests(&self) -> bool {
        Engine::has_requests(self)
    }

    fn counts(&self) -> Counts {
        Engine::counts(self)
    }

    fn lost(&self) -> Option<String> {
        Engine::lost(self)
    }

    fn expert_load(&self) -> Option<Arc<ExpertLoad>> {
        Engine::expert_load(self)
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let kind = match &error {
            EngineError::Refused(Refused::QueueFull { .. }) => ErrorKind::QueueFull,
            EngineError::Refused(Refused::TooLong { .. }) => ErrorKind::TooLong,
            EngineError::Refused(_) => ErrorKind::Invalid,
            EngineError::Model(_) | EngineError::Limits(_) | EngineError::CannotMove | EngineError::Answer { .. } => {
                ErrorKind::Internal
            }
        };
        Self::new(kind, error.to_string())
    }
}
