//! The command line as typed: raw values, which the commands resolve. Each file has the options of a group of
//! commands.

mod advise;
mod balance;
mod bench;
mod convert;
mod errors;
mod gateway;
mod generate;
mod help;
mod inspect;
mod machine;
mod parse;
mod plan;
mod record;
mod routing;
mod serve;
mod simulate;
mod tls;
mod train;

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;

use crate::version;

pub(crate) use advise::AdviseArgs;
pub(crate) use balance::{BalanceArgs, Policy};
pub(crate) use bench::{
    BenchArgs, BenchKind, CasesArgs, CommArgs, DecodeArgs, MachineFileArgs, MoeArgs, OverlapArgs, PipelineBenchArgs,
    RebalanceBenchArgs,
};
pub(crate) use convert::{ConvertArgs, UpcycleArgs};
pub(crate) use errors::OneLine;
pub(crate) use gateway::GatewayArgs;
pub(crate) use generate::{ChatArgs, FormArgs, GenerateArgs, SamplingArgs};
pub(crate) use help::command;
pub(crate) use inspect::{DoctorArgs, EvaluateArgs, InspectArgs, ShardingArgs};
pub(crate) use machine::{CheckArgs, CheckWeights, ComputeArgs, MachineArgs, RankArgs};
pub(crate) use parse::parse;
pub(crate) use plan::{EstimateArgs, PlanArgs};
pub(crate) use record::RecordArgs;
pub(crate) use routing::{RoutingArgs, RoutingCommand, RoutingExportArgs, RoutingPageArgs, RoutingStatsArgs};
pub(crate) use serve::{AccessArgs, KvTypeChoice, LoadArgs, LogFormat, RebalanceArgs, ServeArgs};
pub(crate) use simulate::{PathChoice, PrecisionChoice, SimulateArgs, StepArgs, WireChoice};
pub(crate) use tls::TlsArgs;
pub(crate) use train::{ConfigArgs, LayoutCheckArgs, ReportArgs, StudyArgs, TrainArgs};

/// Train, balance and run Mixture-of-Experts language models.
#[derive(Debug, Parser)]
#[command(name = "moeworks", version = version::short(), arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

/// Options for how much the program prints to standard error.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct TalkArgs {
    /// Print only results and errors: no progress, notes or warnings
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
    /// Print more details, such as the sampling settings and tokens per second
    #[arg(short, long, global = true)]
    pub(crate) verbose: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a language model on text
    Train(TrainArgs),
    /// Generate a continuation of a text
    Generate(GenerateArgs),
    /// Chat with a model, with its own chat template
    Chat(ChatArgs),
    /// Serve a model over HTTP with OpenAI's API, for many requests at a time
    Serve(ServeArgs),
    /// Spread requests over several servers of the same model
    Gateway(GatewayArgs),
    /// Measure how well a model predicts a text: loss, perplexity, bits per byte, expert load
    Evaluate(EvaluateArgs),
    /// Show a model's parameters, memory and expert load
    Inspect(InspectArgs),
    /// Estimate the memory and time of training a configuration
    Estimate(EstimateArgs),
    /// Propose layouts of a model on several ranks, with the cost of each
    Plan(PlanArgs),
    /// Say what holds a run back, with the figures that show it and the settings to try
    Advise(AdviseArgs),
    /// Place experts on ranks by the load that a run recorded
    Balance(BalanceArgs),
    /// Simulate a pipeline schedule, with given times or of a model on a cluster: what each rank does when, and
    /// memory
    Simulate(SimulateArgs),
    /// Check that a configuration has the same losses and gradients in every layout that this machine can hold
    Check(LayoutCheckArgs),
    /// Show the experts of each token of a text; statistics and export of recorded routing
    Routing(RoutingArgs),
    /// Compare routing schemes: train the same small model with each, and a dense model
    Study(StudyArgs),
    /// Turn a dense model into an MoE whose experts are copies of its feed-forward layers
    Upcycle(UpcycleArgs),
    /// Convert a model (also a GGUF file) to a model folder with another number type
    Convert(ConvertArgs),
    /// Measure this machine and the kernels on it
    Bench(BenchArgs),
    /// Write the HTML report of a run again
    Report(ReportArgs),
    /// Check what the program can use of this machine, what is missing, and how to fix it
    Doctor(DoctorArgs),
    /// Print a script that completes commands and options in a shell
    Completions(CompletionsArgs),
    /// Render a chat template for another process
    #[command(hide = true)]
    RenderTemplate,
}

#[derive(Debug, Args)]
#[command(
    before_help = "Usual use:\n  source <(moeworks completions bash)                                       bash, for this session\n  \
                         moeworks completions zsh > ~/.zfunc/_moeworks                             zsh, with ~/.zfunc in $fpath\n  \
                         moeworks completions fish > ~/.config/fish/completions/moeworks.fish      fish"
)]
pub(crate) struct CompletionsArgs {
    /// Shell to print the script for
    #[arg(value_enum)]
    pub(crate) shell: Shell,
}
