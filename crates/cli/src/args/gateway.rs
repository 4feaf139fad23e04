//! The options of `gateway`.

use std::path::PathBuf;

use clap::Args;

use super::TlsArgs;

#[derive(Debug, Args)]
#[command(
    before_help = "Usual use:\n  moeworks gateway --to http://10.0.0.2:8000 http://10.0.0.3:8000            two servers behind one address\n  \
                         moeworks gateway --host 0.0.0.0 --port 80 --to http://10.0.0.2:8000 http://10.0.0.3:8000"
)]
pub(crate) struct GatewayArgs {
    /// The servers, as http://HOST:PORT or https://HOST:PORT; all of the same model
    #[arg(long, value_name = "URL", num_args = 1.., required = true)]
    pub(crate) to: Vec<String>,
    /// The address to listen at; 0.0.0.0 for all of this machine
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub(crate) host: String,
    /// The port; 0 for any that is free, which is printed
    #[arg(long, value_name = "N", default_value_t = 8080)]
    pub(crate) port: u16,
    /// A name in the Host header that is accepted besides localhost and addresses; may be repeated
    #[arg(long, value_name = "NAME")]
    pub(crate) allowed_host: Vec<String>,
    /// Requests whose prompts have the same first N bytes go to the same server; 0 to look at load alone
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub(crate) prefix_bytes: usize,
    /// Requests under way at most; further ones get status 429
    #[arg(long, value_name = "N", default_value_t = 4096)]
    pub(crate) max_requests: usize,
    /// Further servers that get a request whose server went away before it began to answer
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) retries: usize,
    /// Seconds between two looks at whether a server is ready
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    pub(crate) check_interval: f64,
    /// Seconds of silence after which an answer counts as broken
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0)]
    pub(crate) answer_timeout: f64,
    /// Seconds that answers under way have to end after SIGTERM or Ctrl-C; a second signal ends the program at once
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0)]
    pub(crate) shutdown_timeout: f64,
    /// Stands before the names of metrics
    #[arg(long, value_name = "TEXT", default_value = "moeworks_")]
    pub(crate) metrics_prefix: String,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    /// File with the certificates that are trusted of servers at https:// (PEM): that of their authority, or their
    /// own where they signed it themselves
    #[arg(long, value_name = "FILE", help_heading = "TLS")]
    pub(crate) tls_ca: Option<PathBuf>,
}
