//! The options of `train`, `study` and `report`.

use std::path::PathBuf;

use clap::Args;
use clap::builder::PossibleValuesParser;
use moeworks_gpu::DeviceChoice;
use moeworks_train::config::PRESETS;

use super::machine::DeviceParser;

/// Sources of a configuration; later ones win: preset, file, single settings.
#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    /// A named shape of model with its settings (default: tiny)
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(PRESETS.map(|(name, _)| name)))]
    pub(crate) preset: Option<String>,
    /// A TOML file with settings (see `train --print-config`)
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// One setting, such as train.lr=3e-4; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(crate) settings: Vec<String>,
}

#[derive(Debug, Args)]
#[command(
    before_help = "Usual use:\n  moeworks train                               a small model on the text of this folder, in minutes\n  \
                         moeworks train --data books/ --preset small  on your own text\n  \
                         moeworks train --resume auto                 go on with the newest run"
)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Text files, folders, globs, .jsonl, .json, .csv or .parquet files, gzip or zstd compressed or not; - for standard input.
    /// With a weight behind each, such as books=0.3 web=0.7, training draws from them in proportion
    #[arg(long, value_name = "PATH[=WEIGHT]", num_args = 1..)]
    pub(crate) data: Vec<String>,
    /// Optimizer steps (same as --set train.steps=N)
    #[arg(long, value_name = "N")]
    pub(crate) steps: Option<u64>,
    /// Ranks that hold the experts between them: threads of this process, or the processes of `mpirun` (same as --set
    /// parallel.ep=N)
    #[arg(long, value_name = "N")]
    pub(crate) ep: Option<u64>,
    /// Groups of ranks with all experts each (same as --set parallel.dp=N)
    #[arg(long, value_name = "N")]
    pub(crate) dp: Option<u64>,
    /// Ranks that hold attention, dense layers and vocabulary between them and pass the same sequences (same as --set
    /// parallel.tp=N)
    #[arg(long, value_name = "N")]
    pub(crate) tp: Option<u64>,
    /// The device that computes: cpu, cuda (an NVIDIA GPU, found at run time), cuda:N, or auto (same as --set train.device=NAME)
    #[arg(long, value_name = "NAME", value_parser = DeviceParser, hide_possible_values = true)]
    pub(crate) device: Option<DeviceChoice>,
    /// Let the ranks' threads run on any core (same as --set parallel.pin=false)
    #[arg(long)]
    pub(crate) no_pin: bool,
    /// Write what each rank did and when, as a trace for Chrome (chrome://tracing) or ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Folder of this run (default: a new one under runs/)
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Replace the run that is in the folder already, and the file of --trace
    #[arg(long)]
    pub(crate) force: bool,
    /// Begin with the model of this run, checkpoint or model folder: its configuration, weights and tokenizer
    #[arg(long, value_name = "MODEL", conflicts_with_all = ["resume", "preset"])]
    pub(crate) from: Option<PathBuf>,
    /// Go on where a run stopped: its folder, or `auto` for the newest; a run without a checkpoint begins again. Its settings stay
    /// but for those given by --set and other options
    #[arg(long, value_name = "RUN", conflicts_with_all = ["preset", "config", "out", "force"])]
    pub(crate) resume: Option<String>,
    /// Print the full effective configuration with comments, and do nothing else
    #[arg(long)]
    pub(crate) print_config: bool,
}

#[derive(Debug, Args)]
#[command(before_help = "Usual use:\n  moeworks study --data text.txt --only dense top-k")]
pub(crate) struct StudyArgs {
    /// Settings of the base model, over those of a small one
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// The text, as for `train --data`
    #[arg(long, value_name = "PATH", num_args = 1.., required = true)]
    pub(crate) data: Vec<String>,
    /// The page; the plot is written beside it as .svg
    #[arg(long, value_name = "PAGE.md", default_value = "routing-study.md")]
    pub(crate) out: PathBuf,
    /// Folder of the runs; those in it that are not done are gone on with
    #[arg(long, value_name = "DIR", default_value = "runs/study")]
    pub(crate) runs: PathBuf,
    /// Seeds that each variant is trained with
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seeds: u64,
    /// Only these variants, such as dense top-k
    #[arg(long, value_name = "NAME", num_args = 1..)]
    pub(crate) only: Vec<String>,
    /// Replace files that are where the page and the plot are to be and were not made by `study`
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Debug, Args)]
#[command(before_help = "Usual use:\n  moeworks report runs/NAME")]
pub(crate) struct ReportArgs {
    /// A run folder
    pub(crate) run: PathBuf,
}
