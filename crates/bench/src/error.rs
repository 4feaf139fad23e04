//! Errors of measurements.

use moeworks_comm::CommError;
use moeworks_model::{BatchError, LoadError};
use moeworks_moe::{ConfigError, RoutingError};
use moeworks_train::TrainError;

/// The reason why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// A request or a model cannot be timed, for the reason given.
    #[error("{0}")]
    Request(String),
    /// A layer or a model cannot have this shape.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A logit of a router was not finite.
    #[error(transparent)]
    Routing(#[from] RoutingError),
    /// A model's configuration cannot be read.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A model cannot compute with the given input.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// A rank failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A training step failed.
    #[error(transparent)]
    Train(#[from] TrainError),
}
