//! Errors of opening and using a model.

use moeworks_comm::CommError;
use moeworks_gpu::GpuError;
use moeworks_model::gguf::GgufError;
use moeworks_model::{BatchError, LoadError, TokenizerError};
use moeworks_moe::ConfigError;

use crate::chat::{ChatError, SandboxError};
use crate::constraint::ConstraintError;
use crate::data::{DataError, SpanTokensError};
use crate::routing_record::RecordError;
use crate::store::StoreError;

/// An error of opening or using a model, as one line: the problem, its place, and what would be right.
#[derive(Debug, thiserror::Error)]
pub enum InferError {
    /// The path names no model, or a checkpoint that is damaged.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A model folder cannot be read.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A GGUF file cannot be read.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The tokenizer cannot be read, or refuses a text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A setting is out of range.
    #[error(transparent)]
    Setting(#[from] ConfigError),
    /// The tokens do not fit the model.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// A rank was lost.
    #[error(transparent)]
    Ranks(#[from] CommError),
    /// Experts were to be spread over ranks, but the model has none.
    #[error("the model is dense: it has no experts to spread over {num_ranks} ranks; use one rank")]
    NoExperts {
        /// The number of ranks.
        num_ranks: usize,
    },
    /// Layers were to be spread over stages, but the model cannot be cut between its layers.
    #[error(
        "the model has an encoder, relative positions or a capacity of its experts: its layers are not spread over \
         {num_stages} stages; use one"
    )]
    NoStages {
        /// The number of stages.
        num_stages: usize,
    },
    /// There are more stages than layers.
    #[error("{num_stages} stages: the model has {num_layers} layers, and a stage needs at least one")]
    FewLayers {
        /// The number of stages.
        num_stages: usize,
        /// The number of layers.
        num_layers: usize,
    },
    /// A placement of experts does not fit.
    #[error("the placement {problem}")]
    Placement {
        /// The problem.
        problem: String,
    },
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] GpuError),
    /// The chat template cannot be read.
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// The chat template cannot be rendered.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// There are more threads than any machine has cores.
    #[error("{threads} threads: must be at most {most}; 0 for one on each core")]
    ManyThreads {
        /// The threads that were asked for.
        threads: usize,
        /// The largest allowed number.
        most: usize,
    },
    /// An expert cache was asked for without a GPU.
    #[error("an expert cache needs a GPU; choose the device cuda")]
    ExpertCacheWithoutGpu,
    /// Batch invariance was asked for on a GPU, whose kernels are chosen by the number of rows.
    #[error("batch invariance works only on the CPU; choose the device cpu")]
    BatchInvarianceOnGpu,
    /// A result of the model is not a number.
    #[error("the model's result is not a number{}", explain(tensor.as_deref()))]
    NotANumber {
        /// The tensor with NaN or infinity; `None` if all weights are finite.
        tensor: Option<String>,
    },
    /// The prompt has no token.
    #[error("the prompt is empty, and the tokenizer has no token that begins a text")]
    EmptyPrompt,
    /// The prompt leaves no space for an answer.
    #[error(
        "the prompt has {prompt_len} tokens, but the model's context is {context}: shorten it to at most {}",
        context.saturating_sub(1)
    )]
    LongPrompt {
        /// The tokens of the prompt.
        prompt_len: usize,
        /// The tokens of the model's context.
        context: usize,
    },
    /// More new tokens were asked for than fit after the prompt.
    #[error(
        "{asked} new tokens: the model's context is {context} tokens and the prompt has {prompt_len}: give at most {room}, \
         or as many as fit"
    )]
    ManyTokens {
        /// The tokens that were asked for.
        asked: usize,
        /// The tokens of the model's context.
        context: usize,
        /// The tokens of the prompt.
        prompt_len: usize,
        /// The tokens that fit.
        room: usize,
    },
    /// The answer cannot keep to its form.
    #[error(transparent)]
    Form(#[from] ConstraintError),
    /// The text cannot be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The routing cannot be recorded.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The tokenizer lacks the tokens of span corruption.
    #[error(transparent)]
    SpanTokens(#[from] SpanTokensError),
    /// The window length is not possible for the model.
    #[error("windows of {seq_len} tokens: must be from {least} to the model's maximum, {longest}")]
    SeqLen {
        /// The length that was asked for.
        seq_len: usize,
        /// The least that is possible.
        least: usize,
        /// The most that is possible.
        longest: usize,
    },
    /// The text is too short to be evaluated.
    #[error("{num_tokens} tokens, but at least 2 are needed")]
    FewTokens {
        /// Its tokens.
        num_tokens: u64,
    },
    /// The message alone fills the model's context.
    #[error(
        "this message has {len} tokens with what the template puts around it, but the model's context is {context}: shorten it"
    )]
    LongMessage {
        /// The tokens of the message.
        len: usize,
        /// The tokens of the model's context.
        context: usize,
    },
}

/// Explains why a result is not a number, as the rest of a line.
fn explain(tensor: Option<&str>) -> String {
    match tensor {
        Some(name) => format!(": tensor {name:?} holds NaN or infinity; the file may be damaged"),
        None => ", though all weights are: they are too large for the precision".to_owned(),
    }
}
