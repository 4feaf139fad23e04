//! Command-line options for devices and threads, shared by commands.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::str::FromStr as _;

use clap::builder::{PossibleValue, TypedValueParser};
use clap::{Arg, Args, Command, Error, ValueEnum};
use moeworks_gpu::DeviceChoice;
use moeworks_infer::open::WeightsToCheck;

/// The weights that are checked for NaN and infinity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum CheckWeights {
    /// All weights.
    All,
    /// All weights; without the experts for a model larger than half of the machine's memory.
    #[default]
    Auto,
    /// No weights.
    None,
}

impl From<CheckWeights> for WeightsToCheck {
    fn from(check: CheckWeights) -> Self {
        match check {
            CheckWeights::All => Self::All,
            CheckWeights::Auto => Self::Auto,
            CheckWeights::None => Self::None,
        }
    }
}

/// Options for the check of weights before they are used.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// Weights to check for NaN and infinity: all, none, or auto (all, but without the experts of a model larger than
    /// half of the memory)
    #[arg(long, value_name = "WHICH", value_enum, default_value_t)]
    pub(crate) check_weights: CheckWeights,
}

/// Options for how a model is computed.
#[derive(Debug, Args)]
#[command(next_help_heading = "Machine")]
pub(crate) struct ComputeArgs {
    /// Precision of matrix products; `stored` is the precision of the weights in the files
    #[arg(long, default_value = "stored", value_parser = ["stored", "f32", "bf16"])]
    pub(crate) precision: String,
    #[command(flatten)]
    pub(crate) check: CheckArgs,
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
}

/// Options for the threads and the device that compute.
#[derive(Debug, Args)]
#[command(next_help_heading = "Machine")]
pub(crate) struct MachineArgs {
    /// Number of threads (0: one per core)
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) threads: usize,
    /// Device that computes: cpu, cuda (an NVIDIA GPU, found at run time), cuda:N, or auto (a GPU if there is one)
    #[arg(long, value_name = "NAME", default_value_t, value_parser = DeviceParser, hide_possible_values = true)]
    pub(crate) device: DeviceChoice,
    /// Gigabytes of GPU memory for experts; the others stay in the host's memory until tokens choose them (0: all on
    /// the GPU)
    #[arg(long, value_name = "GB", alias = "expert-room", default_value_t = 0.0)]
    pub(crate) expert_cache: f64,
    /// Compute the same bits for a token in every batch and every division of a prompt (CPU only)
    #[arg(long)]
    pub(crate) batch_invariant: bool,
}

/// Options for ranks that hold a model in use between them.
#[derive(Debug, Args)]
#[command(next_help_heading = "Ranks")]
pub(crate) struct RankArgs {
    /// Spread the experts over N ranks: threads of this process, or the N processes that mpirun started (CPU only)
    #[arg(long, value_name = "N")]
    pub(crate) ep: Option<usize>,
    /// Spread the layers over N stages, consecutive layers on each, of --ep ranks (CPU only)
    #[arg(long, value_name = "N")]
    pub(crate) pp: Option<usize>,
    /// File with the ranks of each expert, as `moeworks balance` writes it (default: consecutive experts on each
    /// rank)
    #[arg(long, value_name = "FILE")]
    pub(crate) placement: Option<PathBuf>,
}

/// Parses the name of a device. Shell completions offer the common ones.
#[derive(Clone)]
pub(super) struct DeviceParser;

impl TypedValueParser for DeviceParser {
    type Value = DeviceChoice;

    fn parse_ref(&self, cmd: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<DeviceChoice, Error> {
        DeviceChoice::from_str.parse_ref(cmd, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(["cpu", "cuda", "auto"].into_iter().map(PossibleValue::new)))
    }
}
