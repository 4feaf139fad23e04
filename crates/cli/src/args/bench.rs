//! Command-line options of `bench` and of each of its kinds.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{ConfigArgs, MachineArgs};

#[derive(Debug, Args)]
#[command(
    override_usage = "moeworks bench [KIND] [OPTIONS]",
    subcommand_value_name = "KIND",
    subcommand_help_heading = "Kinds",
    before_help = "Usual use:\n  moeworks bench                        all kernels, an MoE layer and a training step\n  \
                   moeworks bench \"attention forward\"    the cases with this in their name\n  \
                   moeworks bench decode --model MODEL  tokens per second of a model",
    after_help = "`moeworks bench KIND --help` lists the options of a kind. Without a kind it is `kernels`."
)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) kind: BenchKind,
}

/// The kinds of measurement.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchKind {
    /// Time the kernels, an MoE layer and a training step, and print each one's share of this machine's peaks
    Kernels(CasesArgs),
    /// Time whole MoE layers of four published shapes with 1 to 4,096 tokens, forward alone and with backward (two
    /// minutes)
    Layers(CasesArgs),
    /// Compare the time of each routing scheme with the forward pass of a layer of 64 experts
    Routing(CasesArgs),
    /// Time decoding and prefill of a model: tokens per second and share of the memory bandwidth
    Decode(DecodeArgs),
    /// Measure how much of a layer's communication between ranks is hidden behind its computation
    Overlap(OverlapArgs),
    /// Measure latency and bandwidth of each collective between ranks; writes topology.toml for `plan`
    Comm(CommArgs),
    /// Measure steps of pipelines beside the makespans of their schedules, and how much of their all-to-alls is
    /// hidden
    Pipeline(PipelineBenchArgs),
    /// Measure training whose load changes: experts that stay, that are placed once, and that move while it goes on
    Rebalance(RebalanceBenchArgs),
    /// Measure products, memory and links of this machine, and predict training steps from them
    Machine(MachineFileArgs),
    /// Time MoE layers that standard input describes line by line, for comparisons with other programs
    Moe(MoeArgs),
}

/// Options of the kinds that have named cases.
#[derive(Debug, Args)]
pub(crate) struct CasesArgs {
    /// Run only cases whose name contains this, such as `attention forward`, `T 512` or `cosine`; words are joined by
    /// spaces
    #[arg(value_name = "CASE")]
    pub(crate) words: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
}

impl CasesArgs {
    /// Returns the text that the name of a case must contain; empty for all cases.
    pub(crate) fn filter(&self) -> String {
        self.words.join(" ")
    }
}

#[derive(Debug, Args)]
#[command(
    before_help = "Usual use:\n  moeworks bench decode                a model of OLMoE's shape, in f32, bf16, q8 and q4\n  \
                         moeworks bench decode --model MODEL  your own model"
)]
pub(crate) struct DecodeArgs {
    /// Model to time: a run, a checkpoint, a model folder or a GGUF file
    #[arg(long)]
    pub(crate) model: Option<PathBuf>,
    /// Time a model with random weights and the shape of this folder's `config.json`; no other file is needed
    #[arg(long, value_name = "FOLDER", conflicts_with = "model")]
    pub(crate) shape: Option<PathBuf>,
    /// Types of the weights (default: all four)
    #[arg(long, value_name = "TYPE", value_delimiter = ',', conflicts_with = "model", ignore_case = true,
          value_parser = ["f32", "bf16", "q8", "q4"])]
    pub(crate) types: Vec<String>,
    /// Number of layers: OLMoE-1B-7B has 16 (6.9 billion weights); with --shape, its first layers
    #[arg(long, value_name = "N", conflicts_with = "model", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) layers: Option<u16>,
    /// Router setting, such as kind=forced or forced_load=zipf for a skewed load (repeatable); with --model, only
    /// settings that leave the weights unchanged
    #[arg(long, value_name = "SETTING=VALUE", conflicts_with = "endless")]
    pub(crate) router: Vec<String>,
    /// Number of texts generated together; several numbers are measured in turn (default: 1, on a GPU 1, 8 and 64)
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) batch: Vec<u16>,
    /// With --model: print the seconds of each token until stopped
    #[arg(long, requires = "model", conflicts_with = "json")]
    pub(crate) endless: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
}

#[derive(Debug, Args)]
#[command(before_help = "Usual use:\n  moeworks bench overlap                  ranks as threads of this process\n  \
                         moeworks bench overlap --link 1000,125  as over a link of 1 ms and 1 Gbit/s")]
pub(crate) struct OverlapArgs {
    /// Number of ranks, as threads (0: one per core, at least two); under mpirun the ranks are its processes
    #[arg(long, default_value_t = 0)]
    pub(crate) ranks: usize,
    /// Delay messages as this link would, such as 1000,125 for 1 ms and 1 Gbit/s
    #[arg(long, value_name = "LATENCY_US,MB_PER_S")]
    pub(crate) link: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(before_help = "Usual use:\n  moeworks bench comm                      ranks as threads of this process\n  \
                         mpirun -n 8 moeworks bench comm          ranks as processes of MPI\n  \
                         moeworks plan --topology topology.toml   plan with the measured topology")]
pub(crate) struct CommArgs {
    /// Number of ranks, as threads (0: one per core, at least two); under mpirun the ranks are its processes
    #[arg(long, default_value_t = 0)]
    pub(crate) ranks: usize,
    /// Largest number of bytes that a rank holds in a case
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 20)]
    pub(crate) max_bytes: usize,
    /// File for the measured topology
    #[arg(long, value_name = "FILE", default_value = "topology.toml")]
    pub(crate) topology: PathBuf,
    /// Overwrite that file even if `bench comm` did not write it
    #[arg(long)]
    pub(crate) force: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(
    before_help = "Usual use:\n  moeworks bench pipeline                       all schedules with 4 and 8 ranks that wait, 2 that compute\n  \
                         moeworks bench pipeline 1f1b 1f1b_overlap     these two"
)]
pub(crate) struct PipelineBenchArgs {
    /// Schedules to measure: 1f1b, zb_h1, zb_h2, zb_v, dualpipe, dualpipe_v, 1f1b_overlap, interleaved_overlap
    /// (default: all)
    #[arg(value_name = "SCHEDULE")]
    pub(crate) schedules: Vec<String>,
    /// Microbatches of a step, rounded up to what the schedules take
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) microbatches: u16,
    /// Steps of which the median counts
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) steps: u16,
    /// Measure only ranks whose computations are waits
    #[arg(long)]
    pub(crate) waits: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(
    before_help = "Usual use:\n  moeworks bench rebalance --ranks 4                     ranks whose experts are waits, as threads\n  \
                         moeworks bench rebalance off static moves --ranks 2 --computed   three modes, experts computed\n  \
                         mpirun -n 4 moeworks bench rebalance                 ranks as processes of MPI"
)]
pub(crate) struct RebalanceBenchArgs {
    /// Ways of placing experts, each a run: off, static (once, by the load of the first steps), moves, anew, auto
    /// (default: all)
    #[arg(value_name = "MODE")]
    pub(crate) modes: Vec<String>,
    /// Number of ranks, as threads (0: one per core, at least two); under mpirun the ranks are its processes
    #[arg(long, default_value_t = 0)]
    pub(crate) ranks: usize,
    /// Steps of each run
    #[arg(long, value_name = "N", default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) steps: u32,
    /// Steps after which other experts are popular
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) period: u32,
    /// Steps between decisions, and before the placement of static
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) every: u32,
    /// Slots of each rank for copies of experts, with static, anew and auto
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) spare: u16,
    /// Tokens of a rank in a step, each of which chooses two of four experts a rank
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) tokens: u16,
    /// Exponent of Zipf's law, by which experts are chosen
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    pub(crate) zipf: f64,
    /// Wait that stands for a row of an expert, forward and backward, in microseconds
    #[arg(long, value_name = "US", default_value_t = 100.0)]
    pub(crate) row_us: f64,
    /// Compute experts of width 512 instead of waiting; for as many ranks as cores
    #[arg(long, conflicts_with = "row_us")]
    pub(crate) computed: bool,
    /// Delay messages as this link would, such as 20,1250 for 20 us and 10 Gbit/s
    #[arg(long, value_name = "LATENCY_US,MB_PER_S")]
    pub(crate) link: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(
    before_help = "Usual use:\n  moeworks bench machine --out machine.toml                     measures this machine into a file\n  \
                         moeworks bench machine --out machine.toml --check             predicted against measured steps\n  \
                         moeworks bench machine --out machine.toml --predict --set parallel.ep=2   one predicted step"
)]
pub(crate) struct MachineFileArgs {
    /// File of the machine: written, or read with --check and --predict
    #[arg(long, value_name = "FILE", default_value = "machine.toml")]
    pub(crate) out: PathBuf,
    /// Compare steps predicted from the file with real ones of ten configurations, on one and two ranks
    #[arg(long, conflicts_with = "predict")]
    pub(crate) check: bool,
    /// Number of configurations of --check
    #[arg(long, value_name = "N", default_value_t = 10, requires = "check")]
    pub(crate) most: usize,
    /// Predict a step of the configuration from the file, without training
    #[arg(long)]
    pub(crate) predict: bool,
    /// Measure fewer sizes, once each, for a rough file
    #[arg(long, conflicts_with_all = ["check", "predict"])]
    pub(crate) quick: bool,
    /// Also write the machine as a topology of a rank on each core, which `plan --topology` reads
    #[arg(long, value_name = "FILE", conflicts_with_all = ["check", "predict"])]
    pub(crate) topology: Option<PathBuf>,
    /// Overwrite a file that this command did not write
    #[arg(long)]
    pub(crate) force: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
}

#[derive(Debug, Args)]
#[command(
    before_help = "Usual use: one line of JSON per layer on standard input, one line of JSON with seconds per answer:\n  \
                         echo '{\"d\": 1024, \"f\": 384, \"e\": 128, \"k\": 8, \"activation\": \"swiglu\", \"dtype\": \"bf16\",\n        \
                         \"tokens\": 16, \"both\": true}' | moeworks bench moe"
)]
pub(crate) struct MoeArgs {
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
}

/// The kinds that take the names of cases.
const WITH_CASES: [&str; 5] = ["kernels", "layers", "routing", "pipeline", "rebalance"];
/// The kinds without named cases.
const WHOLE: [&str; 5] = ["decode", "overlap", "comm", "machine", "moe"];
/// The options that take no value.
const SWITCHES: [&str; 12] = [
    "--computed",
    "--json",
    "--endless",
    "--force",
    "--check",
    "--predict",
    "-q",
    "--quiet",
    "-v",
    "--verbose",
    "-h",
    "--help",
];

/// Moves the kind of `bench` directly after the word `bench`. Options may then precede the kind, a case may share one
/// argument with its kind (`bench "layers T 512"`), and the kind may be left out (`bench "attention forward"`).
pub(super) fn kind_first(args: Vec<OsString>) -> Vec<OsString> {
    let is_option = |arg: &OsString| arg.as_encoded_bytes().starts_with(b"-");
    let Some(bench) = (1..args.len()).find(|&i| !is_option(&args[i])).filter(|&i| args[i] == "bench") else {
        return args;
    };
    let (mut head, mut rest) = (args[..=bench].to_vec(), args[bench + 1..].to_vec());
    let first = first_word(&rest);
    let word = first.and_then(|i| rest[i].to_str()).unwrap_or_default().to_owned();
    let (kind, case) = word.split_once(' ').map_or((word.as_str(), ""), |(kind, case)| (kind, case.trim()));
    if word == "help" || (first.is_none() && rest.iter().any(|arg| arg == "-h" || arg == "--help")) {
        return args;
    }
    let is_kind = WITH_CASES.contains(&kind) || (case.is_empty() && WHOLE.contains(&kind));
    head.push(if is_kind { kind.into() } else { "kernels".into() });
    match first {
        Some(i) if is_kind && case.is_empty() => drop(rest.remove(i)),
        Some(i) if is_kind => rest[i] = case.into(),
        _ => {}
    }
    head.extend(rest);
    head
}

/// Finds the first argument that is neither an option nor the value of one.
fn first_word(args: &[OsString]) -> Option<usize> {
    let mut i = 0;
    while i < args.len() {
        let arg = args[i].to_string_lossy();
        if arg == "--" {
            return (i + 1 < args.len()).then_some(i + 1);
        }
        if !arg.starts_with('-') {
            return Some(i);
        }
        i += if arg.contains('=') || SWITCHES.contains(&&*arg) { 1 } else { 2 };
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(line: &str) -> String {
        let args = line.split(' ').map(|word| word.replace('_', " ").into()).collect();
        let words: Vec<String> = kind_first(args).into_iter().map(|arg| arg.into_string().unwrap()).collect();
        words.join("|")
    }

    #[test]
    fn old_spellings_of_bench_become_a_kind_and_its_options() {
        let cases = [
            ("moeworks bench", "moeworks|bench|kernels"),
            ("moeworks bench --json", "moeworks|bench|kernels|--json"),
            ("moeworks bench attention_forward --json", "moeworks|bench|kernels|attention forward|--json"),
            ("moeworks bench layers_T_512", "moeworks|bench|layers|T 512"),
            ("moeworks bench --threads 2 routing_cosine", "moeworks|bench|routing|--threads|2|cosine"),
            ("moeworks bench --json layers", "moeworks|bench|layers|--json"),
            ("moeworks bench --ranks=4 comm", "moeworks|bench|comm|--ranks=4"),
            ("moeworks bench --types q4 decode --json", "moeworks|bench|decode|--types|q4|--json"),
            ("moeworks -q bench moe", "moeworks|-q|bench|moe"),
            ("moeworks bench kernels softmax", "moeworks|bench|kernels|softmax"),
            ("moeworks bench moe_layer", "moeworks|bench|kernels|moe layer"),
            ("moeworks bench --help", "moeworks|bench|--help"),
            ("moeworks bench help comm", "moeworks|bench|help|comm"),
            ("moeworks bench comm --help", "moeworks|bench|comm|--help"),
            ("moeworks train bench", "moeworks|train|bench"),
        ];
        for (typed, expected) in cases {
            assert_eq!(first(typed), expected, "{typed}");
        }
    }
}
