//! The units and the shared links of each rank, at each level of a cluster.

use crate::Cluster;

/// The place of each of the first ranks of a cluster: its unit at each level, and the devices that it shares links
/// with.
#[derive(Clone, Debug)]
pub struct Places<'a> {
    /// The cluster.
    pub cluster: &'a Cluster,
    num_ranks: usize,
    /// The unit of each rank, for each level.
    units: Vec<Vec<u32>>,
    /// The number of each rank within the unit of the level below, for each level; at the innermost one its own unit.
    within: Vec<Vec<u32>>,
}

impl<'a> Places<'a> {
    /// Finds the places of ranks `0..num_ranks`, which the cluster must have.
    #[must_use]
    pub fn new(cluster: &'a Cluster, num_ranks: usize) -> Self {
        let innermost = innermost_units(cluster, num_ranks);
        let mut units = Vec::with_capacity(cluster.levels.len());
        let mut size = 1;
        for (index, level) in cluster.levels.iter().enumerate() {
            size *= if index == 0 { 1 } else { level.size };
            units.push(innermost.iter().map(|&unit| unit / size as u32).collect::<Vec<u32>>());
        }
        let within = (0..units.len()).map(|level| numbers(&units[level.saturating_sub(1)])).collect();
        Self { cluster, num_ranks, units, within }
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn num_ranks(&self) -> usize {
        self.num_ranks
    }

    /// Returns the unit of a rank at a level.
    #[must_use]
    pub fn unit(&self, level: usize, rank: usize) -> usize {
        self.units[level][rank] as usize
    }

    /// Returns the innermost level of which both ranks are in one unit; none if they are the same rank.
    #[must_use]
    pub fn level_between(&self, a: usize, b: usize) -> Option<usize> {
        if a == b { None } else { (0..self.units.len()).find(|&level| self.units[level][a] == self.units[level][b]) }
    }

    /// Returns the first of the ranks that share the links of `rank` at a level, and the rail of `rank` among them.
    pub(super) fn port(&self, level: usize, rank: usize) -> (usize, usize) {
        let within = self.within[level][rank] as usize % self.cluster.levels[level].shared_by;
        (rank - within, within % self.cluster.levels[level].rails)
    }
}

fn innermost_units(cluster: &Cluster, num_ranks: usize) -> Vec<u32> {
    if cluster.node_sizes.is_empty() {
        return (0..num_ranks).map(|rank| (rank / cluster.levels[0].size) as u32).collect();
    }
    let nodes = cluster.node_sizes.iter().zip(0..).flat_map(|(&size, node)| std::iter::repeat_n(node, size));
    nodes.take(num_ranks).collect()
}

/// Returns the number of each element among neighbours of the same unit.
fn numbers(units: &[u32]) -> Vec<u32> {
    let mut number = 0;
    let mut last = None;
    let next = |&unit: &u32| {
        number = if last == Some(unit) { number + 1 } else { 0 };
        last = Some(unit);
        number
    };
    units.iter().map(next).collect()
}
