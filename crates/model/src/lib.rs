//! Models: a configuration of shared blocks plus a name table.

pub mod account;
mod blocks;
mod config;
mod decoder;
mod files;
pub mod generation;
pub mod gguf;
pub mod hf;
mod losses;
mod pass;
pub mod safetensors;
mod shapes;
mod tokenizer;
mod upcycle;
mod weights;

pub use config::{
    ActivationKind, LatentAttention, ModelConfig, NormKind, PositionKind, QkNorm, RopeScaling, Rotary, Variant,
};
pub use decoder::Decoder;
pub use hf::LoadError;
pub use pass::{BalanceKind, BatchError, PassOptions, PassStats, RouterNoise, Rules, TokenBatch};
pub use tokenizer::{Tokenizer, TokenizerError};
pub use upcycle::{UpcycleOptions, upcycle};
pub use weights::{
    AttentionInputs, AttentionWeights, DecoderWeights, DenseWeights, FeedForwardWeights, HeadWeights, LatentWeights,
    LayerWeights, LinearWeights, NormWeights, Role,
};
