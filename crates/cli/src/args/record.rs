//! Command-line options for recording routing.

use std::path::PathBuf;

use clap::Args;

/// Options for a record of the experts of each token.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Recording")]
pub(crate) struct RecordArgs {
    /// Record the experts of each token in this file, for `routing stats`, `routing export` and `balance`
    #[arg(long, value_name = "FILE")]
    pub(crate) record_routing: Option<PathBuf>,
    /// Record the weights of the experts, too, as f16
    #[arg(long, requires = "record_routing")]
    pub(crate) record_weights: bool,
    /// Record the token ids, too, from which the text can be read
    #[arg(long, requires = "record_routing")]
    pub(crate) record_token_ids: bool,
}
