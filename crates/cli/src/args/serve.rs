//! Command-line options of `serve`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{ComputeArgs, RankArgs, RecordArgs, TlsArgs};

#[derive(Debug, Args)]
#[command(
    before_help = "Usual use:\n  moeworks serve MODEL                                        on this machine's port 8000\n  \
                         moeworks serve MODEL --host 0.0.0.0 --api-key-file keys.txt   for other machines\n  \
                         moeworks serve MODEL --tls-cert server.pem --tls-key server.key       https://\n  \
                         moeworks serve MODEL --max-running 16 --kv-memory 4"
)]
pub(crate) struct ServeArgs {
    /// Model: a run, a checkpoint, a model folder or a GGUF file
    pub(crate) model: PathBuf,
    /// Address to listen on; 0.0.0.0 for all addresses of this machine
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub(crate) host: String,
    /// Port to listen on; 0 for any free one, which is printed
    #[arg(long, value_name = "N", default_value_t = 8000)]
    pub(crate) port: u16,
    /// Name of the model in requests and answers (repeatable; default: the name of the folder or file)
    #[arg(long, visible_alias = "alias", value_name = "NAME")]
    pub(crate) served_model_name: Vec<String>,
    /// Jinja chat template to use instead of the model's own
    #[arg(long, value_name = "FILE")]
    pub(crate) chat_template: Option<PathBuf>,
    /// The lines on standard error: text, or json with an object a line; with --verbose there is one for each request
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t)]
    pub(crate) log_format: LogFormat,
    #[command(flatten)]
    pub(crate) access: AccessArgs,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    #[command(flatten)]
    pub(crate) record: RecordArgs,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
    #[command(flatten)]
    pub(crate) ranks: RankArgs,
    #[command(flatten)]
    pub(crate) rebalance: RebalanceArgs,
}

/// Options for experts that move between ranks.
#[derive(Debug, Args)]
#[command(next_help_heading = "Moving experts between ranks")]
pub(crate) struct RebalanceArgs {
    /// Move experts while serving: off, online (by the load of the last tokens), or a file of placements as
    /// `moeworks balance` writes it
    #[arg(long, value_name = "WHEN", default_value = "off")]
    pub(crate) rebalance: String,
    /// Slots for experts on each rank beyond an even share, for copies of hot experts
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    pub(crate) spare_slots: usize,
    /// Tokens between the decisions of `--rebalance online`
    #[arg(long, value_name = "TOKENS", default_value_t = 2048)]
    pub(crate) rebalance_every: u64,
    /// Megabytes that a rank sends or receives before a turn at most, though at least one expert
    #[arg(long, value_name = "MB", default_value_t = 32)]
    pub(crate) rebalance_megabytes: usize,
}

/// The form of the lines on standard error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    #[default]
    Text,
    Json,
}

/// The number type of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvTypeChoice {
    F32,
    Bf16,
    #[value(alias = "q8_0")]
    Q8,
}

/// Options for who may send requests.
#[derive(Debug, Args)]
#[command(next_help_heading = "Access")]
pub(crate) struct AccessArgs {
    /// Answer only requests with this key (repeatable). Other users of this machine can read it: prefer
    /// --api-key-file
    #[arg(long, value_name = "KEY", allow_hyphen_values = true)]
    pub(crate) api_key: Vec<String>,
    /// File with keys, one per line
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Name to accept in the Host header besides localhost and addresses (repeatable)
    #[arg(long, value_name = "NAME")]
    pub(crate) allowed_host: Vec<String>,
}

/// Limits on concurrent work.
#[derive(Debug, Args)]
#[command(next_help_heading = "Load")]
pub(crate) struct LoadArgs {
    /// Largest number of answers computed at a time
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(crate) max_running: usize,
    /// Largest number of answers that wait; further requests get status 429
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub(crate) max_waiting: usize,
    /// Largest number of tokens per step; smaller values keep answers steadier while long prompts are read
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub(crate) turn_tokens: usize,
    /// Gigabytes of memory for keys and values (default: enough for --max-running answers, up to a quarter of the
    /// memory)
    #[arg(long, value_name = "GB")]
    pub(crate) kv_memory: Option<f64>,
    /// Number type of keys and values: q8 takes half the memory of bf16, and rounds them to 8 bits (default: that of
    /// activations, bf16 for weights in bf16, else f32)
    #[arg(long, visible_alias = "kv-cache-dtype", value_name = "TYPE", value_enum)]
    pub(crate) kv_type: Option<KvTypeChoice>,
    /// Tokens per block of keys and values
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub(crate) block_len: usize,
    /// Compute every prompt from scratch, even if an earlier one starts with the same text
    #[arg(long)]
    pub(crate) no_prefix_cache: bool,
    /// Seconds that running answers get to finish after SIGTERM or Ctrl-C; a second signal ends the program at once
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0)]
    pub(crate) shutdown_timeout: f64,
    /// Seconds that an answer takes at most, waiting included; 0 for no limit
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    pub(crate) request_timeout: f64,
    /// Prefix of the names of metrics, such as `vllm:` for dashboards made for vLLM
    #[arg(long, value_name = "TEXT", default_value = "moeworks_")]
    pub(crate) metrics_prefix: String,
}
