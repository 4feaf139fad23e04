//! Two hosts on one machine: network namespaces with a wire between them that is slow (`tc tbf`) and has a delay, and
//! Open MPI's launcher starting ranks in each. The tests of other crates that run on hosts use this file too.
//!
//! The kernel's own delay, `netem`, is not available everywhere. The wire is therefore a pair of `tun` devices, one
//! in each host, between which this process carries packets.
#![allow(unsafe_code)] // One system call, which has no safe name in the standard library.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};
use std::{fs, process, thread};

use moeworks_plan::{Link, Topology};

use crate::launcher::{Launcher, launchers, text};

/// Ranks on each of two hosts.
pub(crate) const RANKS_PER_HOST: usize = 2;
/// The bandwidth of a host, so low that other load of the machine takes little time beside it.
const MBIT_PER_S: f64 = 16.0;
/// The delay of a packet.
const DELAY: Duration = Duration::from_millis(1);
/// The share of payload in a packet of 1,500 bytes; IP and TCP headers take the rest.
const PAYLOAD: f64 = 1448.0 / 1500.0;

/// Returns the topology of the hosts. Between hosts a rank gets its share of its host's bandwidth.
pub(crate) fn topology() -> Topology {
    let bytes_per_s = MBIT_PER_S * 1e6 / 8.0 * PAYLOAD / RANKS_PER_HOST as f64;
    Topology {
        node_sizes: vec![RANKS_PER_HOST; 2],
        node_link: Link { latency_s: 1e-5, bytes_per_s: 1e9 },
        cluster_link: Link { latency_s: DELAY.as_secs_f64(), bytes_per_s },
        ..Topology::example_cluster(1)
    }
}

/// Lets the ignored test `player` play `case` on all ranks of two hosts, and returns the output. Prints why if hosts
/// cannot be made.
pub(crate) fn run_on_hosts(player: &'static str, case: &str) -> Option<Output> {
    let Some(launcher) = launchers(player).into_iter().find(|launcher| launcher.is_open_mpi) else {
        println!("SKIPPED: hosts are tried with Open MPI, which is not there");
        return None;
    };
    match Hosts::make() {
        Ok(hosts) => Some(hosts.launcher(&launcher).run(2 * RANKS_PER_HOST, case, Path::new("/dev/null"))),
        Err(problem) => {
            println!("SKIPPED: hosts cannot be made here: {problem}");
            None
        }
    }
}

/// Runs a case that must succeed, and prints the lines about times.
pub(crate) fn succeed_on_hosts(player: &'static str, case: &str) {
    if let Some(output) = run_on_hosts(player, case) {
        let said = text(&output);
        assert!(output.status.success(), "{said}");
        said.lines().filter(|line| line.contains("times as long")).for_each(|line| println!("{line}"));
    }
}

/// The two hosts, until they are dropped.
struct Hosts {
    names: [String; 2],
    folder: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

/// The lock by which tests take turns: hosts are named after the process, and traffic of one test would disturb
/// another's times.
static TURN: Mutex<()> = Mutex::new(());

/// Runs `ip` or `tc`.
fn run(program: &str, arguments: &str) -> Result<(), String> {
    let output = Command::new(program).args(arguments.split_whitespace()).output();
    match output {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!("{program} {arguments}: {}", String::from_utf8_lossy(&output.stderr).trim())),
        Err(error) => Err(format!("{program}: {error}")),
    }
}

unsafe extern "C" {
    fn ioctl(file: i32, request: u64, ...) -> i32;
}

/// Opens one end of a wire: a network device `name` whose packets are read and written here.
fn wire_end(name: &str) -> io::Result<File> {
    const SET_INTERFACE: u64 = 0x4004_54ca;
    const PACKETS_ALONE: u16 = 0x1001;
    let device = File::options().read(true).write(true).open("/dev/net/tun")?;
    let mut request = [0_u8; 40];
    request[..name.len().min(15)].copy_from_slice(&name.as_bytes()[..name.len().min(15)]);
    request[16..18].copy_from_slice(&PACKETS_ALONE.to_ne_bytes());
    // SAFETY: the file is open, and the request is a `struct ifreq` of 40 bytes with a name that ends within its 16.
    match unsafe { ioctl(device.as_raw_fd(), SET_INTERFACE, request.as_mut_ptr()) } {
        0 => Ok(device),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Carries packets from one end to the other until the device is gone.
fn carry(from: Arc<File>, to: Arc<File>) {
    let (send, receive) = mpsc::channel::<(Instant, Vec<u8>)>();
    thread::spawn(move || {
        let mut packet = vec![0; 1 << 16];
        while let Ok(len) = (&*from).read(&mut packet) {
            let _ = send.send((Instant::now() + DELAY, packet[..len].to_vec()));
        }
    });
    thread::spawn(move || {
        for (when, packet) in receive {
            thread::sleep(when.saturating_duration_since(Instant::now()));
            // A packet that cannot be written is lost, as on any wire.
            let _ = (&*to).write(&packet);
        }
    });
}

impl Hosts {
    /// Makes two hosts, or returns the system's error.
    fn make() -> Result<Self, String> {
        let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let names = [0, 1].map(|index| format!("mw{}h{index}", process::id()));
        let hosts = Self { names, folder, _turn: turn };
        let mut ends = Vec::new();
        for (index, host) in hosts.names.iter().enumerate() {
            run("ip", &format!("netns add {host}"))?;
            let end = wire_end(host).map_err(|error| format!("a tun device: {error}"))?;
            ends.push(Arc::new(end));
            run("ip", &format!("link set {host} netns {host} name card"))?;
            run("ip", &format!("-n {host} addr add 10.77.0.{}/24 dev card", index + 1))?;
            run("ip", &format!("-n {host} link set card up"))?;
            run("ip", &format!("-n {host} link set lo up"))?;
            let limit = format!("root tbf rate {MBIT_PER_S}mbit burst 16kb latency 2s");
            run("tc", &format!("-n {host} qdisc add dev card {limit}"))?;
        }
        carry(Arc::clone(&ends[0]), Arc::clone(&ends[1]));
        carry(Arc::clone(&ends[1]), Arc::clone(&ends[0]));
        Ok(hosts)
    }

    /// Writes the script that Open MPI calls in place of `ssh HOST COMMAND`. Each host gets a name of its own, by
    /// which ranks tell nodes apart.
    fn remote_shell(&self) -> PathBuf {
        let path = self.folder.path().join("remote-shell");
        let script = "#!/bin/sh\nhost=$1\nshift\n\
            exec ip netns exec \"$host\" unshare --uts /bin/sh -c \"hostname $host; $*\"\n";
        fs::write(&path, script).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("its owner may");
        path
    }

    /// Makes the launcher that runs in the first host and starts ranks in both.
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
            // Ranks share cores here. A message is handed to the system whole, so that it is sent while its rank has
            // no core.
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
        for name in &self.names {
            let _ = run("ip", &format!("netns delete {name}"));
        }
    }
}
