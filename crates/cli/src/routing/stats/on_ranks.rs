//! The load of ranks and nodes in `moeworks routing stats`, by a placement that is given or that a record has.

use moeworks_infer::routing_record::RecordHeader;
use moeworks_plan::{Nodes, Placement, Placements};
use moeworks_train::routing::{RankLoad, RecordStats};

use crate::args::RoutingStatsArgs;
use crate::failure::Failure;
use crate::model_ranks::read_placements;
use crate::tables;

/// Ranks at most.
const MAX_RANKS: usize = 1 << 16;
/// The loads that a row shows at most.
const SHOWN: usize = 8;

/// Computes the load of ranks and nodes, if they are given or recorded.
pub(super) fn place(args: &RoutingStatsArgs, stats: &mut RecordStats) -> Result<(), Failure> {
    if let Some(ranks) = args.ranks.filter(|ranks| !(1..=MAX_RANKS).contains(ranks)) {
        return Err(Failure::input(format!("--ranks {ranks}: must be from 1 to {MAX_RANKS}")));
    }
    let given = args.placement.as_deref().map(|file| read_placements("--placement", file)).transpose()?;
    let Some(placements) = given.or_else(|| sharded(args, &stats.header)).or_else(|| recorded(&stats.header)) else {
        return match args.nodes {
            Some(nodes) => Err(Failure::input(format!("--nodes {nodes}: needs --ranks or --placement"))),
            None => Ok(()),
        };
    };
    check(args, stats, &placements)?;
    let num_ranks = placements.num_ranks();
    let recorded_nodes = stats.header.ranks_per_node.filter(|_| args.ranks.is_none() && args.placement.is_none());
    let per_node = match args.nodes {
        Some(nodes) if nodes == 0 || !num_ranks.is_multiple_of(nodes) => {
            return Err(Failure::input(format!("--nodes {nodes}: must divide the {num_ranks} ranks")));
        }
        Some(nodes) => num_ranks / nodes,
        None => recorded_nodes.unwrap_or(num_ranks),
    };
    let nodes: Vec<usize> = (0..num_ranks).map(|rank| rank / per_node.max(1)).collect();
    stats.place_on_ranks(&placements, &Nodes::new(&nodes));
    Ok(())
}

fn sharded(args: &RoutingStatsArgs, header: &RecordHeader) -> Option<Placements> {
    args.ranks.map(|ranks| Placement::sharded(header.num_computing, ranks).into())
}

/// Returns the placement with which the record was made.
fn recorded(header: &RecordHeader) -> Option<Placements> {
    header.placement.as_ref()?.parse().ok()
}

/// Refuses a placement of another model or of other ranks than those asked for.
fn check(args: &RoutingStatsArgs, stats: &RecordStats, placements: &Placements) -> Result<(), Failure> {
    let Some(file) = &args.placement else { return Ok(()) };
    let wrong = |problem: String| Err(Failure::input(format!("--placement {}: {problem}", file.display())));
    let (found, expected) = (placements.num_experts(), stats.header.num_computing);
    if found != expected {
        return wrong(format!("is of {found} experts; the record is of {expected}"));
    }
    if let Some(ranks) = args.ranks.filter(|&ranks| ranks != placements.num_ranks()) {
        return wrong(format!("is of {} ranks, not {ranks}", placements.num_ranks()));
    }
    match stats.layers.iter().find(|layer| placements.layer(layer.layer).is_none()) {
        Some(layer) => wrong(format!("has no layer {}, which has experts in the record", layer.layer)),
        None => Ok(()),
    }
}

/// Prints a row for each layer.
pub(super) fn print(stats: &RecordStats) {
    let loads = stats.layers.iter().filter_map(|layer| Some((layer.layer, layer.on_ranks.as_ref()?)));
    let rows: Vec<Vec<String>> = loads.map(|(layer, load)| row(layer, load)).collect();
    let has_nodes = rows.first().is_some_and(|row| row.len() > 3);
    let mut heads = vec!["layer", "imbalance of ranks", "% of the choices by rank"];
    heads.extend(has_nodes.then_some(["imbalance of nodes", "% by node"]).into_iter().flatten());
    tables::print(&heads, &rows);
}

fn row(layer: usize, load: &RankLoad) -> Vec<String> {
    let mut row = vec![layer.to_string(), format!("{:.3}", load.rank_imbalance()), shares(&load.ranks)];
    if load.nodes.len() > 1 {
        row.extend([format!("{:.3}", load.node_imbalance()), shares(&load.nodes)]);
    }
    row
}

/// Lists shares of all choices in percent, the first ones where there are many.
fn shares(loads: &[f64]) -> String {
    let total: f64 = loads.iter().sum();
    let share = |load: &f64| format!("{:.1}", if total > 0.0 { 100.0 * load / total } else { 0.0 });
    let mut shown: Vec<String> = loads.iter().take(SHOWN).map(share).collect();
    if loads.len() > SHOWN {
        shown.push(format!("and {} more", loads.len() - SHOWN));
    }
    shown.join(" ")
}
