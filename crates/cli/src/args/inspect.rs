//! Command-line options of `evaluate`, `inspect` and `doctor`.

use std::path::PathBuf;

use clap::Args;
use moeworks_infer::data::{DataFormat, TextOptions};

use super::{CheckArgs, ComputeArgs, RankArgs, RecordArgs};

/// Options for the text that a command reads.
#[derive(Debug, Args)]
pub(crate) struct DataArgs {
    /// Text to read, in the forms that `train --data` accepts; - reads standard input
    #[arg(long, value_name = "PATH", num_args = 1.., required = true)]
    pub(crate) data: Vec<String>,
    /// Field of JSON rows and column of CSV and Parquet files that holds the text
    #[arg(long, value_name = "NAME", default_value = "text")]
    pub(crate) text_field: String,
    /// Format of the files: auto (by name and content), text, json (rows), csv or parquet
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    pub(crate) data_format: DataFormat,
}

impl DataArgs {
    /// Returns the texts to read.
    pub(crate) fn texts(&self) -> TextOptions {
        let Self { data, text_field, data_format } = self;
        TextOptions { paths: data.clone(), text_field: text_field.clone(), format: *data_format }
    }
}

#[derive(Debug, Args)]
#[command(
    override_usage = "moeworks evaluate [OPTIONS] <MODEL> --data <PATH>...",
    before_help = "Usual use:\n  moeworks evaluate MODEL --data held-out.txt\n  moeworks evaluate MODEL --data held-out.txt --json"
)]
pub(crate) struct EvaluateArgs {
    /// Model: a run, a checkpoint, a model folder or a GGUF file
    pub(crate) model: PathBuf,
    #[command(flatten)]
    pub(crate) text: DataArgs,
    /// Tokens per sequence (default: as in training, or the model's maximum up to 1,024)
    #[arg(long)]
    pub(crate) seq_len: Option<usize>,
    /// Largest number of sequences (0: all of the text)
    #[arg(long, default_value_t = 0)]
    pub(crate) max_sequences: usize,
    #[command(flatten)]
    pub(crate) record: RecordArgs,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
    #[command(flatten)]
    pub(crate) ranks: RankArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(
    before_help = "Usual use:\n  moeworks inspect MODEL\n  moeworks inspect MODEL --sharding --tp 2 --ep 4     the part of each weight on each rank"
)]
pub(crate) struct InspectArgs {
    /// Model: a run, a checkpoint, a model folder or a GGUF file
    pub(crate) model: PathBuf,
    #[command(flatten)]
    pub(crate) check: CheckArgs,
    #[command(flatten)]
    pub(crate) sharding: ShardingArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Options for a list of weights with their division among ranks.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sharding")]
pub(crate) struct ShardingArgs {
    /// List the weights: shape, division among ranks, the part of each rank, bytes per rank, and whether they are
    /// trained. For a run, the settings default to its own
    #[arg(long)]
    pub(crate) sharding: bool,
    /// Number of groups of ranks; each group has all experts
    #[arg(long, value_name = "N", requires = "sharding")]
    pub(crate) dp: Option<usize>,
    /// Number of ranks of a group, which divide the experts among themselves
    #[arg(long, value_name = "N", requires = "sharding")]
    pub(crate) ep: Option<usize>,
    /// Number of ranks that divide all other matrices among themselves
    #[arg(long, value_name = "N", requires = "sharding")]
    pub(crate) tp: Option<usize>,
    /// Ranks that hold each expert, as in parallel.placement: sharded, everywhere, or a file (default: that of the
    /// run; sharded with another --ep or --tp)
    #[arg(long, value_name = "FILE", requires = "sharding")]
    pub(crate) placement: Option<String>,
    /// Rule as in parallel.sharding, such as "model.layers.0.self_attn.*=replicated" (repeatable)
    #[arg(long, value_name = "PATTERN=CUT", requires = "sharding")]
    pub(crate) shard: Vec<String>,
    /// Weights that are not trained, as in train.freeze, such as "*.mlp.experts.*" (repeatable)
    #[arg(long, value_name = "PATTERN", requires = "sharding")]
    pub(crate) freeze: Vec<String>,
}

#[derive(Debug, Args)]
#[command(before_help = "Usual use:\n  moeworks doctor")]
pub(crate) struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}
