//! `moeworks plan`: layouts of a model on ranks and their costs, without starting any rank.

mod explain;
mod inputs;
mod json;
mod layouts;
mod layouts_json;
mod rows;
mod serving;

use std::path::{Path, PathBuf};

use moeworks_bench::training::{memory_bytes_per_s, tokens_per_second};
use moeworks_model::model_cost::{Kept, shape, training_flops_per_token};
use moeworks_plan::{Estimate, ModelShape, Precision, RankSpec, Tokens, Topology, Workload, propose, weak_scaling};
use moeworks_train::config::{RunConfig, TrainConfig};
use moeworks_train::machine_bytes;
use serde_json::{Value, json};

use self::explain::explain;
use self::json::{as_json, scaling_json};
use self::rows::{HEADER, SCALING_HEADER, scaling_row, table_row};
use crate::args::PlanArgs;
use crate::environment;
use crate::estimate::vocabulary;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::progress::thousands;
use crate::tables;
use crate::train::resolve_config;

/// The number of ranks of the smallest simulated cluster.
const LEAST_SIMULATED_RANKS: usize = 8;
/// The number of ranks of the largest simulated cluster, by default.
const SIMULATED_RANKS: usize = 2048;
/// The number of tokens per rank in the simulated table.
const SIMULATED_TOKENS: usize = 8192;
/// The largest number of ranks for which a plan is made.
const MAX_RANKS: usize = 1 << 16;
/// The highest stage of ZeRO.
const MAX_ZERO: u8 = 3;
/// The memory assumed for a machine that does not report its own.
const UNKNOWN_MEMORY: u64 = 16 << 30;

pub(crate) fn run(args: &PlanArgs) -> Result<ExitCode, Failure> {
    if args.ranks.is_some_and(|ranks| !(1..=MAX_RANKS).contains(&ranks)) {
        return Err(Failure::input(format!("--ranks must be from 1 to {MAX_RANKS}")));
    }
    if args.described.top == 0 {
        return Err(Failure::input("--top 0: must be at least 1"));
    }
    match args {
        _ if args.scaling => scaling(args),
        _ if args.serving.serve => serving::run(args),
        _ if args.is_wide() => layouts::run(args),
        _ => proposals(args),
    }
}

fn proposals(args: &PlanArgs) -> Result<ExitCode, Failure> {
    let config = config_to_lay_out(args)?;
    let (topology, place) = match (topology_file(args), args.ranks) {
        (Some(file), ranks) => {
            let topology = read_topology(&file)?;
            (ranks.map_or(topology.clone(), |ranks| topology.resized(ranks)), file.display().to_string())
        }
        (None, Some(ranks)) => (this_machine(&config, ranks)?, "this machine, shared by its ranks".to_owned()),
        (None, None) => {
            return Err(Failure::input(
                "plan needs --ranks N or --topology FILE (such as topology.toml, which `moeworks bench comm` writes)",
            ));
        }
    };
    let tokens = Tokens::Sequences { num: config.train.batch_size, len: config.train.seq_len };
    let shape = model_shape(&config)?;
    let (found, workload) = find(&shape, workload(&config, tokens), &topology);
    let shown = args.described.top;
    if args.json {
        let proposals: Vec<Value> = found.iter().take(shown).map(as_json).collect();
        println!("{:#}", json!({ "topology": place, "zero": workload.zero, "proposals": proposals }));
        return Ok(ExitCode::SUCCESS);
    }
    describe(&shape, &workload, &topology, &place);
    tables::print(&HEADER, &found.iter().take(shown).map(table_row).collect::<Vec<_>>());
    if found.len() > shown {
        println!("  and {} more", found.len() - shown);
    }
    println!();
    explain(&found, workload.zero, &topology);
    println!();
    println!(
        "Pipelines, context parallelism, schedules and recomputation are compared with --global-batch, --cluster or --model."
    );
    Ok(ExitCode::SUCCESS)
}

/// Returns the configuration with its vocabulary size set. The model must be one that can be divided among ranks.
fn config_to_lay_out(args: &PlanArgs) -> Result<RunConfig, Failure> {
    let mut config = resolve_config(&args.config, Vec::new())?;
    if config.model.variant.encoder.is_some() {
        return Err(Failure::input(
            "a model with an encoder is trained on one rank alone: there is nothing to lay out",
        ));
    }
    config.model.vocab_size = vocabulary(&config);
    Ok(config)
}

/// Finds the layouts, best first. The stage of ZeRO is the configured one, or a higher one if nothing fits otherwise.
fn find(shape: &ModelShape, workload: Workload, topology: &Topology) -> (Vec<Estimate>, Workload) {
    let with = |zero| {
        let workload = Workload { zero, ..workload };
        (propose(shape, &workload, topology), workload)
    };
    let mut all = (workload.zero..=MAX_ZERO).map(with);
    all.find(|(found, _)| found.first().is_some_and(|best| best.fits)).unwrap_or_else(|| with(MAX_ZERO))
}

fn scaling(args: &PlanArgs) -> Result<ExitCode, Failure> {
    if let Some(ranks) = args.ranks.filter(|&ranks| ranks < LEAST_SIMULATED_RANKS) {
        return Err(Failure::input(format!(
            "--scaling --ranks {ranks}: the table begins at {LEAST_SIMULATED_RANKS} ranks; give at least as many, or leave \
             --scaling out for layouts on {ranks}"
        )));
    }
    let is_own_model = args.config.config.is_some() || args.config.preset.is_some() || !args.config.settings.is_empty();
    let (shape, workload) = if is_own_model {
        let config = config_to_lay_out(args)?;
        let tokens = Tokens::OfEachRank(config.train.batch_size * config.train.seq_len);
        (model_shape(&config)?, workload(&config, tokens))
    } else {
        let precision = Precision::Bf16;
        (
            ModelShape::example(),
            Workload { tokens: Tokens::OfEachRank(SIMULATED_TOKENS), precision, zero: 1, expert_gradient_bytes: 4 },
        )
    };
    let (cluster, place) = match &args.topology {
        Some(file) => (read_topology(file)?, file.display().to_string()),
        None => (Topology::example_cluster(1), "the described cluster".to_owned()),
    };
    let rows = weak_scaling(&shape, &workload, &cluster, args.ranks.unwrap_or(SIMULATED_RANKS));
    if args.json {
        println!("{:#}", json!({ "topology": place, "rows": rows.iter().map(scaling_json).collect::<Vec<_>>() }));
        return Ok(ExitCode::SUCCESS);
    }
    describe(&shape, &workload, &cluster, &place);
    tables::print(&SCALING_HEADER, &rows.iter().map(scaling_row).collect::<Vec<_>>());
    println!();
    println!(
        "Share: of the step that tokens are under way while nothing is computed; each next column is with what stands"
    );
    println!("before it too. Hierarchical: once to each node. Overlap: up to 8 chunks. Compression: a byte a number.");
    println!(
        "Matrices cut: all of that with the best of --tp 2, 4, .. in a node, and the share of its sums over cut matrices."
    );
    Ok(ExitCode::SUCCESS)
}

/// Returns the given topology file, or the one that `bench comm` wrote to the current folder.
fn topology_file(args: &PlanArgs) -> Option<PathBuf> {
    let measured = RunConfig::default().parallel.topology;
    args.topology.clone().or_else(|| measured.exists().then_some(measured))
}

fn read_topology(file: &Path) -> Result<Topology, Failure> {
    let shown = file.display();
    let text = std::fs::read_to_string(file).map_err(|error| Failure::input(format!("{shown}: {error}")))?;
    Topology::parse(&text).map_err(|error| Failure::input(format!("{shown}: {error}")))
}

/// Describes this machine by a short measurement of `config`.
fn this_machine(config: &RunConfig, num_ranks: usize) -> Result<Topology, Failure> {
    let machine = environment::machine();
    let speed = tokens_per_second(config, &machine)?;
    let whole = RankSpec {
        flops: speed.tokens_per_s * training_flops_per_token(&config.model, config.train.seq_len),
        memory_bytes: machine_bytes().unwrap_or(UNKNOWN_MEMORY) as f64,
        memory_bytes_per_s: memory_bytes_per_s(config, &machine)?,
    };
    Ok(Topology::one_machine(num_ranks, whole))
}

fn model_shape(config: &RunConfig) -> Result<ModelShape, Failure> {
    let TrainConfig { precision, checkpoint_layers, seq_len, .. } = config.train;
    Ok(shape(&config.model, &config.weight_table()?, seq_len, Kept { precision, checkpoint_layers }))
}

/// Describes a step of `config`.
fn workload(config: &RunConfig, tokens: Tokens) -> Workload {
    Workload {
        tokens,
        precision: config.train.precision,
        zero: config.parallel.zero,
        expert_gradient_bytes: config.train.expert_gradients.bytes(),
    }
}

fn describe(shape: &ModelShape, workload: &Workload, topology: &Topology, place: &str) {
    let nodes = topology.node_sizes.len();
    println!(
        "{} ranks on {nodes} node{}: {place}. {} parameters, {} of them in {} experts in each of {} layers, {} a token; \
         {} tokens a rank.",
        thousands(topology.num_ranks() as u64),
        if nodes == 1 { "" } else { "s" },
        thousands(shape.params()),
        thousands(shape.params() - shape.dense_params),
        shape.num_experts,
        shape.num_moe_layers,
        shape.top_k,
        thousands(workload.tokens.of_group(topology.num_ranks(), 1) as u64),
    );
    println!();
}
