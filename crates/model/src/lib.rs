//! Models: a configuration of shared blocks plus a name table.

pub mod account;
mod blocks;
mod config;
mod decoder;
mod files;
pub mod generation;
pub mod hf;
mod losses;
mod pass;
pub mod safetensors;
mod tokenizer;
mod weights;

pub use config::{ActivationKind, ModelConfig, QkNorm};
pub use decoder::Decoder;
pub use hf::LoadError;
pub use pass::{BalanceKind, BatchError, PassOptions, PassStats, RouterNoise, Rules, TokenBatch};
pub use tokenizer::{Tokenizer, TokenizerError};
pub use weights::{AttentionWeights, DecoderWeights, DenseWeights, FeedForwardWeights, LayerWeights, Role};
