//! `moeworks bench comm`: prints the time of each collective by size, among threads of this process or the processes
//! of an MPI launcher, next to a memory copy and the MPI library's own call. Writes the links as a topology.

use moeworks_bench::cluster::{self, Among, ClusterTimes, SIZES};
use moeworks_bench::collectives::Timing;
use moeworks_bench::ranks;
use moeworks_comm::CommError;
use moeworks_comm::mpi::{RawMpi, is_launched};

use crate::args::CommArgs;
use crate::environment;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::page::{Target, write_whole};
use crate::ranks::{MAX_THREADS, too_many_ranks};
use crate::tables;

const HEADER: [&str; 7] = ["collective", "bytes", "µs", "GB/s", "of a copy", "MPI's own, µs", "of MPI's own"];

/// The first line of a topology file that this program writes.
const MARK: &str = "# Measured by `moeworks bench comm`";

pub(super) fn run(args: &CommArgs) -> Result<ExitCode, Failure> {
    Target { option: "--topology", path: &args.topology, mark: MARK, is_forced: args.force }.check()?;
    if args.max_bytes < SIZES[0] {
        return Err(Failure::input(format!("--max-bytes {}: must be at least {}", args.max_bytes, SIZES[0])));
    }
    check_ranks(args.ranks)?;
    let machine = environment::machine();
    let measured = ranks::on_ranks(args.ranks, |comm| {
        let raw = is_launched().then(RawMpi::from_run).transpose().map_err(CommError::from)?;
        cluster::measure(comm, raw.as_ref(), args.max_bytes, &machine)
    })?;
    let Some(measured) = measured else { return Ok(ExitCode::SUCCESS) };
    write_whole(&args.topology, &topology_file(&measured))?;
    if args.json {
        println!("{:#}", measured.json());
    } else {
        print(&measured);
        println!("\nwritten: {}", args.topology.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns an error for more threads than a process may have.
pub(super) fn check_ranks(num_ranks: usize) -> Result<(), Failure> {
    if num_ranks > MAX_THREADS && !is_launched() {
        return Err(Failure::input(format!("--ranks {num_ranks}: {}", too_many_ranks())));
    }
    Ok(())
}

fn topology_file(measured: &ClusterTimes) -> String {
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

fn print(measured: &ClusterTimes) {
    println!("{} ranks, {}", measured.num_ranks, measured.kind);
    for among in Among::EVERY {
        let cases = measured.timings.iter().filter(|case| case.among == among);
        let rows: Vec<Vec<String>> = cases.map(|case| cells(&case.timing)).collect();
        if !rows.is_empty() {
            println!("among {}:", among.name());
            tables::print(&HEADER, &rows);
        }
    }
    for (name, link) in [("inside a node", measured.links.node), ("between nodes", measured.links.cluster)] {
        if let Some(link) = link {
            println!("{name}: {:.1} µs, {:.2} GB/s", link.latency_s * 1e6, link.bytes_per_s / 1e9);
        }
    }
}

/// Formats a time with enough digits to distinguish short calls.
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
