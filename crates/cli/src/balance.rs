//! `moeworks balance`: a placement of experts on ranks, by the load that a run recorded.

use std::fs;
use std::path::Path;

use moeworks_infer::store::METRICS_JSONL;
use moeworks_plan::{BalanceError, EplbSizes, Placement, Placements, RankLoads, eplb, improve};
use moeworks_train::metrics::{ExpertLoads, LoadWindow, read_loads};
use serde_json::json;

use crate::args::{BalanceArgs, Policy};
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::page::{Target, write_whole};
use crate::tables;

const PLACEMENT_FILE: &str = "placement.txt";
/// Ranks and slots at most.
const MAX_SIZE: usize = 1 << 16;

/// The outcome in one layer.
struct LayerOutcome {
    layer: usize,
    placement: Placement,
    before: f64,
    after: f64,
    /// Copies of experts on ranks that did not hold them.
    num_moved: usize,
}

pub(crate) fn run(args: &BalanceArgs) -> Result<ExitCode, Failure> {
    for (option, value, least) in
        [("--ranks", args.ranks, 1), ("--nodes", args.nodes, 1), ("--spare", args.spare, 0), ("--last", args.last, 1)]
    {
        if !(least..=MAX_SIZE).contains(&value) {
            return Err(Failure::input(format!("{option} {value}: must be from {least} to {MAX_SIZE}")));
        }
    }
    let window = read_window(args)?;
    let out = args.out.clone().unwrap_or_else(|| args.run.join(PLACEMENT_FILE));
    Target { option: "--out", path: &out, mark: "placement experts=", is_forced: args.force }.check()?;
    let before = args.from.as_deref().map(|file| read_placement(file, args, &window)).transpose()?;
    let outcomes: Vec<LayerOutcome> = window
        .layers
        .iter()
        .map(|loads| balance(args, loads, before.as_ref()).map_err(|error| Failure::input(error.to_string())))
        .collect::<Result<_, _>>()?;
    let placements = Placements::per_layer(outcomes.iter().map(|outcome| (outcome.layer, outcome.placement.clone())));
    write_whole(&out, &placements.to_string())?;
    if args.json {
        print_json(&window, &outcomes, &out);
    } else {
        print_table(&window, &outcomes, &out);
    }
    Ok(ExitCode::SUCCESS)
}

fn read_window(args: &BalanceArgs) -> Result<LoadWindow, Failure> {
    let file = args.run.join(METRICS_JSONL);
    let window = read_loads(&file, args.last).map_err(|error| Failure::input(error.to_string()))?;
    if window.layers.is_empty() {
        let message = format!("{}: has no record of an MoE layer; train a model with experts first", file.display());
        return Err(Failure::input(message));
    }
    Ok(window)
}

/// The placement that is compared with, for the layers and sizes of the run.
fn read_placement(file: &Path, args: &BalanceArgs, window: &LoadWindow) -> Result<Placements, Failure> {
    let as_failure = |problem: String| Failure::input(format!("--from {}: {problem}", file.display()));
    let text = fs::read_to_string(file).map_err(|error| as_failure(error.to_string()))?;
    let placements: Placements = text.parse().map_err(|error| as_failure(format!("{error}")))?;
    for ExpertLoads { layer, tokens_per_expert } in &window.layers {
        let sizes = placements.layer(*layer).map(|placement| (placement.num_experts(), placement.num_ranks()));
        let expected = (tokens_per_expert.len(), args.ranks);
        match sizes {
            None => return Err(as_failure(format!("has no layer {layer}, which has experts in the run"))),
            Some(sizes) if sizes != expected => {
                let ((experts, ranks), (num_experts, num_ranks)) = (sizes, expected);
                let problem =
                    format!("is of {experts} experts on {ranks} ranks; must be of {num_experts} on {num_ranks}");
                return Err(as_failure(problem));
            }
            Some(_) => {}
        }
    }
    Ok(placements)
}

fn balance(args: &BalanceArgs, loads: &ExpertLoads, before: Option<&Placements>) -> Result<LayerOutcome, BalanceError> {
    let (num_experts, num_ranks) = (loads.tokens_per_expert.len(), args.ranks);
    let expert_loads: Vec<f64> = loads.tokens_per_expert.iter().map(|&count| count as f64).collect();
    let sharded = || Placement::sharded(num_experts, num_ranks);
    let old = before.and_then(|placements| placements.layer(loads.layer).cloned()).unwrap_or_else(sharded);
    // Experts that do not divide over the ranks leave slots over, which are filled as well.
    let num_slots = (num_experts + args.spare).next_multiple_of(num_ranks);
    let placement = match args.policy {
        Policy::Eplb => {
            let sizes = EplbSizes { num_slots, num_groups: args.groups, num_nodes: args.nodes, num_ranks };
            eplb(&expert_loads, sizes)?
        }
        Policy::Moves => improve(&old, &expert_loads, num_slots / num_ranks, args.moves)?.0,
    };
    let imbalance = |placement: &Placement| RankLoads::new(placement, &expert_loads).map(|loads| loads.imbalance());
    let moved = |expert| placement.ranks_of(expert).iter().filter(|&&rank| !old.holds(rank, expert)).count();
    let num_moved = (0..num_experts).map(moved).sum();
    let (before, after) = (imbalance(&old)?, imbalance(&placement)?);
    Ok(LayerOutcome { layer: loads.layer, placement, before, after, num_moved })
}

fn mean(outcomes: &[LayerOutcome], value: impl Fn(&LayerOutcome) -> f64) -> f64 {
    outcomes.iter().map(value).sum::<f64>() / outcomes.len() as f64
}

fn print_table(window: &LoadWindow, outcomes: &[LayerOutcome], out: &Path) {
    let LoadWindow { last_step, num_steps, .. } = window;
    println!(
        "Load of the last {num_steps} steps up to step {last_step}; imbalance is the largest rank's load over the mean, less 1"
    );
    let row = |outcome: &LayerOutcome| {
        let figures =
            [format!("{:.3}", outcome.before), format!("{:.3}", outcome.after), outcome.num_moved.to_string()];
        [vec![outcome.layer.to_string()], figures.to_vec()].concat()
    };
    let rows: Vec<Vec<String>> = outcomes.iter().map(row).collect();
    tables::print(&["layer", "before", "after", "experts to copy"], &rows);
    let (before, after) = (mean(outcomes, |outcome| outcome.before), mean(outcomes, |outcome| outcome.after));
    println!("Mean imbalance {before:.3} before, {after:.3} after: {}", out.display());
}

fn print_json(window: &LoadWindow, outcomes: &[LayerOutcome], out: &Path) {
    let layer = |outcome: &LayerOutcome| {
        json!({
            "layer": outcome.layer,
            "imbalance_before": outcome.before,
            "imbalance_after": outcome.after,
            "experts_to_copy": outcome.num_moved,
        })
    };
    let layers: Vec<_> = outcomes.iter().map(layer).collect();
    let value = json!({
        "last_step": window.last_step,
        "steps": window.num_steps,
        "layers": layers,
        "imbalance_before": mean(outcomes, |outcome| outcome.before),
        "imbalance_after": mean(outcomes, |outcome| outcome.after),
        "placement": out.display().to_string(),
    });
    println!("{value:#}");
}
