//! The options of `convert` and `upcycle`.

use std::path::PathBuf;

use clap::Args;

use super::CheckArgs;

#[derive(Debug, Args)]
#[command(
    before_help = "Usual use:\n  moeworks upcycle DENSE OUT --experts 8 --top-k 2\n  moeworks train --from OUT --data text.txt"
)]
pub(crate) struct UpcycleArgs {
    /// The dense model: a run, a checkpoint or a model folder
    pub(crate) dense: PathBuf,
    /// The folder that is written
    pub(crate) out: PathBuf,
    /// Experts of an MoE layer
    #[arg(long, default_value_t = 8)]
    pub(crate) experts: usize,
    /// Experts that a token goes to
    #[arg(long, default_value_t = 2)]
    pub(crate) top_k: usize,
    /// Every how many layers one gets experts; the others stay dense
    #[arg(long, default_value_t = 1)]
    pub(crate) every: usize,
    /// Deviation of the noise on experts, relative to that of their weights; 0 keeps them exact copies
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) noise: f32,
    /// Seed of routers and noise
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Replace the model that is in the folder already
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) check: CheckArgs,
}

#[derive(Debug, Args)]
#[command(
    before_help = "Usual use:\n  moeworks convert MODEL OUT --dtype bf16\n  moeworks convert MODEL OUT --quantize int8 --only experts"
)]
pub(crate) struct ConvertArgs {
    /// A run, a checkpoint, a model folder or a GGUF file
    pub(crate) model: PathBuf,
    /// The folder that is written
    pub(crate) out: PathBuf,
    /// Type of the matrices (default: as they are)
    #[arg(long, value_name = "TYPE", value_parser = ["f32", "bf16", "f16"])]
    pub(crate) dtype: Option<String>,
    /// Write matrices as blocks of 32 small integers with a scale. Embeddings, norms, biases and routers stay
    #[arg(long, value_name = "TYPE", value_parser = ["int8", "int4"])]
    pub(crate) quantize: Option<String>,
    /// Which matrices --quantize means (default: all)
    #[arg(long, requires = "quantize", value_name = "WHICH", value_parser = ["experts"])]
    pub(crate) only: Option<String>,
    /// Replace the model that is in the folder already
    #[arg(long)]
    pub(crate) force: bool,
    /// Write the nearest number that fits where one is too large for its new type, instead of refusing
    #[arg(long)]
    pub(crate) clamp: bool,
    #[command(flatten)]
    pub(crate) check: CheckArgs,
}
