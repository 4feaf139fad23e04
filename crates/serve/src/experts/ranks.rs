//! The ranks of experts, before any has moved and now.

use std::collections::BTreeSet;

use moeworks_plan::{Nodes, Placement, Placements, RankLoads};

use super::LayerLoad;

/// The ranks of experts while texts are served.
#[derive(Clone, Debug, PartialEq)]
pub struct RankLoad {
    /// The placements with which the server began.
    pub first: Placements,
    /// The placements in force.
    pub now: Placements,
    /// Copies of experts that have travelled.
    pub num_copies: u64,
    /// The experts that have moved, with their layers.
    pub moved: BTreeSet<(usize, usize)>,
    /// The load of each layer's experts by which the last decision was made; empty before the first.
    pub window: Vec<Vec<u64>>,
    /// The nodes of the ranks.
    pub nodes: Nodes,
}

/// The load of a layer's ranks by one placement.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadOfRanks {
    /// `[ranks]`: tokens of the experts of each rank; replicas share an expert's evenly.
    pub ranks: Vec<f64>,
    /// `[nodes]`: tokens of the ranks of each node.
    pub nodes: Vec<f64>,
}

impl RankLoad {
    /// Creates the ranks, on `nodes`, of experts that are where `placements` say.
    #[must_use]
    pub fn new(placements: Placements, nodes: Nodes) -> Self {
        let (first, moved, window) = (placements.clone(), BTreeSet::new(), Vec::new());
        Self { first, now: placements, num_copies: 0, moved, window, nodes }
    }

    /// Returns the load of the ranks of a layer, which has `place` MoE layers before it, by the placement in force:
    /// that of the last decision, or of all tokens before the first.
    #[must_use]
    pub fn of_layer(&self, place: usize, load: &LayerLoad) -> Option<LoadOfRanks> {
        let loads = self.loads(&self.now, place, load)?;
        let of_node = |ranks: &Vec<usize>| ranks.iter().map(|&rank| loads.loads()[rank]).sum();
        Some(LoadOfRanks { nodes: self.nodes.ranks().iter().map(of_node).collect(), ranks: loads.loads().to_vec() })
    }

    fn loads(&self, placements: &Placements, place: usize, load: &LayerLoad) -> Option<RankLoads> {
        let placement = placements.layer(load.layer)?;
        let counts = self.window.get(place).unwrap_or(&load.tokens_per_expert);
        let counts: Vec<f64> = counts.iter().take(placement.num_experts()).map(|&count| count as f64).collect();
        RankLoads::new(placement, &counts).ok()
    }

    pub(super) fn moved(&mut self, layer: usize, placement: &Placement, experts: impl Iterator<Item = usize>) {
        for expert in experts {
            self.moved.insert((layer, expert));
            self.num_copies += 1;
        }
        let now = |number: usize| {
            let of_layer = if number == layer { Some(placement) } else { self.now.layer(number) };
            Some((number, of_layer?.clone()))
        };
        self.now = Placements::per_layer(self.now.layers().into_iter().filter_map(now));
    }

    /// Returns the mean load over the highest load of ranks, as the mean of all layers, by the first placements and
    /// by those in force. The load is that of the last decision, or of all tokens before the first.
    #[must_use]
    pub fn balancedness(&self, layers: &[LayerLoad]) -> [f64; 2] {
        [&self.first, &self.now].map(|placements| {
            let of_layer = |(place, load): (usize, &LayerLoad)| {
                Some(1.0 / (1.0 + self.loads(placements, place, load)?.imbalance()))
            };
            let found: Vec<f64> = layers.iter().enumerate().filter_map(of_layer).collect();
            if found.is_empty() { 1.0 } else { found.iter().sum::<f64>() / found.len() as f64 }
        })
    }

    /// Counts the copies of experts beyond the first of each, over all layers.
    #[must_use]
    pub fn num_replicas(&self) -> usize {
        let extra = |placement: &Placement| {
            (0..placement.num_experts()).map(|expert| placement.ranks_of(expert).len() - 1).sum::<usize>()
        };
        self.now.layers().into_iter().filter_map(|layer| self.now.layer(layer)).map(extra).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn balancedness_is_told_by_the_first_placement_and_by_that_in_force() {
        let first = Placement::sharded(4, 2);
        let mut ranks = RankLoad::new(Placements::per_layer([(3, first)]), Nodes::new(&[0, 1]));
        let load = LayerLoad { layer: 3, num_tokens: 8, tokens_per_expert: vec![6, 6, 2, 2] };
        assert_eq!(ranks.balancedness(std::slice::from_ref(&load)), [8.0 / 12.0; 2]);
        let now = "placement experts=4 ranks=2\n0: 0\n1: 1\n2: 0\n3: 0 1\n".parse().unwrap();
        ranks.moved(3, &now, [1, 2, 3].into_iter());
        assert_eq!(ranks.balancedness(std::slice::from_ref(&load)), [8.0 / 12.0, 8.0 / 9.0]);
        assert_eq!((ranks.num_copies, ranks.moved.len(), ranks.num_replicas()), (3, 3, 1));
        let expected = LoadOfRanks { ranks: vec![9.0, 7.0], nodes: vec![9.0, 7.0] };
        assert_eq!(ranks.of_layer(0, &load), Some(expected));
        ranks.window = vec![vec![1, 0, 0, 0]];
        assert_eq!(ranks.balancedness(&[load]), [0.5; 2]);
    }
}
