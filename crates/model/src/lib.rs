//! Models: a configuration of shared blocks plus a name table.

pub mod account;
mod config;

pub use config::{ActivationKind, ModelConfig, QkNorm};
