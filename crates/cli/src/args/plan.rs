//! Command-line options of `plan` and `estimate`.

use std::path::PathBuf;

use clap::Args;

use super::ConfigArgs;

#[derive(Debug, Args)]
#[command(
    before_help = "Usual use:\n  moeworks estimate --config run.toml\n  moeworks estimate --preset small --set train.steps=5000"
)]
pub(crate) struct EstimateArgs {
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(
    before_help = "Usual use:\n  moeworks plan --ranks 8                   layouts on 8 ranks of this machine\n  \
                         moeworks plan --topology cluster.toml     layouts on a described cluster\n  \
                         moeworks plan --scaling                  how a described cluster scales from 8 to 2,048 ranks"
)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Total number of ranks (default: those of --topology)
    #[arg(long, value_name = "N")]
    pub(crate) ranks: Option<usize>,
    /// TOML file with the nodes, their ranks and the links between them (default: this machine, shared by the ranks)
    #[arg(long, value_name = "FILE")]
    pub(crate) topology: Option<PathBuf>,
    /// Print how a cluster scales from 8 to 2,048 ranks (or --ranks) with the same tokens on each; without
    /// --topology, --config and --preset, for a built-in cluster and model
    #[arg(long, alias = "simulate")]
    pub(crate) scaling: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}
