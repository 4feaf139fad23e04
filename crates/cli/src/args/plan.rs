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
                         moeworks plan --model deepseek-v3 --cluster h800 --ranks 2048 --precision fp8 --global-batch 15360 --tokens 14.8T\n  \
                         moeworks plan --config run.toml --cluster machine.toml --ranks 2   on this machine, once measured\n  \
                         moeworks plan --model deepseek-v3 --cluster h800 --ranks 128 --serve\n  \
                         moeworks plan --scaling                  how a described cluster scales from 8 to 2,048 ranks"
)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Total number of ranks (default: those of --topology or --cluster)
    #[arg(long, value_name = "N")]
    pub(crate) ranks: Option<usize>,
    /// TOML file with the nodes, their ranks and the links between them (default: this machine, shared by the ranks)
    #[arg(long, value_name = "FILE", conflicts_with = "cluster")]
    pub(crate) topology: Option<PathBuf>,
    /// Print how a cluster scales from 8 to 2,048 ranks (or --ranks) with the same tokens on each; without
    /// --topology, --config and --preset, for a built-in cluster and model
    #[arg(long, alias = "simulate", conflicts_with_all = [
        "cluster", "model", "serve", "tokens", "global_batch", "seq_len", "precision", "top", "tp", "cp", "pp", "ep", "etp",
        "microbatch", "zero", "schedule", "recompute", "trainable", "skew", "zipf", "loads",
    ])]
    pub(crate) scaling: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) described: DescribedArgs,
    #[command(flatten)]
    pub(crate) pins: PinArgs,
    #[command(flatten)]
    pub(crate) load: SkewArgs,
    #[command(flatten)]
    pub(crate) bill: BillArgs,
    #[command(flatten)]
    pub(crate) serving: ServingArgs,
}

impl PlanArgs {
    /// Returns whether layouts in all dimensions are asked for, with pipelines and the like, rather than those in dp,
    /// ep and tp of a measured machine.
    pub(crate) fn is_wide(&self) -> bool {
        let Self { described, pins, load, bill, serving, .. } = self;
        let is_described = described.cluster.is_some() || described.model.is_some() || described.is_sized();
        is_described || pins.is_given() || load.is_given() || bill.is_given() || serving.serve
    }
}

/// Clusters and models of files, and the work of a step. Any of these also compares pipelines, context parallelism,
/// expert-tensor parallelism, schedules and recomputation.
#[derive(Debug, Args)]
#[command(next_help_heading = "Layouts in all dimensions")]
pub(crate) struct DescribedArgs {
    /// Cluster by name (a100-ndm-v4, h100, h800, gb200, tpu-v3, two-sites, 1000-datacentres, optical), or a TOML
    /// file, such as the machine.toml of `bench machine`
    #[arg(long, value_name = "NAME|FILE")]
    pub(crate) cluster: Option<String>,
    /// Model by name (switch-c, meta-1.1t, gshard-600b, deepseek-v3, qwen3-235b, mixtral-8x22b, swinv2-moe-3b), or a
    /// TOML file, in the place of --config and --preset
    #[arg(long, value_name = "NAME|FILE", conflicts_with_all = ["config", "preset", "settings"])]
    pub(crate) model: Option<String>,
    /// Sequences of a step (default: those of the configuration; 4 million tokens, and one for each rank, for
    /// --model)
    #[arg(long, value_name = "N")]
    pub(crate) global_batch: Option<usize>,
    /// Tokens of a sequence (default: those of the model or configuration)
    #[arg(long, value_name = "N")]
    pub(crate) seq_len: Option<usize>,
    /// Number format of products (default: that of the configuration; bf16 for --model)
    #[arg(long, value_name = "f32|bf16|fp8")]
    pub(crate) precision: Option<String>,
    /// Number of layouts to print
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub(crate) top: usize,
}

impl DescribedArgs {
    fn is_sized(&self) -> bool {
        self.global_batch.is_some() || self.seq_len.is_some() || self.precision.is_some()
    }
}

/// Sizes that are given; all others are searched.
#[derive(Debug, Args)]
#[command(next_help_heading = "Given sizes (the others are searched)")]
pub(crate) struct PinArgs {
    /// Tensor parallelism outside the experts
    #[arg(long, value_name = "N")]
    pub(crate) tp: Option<usize>,
    /// Context parallelism (planned only: `train` has none)
    #[arg(long, value_name = "N")]
    pub(crate) cp: Option<usize>,
    /// Pipeline ranks
    #[arg(long, value_name = "N")]
    pub(crate) pp: Option<usize>,
    /// Expert parallelism: ranks that hold the experts between them
    #[arg(long, value_name = "N")]
    pub(crate) ep: Option<usize>,
    /// Expert-tensor parallelism (planned only: `train` has none)
    #[arg(long, value_name = "N")]
    pub(crate) etp: Option<usize>,
    /// Sequences of a microbatch of a data-parallel rank
    #[arg(long, value_name = "N")]
    pub(crate) microbatch: Option<usize>,
    /// Stage of ZeRO, 0 to 3
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=3))]
    pub(crate) zero: Option<u8>,
    /// Schedule of a pipeline, as in `train --set parallel.schedule`
    #[arg(long, value_name = "NAME")]
    pub(crate) schedule: Option<String>,
    /// Activations that are computed again: none, selective (planned only) or full
    #[arg(long, value_name = "WHICH")]
    pub(crate) recompute: Option<String>,
    /// Only layouts that `moeworks train` carries out
    #[arg(long)]
    pub(crate) trainable: bool,
}

impl PinArgs {
    fn is_given(&self) -> bool {
        let sizes = [self.tp, self.cp, self.pp, self.ep, self.etp, self.microbatch];
        let words = self.schedule.is_some() || self.recompute.is_some() || self.zero.is_some();
        sizes.iter().any(Option::is_some) || words || self.trainable
    }
}

/// Unequal load of the experts.
#[derive(Debug, Args)]
#[command(next_help_heading = "Load of the experts")]
pub(crate) struct SkewArgs {
    /// Coefficient of variation of the experts' loads: standard deviation over mean (default: 0, all alike)
    #[arg(long, value_name = "CV", conflicts_with_all = ["zipf", "loads"])]
    pub(crate) skew: Option<f64>,
    /// Exponent of Zipf's law for the experts' loads
    #[arg(long, value_name = "S", conflicts_with = "loads")]
    pub(crate) zipf: Option<f64>,
    /// Loads that a run recorded in its last 100 steps
    #[arg(long, value_name = "RUN")]
    pub(crate) loads: Option<PathBuf>,
}

impl SkewArgs {
    fn is_given(&self) -> bool {
        self.skew.is_some() || self.zipf.is_some() || self.loads.is_some()
    }
}

/// Days, price and energy.
#[derive(Debug, Args)]
#[command(next_help_heading = "Days, price and energy")]
pub(crate) struct BillArgs {
    /// Tokens to train on, such as 14.8T, 300B or 1e9
    #[arg(long, value_name = "N")]
    pub(crate) tokens: Option<String>,
    /// Price of a rank for an hour (default: that of the cluster)
    #[arg(long, value_name = "PER_HOUR", requires = "tokens")]
    pub(crate) price: Option<f64>,
    /// Power of a rank in watts (default: that of the cluster)
    #[arg(long, value_name = "W", requires = "tokens")]
    pub(crate) watts: Option<f64>,
}

impl BillArgs {
    fn is_given(&self) -> bool {
        self.tokens.is_some() || self.price.is_some() || self.watts.is_some()
    }
}

/// Serving in the place of training.
#[derive(Debug, Args)]
#[command(next_help_heading = "Serving")]
pub(crate) struct ServingArgs {
    /// Plan serving: replicas, batch, keys and values, prefill and decode apart or together
    #[arg(long, conflicts_with_all = [
        "tokens", "global_batch", "seq_len", "top", "tp", "cp", "pp", "ep", "etp", "microbatch", "zero", "schedule", "recompute",
        "trainable",
    ])]
    pub(crate) serve: bool,
    /// Tokens of a prompt
    #[arg(long, value_name = "N", default_value_t = 2048, requires = "serve")]
    pub(crate) input: usize,
    /// Tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 512, requires = "serve")]
    pub(crate) output: usize,
    /// Most milliseconds between two tokens of an answer (default: no limit)
    #[arg(long, value_name = "MS", requires = "serve")]
    pub(crate) token_ms: Option<f64>,
}
