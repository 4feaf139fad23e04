//! Mixture-of-Experts: which experts a token goes to, which row goes where, and the layer that carries it out.

mod config;

pub use config::{ConfigError, MoeConfig, ScoreOrder};
