//! The command line as it is typed: raw values, resolved by the commands. One file holds the options of a group of commands.

mod bench;
mod convert;
mod errors;
mod generate;
mod help;
mod inspect;
mod machine;
mod parse;
mod plan;
mod serve;
mod simulate;
mod train;

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;

use crate::version;

pub(crate) use bench::{BenchArgs, BenchKind, CasesArgs, CommArgs, DecodeArgs, MoeArgs, OverlapArgs};
pub(crate) use convert::{ConvertArgs, UpcycleArgs};
pub(crate) use errors::OneLine;
pub(crate) use generate::{ChatArgs, GenerateArgs, SamplingArgs};
pub(crate) use help::command;
pub(crate) use inspect::{DoctorArgs, EvaluateArgs, InspectArgs, RoutingArgs, ShardingArgs};
pub(crate) use machine::{CheckArgs, CheckWeights, ComputeArgs, MachineArgs};
pub(crate) use parse::parse;
pub(crate) use plan::{EstimateArgs, PlanArgs};
pub(crate) use serve::{AccessArgs, LoadArgs, ServeArgs};
pub(crate) use simulate::SimulateArgs;
pub(crate) use train::{ConfigArgs, ReportArgs, StudyArgs, TrainArgs};

/// Train, balance and run Mixture-of-Experts language models.
#[derive(Debug, Parser)]
#[command(name = "moeworks", version = version::short(), arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

/// Options for how much the program says on standard error.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct TalkArgs {
    /// Print only results and errors: no progress, notes or warnings
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
    /// Say more of what is done, such as the sampling settings and tokens per second
    #[arg(short, long, global = true)]
    pub(crate) verbose: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a language model on text
    Train(TrainArgs),
    /// Continue a text
    Generate(GenerateArgs),
    /// Talk with a model by its own chat template
    Chat(ChatArgs),
    /// Answer requests over HTTP, as OpenAI's API has them, many at a time
    Serve(ServeArgs),
    /// Measure how well a model predicts a text: loss, perplexity, bits per byte, expert load
    Evaluate(EvaluateArgs),
    /// Show what a model has: parameters, memory, expert load
    Inspect(InspectArgs),
    /// Say what training a configuration would cost
    Estimate(EstimateArgs),
    /// Propose layouts of a model on several ranks, and say what each costs
    Plan(PlanArgs),
    /// Show when each rank of a pipeline schedule does what, and what it holds, by given times
    Simulate(SimulateArgs),
    /// Write a page that shows which experts the tokens of a text go to
    Routing(RoutingArgs),
    /// Compare routing schemes: train the same small model with each, and a dense one beside it
    Study(StudyArgs),
    /// Make an MoE of a dense model: experts are copies of its feed-forward layers
    Upcycle(UpcycleArgs),
    /// Write a model folder in another type, also from a GGUF file
    Convert(ConvertArgs),
    /// Measure this machine and the kernels on it
    Bench(BenchArgs),
    /// Write the HTML report of a run again
    Report(ReportArgs),
    /// Say what of this machine the program can use, what is missing, and what to do
    Doctor(DoctorArgs),
    /// Print a script that completes commands and options in a shell
    Completions(CompletionsArgs),
    /// Carries out a chat template for another process
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
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: Shell,
}
