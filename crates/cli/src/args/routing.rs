//! Command-line options of `routing`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::ComputeArgs;
use super::inspect::DataArgs;

#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    override_usage = "moeworks routing [OPTIONS] <MODEL> --data <FILE>...\n       moeworks routing stats [OPTIONS] <RECORD|RUN>\n       \
                      moeworks routing export <RECORD> --out <FILE>",
    before_help = "Usual use:\n  moeworks routing MODEL --data text.txt                     writes routing.html\n  \
                   moeworks routing stats run.records                         says how concentrated and stable it is\n  \
                   moeworks routing export run.records --out run.parquet      for other programs"
)]
pub(crate) struct RoutingArgs {
    #[command(subcommand)]
    pub(crate) command: Option<RoutingCommand>,
    #[command(flatten)]
    pub(crate) page: RoutingPageArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RoutingCommand {
    /// Say how concentrated recorded routing is, how stable, and how well it can be foretold
    Stats(RoutingStatsArgs),
    /// Write recorded routing as JSON lines or Parquet
    Export(RoutingExportArgs),
}

/// The options of the page of a text.
#[derive(Debug, Args)]
pub(crate) struct RoutingPageArgs {
    /// Model: a run, a checkpoint, a model folder or a GGUF file
    // Absent only beside a subcommand.
    #[arg(required = true)]
    pub(crate) model: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) text: DataArgs,
    /// Page to write (default: routing.html in the run's folder; in the current folder for a model folder)
    #[arg(long, value_name = "PAGE.html")]
    pub(crate) out: Option<PathBuf>,
    /// Number of tokens to show, from the start of the text
    #[arg(long, value_name = "N", default_value_t = 2000)]
    pub(crate) max_tokens: usize,
    /// Overwrite a page that `routing` did not write
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
}

#[derive(Debug, Args)]
#[command(
    before_help = "Usual use:\n  moeworks routing stats run.records\n  moeworks routing stats RUN --page stats.html"
)]
pub(crate) struct RoutingStatsArgs {
    /// Record of routing, or a run: its record, or else the loads in its metrics
    #[arg(value_name = "RECORD|RUN")]
    pub(crate) record: PathBuf,
    /// Steps of a window of time (tokens, where a record has no loads of steps; default: 1 step, or a twentieth of
    /// the tokens)
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) window: Option<u64>,
    /// Windows whose loads together are foretold: with --window 20 and --ahead 50 those of the next 1,000 steps
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true)]
    pub(crate) ahead: usize,
    /// Also show the load of so many ranks, over which experts are sharded in their order
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) ranks: Option<usize>,
    /// Also show the load of the ranks of this placement
    #[arg(long, value_name = "FILE")]
    pub(crate) placement: Option<PathBuf>,
    /// Nodes, each with as many of the ranks (default: those of the record, or 1)
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) nodes: Option<usize>,
    /// Page with pictures to write
    #[arg(long, value_name = "PAGE.html")]
    pub(crate) page: Option<PathBuf>,
    /// Overwrite a page that `routing` did not write
    #[arg(long)]
    pub(crate) force: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(
    before_help = "Usual use:\n  moeworks routing export run.records --out run.parquet\n  moeworks routing export run.records --out run.jsonl"
)]
pub(crate) struct RoutingExportArgs {
    /// Record of routing, or a run that keeps one
    #[arg(value_name = "RECORD|RUN")]
    pub(crate) record: PathBuf,
    /// File to write: .jsonl for JSON lines, .parquet for Parquet
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Overwrite a file that is there
    #[arg(long)]
    pub(crate) force: bool,
}
