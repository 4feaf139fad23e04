//! The links between the processes of a run, measured for a moment.

use moeworks_comm::{CommError, Communicator, Reduce};
use moeworks_plan::{Link, RankSpec, Topology};

use crate::parallel::time_all_to_all;

/// Bytes that each rank sends each other one.
const BYTES: usize = 1 << 18;
/// The latency assumed where there is nobody to send to.
const LATENCY_S: f64 = 5e-6;

/// Returns the cluster of the ranks of `comm`: their nodes, the speed and memory of the slowest of them, and the
/// links as measured. `own` is this rank's speed and memory. All ranks call this, and have the same result.
///
/// # Errors
/// If a rank died or hangs.
pub fn measured_topology(comm: &dyn Communicator, own: RankSpec) -> Result<Topology, CommError> {
    let (nodes, rank) = (comm.nodes(), comm.rank());
    let num_nodes = nodes.iter().max().map_or(1, |last| last + 1);
    let size_of = |node: usize| nodes.iter().filter(|&&of| of == node).count();
    let node_sizes: Vec<usize> = (0..num_nodes).map(size_of).collect();
    let mut slowest = [own.flops, own.memory_bytes, own.memory_bytes_per_s];
    comm.all_reduce(&mut slowest, Reduce::Min)?;
    let [flops, memory_bytes, memory_bytes_per_s] = slowest;
    let node = comm.split(Some(nodes[rank] as u32), rank)?.expect("a rank with a color is in a group");
    let copy = Link { latency_s: LATENCY_S, bytes_per_s: memory_bytes_per_s / 2.0 };
    let mut links = [measured(&*node, node.size() - 1)?.unwrap_or(copy); 2];
    if num_nodes > 1 {
        links[1] = measured(comm, comm.size() - node.size())?.unwrap_or(copy);
    }
    // The slowest of all nodes.
    let mut figures = links.map(|link| [link.latency_s, -link.bytes_per_s]).concat();
    comm.all_reduce(&mut figures, Reduce::Max)?;
    let link = |at: usize| Link { latency_s: figures[at], bytes_per_s: -figures[at + 1] };
    let rank = RankSpec { flops, memory_bytes, memory_bytes_per_s };
    Ok(Topology { node_sizes, rank, node_link: link(0), cluster_link: link(2), numa_cores: Vec::new() })
}

/// Measures the link of a rank to `num_far` of the ranks of `comm` while all send to all; none without any.
fn measured(comm: &dyn Communicator, num_far: usize) -> Result<Option<Link>, CommError> {
    if num_far == 0 || comm.size() < 2 {
        return Ok(None);
    }
    let small = time_all_to_all(comm, comm, 1)?;
    let large = time_all_to_all(comm, comm, BYTES)?;
    let bytes_per_s = (BYTES * num_far) as f64 / (large - small).max(1e-9);
    Ok(Some(Link { latency_s: small / (comm.size() - 1) as f64, bytes_per_s }))
}
