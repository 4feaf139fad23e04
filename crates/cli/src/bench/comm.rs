//! `moeworks bench comm`: how long each collective takes by size, among threads of this process or, under an MPI launcher,
//! among its processes, beside a copy in memory and the library's own call; and the links, written as a topology.

use moeworks_comm::measure::{self, Collective, Links, Timing};
use moeworks_comm::mpi::{MpiOptions, RawMpi, is_launched, run_mpi};
use moeworks_comm::{CommError, Communicator, RankOptions, Reduce, cores_by_numa_node, try_run_ranks};
use moeworks_ops::linear::linear;
use moeworks_ops::measure::best_seconds_of_many;
use moeworks_ops::{Context, peak};
use moeworks_plan::{Link, Nodes, RankSpec, Topology};
use moeworks_tensor::{DType, Tensor};
use moeworks_train::measure::machine_bytes;
use serde_json::{Value, json};

use crate::args::CommArgs;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::page::{Target, write_whole};
use crate::ranks::{MAX_THREADS, too_many_ranks};
use crate::tables;

/// Bytes that each rank holds.
const SIZES: [usize; 6] = [64, 1 << 10, 16 << 10, 256 << 10, 4 << 20, 64 << 20];

/// How long ranks wait for each other: on a busy machine some measure much longer.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(300);

/// Memory of a machine that does not say.
const UNKNOWN_MEMORY: u64 = 8 << 30;

const HEADER: [&str; 7] = ["collective", "bytes", "µs", "GB/s", "of a copy", "MPI's own, µs", "of MPI's own"];

/// Ranks that are measured together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Among {
    /// All of them.
    All,
    /// Those of a node, on all nodes at the same time.
    Node,
    /// One of each node, and at the same time all the others so.
    Nodes,
}

impl Among {
    const EVERY: [Self; 3] = [Self::All, Self::Node, Self::Nodes];

    fn name(self) -> &'static str {
        match self {
            Self::All => "all ranks",
            Self::Node => "the ranks of a node",
            Self::Nodes => "a rank of each node",
        }
    }
}

/// What rank 0 has learnt.
struct Measured {
    kind: String,
    num_ranks: usize,
    timings: Vec<(Among, Timing)>,
    links: Links,
    topology: Topology,
}

/// The first line of a topology file that this program writes.
const MARK: &str = "# Measured by `moeworks bench comm`";

pub(super) fn run(args: &CommArgs) -> Result<ExitCode, Failure> {
    Target { option: "--topology", path: &args.topology, mark: MARK, is_forced: args.force }.check()?;
    if args.max_bytes < SIZES[0] {
        return Err(Failure::input(format!("--max-bytes {}: must be at least {}", args.max_bytes, SIZES[0])));
    }
    let measured = on_ranks(args.ranks, |comm| {
        let raw = is_launched().then(RawMpi::of_run).transpose().map_err(CommError::from)?;
        measure_all(comm, raw.as_ref(), args.max_bytes)
    })?;
    let Some(measured) = measured else { return Ok(ExitCode::SUCCESS) };
    write_whole(&args.topology, &topology_file(&measured))?;
    if args.json {
        println!("{:#}", measured.json());
    } else {
        measured.print();
        println!("\nwritten: {}", args.topology.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// What rank 0 makes of `work`, which all ranks do: the processes of an MPI launcher, or so many threads, with 0 one for each core
/// and at least two.
pub(super) fn on_ranks<T: Send>(
    num_ranks: usize,
    work: impl Fn(&dyn Communicator) -> Result<Option<T>, CommError> + Sync,
) -> Result<Option<T>, Failure> {
    if is_launched() {
        if num_ranks > 0 {
            return Err(Failure::input("--ranks: the processes that the launcher started are the ranks; leave it out"));
        }
        let report = |rank: usize, error: &dyn std::fmt::Display| eprintln!("moeworks: rank {rank}: {error}");
        // As it is used where speed counts, also in a debug build: without comparing calls first.
        let options = MpiOptions::default().with_checks(false).with_timeout(PATIENCE);
        return Ok(run_mpi(&options, report, work)?);
    }
    if num_ranks > MAX_THREADS {
        return Err(Failure::input(format!("--ranks {num_ranks}: {}", too_many_ranks())));
    }
    let num_ranks = if num_ranks == 0 { num_cores().max(2) } else { num_ranks };
    let results = try_run_ranks(&RankOptions::new(num_ranks).with_timeout(PATIENCE), work)?;
    Ok(results.into_iter().flatten().next())
}

/// The cores that this process may use.
pub(super) fn num_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn measure_all(comm: &dyn Communicator, raw: Option<&RawMpi>, max_bytes: usize) -> Result<Option<Measured>, CommError> {
    let mut timings = of_sizes((comm, Among::All), raw, max_bytes)?;
    let grid = Nodes::new(comm.nodes());
    let (node, place) = (grid.of(comm.rank()), grid.place(comm.rank()));
    if grid.num() > 1 && grid.num() < comm.size() {
        for (among, color) in [(Among::Node, node), (Among::Nodes, place)] {
            let color = u32::try_from(color).expect("fewer nodes and ranks than 2^32");
            let raw = raw.map(|raw| raw.split(color, comm.rank()));
            if let Some(part) = comm.split(Some(color), comm.rank())? {
                timings.extend(of_sizes((&*part, among), raw.as_ref(), max_bytes)?);
            }
            comm.barrier()?;
        }
    }
    let links = measure::links(comm)?;
    let topology = topology(comm, &links)?;
    let kind = raw.map_or_else(|| "threads".to_owned(), RawMpi::version);
    Ok((comm.rank() == 0).then_some(Measured { kind, num_ranks: comm.size(), timings, links, topology }))
}

/// Every collective with every size among the ranks of `comm`.
fn of_sizes(
    (comm, among): (&dyn Communicator, Among),
    raw: Option<&RawMpi>,
    max_bytes: usize,
) -> Result<Vec<(Among, Timing)>, CommError> {
    let mut timings = vec![(among, measure::time(comm, raw, Collective::Barrier, 0)?)];
    for &collective in &Collective::ALL[1..] {
        for bytes in SIZES.into_iter().filter(|&bytes| bytes <= max_bytes) {
            timings.push((among, measure::time(comm, raw, collective, bytes)?));
        }
    }
    Ok(timings)
}

/// What all ranks do at the same time says what each can.
fn topology(comm: &dyn Communicator, links: &Links) -> Result<Topology, CommError> {
    let nodes = comm.nodes();
    let num_nodes = nodes.iter().max().map_or(0, |last| last + 1);
    let size_of = |node: usize| nodes.iter().filter(|&&other| other == node).count();
    let node_sizes: Vec<usize> = (0..num_nodes).map(size_of).collect();
    let largest = node_sizes.iter().copied().max().unwrap_or(1);
    let cores = num_cores();
    let ctx = Context::cpu((cores / largest).max(1));
    comm.barrier()?;
    let mut rates = [
        product_rate(&ctx),
        peak::measure(&ctx).read_bytes_per_s,
        machine_bytes().unwrap_or(UNKNOWN_MEMORY) as f64 / largest as f64,
    ];
    comm.all_reduce(&mut rates, Reduce::Min)?;
    let rank = RankSpec { flops: rates[0], memory_bytes: rates[2], memory_bytes_per_s: rates[1] };
    // What there is none of costs as much as the other.
    let any = links.node.or(links.cluster).unwrap_or(Link { latency_s: 1e-6, bytes_per_s: rates[1] / 2.0 });
    let (node_link, cluster_link) = (links.node.unwrap_or(any), links.cluster.unwrap_or(any));
    Ok(Topology { node_sizes, rank, node_link, cluster_link, numa_cores: cores_by_numa_node() })
}

/// Floating-point operations a second of a product such as a model's.
fn product_rate(ctx: &Context) -> f64 {
    let (rows, width) = (512, 512);
    let x = Tensor::zeros(ctx.pool(), &[rows, width], DType::F32);
    let w = Tensor::zeros(ctx.pool(), &[width, width], DType::F32);
    let seconds = best_seconds_of_many(ctx, || drop(linear(ctx, &x, &w, DType::F32)));
    2.0 * (rows * width * width) as f64 / seconds
}

fn topology_file(measured: &Measured) -> String {
    let mut text = format!("{MARK} with {} ranks ({}).\n", measured.num_ranks, measured.kind);
    if measured.links.cluster.is_none() {
        text +=
            "# There is one node: cluster_link is a copy of node_link, to be replaced by what your network gives.\n";
    }
    if measured.links.node.is_none() {
        text += "# No node has two ranks: node_link is not measured.\n";
    }
    text + &measured.topology.to_toml()
}

impl Measured {
    fn print(&self) {
        println!("{} ranks, {}", self.num_ranks, self.kind);
        for among in Among::EVERY {
            let timings = self.timings.iter().filter(|(of, _)| *of == among);
            let rows: Vec<Vec<String>> = timings.map(|(_, timing)| cells(timing)).collect();
            if !rows.is_empty() {
                println!("among {}:", among.name());
                tables::print(&HEADER, &rows);
            }
        }
        for (name, link) in [("inside a node", self.links.node), ("between nodes", self.links.cluster)] {
            if let Some(link) = link {
                println!("{name}: {:.1} µs, {:.2} GB/s", link.latency_s * 1e6, link.bytes_per_s / 1e9);
            }
        }
    }

    fn json(&self) -> Value {
        let link = |link: Option<Link>| link.map(|link| json!([link.latency_s, link.bytes_per_s]));
        let cases: Vec<Value> = self
            .timings
            .iter()
            .map(|(among, timing)| {
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

/// With as many digits as tell short calls apart.
fn microseconds(seconds: f64) -> String {
    let us = seconds * 1e6;
    if us < 100.0 { format!("{us:.2}") } else { format!("{us:.0}") }
}

fn cells(timing: &Timing) -> Vec<String> {
    let ratio = |of: f64| format!("{:.2}", timing.seconds / of);
    let moves = timing.bytes > 0;
    vec![
        format!("{:?}", timing.collective),
        timing.bytes.to_string(),
        microseconds(timing.seconds),
        if moves { format!("{:.2}", timing.bytes as f64 / timing.seconds / 1e9) } else { String::new() },
        if moves { ratio(timing.copy_seconds) } else { String::new() },
        timing.raw_seconds.map_or_else(String::new, microseconds),
        timing.raw_seconds.map_or_else(String::new, ratio),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_there_are_nodes_each_is_measured_and_what_is_between_them() {
        let options = RankOptions::new(0).with_nodes(&[0, 0, 1, 1, 1]).with_timeout(PATIENCE);
        let measured = try_run_ranks(&options, |comm| measure_all(comm, None, 64)).expect("ranks talk");
        let measured = measured.into_iter().flatten().next().expect("rank 0 knows");
        for among in Among::EVERY {
            let timings = measured.timings.iter().filter(|(of, _)| *of == among);
            assert_eq!(timings.count(), Collective::ALL.len(), "{}", among.name());
        }
        assert!(measured.links.cluster.is_some());
        assert_eq!(measured.topology.node_sizes, [2, 3]);
    }
}
