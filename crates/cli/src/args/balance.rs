//! The options of `balance`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// Ways to find a placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Policy {
    /// Anew, with copies of hot experts in the spare slots (DeepSeek's EPLB)
    Eplb,
    /// By a few moves and swaps from a placement that is there
    Moves,
    /// Few moves, found by a beam search instead of the best move each time
    Beam,
    /// Anew, with experts that tokens choose together on one node (GRACE-MoE); needs choices of single tokens
    Coactivation,
}

#[derive(Debug, Args)]
#[command(
    before_help = "Usual use:\n  moeworks balance run --ranks 8 --spare 8              copies of hot experts in 8 spare slots\n  \
                         moeworks balance run --ranks 8 --policy moves --moves 4   at most 4 moves in each layer\n  \
                         moeworks balance run.records --ranks 8 --nodes 2 --policy coactivation   by a record of single tokens\n  \
                         moeworks train --ep 8 --set parallel.placement=run/placement.txt   trains with the placement"
)]
pub(crate) struct BalanceArgs {
    /// The run whose records say how much each expert was chosen, or a record of routing
    #[arg(value_name = "RUN|RECORD")]
    pub(crate) run: PathBuf,
    /// Ranks that hold the experts between them
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) ranks: usize,
    /// Nodes, each with as many of the ranks
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 1)]
    pub(crate) nodes: usize,
    /// Groups of consecutive experts, each on one node; EPLB packs them on nodes first
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 1)]
    pub(crate) groups: usize,
    /// Slots for copies of experts, on all ranks together
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 0)]
    pub(crate) spare: usize,
    /// The way in which the placement is found
    #[arg(long, value_enum, default_value_t = Policy::Eplb)]
    pub(crate) policy: Policy,
    /// Moves of experts in each layer at most, with --policy moves or beam
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 8)]
    pub(crate) moves: usize,
    /// Placements that --policy beam follows at a time
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 8)]
    pub(crate) beam: usize,
    /// Show the imbalance of single steps with rows of hot experts shared out over idle ranks, too (needs a record)
    #[arg(long)]
    pub(crate) split_rows: bool,
    /// The placement that is compared with, and that --policy moves begins with (default: experts sharded in their
    /// order)
    #[arg(long, value_name = "FILE")]
    pub(crate) from: Option<PathBuf>,
    /// Steps at the end of the run whose load counts; blocks of a record without loads of steps
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 100)]
    pub(crate) last: usize,
    /// The file that is written (default: placement.txt in the run, or beside the record)
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Replaces a file that this command did not make
    #[arg(long)]
    pub(crate) force: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}
