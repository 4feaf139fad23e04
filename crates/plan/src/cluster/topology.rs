//! Clusters from topologies of two levels, and back.

use super::{Cluster, ClusterError, Device, Level};
use crate::{Link, Precision, RankSpec, Topology};

impl From<&Topology> for Cluster {
    /// Makes the cluster of two levels, or of one if there is one node, on which all costs are those of the topology:
    /// a message takes its link's latency for itself, and each rank has links of its own.
    fn from(topology: &Topology) -> Self {
        let RankSpec { flops, memory_bytes, memory_bytes_per_s } = topology.rank;
        let device = Device {
            name: "rank".to_owned(),
            f32_flops: flops,
            bf16_flops: flops,
            fp8_flops: flops,
            efficiency: 1.0,
            fp8_efficiency: None,
            attention_efficiency: None,
            memory_bytes,
            memory_bytes_per_s,
            memory_efficiency: 1.0,
            price_per_hour: None,
            watts: None,
        };
        let largest = topology.node_sizes.iter().copied().max().unwrap_or(1);
        let is_even = topology.node_sizes.iter().all(|&size| size == largest);
        let level = |name, size, link: Link| Level {
            message_s: link.latency_s,
            ..Level::new(name, size, 0.0, link.bytes_per_s)
        };
        let levels = vec![
            level("node", largest, topology.node_link),
            level("cluster", topology.node_sizes.len().max(1), topology.cluster_link),
        ];
        let node_sizes = if is_even { Vec::new() } else { topology.node_sizes.clone() };
        Self { name: "topology".to_owned(), device, levels, node_sizes, machine: None }
    }
}

impl Cluster {
    /// Returns the topology of two levels whose links are the share of one rank while all ranks send. Fails if the
    /// cluster has more levels; of one level it is one node.
    pub fn to_topology(&self, precision: Precision) -> Result<Topology, ClusterError> {
        let (inner, outer) = match &self.levels[..] {
            [only] => (only, None),
            [inner, outer] => (inner, Some(outer)),
            levels => return Err(ClusterError::Levels { name: self.name.clone(), levels: levels.len() }),
        };
        let link = |level: &Level| Link {
            latency_s: level.latency_s + level.message_s,
            bytes_per_s: level.share_bytes_per_s(),
        };
        let num_nodes = outer.map_or(1, |outer| outer.size);
        Ok(Topology {
            node_sizes: if self.node_sizes.is_empty() { vec![inner.size; num_nodes] } else { self.node_sizes.clone() },
            rank: RankSpec {
                flops: self.device.flops(precision),
                memory_bytes: self.device.memory_bytes,
                memory_bytes_per_s: self.device.memory_rate(),
            },
            node_link: link(inner),
            cluster_link: link(outer.unwrap_or(inner)),
            numa_cores: Vec::new(),
        })
    }
}
