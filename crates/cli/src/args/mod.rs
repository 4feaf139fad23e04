//! The command line as it is typed: raw values, resolved by the commands. One file holds the options of a group of commands.

mod bench;
mod convert;
mod generate;
mod inspect;
mod machine;
mod plan;
mod train;

use clap::{Parser, Subcommand};

use crate::version;

pub(crate) use bench::BenchArgs;
pub(crate) use convert::{ConvertArgs, UpcycleArgs};
pub(crate) use generate::{ChatArgs, GenerateArgs, SamplingArgs};
pub(crate) use inspect::{DoctorArgs, EvaluateArgs, InspectArgs, RoutingArgs};
pub(crate) use machine::{ComputeArgs, MachineArgs};
pub(crate) use plan::{EstimateArgs, PlanArgs};
pub(crate) use train::{ConfigArgs, ReportArgs, StudyArgs, TrainArgs};

/// Train, balance and serve Mixture-of-Experts models.
#[derive(Debug, Parser)]
#[command(name = "moeworks", version = version::short(), long_version = version::long(), arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a language model on text; with no options on the text of the checkout you stand in
    Train(TrainArgs),
    /// Continue a prompt with a trained model
    Generate(GenerateArgs),
    /// Talk with a model by its own chat template; turns are lines, typed or piped in
    Chat(ChatArgs),
    /// Loss, perplexity, bits per byte and expert load of a model on a text
    Evaluate(EvaluateArgs),
    /// What a run or a model folder holds: parameters, memory, expert load
    Inspect(InspectArgs),
    /// What training a configuration would cost, before training it
    Estimate(EstimateArgs),
    /// Propose how to lay a model out on ranks, and say what each layout costs
    Plan(PlanArgs),
    /// Show a text coloured by the experts that its tokens go to, layer by layer, as an HTML page
    Routing(RoutingArgs),
    /// Train the same small model with each routing scheme, and a dense one beside it, and compare them on a page
    Study(StudyArgs),
    /// Make a Mixture-of-Experts from a dense model: experts are copies of its feed-forwards
    Upcycle(UpcycleArgs),
    /// Write a model folder with its matrices in another type
    Convert(ConvertArgs),
    /// Measure this machine's peaks and the kernels' share of them
    Bench(BenchArgs),
    /// Write a run's HTML report again from its metrics
    Report(ReportArgs),
    /// Say what of this machine the program can use, what is missing, and what to do
    Doctor(DoctorArgs),
    /// Carries out a chat template for another process
    #[command(hide = true)]
    RenderTemplate,
}
