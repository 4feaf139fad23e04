//! Command-line options of `simulate`.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
#[command(
    before_help = "Usual use:\n  moeworks simulate --schedule 1f1b --pp 4 --microbatches 8\n  \
                   moeworks simulate --schedule dualpipe --pp 8 --microbatches 16 --svg timeline.svg",
    next_help_heading = "Schedule"
)]
pub(crate) struct SimulateArgs {
    /// Schedule: gpipe, 1f1b, interleaved, zb_h1, zb_h2, zb_v, zb_1p, zb_2p, dualpipe, dualpipe_v, 1f1b_overlap,
    /// interleaved_overlap, or a file in the format of --text
    #[arg(long, value_name = "NAME|FILE")]
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
    /// Times of a stage's F, B and W, and optionally of a message to the next rank
    #[arg(
        long,
        help_heading = "Times and memory",
        value_name = "F,B,W[,T]",
        value_delimiter = ',',
        default_value = "1,1,1,0"
    )]
    pub(crate) times: Vec<f64>,
    /// Times of a stage's dispatches and combines in each direction; shows them as separate actions, overlapped where
    /// the schedule has pairs
    #[arg(long, help_heading = "Times and memory", value_name = "D,C", value_delimiter = ',')]
    pub(crate) all_to_all: Option<Vec<f64>>,
    /// Number of MoE layers of a stage, among which --all-to-all is divided
    #[arg(long, help_heading = "Times and memory", value_name = "L", default_value_t = 1)]
    pub(crate) moe_layers: u16,
    /// Time of an overlapped pair (default: the sum of its two actions)
    #[arg(long, help_heading = "Times and memory", value_name = "T", conflicts_with = "all_to_all")]
    pub(crate) pair: Option<f64>,
    /// Sizes of a microbatch's activations in a stage: all of them, and the part kept for W after B
    #[arg(long, help_heading = "Times and memory", value_name = "B,W", value_delimiter = ',', default_value = "1,1")]
    pub(crate) memory: Vec<f64>,
    /// Memory limit of a rank in the unit of --memory, for zb_1p and zb_2p (default: their own)
    #[arg(long, help_heading = "Times and memory", value_name = "X")]
    pub(crate) memory_limit: Option<f64>,
    /// Unit of the times, for the labels
    #[arg(long, help_heading = "Times and memory", value_name = "UNIT", default_value = "time units")]
    pub(crate) unit: String,
    /// Draw the timeline into this file
    #[arg(long, help_heading = "Output", value_name = "OUT.svg")]
    pub(crate) svg: Option<PathBuf>,
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
