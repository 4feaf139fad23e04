//! The options of `bench`.

use std::path::PathBuf;

use clap::Args;

use super::MachineArgs;

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Only cases whose name contains this, such as "experts forward" or "training"; `decode` times decoding and prefill of
    /// a model of OLMoE's shape instead; `comm` times the collectives between ranks and
    /// their links; `overlap` states how much of a layer's communication between ranks is hidden under its computation, by the
    /// number of chunks; `moe` times the MoE layers that lines of standard input name, such as
    /// `{"d": 1024, "f": 384, "e": 128, "k": 8, "activation": "swiglu", "dtype": "bf16", "tokens": 16, "both": true}`;
    /// `layers` times whole layers of four published shapes, from one token to 4,096, forward and both passes (about two minutes;
    /// `"layers T 512"` those with such a name);
    /// `routing` times every scheme of routing beside a layer's forward pass, `"routing cosine"` those with such a name
    #[arg(default_value = "")]
    pub(crate) filter: String,
    /// For `decode`: this model instead (a run, a checkpoint, a model folder or a GGUF file)
    #[arg(long)]
    pub(crate) model: Option<PathBuf>,
    /// For `decode`: a model of the shape that this folder's `config.json` describes, with random weights; no others need be there
    #[arg(long, value_name = "FOLDER", conflicts_with = "model")]
    pub(crate) shape: Option<PathBuf>,
    /// For `decode`: types of the weights, of f32, bf16, q8 and q4 (default: all four)
    #[arg(long, value_name = "TYPE", value_delimiter = ',', conflicts_with = "model")]
    pub(crate) types: Vec<String>,
    /// For `decode`: layers of the model, of which OLMoE-1B-7B has 16 (6.9 billion weights); with `--shape` its first ones
    #[arg(long, value_name = "N", conflicts_with = "model", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) layers: Option<u16>,
    /// For `decode` with `--model`: print the seconds of each token as it comes, until stopped
    #[arg(long, requires = "model", conflicts_with = "json")]
    pub(crate) endless: bool,
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// For `comm` and `overlap`: ranks, as threads (0: one for each core, at least two); under mpirun its processes are the ranks
    #[arg(long, default_value_t = 0)]
    pub(crate) ranks: usize,
    /// For `overlap`: let messages take as long as over this link, such as 1000,125 for 1 ms and 1 Gbit/s
    #[arg(long, value_name = "LATENCY_US,MB_PER_S")]
    pub(crate) link: Option<String>,
    /// For `comm`: the most bytes that a rank holds in a case
    #[arg(long, default_value_t = 64 << 20)]
    pub(crate) max_bytes: usize,
    /// For `comm`: where the measured topology is written, for `moeworks plan`
    #[arg(long, default_value = "topology.toml")]
    pub(crate) topology: PathBuf,
    /// For `comm`: replace a file there that `bench comm` did not write
    #[arg(long)]
    pub(crate) force: bool,
}
