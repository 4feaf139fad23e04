//! Command-line options of `convert` and `upcycle`.

use std::path::PathBuf;

use clap::Args;

use super::CheckArgs;

#[derive(Debug, Args)]
#[command(
    before_help = "Usual use:\n  moeworks upcycle DENSE OUT --experts 8 --top-k 2\n  moeworks train --from OUT --data text.txt"
)]
pub(crate) struct UpcycleArgs {
    /// Dense model: a run, a checkpoint or a model folder
    pub(crate) dense: PathBuf,
    /// Folder to write
    pub(crate) out: PathBuf,
    /// Number of experts of an MoE layer
    #[arg(long, default_value_t = 8)]
    pub(crate) experts: usize,
    /// Number of experts that each token chooses
    #[arg(long, default_value_t = 2)]
    pub(crate) top_k: usize,
    /// Convert every N-th layer; the others stay dense
    #[arg(long, default_value_t = 1)]
    pub(crate) every: usize,
    /// Standard deviation of the noise added to the experts, relative to that of their weights; 0 makes exact copies
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) noise: f32,
    /// Seed of the routers and of the noise
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Replace a model that is already in the folder
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
    /// Model: a run, a checkpoint, a model folder or a GGUF file
    pub(crate) model: PathBuf,
    /// Folder to write
    pub(crate) out: PathBuf,
    /// Type of the matrices (default: unchanged)
    #[arg(long, value_name = "TYPE", value_parser = ["f32", "bf16", "f16"])]
    pub(crate) dtype: Option<String>,
    /// Quantize matrices to blocks of 32 small integers with a scale; embeddings, norms, biases and routers are not
    /// quantized
    #[arg(long, value_name = "TYPE", value_parser = ["int8", "int4"])]
    pub(crate) quantize: Option<String>,
    /// Quantize only these matrices (default: all)
    #[arg(long, requires = "quantize", value_name = "WHICH", value_parser = ["experts"])]
    pub(crate) only: Option<String>,
    /// Replace a model that is already in the folder
    #[arg(long)]
    pub(crate) force: bool,
    /// Clamp numbers that are too large for the new type instead of reporting an error
    #[arg(long)]
    pub(crate) clamp: bool,
    #[command(flatten)]
    pub(crate) check: CheckArgs,
}
