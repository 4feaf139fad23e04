//! The options of `generate` and `chat`.

use std::path::PathBuf;

use clap::Args;

use super::ComputeArgs;

/// How tokens are drawn.
#[derive(Debug, Args)]
pub(crate) struct SamplingArgs {
    /// 0 always takes the likeliest token; higher is more varied
    #[arg(long, default_value_t = 0.8, allow_negative_numbers = true)]
    pub(crate) temperature: f32,
    /// Only the k likeliest tokens (0: all)
    #[arg(long, default_value_t = 0)]
    pub(crate) top_k: usize,
    /// Only the likeliest tokens that together have this probability
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    pub(crate) top_p: f32,
    /// Only tokens at least this share as likely as the likeliest
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) min_p: f32,
    /// Seed of the sampling; the same seed gives the same text
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
}

#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    /// A run, a checkpoint, a model folder or a GGUF file
    pub(crate) model: PathBuf,
    /// The text to continue; - for standard input
    #[arg(long, default_value = "")]
    pub(crate) prompt: String,
    /// Tokens to generate at most (default: 200, or as many as the model has room for)
    #[arg(long)]
    pub(crate) max_tokens: Option<usize>,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ChatArgs {
    /// A run, a checkpoint, a model folder or a GGUF file
    pub(crate) model: PathBuf,
    /// What the model is told before the conversation
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// A chat template in Jinja in place of the model's own
    #[arg(long, value_name = "FILE")]
    pub(crate) template: Option<PathBuf>,
    /// Tokens of an answer at most (default: as many as the model has room for)
    #[arg(long)]
    pub(crate) max_tokens: Option<usize>,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
}
