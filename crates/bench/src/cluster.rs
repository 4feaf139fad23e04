//! Times of all collectives by size among all ranks, inside a node and between nodes, and the topology derived from
//! them.

use moeworks_comm::mpi::RawMpi;
use moeworks_comm::{CommError, Communicator, Reduce, cores_by_numa_node};
use moeworks_ops::linear::linear;
use moeworks_ops::{Context, MachineOptions, peak};
use moeworks_plan::{Link, Nodes, RankSpec, Topology};
use moeworks_tensor::{DType, Tensor};
use moeworks_train::machine_bytes;
use serde_json::{Value, json};

use crate::collectives::{self, Collective, Links, Timing};
use crate::ranks::num_cores;
use crate::timing::best_seconds_of_many;

/// The numbers of bytes that each rank holds in the cases.
pub const SIZES: [usize; 6] = [64, 1 << 10, 16 << 10, 256 << 10, 4 << 20, 64 << 20];

/// The memory assumed for a machine that does not report its own.
const UNKNOWN_MEMORY: u64 = 8 << 30;

/// The ranks that are measured together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Among {
    /// All ranks.
    All,
    /// The ranks of a node, on all nodes at the same time.
    Node,
    /// One rank of each node; all such groups at the same time.
    Nodes,
}

impl Among {
    /// All variants, in the order of a table.
    pub const EVERY: [Self; 3] = [Self::All, Self::Node, Self::Nodes];

    /// Returns the name that tables print.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::All => "all ranks",
            Self::Node => "the ranks of a node",
            Self::Nodes => "a rank of each node",
        }
    }
}

/// The times of one collective among some ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TimingAmong {
    /// The ranks of the measurement.
    pub among: Among,
    /// The measured times.
    pub timing: Timing,
}

/// The times of a cluster's collectives and links.
#[derive(Clone, Debug)]
pub struct ClusterTimes {
    /// `threads`, or the MPI library with its version.
    pub kind: String,
    /// The number of ranks.
    pub num_ranks: usize,
    /// Every case.
    pub timings: Vec<TimingAmong>,
    /// The links inside a node and between nodes.
    pub links: Links,
    /// The topology that `plan` reads.
    pub topology: Topology,
}

/// Times every collective with all of [`SIZES`] up to `max_bytes`, and the links. All ranks must call it; rank 0 gets
/// the times.
///
/// # Errors
/// [`CommError`], as all calls.
pub fn measure(
    comm: &dyn Communicator,
    raw: Option<&RawMpi>,
    max_bytes: usize,
    machine: &MachineOptions,
) -> Result<Option<ClusterTimes>, CommError> {
    let mut timings = time_sizes(comm, Among::All, raw, max_bytes)?;
    let grid = Nodes::new(comm.nodes());
    let (node, place) = (grid.of(comm.rank()), grid.place(comm.rank()));
    if grid.num() > 1 && grid.num() < comm.size() {
        for (among, color) in [(Among::Node, node), (Among::Nodes, place)] {
            let color = u32::try_from(color).expect("fewer nodes and ranks than 2^32");
            let raw = raw.map(|raw| raw.split(color, comm.rank()));
            if let Some(part) = comm.split(Some(color), comm.rank())? {
                timings.extend(time_sizes(&*part, among, raw.as_ref(), max_bytes)?);
            }
            comm.barrier()?;
        }
    }
    let links = collectives::links(comm)?;
    let topology = topology(comm, &links, machine)?;
    let kind = raw.map_or_else(|| "threads".to_owned(), RawMpi::version);
    Ok((comm.rank() == 0).then_some(ClusterTimes { kind, num_ranks: comm.size(), timings, links, topology }))
}

/// Times every collective with every size among the ranks of `comm`.
fn time_sizes(
    comm: &dyn Communicator,
    among: Among,
    raw: Option<&RawMpi>,
    max_bytes: usize,
) -> Result<Vec<TimingAmong>, CommError> {
    let mut timings = vec![TimingAmong { among, timing: collectives::time(comm, raw, Collective::Barrier, 0)? }];
    for &collective in &Collective::ALL[1..] {
        for bytes in SIZES.into_iter().filter(|&bytes| bytes <= max_bytes) {
            timings.push(TimingAmong { among, timing: collectives::time(comm, raw, collective, bytes)? });
        }
    }
    Ok(timings)
}

/// Measures the rates of a rank while all ranks compute, and combines them with the links into a topology.
fn topology(comm: &dyn Communicator, links: &Links, machine: &MachineOptions) -> Result<Topology, CommError> {
    let nodes = comm.nodes();
    let num_nodes = nodes.iter().max().map_or(0, |last| last + 1);
    let size_of = |node: usize| nodes.iter().filter(|&&other| other == node).count();
    let node_sizes: Vec<usize> = (0..num_nodes).map(size_of).collect();
    let largest = node_sizes.iter().copied().max().unwrap_or(1);
    let cores = num_cores();
    let ctx = Context::cpu((cores / largest).max(1)).on_machine(machine);
    comm.barrier()?;
    let mut rates = [
        product_rate(&ctx),
        peak::measure(&ctx).read_bytes_per_s,
        machine_bytes().unwrap_or(UNKNOWN_MEMORY) as f64 / largest as f64,
    ];
    comm.all_reduce(&mut rates, Reduce::Min)?;
    let rank = RankSpec { flops: rates[0], memory_bytes: rates[2], memory_bytes_per_s: rates[1] };
    // A missing kind of link is assumed to be as fast as the other.
    let any = links.node.or(links.cluster).unwrap_or(Link { latency_s: 1e-6, bytes_per_s: rates[1] / 2.0 });
    let (node_link, cluster_link) = (links.node.unwrap_or(any), links.cluster.unwrap_or(any));
    Ok(Topology { node_sizes, rank, node_link, cluster_link, numa_cores: cores_by_numa_node() })
}

/// Returns floating-point operations per second of a GEMM of a model's size.
fn product_rate(ctx: &Context) -> f64 {
    let (rows, width) = (512, 512);
    let x = Tensor::zeros(ctx.pool(), &[rows, width], DType::F32);
    let w = Tensor::zeros(ctx.pool(), &[width, width], DType::F32);
    let seconds = best_seconds_of_many(ctx, || drop(linear(ctx, &x, &w, DType::F32)));
    2.0 * (rows * width * width) as f64 / seconds
}

impl ClusterTimes {
    /// Returns the times and links as JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        let link = |link: Option<Link>| link.map(|link| json!([link.latency_s, link.bytes_per_s]));
        let cases: Vec<Value> = self
            .timings
            .iter()
            .map(|TimingAmong { among, timing }| {
                json!({
                    "among": among.name(), "collective": format!("{:?}", timing.collective), "bytes": timing.bytes, "seconds": timing.seconds,
                    "raw_seconds": timing.raw_seconds, "copy_seconds": timing.copy_seconds,
                })
            })
            .collect();
        json!({
            "kind": self.kind, "ranks": self.num_ranks, "cases": cases,
            "node_link": link(self.links.node), "cluster_link": link(self.links.cluster),
        })
    }
}

#[cfg(test)]
mod tests {
    use moeworks_comm::{RankOptions, try_run_ranks};

    use super::*;
    use crate::ranks::TIMEOUT;

    #[test]
    fn where_there_are_nodes_each_is_measured_and_what_is_between_them() {
        let options = RankOptions::new(0).with_nodes(&[0, 0, 1, 1, 1]).with_timeout(TIMEOUT);
        let measured =
            try_run_ranks(&options, |comm| measure(comm, None, 64, &MachineOptions::default())).expect("ranks talk");
        let measured = measured.into_iter().flatten().next().expect("rank 0 knows");
        for among in Among::EVERY {
            let timings = measured.timings.iter().filter(|case| case.among == among);
            assert_eq!(timings.count(), Collective::ALL.len(), "{}", among.name());
        }
        assert!(measured.links.cluster.is_some());
        assert_eq!(measured.topology.node_sizes, [2, 3]);
    }
}
