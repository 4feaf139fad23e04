//! Command-line options of `train`, `study` and `report`.

use std::path::PathBuf;

use clap::Args;
use clap::builder::PossibleValuesParser;
use moeworks_gpu::DeviceChoice;
use moeworks_train::config::PRESETS;

use super::machine::DeviceParser;

/// Sources of a configuration, in increasing priority: preset, file, single settings.
#[derive(Debug, Args)]
#[command(next_help_heading = "Configuration")]
pub(crate) struct ConfigArgs {
    /// Named model shape with its settings (default: tiny)
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(PRESETS.map(|(name, _)| name)))]
    pub(crate) preset: Option<String>,
    /// TOML file with settings (see `train --print-config`)
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Single setting, such as train.lr=3e-4 (repeatable)
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(crate) settings: Vec<String>,
}

#[derive(Debug, Args)]
#[command(
    before_help = "Usual use:\n  moeworks train                               a small model on the text of this folder, in minutes\n  \
                         moeworks train --data books/ --preset small  on your own text\n  \
                         moeworks train --auto-layout                 on all cores, in the layout that is fastest\n  \
                         moeworks train --resume auto                 continue the newest run"
)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Text files, folders, globs, .jsonl, .json, .csv or .parquet files, plain or compressed with gzip or zstd; -
    /// reads standard input. Weights, as in books=0.3 web=0.7, set the proportions in which training draws from the
    /// sources
    #[arg(long, value_name = "PATH[=WEIGHT]", num_args = 1..)]
    pub(crate) data: Vec<String>,
    /// Number of optimizer steps (same as --set train.steps=N)
    #[arg(long, value_name = "N")]
    pub(crate) steps: Option<u64>,
    /// Number of ranks that divide the experts among themselves: threads of this process, or the processes of
    /// `mpirun` (same as --set parallel.ep=N)
    #[arg(long, value_name = "N")]
    pub(crate) ep: Option<u64>,
    /// Number of groups of ranks; each group has all experts (same as --set parallel.dp=N)
    #[arg(long, value_name = "N")]
    pub(crate) dp: Option<u64>,
    /// Number of ranks that divide attention, dense layers and vocabulary among themselves and process the same
    /// sequences (same as --set parallel.tp=N)
    #[arg(long, value_name = "N")]
    pub(crate) tp: Option<u64>,
    /// Stages of a pipeline over the ranks: each group of dp x ep x tp ranks holds a part of the layers, and the
    /// train.grad_accumulation microbatches of a step go through them by parallel.schedule (same as --set
    /// parallel.pp=N)
    #[arg(long, value_name = "N")]
    pub(crate) pp: Option<u64>,
    /// Movement of experts between ranks while training goes on: off, online (by the load of the last steps), or the
    /// file of a placement to which they move, such as `moeworks balance` writes (same as --set
    /// rebalance.mode=WHEN)
    #[arg(long, value_name = "WHEN")]
    pub(crate) rebalance: Option<String>,
    /// Try the planner's best few layouts of N ranks for some steps each, and train in the fastest (default N: that
    /// of --dp, --ep, --tp and --pp, or one per core; under `mpirun` its processes); each decision is a line of
    /// layouts.jsonl in the run
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "0", conflicts_with = "trace")]
    pub(crate) auto_layout: Option<usize>,
    /// Share by which the median of ten steps may leave what was measured before layouts are tried again
    #[arg(long, value_name = "SHARE", default_value_t = 0.5, requires = "auto_layout", allow_hyphen_values = true)]
    pub(crate) layout_tolerance: f64,
    /// Device that computes: cpu, cuda (an NVIDIA GPU, found at run time), cuda:N, or auto (same as --set
    /// train.device=NAME)
    #[arg(long, value_name = "NAME", value_parser = DeviceParser, hide_possible_values = true)]
    pub(crate) device: Option<DeviceChoice>,
    /// Let the ranks' threads run on any core (same as --set parallel.pin=false)
    #[arg(long)]
    pub(crate) no_pin: bool,
    /// Write a trace of what each rank did and when, for chrome://tracing or ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Folder of this run (default: a new one under runs/)
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Replace a run that is already in the folder, and the file of --trace
    #[arg(long)]
    pub(crate) force: bool,
    /// Start from this run, checkpoint or model folder: its configuration, weights and tokenizer
    #[arg(long, value_name = "MODEL", conflicts_with_all = ["resume", "preset"])]
    pub(crate) from: Option<PathBuf>,
    /// Continue a stopped run: its folder, or `auto` for the newest; a run without a checkpoint starts again. Its
    /// settings are kept except for those given by --set and other options
    #[arg(long, value_name = "RUN", conflicts_with_all = ["preset", "config", "out", "force"])]
    pub(crate) resume: Option<String>,
    /// Print the effective configuration with comments and exit
    #[arg(long)]
    pub(crate) print_config: bool,
}

#[derive(Debug, Args)]
#[command(before_help = "Usual use:\n  moeworks study --data text.txt --only dense top-k")]
pub(crate) struct StudyArgs {
    /// Settings of the base model, in addition to those of a small one
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Text to train on, in the forms that `train --data` accepts
    #[arg(long, value_name = "PATH", num_args = 1.., required = true)]
    pub(crate) data: Vec<String>,
    /// Page to write; the plot is written beside it as .svg
    #[arg(long, value_name = "PAGE.md", default_value = "routing-study.md")]
    pub(crate) out: PathBuf,
    /// Folder of the runs; unfinished runs in it are continued
    #[arg(long, value_name = "DIR", default_value = "runs/study")]
    pub(crate) runs: PathBuf,
    /// Number of seeds with which each variant is trained
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seeds: u64,
    /// Train only these variants, such as dense top-k
    #[arg(long, value_name = "NAME", num_args = 1..)]
    pub(crate) only: Vec<String>,
    /// Overwrite a page or plot that `study` did not write
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Debug, Args)]
#[command(
    before_help = "Usual use:\n  moeworks check                                   the default model on up to 4 ranks\n  \
                         moeworks check --config mine.toml                your own configuration, its layout included\n  \
                         moeworks check --config mine.toml --ranks 8      on up to 8 ranks",
    after_help = "Exit code 0: all layouts are equal; 1: one differs, or failed; 2: the configuration is wrong."
)]
pub(crate) struct LayoutCheckArgs {
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Most ranks of a layout, threads of this process (default: 4, or those of the configuration if more)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(2..=64))]
    pub(crate) ranks: Option<u16>,
    /// Largest difference of a value, as a share of the largest value of its tensor
    #[arg(long, value_name = "SHARE", default_value_t = 1e-4)]
    pub(crate) tolerance: f64,
    /// Print why layouts were left out
    #[arg(long)]
    pub(crate) skipped: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Double the gradient of this tensor on one rank, to see that it is found
    #[arg(long, value_name = "TENSOR", hide = true)]
    pub(crate) fault: Option<String>,
}

#[derive(Debug, Args)]
#[command(before_help = "Usual use:\n  moeworks report runs/NAME")]
pub(crate) struct ReportArgs {
    /// Run folder
    pub(crate) run: PathBuf,
}
