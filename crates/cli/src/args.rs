//! The command line as it is typed: raw values, resolved by the commands.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use moeworks_ops::cuda::DeviceChoice;

/// Train, balance and serve Mixture-of-Experts models.
#[derive(Debug, Parser)]
#[command(name = "moeworks", version, arg_required_else_help = true)]
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
    /// Carries out a chat template for another process
    #[command(hide = true)]
    RenderTemplate,
}

/// Where a configuration comes from; later ones win: preset, file, single settings.
#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    /// A named preset: tiny, small, olmoe-like, switch-like, deepseek-like
    #[arg(long)]
    pub(crate) preset: Option<String>,
    /// A TOML file with settings (see `train --print-config`)
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// One setting, such as train.lr=3e-4; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(crate) settings: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Text files, folders, globs, .jsonl or .parquet files, gzip or zstd compressed or not
    #[arg(long, value_name = "PATH", num_args = 1..)]
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
    /// What computes: cpu, cuda (an NVIDIA GPU, found at run time), cuda:N, or auto (same as --set train.device=NAME)
    #[arg(long, value_name = "NAME")]
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
    /// Begin with the model of this run, checkpoint or model folder: its configuration, weights and tokenizer
    #[arg(long, value_name = "MODEL", conflicts_with_all = ["resume", "preset"])]
    pub(crate) from: Option<PathBuf>,
    /// Go on where a run stopped: its folder, or `auto` for the newest
    #[arg(long, value_name = "RUN")]
    pub(crate) resume: Option<String>,
    /// Print the full effective configuration with comments, and do nothing else
    #[arg(long)]
    pub(crate) print_config: bool,
}

/// How tokens are drawn.
#[derive(Debug, Args)]
pub(crate) struct SamplingArgs {
    /// 0 always takes the likeliest token; higher is more varied
    #[arg(long, default_value_t = 0.8, allow_negative_numbers = true)]
    pub(crate) temperature: f32,
    /// Only the k likeliest tokens (0: all)
    #[arg(long, default_value_t = 0)]
    pub(crate) top_k: usize,
    /// Only the likeliest tokens that together have this probability
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    pub(crate) top_p: f32,
    /// Only tokens at least this share as likely as the likeliest
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) min_p: f32,
    /// Seed of the sampling; the same seed gives the same text
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
}

/// In what way a model computes.
#[derive(Debug, Args)]
pub(crate) struct ComputeArgs {
    /// Precision of the products: that of the weights as they are stored, f32 or bf16
    #[arg(long, default_value = "stored")]
    pub(crate) precision: String,
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
}

/// What computes.
#[derive(Debug, Args)]
pub(crate) struct MachineArgs {
    /// Threads (0: one for each core)
    #[arg(long, default_value_t = 0)]
    pub(crate) threads: usize,
    /// cpu, cuda (an NVIDIA GPU, found at run time), cuda:N, or auto: a GPU if there is one
    #[arg(long, default_value_t)]
    pub(crate) device: DeviceChoice,
    /// GB of a GPU's memory for experts; those that find no room stay in the host's until tokens choose them (0: all are on the GPU)
    #[arg(long, value_name = "GB", default_value_t = 0.0)]
    pub(crate) expert_room: f64,
}

#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    /// A run, a checkpoint, a model folder or a GGUF file
    pub(crate) model: PathBuf,
    /// The text to continue; - for standard input
    #[arg(long, default_value = "")]
    pub(crate) prompt: String,
    /// Tokens to generate at most (default: 200, or as many as the model has room for)
    #[arg(long)]
    pub(crate) max_tokens: Option<usize>,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ChatArgs {
    /// A run, a checkpoint, a model folder or a GGUF file
    pub(crate) model: PathBuf,
    /// What the model is told before the conversation
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// A chat template in Jinja in place of the model's own
    #[arg(long, value_name = "FILE")]
    pub(crate) template: Option<PathBuf>,
    /// Tokens of an answer at most (default: as many as the model has room for)
    #[arg(long)]
    pub(crate) max_tokens: Option<usize>,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
}

#[derive(Debug, Args)]
pub(crate) struct EvaluateArgs {
    /// A run, a checkpoint, a model folder or a GGUF file
    pub(crate) model: PathBuf,
    /// Texts to evaluate on, as for `train --data`
    #[arg(long, value_name = "PATH", num_args = 1.., required = true)]
    pub(crate) data: Vec<String>,
    /// Tokens a sequence (default: as in training, or the model's maximum up to 1,024)
    #[arg(long)]
    pub(crate) seq_len: Option<usize>,
    /// Sequences at most (0: all of the text)
    #[arg(long, default_value_t = 0)]
    pub(crate) max_sequences: usize,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// A run, a checkpoint, a model folder or a GGUF file
    pub(crate) model: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct EstimateArgs {
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Ranks in all (default: those of --topology)
    #[arg(long, value_name = "N")]
    pub(crate) ranks: Option<usize>,
    /// A TOML file with the nodes, their ranks and the links between them (default: this machine, shared by the ranks)
    #[arg(long, value_name = "FILE")]
    pub(crate) topology: Option<PathBuf>,
    /// The table of a cluster that grows from 8 to 2,048 ranks (or --ranks), with the same tokens on each; without --topology,
    /// --config and --preset for a described cluster and model
    #[arg(long)]
    pub(crate) simulate: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RoutingArgs {
    /// A run, a checkpoint, a model folder or a GGUF file
    pub(crate) model: PathBuf,
    /// The text, as for `train --data`
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    pub(crate) data: Vec<String>,
    /// The page (default: routing.html in the run's folder; in the current one for a model folder)
    #[arg(long, value_name = "PAGE.html")]
    pub(crate) out: Option<PathBuf>,
    /// How much of the text is shown, from its beginning
    #[arg(long, value_name = "N", default_value_t = 2000)]
    pub(crate) max_tokens: usize,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
}

#[derive(Debug, Args)]
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
}

#[derive(Debug, Args)]
pub(crate) struct UpcycleArgs {
    /// The dense model: a run, a checkpoint or a model folder
    pub(crate) dense: PathBuf,
    /// The folder that is written
    pub(crate) out: PathBuf,
    /// Experts of an MoE layer
    #[arg(long, default_value_t = 8)]
    pub(crate) experts: usize,
    /// Experts that a token goes to
    #[arg(long, default_value_t = 2)]
    pub(crate) top_k: usize,
    /// Every how many layers one gets experts; the others stay dense
    #[arg(long, default_value_t = 1)]
    pub(crate) every: usize,
    /// Deviation of the noise on experts, relative to that of their weights; 0 keeps them exact copies
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) noise: f32,
    /// Seed of routers and noise
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
}

#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// A run, a checkpoint, a model folder or a GGUF file
    pub(crate) model: PathBuf,
    /// The folder that is written
    pub(crate) out: PathBuf,
    /// Type of the matrices: f32, bf16 or f16 (default: as they are)
    #[arg(long)]
    pub(crate) dtype: Option<String>,
    /// Write matrices as blocks of 32 small integers with a scale: int8 or int4. Embeddings, norms, biases and routers stay
    #[arg(long, value_name = "TYPE")]
    pub(crate) quantize: Option<String>,
    /// Which matrices --quantize means: experts (default: all)
    #[arg(long, requires = "quantize", value_name = "WHICH")]
    pub(crate) only: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Only cases whose name contains this, such as "experts forward" or "training"; `decode` times decoding and prefill of
    /// a model of OLMoE's shape instead; `comm` times the collectives between ranks and
    /// their links; `overlap` states how much of a layer's communication between ranks is hidden under its computation, by the
    /// number of chunks; `moe` times the MoE layers that lines of standard input name, such as
    /// `{"d": 1024, "f": 384, "e": 128, "k": 8, "activation": "swiglu", "dtype": "bf16", "tokens": 16, "both": true}`;
    /// `layers` times whole layers of four published shapes, from one token to 4,096, forward and both passes (about two minutes;
    /// `"layers T 512"` those with such a name);
    /// `routing` times every scheme of routing beside a layer's forward pass, `"routing cosine"` those with such a name
    #[arg(default_value = "")]
    pub(crate) filter: String,
    /// For `decode`: this model instead (a run, a checkpoint, a model folder or a GGUF file)
    #[arg(long)]
    pub(crate) model: Option<PathBuf>,
    /// For `decode`: a model of the shape that this folder's `config.json` describes, with random weights; no others need be there
    #[arg(long, value_name = "FOLDER", conflicts_with = "model")]
    pub(crate) shape: Option<PathBuf>,
    /// For `decode`: types of the weights, of f32, bf16, q8 and q4 (default: all four)
    #[arg(long, value_name = "TYPE", value_delimiter = ',', conflicts_with = "model")]
    pub(crate) types: Vec<String>,
    /// For `decode`: layers of the model, of which OLMoE-1B-7B has 16 (6.9 billion weights); with `--shape` its first ones
    #[arg(long, value_name = "N", conflicts_with = "model", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) layers: Option<u16>,
    /// For `decode` with `--model`: print the seconds of each token as it comes, until stopped
    #[arg(long, requires = "model", conflicts_with = "json")]
    pub(crate) endless: bool,
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// For `comm` and `overlap`: ranks, as threads (0: one for each core, at least two); under mpirun its processes are the ranks
    #[arg(long, default_value_t = 0)]
    pub(crate) ranks: usize,
    /// For `overlap`: let messages take as long as over this link, such as 1000,125 for 1 ms and 1 Gbit/s
    #[arg(long, value_name = "LATENCY_US,MB_PER_S")]
    pub(crate) link: Option<String>,
    /// For `comm`: the most bytes that a rank holds in a case
    #[arg(long, default_value_t = 64 << 20)]
    pub(crate) max_bytes: usize,
    /// For `comm`: where the measured topology is written, for `moeworks plan`
    #[arg(long, default_value = "topology.toml")]
    pub(crate) topology: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// A run folder
    pub(crate) run: PathBuf,
}
