//! `moeworks balance`: a placement of experts on ranks, by the load that a run or a record has.

mod loads;
mod print;

use std::fs;
use std::path::Path;

use moeworks_plan::{
    BalanceError, BeamOptions, Coactivation, EplbSizes, NodeSizes, Placement, Placements, RankLoads, SplitOptions,
    eplb, improve, improve_by_beam, place_by_coactivation, split_rows,
};
use moeworks_train::metrics::ExpertLoads;

use self::loads::Loads;
use crate::args::{BalanceArgs, Policy};
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::page::{Target, write_whole};

const PLACEMENT_FILE: &str = "placement.txt";
/// Ranks and slots at most.
const MAX_SIZE: usize = 1 << 16;
/// The load of a node over the mean at most, less 1, that placing by co-activation allows.
const MAX_NODE_EXCESS: f64 = 0.1;

/// A figure before and after.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Change {
    before: f64,
    after: f64,
}

/// The outcome in one layer.
struct LayerOutcome {
    layer: usize,
    placement: Placement,
    /// The imbalance of the load of all steps together.
    imbalance: Change,
    /// The mean of the imbalances of single steps, where they are recorded.
    of_steps: Option<Change>,
    /// The mean imbalance of single steps under the new placement with rows shared out in each.
    with_split: Option<f64>,
    /// The share of pairs of experts that a node holds, where pairs are recorded.
    in_node: Option<Change>,
    /// Copies of experts on ranks that did not hold them.
    num_moved: usize,
}

pub(crate) fn run(args: &BalanceArgs) -> Result<ExitCode, Failure> {
    for (option, value, least) in [
        ("--ranks", args.ranks, 1),
        ("--nodes", args.nodes, 1),
        ("--spare", args.spare, 0),
        ("--last", args.last, 1),
        ("--beam", args.beam, 1),
    ] {
        if !(least..=MAX_SIZE).contains(&value) {
            return Err(Failure::input(format!("{option} {value}: must be from {least} to {MAX_SIZE}")));
        }
    }
    let loads = Loads::read(args)?;
    let out = args.out.clone().unwrap_or_else(|| default_out(&args.run));
    Target { option: "--out", path: &out, mark: "placement experts=", is_forced: args.force }.check()?;
    let before = args.from.as_deref().map(|file| read_placement(file, args, &loads)).transpose()?;
    let outcomes: Vec<LayerOutcome> = (0..loads.window.layers.len())
        .map(|at| balance(args, &loads, at, before.as_ref()).map_err(|error| Failure::input(error.to_string())))
        .collect::<Result<_, _>>()?;
    let placements = Placements::per_layer(outcomes.iter().map(|outcome| (outcome.layer, outcome.placement.clone())));
    write_whole(&out, &placements.to_string())?;
    if args.json {
        print::json(&loads, &outcomes, &out);
    } else {
        print::table(&loads, &outcomes, &out);
    }
    Ok(ExitCode::SUCCESS)
}

/// The placement's file in a run, or beside a record.
fn default_out(run: &Path) -> std::path::PathBuf {
    if run.is_file() { run.with_file_name(PLACEMENT_FILE) } else { run.join(PLACEMENT_FILE) }
}

/// The placement that is compared with, for the layers and sizes of the run.
fn read_placement(file: &Path, args: &BalanceArgs, loads: &Loads) -> Result<Placements, Failure> {
    let as_failure = |problem: String| Failure::input(format!("--from {}: {problem}", file.display()));
    let text = fs::read_to_string(file).map_err(|error| as_failure(error.to_string()))?;
    let placements: Placements = text.parse().map_err(|error| as_failure(format!("{error}")))?;
    for ExpertLoads { layer, tokens_per_expert } in &loads.window.layers {
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

fn as_loads(counts: &[u64]) -> Vec<f64> {
    counts.iter().map(|&count| count as f64).collect()
}

fn balance(
    args: &BalanceArgs,
    loads: &Loads,
    at: usize,
    before: Option<&Placements>,
) -> Result<LayerOutcome, BalanceError> {
    let ExpertLoads { layer, tokens_per_expert } = &loads.window.layers[at];
    let (num_experts, num_ranks) = (tokens_per_expert.len(), args.ranks);
    let expert_loads = as_loads(tokens_per_expert);
    let sharded = || Placement::sharded(num_experts, num_ranks);
    let old = before.and_then(|placements| placements.layer(*layer).cloned()).unwrap_or_else(sharded);
    let pairs = loads.pairs.get(at);
    let placement = place(args, &expert_loads, &old, pairs)?;
    let moved = |expert| placement.ranks_of(expert).iter().filter(|&&rank| !old.holds(rank, expert)).count();
    let imbalance = |placement: &Placement| RankLoads::new(placement, &expert_loads).map(|loads| loads.imbalance());
    let steps: Vec<&[u64]> = loads.steps.iter().map(|step| &step[at][..]).collect();
    let ranks_per_node = num_ranks / args.nodes.min(num_ranks);
    let in_node = |pairs: &Coactivation, placement: &Placement| pairs.in_node_share(placement, ranks_per_node);
    let with_pairs = pairs.filter(|_| args.nodes > 1);
    Ok(LayerOutcome {
        layer: *layer,
        imbalance: Change { before: imbalance(&old)?, after: imbalance(&placement)? },
        of_steps: mean_of_steps(&old, &steps)?
            .zip(mean_of_steps(&placement, &steps)?)
            .map(|(before, after)| Change { before, after }),
        with_split: if args.split_rows { mean_with_split(&placement, &steps)? } else { None },
        in_node: with_pairs.map(|pairs| Change { before: in_node(pairs, &old), after: in_node(pairs, &placement) }),
        num_moved: (0..num_experts).map(moved).sum(),
        placement,
    })
}

/// Finds the placement of a layer by the policy.
fn place(
    args: &BalanceArgs,
    expert_loads: &[f64],
    old: &Placement,
    pairs: Option<&Coactivation>,
) -> Result<Placement, BalanceError> {
    let num_ranks = args.ranks;
    // Experts that do not divide over the ranks leave slots over, which are filled as well.
    let num_slots = (expert_loads.len() + args.spare).next_multiple_of(num_ranks);
    let slots_per_rank = num_slots / num_ranks;
    match args.policy {
        Policy::Eplb => {
            let sizes = EplbSizes { num_slots, num_groups: args.groups, num_nodes: args.nodes, num_ranks };
            eplb(expert_loads, sizes)
        }
        Policy::Moves => improve(old, expert_loads, slots_per_rank, args.moves).map(|(placement, _)| placement),
        Policy::Beam => {
            let options = BeamOptions { slots_per_rank, max_moves: args.moves, width: args.beam };
            improve_by_beam(old, expert_loads, options).map(|(placement, _)| placement)
        }
        Policy::Coactivation => {
            let sizes = NodeSizes { num_ranks, num_nodes: args.nodes, slots_per_rank, max_excess: MAX_NODE_EXCESS };
            let none = Coactivation::new(expert_loads.len());
            place_by_coactivation(expert_loads, pairs.unwrap_or(&none), sizes)
        }
    }
}

/// Returns the mean imbalance of single steps; none without a step with load.
fn mean_of_steps(placement: &Placement, steps: &[&[u64]]) -> Result<Option<f64>, BalanceError> {
    mean(steps, |rows| Ok(RankLoads::new(placement, &as_loads(rows))?.imbalance()))
}

/// Returns the mean imbalance of single steps in which rows of hot experts are shared out.
fn mean_with_split(placement: &Placement, steps: &[&[u64]]) -> Result<Option<f64>, BalanceError> {
    mean(steps, |rows| Ok(split_rows(placement, rows, SplitOptions::default())?.imbalance()))
}

fn mean(steps: &[&[u64]], figure: impl Fn(&[u64]) -> Result<f64, BalanceError>) -> Result<Option<f64>, BalanceError> {
    let steps: Vec<&&[u64]> = steps.iter().filter(|rows| rows.iter().any(|&count| count > 0)).collect();
    let sum = steps.iter().map(|rows| figure(rows)).sum::<Result<f64, _>>()?;
    Ok((!steps.is_empty()).then(|| sum / steps.len() as f64))
}
