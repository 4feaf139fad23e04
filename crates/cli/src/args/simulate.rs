//! Command-line options of `simulate`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

#[derive(Debug, Args)]
#[command(
    override_usage = "moeworks simulate [OPTIONS] --schedule <NAME|FILE>",
    before_help = "Usual use:\n  moeworks simulate --schedule 1f1b --pp 4 --microbatches 8\n  \
                   moeworks simulate --schedule dualpipe --pp 8 --microbatches 16 --svg timeline.svg\n  \
                   moeworks simulate --schedule zb_h1 --pp 16 --microbatches 64 --model deepseek-v3 --cluster h800 --ep 64\n  \
                   moeworks simulate --schedule 1f1b --pp 2 --microbatches 8 --model model.toml --cluster machine.toml --ep 2\n  \
                   moeworks simulate --list                  the bundled models and clusters",
    next_help_heading = "Schedule"
)]
pub(crate) struct SimulateArgs {
    /// Schedule: gpipe, 1f1b, interleaved, zb_h1, zb_h2, zb_v, zb_1p, zb_2p, dualpipe, dualpipe_v, 1f1b_overlap,
    /// interleaved_overlap, or a file in the format of --text
    #[arg(
        long,
        value_name = "NAME|FILE",
        required = false,
        required_unless_present = "list",
        default_value_if("list", "true", "")
    )]
    pub(crate) schedule: String,
    /// Number of pipeline ranks
    #[arg(long, value_name = "N")]
    pub(crate) pp: Option<usize>,
    /// Number of microbatches per step
    #[arg(long, value_name = "M")]
    pub(crate) microbatches: Option<usize>,
    /// Stages per rank, for interleaved and interleaved_overlap (default: 2)
    #[arg(long, value_name = "V")]
    pub(crate) r#virtual: Option<usize>,
    #[command(flatten)]
    pub(crate) step: StepArgs,
    /// Times of a stage's F, B and W, and optionally of a message to the next rank
    #[arg(
        long,
        help_heading = "Times and memory",
        value_name = "F,B,W[,T]",
        allow_hyphen_values = true,
        value_delimiter = ',',
        default_value = "1,1,1,0",
        conflicts_with = "model"
    )]
    pub(crate) times: Vec<f64>,
    /// Times of a stage's dispatches and combines in each direction; shows them as separate actions, overlapped where
    /// the schedule has pairs
    #[arg(
        long,
        help_heading = "Times and memory",
        value_name = "D,C",
        allow_hyphen_values = true,
        value_delimiter = ',',
        conflicts_with = "model"
    )]
    pub(crate) all_to_all: Option<Vec<f64>>,
    /// Number of MoE layers of a stage, among which --all-to-all is divided
    #[arg(
        long,
        help_heading = "Times and memory",
        value_name = "L",
        default_value_t = 1,
        requires = "all_to_all",
        conflicts_with = "model"
    )]
    pub(crate) moe_layers: u16,
    /// Time of an overlapped pair (default: the sum of its two actions)
    #[arg(long, help_heading = "Times and memory", value_name = "T", conflicts_with_all = ["all_to_all", "model"])]
    pub(crate) pair: Option<f64>,
    /// Sizes of a microbatch's activations in a stage: all of them, and the part kept for W after B
    #[arg(
        long,
        help_heading = "Times and memory",
        value_name = "B,W",
        allow_hyphen_values = true,
        value_delimiter = ',',
        default_value = "1,1",
        conflicts_with = "model"
    )]
    pub(crate) memory: Vec<f64>,
    /// Memory limit of a rank in the unit of --memory (bytes with --model), for zb_1p and zb_2p (default: their own)
    #[arg(long, help_heading = "Times and memory", value_name = "X")]
    pub(crate) memory_limit: Option<f64>,
    /// Unit of the times, for the labels
    #[arg(
        long,
        help_heading = "Times and memory",
        value_name = "UNIT",
        default_value = "time units",
        conflicts_with = "model"
    )]
    pub(crate) unit: String,
    /// List the bundled models and clusters
    #[arg(long, help_heading = "Output")]
    pub(crate) list: bool,
    /// Draw the timeline into this file
    #[arg(long, help_heading = "Output", value_name = "OUT.svg")]
    pub(crate) svg: Option<PathBuf>,
    /// Write a trace of the ranks to this file, for Perfetto or Chrome; a time unit is a millisecond
    #[arg(long, help_heading = "Output", value_name = "OUT.json")]
    pub(crate) trace: Option<PathBuf>,
    /// Write the schedule to this file, one row per rank
    #[arg(long, help_heading = "Output", value_name = "OUT")]
    pub(crate) text: Option<PathBuf>,
    /// Overwrite files that this command did not write
    #[arg(long, help_heading = "Output")]
    pub(crate) force: bool,
    /// Print JSON
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

/// A model and a cluster, in the place of given times.
#[derive(Debug, Args)]
#[command(next_help_heading = "Model and cluster")]
pub(crate) struct StepArgs {
    /// Model whose step is simulated: a bundled one (see --list), or a TOML file that describes one
    #[arg(long, value_name = "NAME|FILE", requires = "cluster")]
    pub(crate) model: Option<String>,
    /// Cluster that it runs on: a bundled one (see --list), grown to the ranks that are needed; or a TOML
    /// file, such as the machine.toml of `bench machine`
    #[arg(long, value_name = "NAME|FILE", requires = "model")]
    pub(crate) cluster: Option<String>,
    /// Number of copies of each expert (data parallelism)
    #[arg(long, value_name = "N", default_value_t = 1, requires = "model")]
    pub(crate) dp: usize,
    /// Number of groups that hold the experts between them (expert parallelism)
    #[arg(long, value_name = "N", default_value_t = 1, requires = "model")]
    pub(crate) ep: usize,
    /// Number of ranks that hold each matrix between them (tensor parallelism)
    #[arg(long, value_name = "N", default_value_t = 1, requires = "model")]
    pub(crate) tp: usize,
    /// Number of ranks of dp x ep that share a sequence and pass keys and values around (context parallelism; planned
    /// only: `train` has none)
    #[arg(long, value_name = "N", default_value_t = 1, requires = "model")]
    pub(crate) cp: usize,
    /// Number of chunks of a layer's all-to-alls, of which one travels while experts compute another
    #[arg(long, value_name = "N", default_value_t = 1, requires = "model")]
    pub(crate) chunks: usize,
    /// Tokens of each rank in a microbatch; ranks of --tp and --cp share sequences (default: its share of one)
    #[arg(long, value_name = "T", requires = "model")]
    pub(crate) tokens: Option<usize>,
    /// Tokens of a sequence, which attention depends on (default: the model's)
    #[arg(long, value_name = "S", requires = "model")]
    pub(crate) sequence: Option<usize>,
    /// Number format of matrix products
    #[arg(long, value_enum, default_value = "bf16", requires = "model")]
    pub(crate) precision: PrecisionChoice,
    /// ZeRO stage: nothing (0), the optimizer's state (1), gradients too (2) or weights too (3) are cut among copies
    #[arg(long, value_name = "Z", default_value_t = 1, requires = "model")]
    pub(crate) zero: u8,
    /// Keep only the inputs of layers, and compute the rest again in backward
    #[arg(long, requires = "model")]
    pub(crate) checkpoint_layers: bool,
    /// Path of tokens to experts: straight, in the node first, or once to each node
    #[arg(long, value_enum, default_value = "linear", requires = "model")]
    pub(crate) path: PathChoice,
    /// Format of tokens on the way to experts (default: that of products); results come back in no less than bf16
    #[arg(long, value_enum, requires = "model")]
    pub(crate) wire: Option<WireChoice>,
    /// Rows of the most used expert over the average; the others share the rest
    #[arg(long, value_name = "X", default_value_t = 1.0, requires = "model")]
    pub(crate) skew: f64,
    /// Number of units of the outermost level that fetch each other's experts, so that tokens stay among them
    /// (HybridEP)
    #[arg(long, value_name = "S", default_value_t = 1, requires = "model")]
    pub(crate) domain: usize,
    /// Factor by which fetched experts are compressed
    #[arg(long, value_name = "X", default_value_t = 1.0, requires = "domain")]
    pub(crate) expert_compression: f64,
}

/// The number format of products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PrecisionChoice {
    F32,
    Bf16,
    Fp8,
}

/// The path of tokens to experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PathChoice {
    Linear,
    Hierarchical,
    #[value(name = "two_hop")]
    TwoHop,
}

/// The format of tokens on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum WireChoice {
    F32,
    Bf16,
    F16,
    Int8,
    Fp8,
}
