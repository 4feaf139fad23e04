//! The options of `simulate`.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct SimulateArgs {
    /// gpipe, 1f1b, interleaved, zb_h1, zb_h2, zb_v, zb_1p, zb_2p, dualpipe, dualpipe_v, 1f1b_overlap, interleaved_overlap, or a
    /// file with a schedule, as --text writes it
    #[arg(long, value_name = "NAME|FILE")]
    pub(crate) schedule: String,
    /// Pipeline ranks
    #[arg(long, value_name = "N")]
    pub(crate) pp: Option<usize>,
    /// Microbatches of a step
    #[arg(long, value_name = "M")]
    pub(crate) microbatches: Option<usize>,
    /// Stages of a rank, for interleaved and interleaved_overlap (default: 2)
    #[arg(long, value_name = "V")]
    pub(crate) r#virtual: Option<usize>,
    /// Times of F, B and W of a stage and of a message to the next rank, which may be left out
    #[arg(long, value_name = "F,B,W[,T]", value_delimiter = ',', default_value = "1,1,1,0")]
    pub(crate) times: Vec<f64>,
    /// Times of a stage's dispatches and combines, each way: shows them as actions of their own, overlapped where the schedule
    /// has pairs
    #[arg(long, value_name = "D,C", value_delimiter = ',')]
    pub(crate) all_to_all: Option<Vec<f64>>,
    /// MoE layers of a stage, among which --all-to-all is shared out
    #[arg(long, value_name = "L", default_value_t = 1)]
    pub(crate) moe_layers: u16,
    /// Time of an overlapped pair (default: as long as its two actions)
    #[arg(long, value_name = "T", conflicts_with = "all_to_all")]
    pub(crate) pair: Option<f64>,
    /// Sizes of the activations of a microbatch in a stage: all of them, and what is left for W once B is done
    #[arg(long, value_name = "B,W", value_delimiter = ',', default_value = "1,1")]
    pub(crate) memory: Vec<f64>,
    /// The most memory of a rank, in the unit of --memory, for zb_1p and zb_2p in the place of their own
    #[arg(long, value_name = "X")]
    pub(crate) memory_limit: Option<f64>,
    /// Unit of the times, as the picture names it
    #[arg(long, value_name = "UNIT", default_value = "time units")]
    pub(crate) unit: String,
    /// Draw the timeline into this file
    #[arg(long, value_name = "OUT.svg")]
    pub(crate) svg: Option<PathBuf>,
    /// Write the schedule into this file, a row a rank
    #[arg(long, value_name = "OUT")]
    pub(crate) text: Option<PathBuf>,
    /// Replace files that this command did not make
    #[arg(long)]
    pub(crate) force: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}
