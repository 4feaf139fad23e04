//! Several hosts on one machine: network namespaces with a link of limited rate between them (`tc tbf`), and Open MPI's launcher
//! starting ranks in each. Needs Linux and root; says so and passes where that, or Open MPI, is missing.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use std::{fs, process};

use moeworks_comm::{CommError, Communicator, Hierarchy, Reduce, RowPlan};
use moeworks_plan::cost::collectives::{Rows, all_to_all, fastest_path};
use moeworks_plan::{Algorithm, Group, Link, Topology, Wire};
use moeworks_tensor::{DType, MemoryPool, Tensor};

use crate::mpi::{Launcher, launchers, text};

/// Ranks on each of two hosts.
const RANKS_PER_HOST: usize = 2;
/// What a host can send: so little that what else the machine does is short beside it.
const MBIT_PER_S: f64 = 16.0;
/// Bytes of payload in a byte on the wire: Ethernet, IP and TCP take the rest of 1,514.
const PAYLOAD: f64 = 1448.0 / 1514.0;
/// Tokens of a rank, each of which wants experts of all four ranks.
const TOKENS: usize = 256;
const WIDTH: usize = 256;
/// How often each path is timed; the least counts: what else the machine does only adds.
const REPEATS: usize = 3;

/// The hosts, until they are dropped.
struct Hosts {
    names: Vec<String>,
    hub: String,
    folder: tempfile::TempDir,
}

/// Runs `ip` or `tc`.
fn run(program: &str, arguments: &str) -> Result<(), String> {
    let output = Command::new(program).args(arguments.split_whitespace()).output();
    match output {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!("{program} {arguments}: {}", String::from_utf8_lossy(&output.stderr).trim())),
        Err(error) => Err(format!("{program}: {error}")),
    }
}

impl Hosts {
    /// Two of them on a bridge, or what the system says against it.
    fn make() -> Result<Self, String> {
        let name = |index: usize| format!("mw{}h{index}", process::id());
        let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
        let hosts = Self { names: vec![name(0), name(1)], hub: format!("mw{}hub", process::id()), folder };
        let hub = &hosts.hub;
        run("ip", &format!("netns add {hub}"))?;
        run("ip", &format!("-n {hub} link add bridge type bridge"))?;
        run("ip", &format!("-n {hub} link set bridge up"))?;
        for (index, host) in hosts.names.iter().enumerate() {
            run("ip", &format!("netns add {host}"))?;
            run("ip", &format!("-n {hub} link add port{index} type veth peer name card netns {host}"))?;
            run("ip", &format!("-n {hub} link set port{index} master bridge up"))?;
            run("ip", &format!("-n {host} addr add 10.77.0.{}/24 dev card", index + 1))?;
            run("ip", &format!("-n {host} link set card up"))?;
            run("ip", &format!("-n {host} link set lo up"))?;
            let limit = format!("root tbf rate {MBIT_PER_S}mbit burst 16kb latency 2s");
            run("tc", &format!("-n {host} qdisc add dev card {limit}"))?;
        }
        Ok(hosts)
    }

    /// What Open MPI calls in place of `ssh HOST COMMAND`. A host has a name of its own: ranks tell by it who is where.
    fn remote_shell(&self) -> PathBuf {
        let path = self.folder.path().join("remote-shell");
        let script = "#!/bin/sh\nhost=$1\nshift\n\
            exec ip netns exec \"$host\" unshare --uts /bin/sh -c \"hostname $host; $*\"\n";
        fs::write(&path, script).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("its owner may");
        path
    }

    /// The launcher, in the first host, for ranks in both.
    fn launcher(&self, launcher: &Launcher) -> Launcher {
        let slots: Vec<String> = self.names.iter().map(|name| format!("{name}:{RANKS_PER_HOST}")).collect();
        let shell = self.remote_shell();
        let shell = shell.to_str().expect("a path of letters");
        let before = [shell, &self.names[0]].map(str::to_owned).to_vec();
        let flags = [
            "--allow-run-as-root",
            "--bind-to",
            "none",
            "--timeout",
            "120",
            "--prtemca",
            "plm_ssh_agent",
            shell,
            "--mca",
            "mpi_yield_when_idle",
            "1",
            // Ranks share cores here: a message is handed to the system whole, which sends it while its rank has no core.
            "--mca",
            "btl_tcp_eager_limit",
            "4000000",
            "-H",
            &slots.join(","),
        ];
        Launcher { before, flags: flags.map(str::to_owned).to_vec(), ..launcher.clone() }
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in self.names.iter().chain([&self.hub]) {
            let _ = run("ip", &format!("netns delete {name}"));
        }
    }
}

#[test]
fn between_hosts_paths_differ_by_the_factor_that_their_costs_say() {
    let Some(launcher) = launchers().into_iter().find(|launcher| launcher.is_open_mpi) else {
        return println!("SKIPPED: hosts are tried with Open MPI, which is not there");
    };
    let hosts = match Hosts::make() {
        Ok(hosts) => hosts,
        Err(problem) => return println!("SKIPPED: network namespaces cannot be made here: {problem}"),
    };
    let output = hosts.launcher(&launcher).run(2 * RANKS_PER_HOST, "hosts", Path::new("/dev/null"));
    assert!(output.status.success(), "{}", text(&output));
    let said = text(&output);
    said.lines().filter(|line| line.contains("times as long")).for_each(|line| println!("{line}"));
}

/// The links as they were made. What a rank gets between hosts is its share of what its host can send.
fn topology() -> Topology {
    let bytes_per_s = MBIT_PER_S * 1e6 / 8.0 * PAYLOAD / RANKS_PER_HOST as f64;
    Topology {
        node_sizes: vec![RANKS_PER_HOST; 2],
        node_link: Link { latency_s: 1e-5, bytes_per_s: 1e9 },
        cluster_link: Link { latency_s: 1e-3, bytes_per_s },
        ..Topology::example_cluster(1)
    }
}

/// What a rank does: times each path and compares with the costs.
pub(crate) fn play(comm: &dyn Communicator) -> Result<(), CommError> {
    assert_eq!(comm.nodes(), [0, 0, 1, 1], "who is on which host");
    let ranks: Vec<usize> = (0..comm.size()).collect();
    let rows = Rows { tokens: TOKENS, top_k: ranks.len(), num_experts: ranks.len(), row_bytes: 4 * WIDTH };
    let group = Group::of(&topology(), &ranks);
    let cost = |algorithm| all_to_all(&topology(), group, algorithm, &rows).seconds;
    let linear = seconds(comm, Algorithm::Linear)?;
    for algorithm in [Algorithm::Hierarchical, Algorithm::TwoHop] {
        let factor = linear / seconds(comm, algorithm)?;
        let expected = cost(Algorithm::Linear) / cost(algorithm);
        if comm.rank() == 0 {
            println!(
                "linear {linear:.3} s takes {factor:.2} times as long as {algorithm:?}, by its costs {expected:.2} times"
            );
        }
        assert!((factor / expected - 1.0).abs() < 0.25, "{algorithm:?}: {factor}, not {expected}");
    }
    assert_eq!(
        fastest_path(&topology(), group, &rows),
        Algorithm::TwoHop,
        "what is chosen by cost is what was fastest"
    );
    Ok(())
}

/// Seconds of the slowest rank to send all tokens to all ranks: the least of a few.
fn seconds(comm: &dyn Communicator, algorithm: Algorithm) -> Result<f64, CommError> {
    let hierarchy = Hierarchy::new(comm)?;
    let everywhere: Vec<usize> = (0..comm.size()).collect();
    let plan = RowPlan::new(&hierarchy, algorithm, &vec![everywhere.as_slice(); TOKENS])?;
    let pool = MemoryPool::new();
    let rows = Tensor::zeros(&pool, &[TOKENS, WIDTH], DType::F32);
    let mut times = Vec::new();
    for _ in 0..=REPEATS {
        comm.barrier()?;
        let start = Instant::now();
        plan.dispatch(&hierarchy, &rows, Wire::F32, &pool)?;
        let mut slowest = [start.elapsed().as_secs_f64()];
        comm.all_reduce(&mut slowest, Reduce::Max)?;
        times.push(slowest[0]);
    }
    // The first opens connections.
    Ok(times[1..].iter().copied().fold(f64::INFINITY, f64::min))
}

/// How long ranks wait for each other on links as slow as these.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
