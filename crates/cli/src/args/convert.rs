//! The options of `convert` and `upcycle`.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
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
}

#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// A run, a checkpoint, a model folder or a GGUF file
    pub(crate) model: PathBuf,
    /// The folder that is written
    pub(crate) out: PathBuf,
    /// Type of the matrices: f32, bf16 or f16 (default: as they are)
    #[arg(long)]
    pub(crate) dtype: Option<String>,
    /// Write matrices as blocks of 32 small integers with a scale: int8 or int4. Embeddings, norms, biases and routers stay
    #[arg(long, value_name = "TYPE")]
    pub(crate) quantize: Option<String>,
    /// Which matrices --quantize means: experts (default: all)
    #[arg(long, requires = "quantize", value_name = "WHICH")]
    pub(crate) only: Option<String>,
    /// Replace the model that is in the folder already
    #[arg(long)]
    pub(crate) force: bool,
}
