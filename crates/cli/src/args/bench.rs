//! The options of `bench` and of each of its kinds.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::MachineArgs;

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
    /// Peaks of this machine, and each kernel's share of them, of an MoE layer and of a training step
    Kernels(CasesArgs),
    /// Whole MoE layers of four published shapes, from 1 to 4,096 tokens, forward and both passes (about two minutes)
    Layers(CasesArgs),
    /// The cost of each routing scheme beside the forward pass of a layer of 64 experts
    Routing(CasesArgs),
    /// Decoding and prefill of a model: tokens per second, and the share of the memory's bandwidth
    Decode(DecodeArgs),
    /// The share of a layer's communication between ranks that is hidden under its computation
    Overlap(OverlapArgs),
    /// Latency and bandwidth of each collective between ranks; writes topology.toml for `plan`
    Comm(CommArgs),
    /// MoE layers that lines of standard input describe, for comparisons with other programs
    Moe(MoeArgs),
}

/// The options of kinds that have cases with names.
#[derive(Debug, Args)]
pub(crate) struct CasesArgs {
    /// Only cases with this in their name, such as `attention forward`, `T 512` or `cosine`; words are joined by spaces
    #[arg(value_name = "CASE")]
    pub(crate) words: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
}

impl CasesArgs {
    /// The text that the name of a case must contain; empty for all.
    pub(crate) fn filter(&self) -> String {
        self.words.join(" ")
    }
}

#[derive(Debug, Args)]
#[command(
    before_help = "Usual use:\n  moeworks bench decode                a model of OLMoE's shape, in f32, bf16, q8 and q4\n  \
                         moeworks bench decode --model MODEL  a model of yours"
)]
pub(crate) struct DecodeArgs {
    /// Time this model: a run, a checkpoint, a model folder or a GGUF file
    #[arg(long)]
    pub(crate) model: Option<PathBuf>,
    /// Time a model of the shape that this folder's `config.json` describes, with random weights; no other file is needed
    #[arg(long, value_name = "FOLDER", conflicts_with = "model")]
    pub(crate) shape: Option<PathBuf>,
    /// Types of the weights (default: all four)
    #[arg(long, value_name = "TYPE", value_delimiter = ',', conflicts_with = "model", ignore_case = true,
          value_parser = ["f32", "bf16", "q8", "q4"])]
    pub(crate) types: Vec<String>,
    /// Layers of the model: OLMoE-1B-7B has 16 (6.9 billion weights); with --shape its first ones
    #[arg(long, value_name = "N", conflicts_with = "model", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) layers: Option<u16>,
    /// A setting of the router, such as kind=forced and forced_load=zipf for a skewed load (repeatable); with --model it must leave the
    /// weights as they are
    #[arg(long, value_name = "SETTING=VALUE", conflicts_with = "endless")]
    pub(crate) router: Vec<String>,
    /// Texts that are generated together: several numbers are measured one after the other (default: 1, on a GPU 1, 8 and 64)
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) batch: Vec<u16>,
    /// With --model: print the seconds of each token as it comes, until stopped
    #[arg(long, requires = "model", conflicts_with = "json")]
    pub(crate) endless: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
}

#[derive(Debug, Args)]
pub(crate) struct OverlapArgs {
    /// Ranks, as threads (0: one for each core, at least two); under mpirun its processes are the ranks
    #[arg(long, default_value_t = 0)]
    pub(crate) ranks: usize,
    /// Let messages take as long as over this link, such as 1000,125 for 1 ms and 1 Gbit/s
    #[arg(long, value_name = "LATENCY_US,MB_PER_S")]
    pub(crate) link: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(before_help = "Usual use:\n  moeworks bench comm                      ranks as threads of this process\n  \
                         mpirun -n 8 moeworks bench comm          ranks as processes of MPI\n  \
                         moeworks plan --topology topology.toml   plan with what was measured")]
pub(crate) struct CommArgs {
    /// Ranks, as threads (0: one for each core, at least two); under mpirun its processes are the ranks
    #[arg(long, default_value_t = 0)]
    pub(crate) ranks: usize,
    /// The most bytes that a rank holds in a case
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 20)]
    pub(crate) max_bytes: usize,
    /// The file that the measured topology is written to
    #[arg(long, value_name = "FILE", default_value = "topology.toml")]
    pub(crate) topology: PathBuf,
    /// Replace a file there that `bench comm` did not write
    #[arg(long)]
    pub(crate) force: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(
    before_help = "Usual use: a line on standard input for each layer, a line of JSON with seconds for each answer:\n  \
                         echo '{\"d\": 1024, \"f\": 384, \"e\": 128, \"k\": 8, \"activation\": \"swiglu\", \"dtype\": \"bf16\",\n        \
                         \"tokens\": 16, \"both\": true}' | moeworks bench moe"
)]
pub(crate) struct MoeArgs {
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
}

/// Kinds that take the names of cases.
const WITH_CASES: [&str; 3] = ["kernels", "layers", "routing"];
/// Kinds without cases.
const WHOLE: [&str; 4] = ["decode", "overlap", "comm", "moe"];
/// Options that take no value.
const SWITCHES: [&str; 9] = ["--json", "--endless", "--force", "-q", "--quiet", "-v", "--verbose", "-h", "--help"];

/// Puts the kind of `bench` behind the word `bench`, so that options may stand before it, cases may stand in one argument with their
/// kind (`bench "layers T 512"`), and the kind may be left out (`bench "attention forward"`).
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

/// The position of the first argument that is neither an option nor an option's value.
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
