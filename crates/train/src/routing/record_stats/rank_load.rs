//! The load of ranks and nodes by a placement of the recorded experts.

use moeworks_plan::{Nodes, Placements, RankLoads};

use super::RecordStats;

/// The load of the ranks and nodes that compute a layer's experts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankLoad {
    /// `[ranks]`: choices that each rank computes.
    pub ranks: Vec<f64>,
    /// `[nodes]`: choices that the ranks of each node compute.
    pub nodes: Vec<f64>,
}

impl RankLoad {
    /// Returns the largest load of a rank over the mean, less 1.
    #[must_use]
    pub fn rank_imbalance(&self) -> f64 {
        imbalance(&self.ranks)
    }

    /// Returns the largest load of a node over the mean, less 1.
    #[must_use]
    pub fn node_imbalance(&self) -> f64 {
        imbalance(&self.nodes)
    }
}

fn imbalance(loads: &[f64]) -> f64 {
    let mean = loads.iter().sum::<f64>() / loads.len().max(1) as f64;
    if mean > 0.0 { loads.iter().copied().fold(0.0, f64::max) / mean - 1.0 } else { 0.0 }
}

impl RecordStats {
    /// Adds the load of ranks on `nodes` that hold the experts by `placements`. Experts that compute nothing are on
    /// no rank. Layers without a placement of that many ranks and experts are left out.
    pub fn place_on_ranks(&mut self, placements: &Placements, nodes: &Nodes) {
        for layer in &mut self.layers {
            let placement =
                placements.layer(layer.layer).filter(|placement| placement.num_ranks() == nodes.num_ranks());
            let Some(placement) = placement else { continue };
            let loads: Vec<f64> = layer.chosen.iter().take(placement.num_experts()).map(|&load| load as f64).collect();
            layer.on_ranks = RankLoads::by_source(placement, &loads, nodes).ok().map(|loads| RankLoad {
                nodes: nodes.ranks().iter().map(|ranks| ranks.iter().map(|&rank| loads.loads()[rank]).sum()).collect(),
                ranks: loads.loads().to_vec(),
            });
        }
    }
}
