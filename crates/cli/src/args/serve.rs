//! The options of `serve`.

use std::path::PathBuf;

use clap::Args;

use super::ComputeArgs;

#[derive(Debug, Args)]
#[command(
    before_help = "Usual use:\n  moeworks serve MODEL                                        on this machine's port 8000\n  \
                         moeworks serve MODEL --host 0.0.0.0 --api-key-file keys.txt   for other machines\n  \
                         moeworks serve MODEL --max-running 16 --kv-memory 4"
)]
pub(crate) struct ServeArgs {
    /// A run, a checkpoint, a model folder or a GGUF file
    pub(crate) model: PathBuf,
    /// The address to listen at; 0.0.0.0 for all of this machine
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub(crate) host: String,
    /// The port; 0 for any that is free, which is printed
    #[arg(long, value_name = "N", default_value_t = 8000)]
    pub(crate) port: u16,
    /// The model's name in requests and answers; may be repeated (default: the name of the folder or file)
    #[arg(long, visible_alias = "alias", value_name = "NAME")]
    pub(crate) served_model_name: Vec<String>,
    /// A chat template in Jinja in place of the model's own
    #[arg(long, value_name = "FILE")]
    pub(crate) chat_template: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) access: AccessArgs,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
}

/// The options that say who is answered.
#[derive(Debug, Args)]
#[command(next_help_heading = "Access")]
pub(crate) struct AccessArgs {
    /// Answer only requests with this key; may be repeated. Other users of this machine can read it: rather use --api-key-file
    #[arg(long, value_name = "KEY", allow_hyphen_values = true)]
    pub(crate) api_key: Vec<String>,
    /// A file with keys, one a line
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// A name in the Host header that is accepted besides localhost and addresses; may be repeated
    #[arg(long, value_name = "NAME")]
    pub(crate) allowed_host: Vec<String>,
}

/// The options that bound what is done at a time.
#[derive(Debug, Args)]
#[command(next_help_heading = "Load")]
pub(crate) struct LoadArgs {
    /// Answers that are computed at a time
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(crate) max_running: usize,
    /// Answers that wait besides; further requests get status 429
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub(crate) max_waiting: usize,
    /// Tokens of a turn at most; a smaller number lets answers go on more evenly beside long prompts
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub(crate) turn_tokens: usize,
    /// GB of memory for keys and values (default: as much as --max-running answers need, up to a quarter of the memory)
    #[arg(long, value_name = "GB")]
    pub(crate) kv_memory: Option<f64>,
    /// Tokens of a block of keys and values
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub(crate) block_len: usize,
    /// Compute every prompt anew, also where another began with the same text
    #[arg(long)]
    pub(crate) no_prefix_cache: bool,
    /// Seconds that answers under way have to end after SIGTERM or Ctrl-C; a second signal ends the program at once
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0)]
    pub(crate) shutdown_timeout: f64,
    /// Stands before the names of metrics, as in `vllm:` for dashboards that were made for vLLM
    #[arg(long, value_name = "TEXT", default_value = "moeworks_")]
    pub(crate) metrics_prefix: String,
}
