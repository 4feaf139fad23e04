//! Models: a configuration of shared blocks plus a name table.

mod config;

pub use config::{ActivationKind, ModelConfig, QkNorm};
