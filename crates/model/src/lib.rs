//! Language models: configurations, weights, file formats, tokenizers, and passes over tokens.

pub mod model_cost;

mod config;
mod decoder;
mod encoder;
mod expert_parallel;
mod file_kind;
pub mod files;
mod finite;
mod gather;
pub mod gguf;
pub mod hf;
mod key_names;
mod kv_cache;
mod kv_type;
mod layers;
mod losses;
mod mode;
mod paged_kv_cache;
mod pass;
mod pass_order;
mod path_advice;
mod remote_experts;
mod remote_stages;
mod rope_tables;
pub mod safetensors;
mod scan;
mod sharding;
mod split;
mod stage;
mod tensor_ranks;
mod tokenizer;
mod upcycle;
mod weights;

pub use config::{
    ActivationKind, EncoderConfig, LatentAttention, ModelConfig, NormKind, PositionKind, QkNorm, RopeScaling, Rotary,
    Variant,
};
pub use decoder::{Decoder, InitHook};
pub use encoder::SourceBatch;
pub use gather::Gather;
pub use hf::LoadError;
pub use kv_cache::KvCache;
pub use kv_type::KvType;
pub use layers::{EncoderOutput, ResidualStream, WeightGradTask, WeightGradTasks, WeightGrads};
pub use losses::{LossValues, RouterLoss, router_losses};
pub use mode::Mode;
pub use paged_kv_cache::PagedKvCache;
pub use pass::{
    BalanceKind, BatchError, ExpertIdShape, PassOptions, PassStats, RouterLosses, RouterNoise, SequencePart,
    TokenBatch, WantedLogits,
};
pub use pass_order::{PassAction, PassOrder};
pub use path_advice::{model_path_advice, only_gguf};
pub use remote_stages::{RemoteStages, serve_stage};
pub use scan::{NotFinite, WeightCheck};
pub use sharding::{HeldPart, Sharding};
pub use split::{Cut, TensorShare, TensorSplit};
pub use stage::{
    GradTarget, LayerDone, RoutingHook, Stage, StageBackward, StageForward, StageOutputGrads, StagePart, StageRanks,
    StageSaved, TextPart,
};
pub use tensor_ranks::TensorRanks;
pub use tokenizer::{TokenBytes, TokenTable, Tokenizer, TokenizerError};
pub use upcycle::{UpcycleOptions, upcycle};
pub use weights::{
    AttentionInputs, AttentionWeights, CrossWeights, DecoderWeights, DenseWeights, EncoderWeights, FeedForwardWeights,
    HeadWeights, Init, LatentWeights, LayerWeights, LinearWeights, ModelPart, NormWeights, ParamSet, QueryDown, Shard,
    TableBuilder, WeightGroup, WeightPlace, WeightRole, WeightRuleError, WeightSpec, WeightTable,
};
