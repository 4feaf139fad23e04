//! The options of TLS that servers have in common.

use std::path::PathBuf;

use clap::Args;

/// Options for TLS.
#[derive(Debug, Args)]
#[command(next_help_heading = "TLS")]
pub(crate) struct TlsArgs {
    /// File with the certificate to show to clients, and those between it and its authority (PEM); connections are
    /// https:// then
    #[arg(long, visible_alias = "ssl-certfile", alias = "ssl-cert-file", value_name = "FILE", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// File with the private key of the certificate (PEM, without a password)
    #[arg(long, visible_alias = "ssl-keyfile", alias = "ssl-key-file", value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
}
