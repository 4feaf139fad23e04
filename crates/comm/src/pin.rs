//! Pinning of ranks to CPU cores of their own.
//!
//! The cores of a machine are divided in the order of their location, so that a rank's cores are neighbours and lie
//! on one NUMA node where possible. Linux allocates a thread's memory near the core that first writes to it, so
//! memory follows.
//!
//! The location of cores is read from Linux's sysfs. hwloc knows more systems, but its crate (`hwlocality`) needs the
//! C library at build time, which this program avoids.

use std::path::Path;

use crate::{CommError, Communicator};

/// The number of words in a set of cores.
const WORDS: usize = 16;

/// A set of cores: bit c stands for core c.
pub(crate) type Cores = [u64; WORDS];

/// The folder in which Linux describes its cores.
const SYSTEM: &str = "/sys/devices/system/cpu";

/// Divides the cores that the ranks of a machine may use among them, and returns this rank's number of cores. It is
/// below one where there are more ranks than cores. With `pins` this thread and those that it starts later are
/// restricted to its share. There is no restriction where ranks outnumber cores, where the launcher has pinned ranks
/// already, and on systems other than Linux. All ranks must call it.
///
/// # Errors
/// Returns a [`CommError`] if a rank died, hangs or disagrees.
pub fn share_cores(comm: &dyn Communicator, pins: bool) -> Result<f64, CommError> {
    let own = allowed();
    let mut all = vec![[0; WORDS]; comm.size()];
    comm.all_gather(&[own], &mut all)?;
    let (nodes, rank) = (comm.nodes(), comm.rank());
    let neighbours: Vec<usize> = (0..comm.size()).filter(|&other| nodes[other] == nodes[rank]).collect();
    let place = neighbours.iter().position(|&other| other == rank).unwrap_or(0);
    let cores = core_list(&own);
    if cores.is_empty() {
        let machine = std::thread::available_parallelism().map_or(1, usize::from);
        return Ok(machine as f64 / neighbours.len() as f64);
    }
    if neighbours.iter().any(|&other| all[other] != own) {
        return Ok(cores.len() as f64);
    }
    if !pins || cores.len() < neighbours.len() {
        return Ok(cores.len() as f64 / neighbours.len() as f64);
    }
    let cores = sort_by_location(cores, Path::new(SYSTEM));
    let end = |place: usize| cores.len() * place / neighbours.len();
    let share = &cores[end(place)..end(place + 1)];
    restrict(share);
    Ok(share.len() as f64)
}

/// Returns the number of cores in the union of several sets; 0 where that is unknown.
pub(crate) fn num_cores(sets: &[Cores]) -> usize {
    let of_word = |word: usize| sets.iter().fold(0, |all, set| all | set[word]).count_ones() as usize;
    (0..WORDS).map(of_word).sum()
}

/// Lists the cores of a set in ascending order.
fn core_list(set: &Cores) -> Vec<usize> {
    (0..64 * WORDS).filter(|core| set[core / 64] >> (core % 64) & 1 == 1).collect()
}

/// Sorts cores by NUMA node, socket and physical core, as far as the description in the folder `system` tells.
fn sort_by_location(mut cores: Vec<usize>, system: &Path) -> Vec<usize> {
    cores.sort_by_cached_key(|core| {
        let folder = system.join(format!("cpu{core}"));
        let numa = numa_node(&folder);
        let number = |name: &str| {
            let text = std::fs::read_to_string(folder.join("topology").join(name)).ok()?;
            text.trim().parse::<usize>().ok()
        };
        (numa, number("physical_package_id"), number("core_id"), *core)
    });
    cores
}

/// Returns the NUMA node of the core that `folder` describes.
fn numa_node(folder: &Path) -> Option<usize> {
    let names = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    names.filter_map(|name| name.to_str()?.strip_prefix("node")?.parse::<usize>().ok()).min()
}

/// Returns, for each NUMA node of this machine with cores that this thread may use, their number; empty where the
/// system does not say.
#[must_use]
pub fn cores_by_numa_node() -> Vec<usize> {
    by_numa_node(&core_list(&allowed()), Path::new(SYSTEM))
}

fn by_numa_node(cores: &[usize], system: &Path) -> Vec<usize> {
    let mut counts = std::collections::BTreeMap::new();
    for core in cores {
        let Some(node) = numa_node(&system.join(format!("cpu{core}"))) else { return Vec::new() };
        *counts.entry(node).or_insert(0) += 1;
    }
    counts.into_values().collect()
}

/// Returns the cores that this thread may use; none where that is unknown.
#[cfg(target_os = "linux")]
pub(crate) fn allowed() -> Cores {
    let mut cores = [0; WORDS];
    // SAFETY: a set of cores is plain bits, all of which may be zero.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is valid for writing as many bytes as are said. 0 is this thread.
    if unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) } != 0 {
        return cores;
    }
    for core in 0..(64 * WORDS).min(libc::CPU_SETSIZE as usize) {
        // SAFETY: a number below the size of the set.
        cores[core / 64] |= u64::from(unsafe { libc::CPU_ISSET(core, &set) }) << (core % 64);
    }
    cores
}

#[cfg(target_os = "linux")]
fn restrict(cores: &[usize]) {
    // SAFETY: as in `allowed`.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for &core in cores {
        // SAFETY: as in `allowed`, where the number comes from.
        unsafe { libc::CPU_SET(core, &mut set) };
    }
    // SAFETY: `set` is valid for reading as many bytes as are said. If the call is refused the thread keeps its
    // cores, which is only slower.
    unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) };
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn allowed() -> Cores {
    [0; WORDS]
}

#[cfg(not(target_os = "linux"))]
fn restrict(_cores: &[usize]) {}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::{RankOptions, try_run_ranks};

    /// Returns for each rank its number of cores, and the cores that a thread which it starts may use.
    fn shares(num_ranks: usize, pins: bool, before: impl Fn(usize) + Sync) -> Vec<(f64, Vec<usize>)> {
        try_run_ranks(&RankOptions::new(num_ranks), |comm| {
            before(comm.rank());
            let share = share_cores(comm, pins)?;
            Ok::<_, CommError>((share, std::thread::spawn(|| core_list(&allowed())).join().unwrap()))
        })
        .unwrap()
    }

    #[test]
    fn ranks_share_the_cores_without_overlap() {
        let all = core_list(&allowed());
        let num_ranks = all.len().min(2);
        let pinned = shares(num_ranks, true, |_| ());
        assert!(
            pinned.iter().all(|(share, cores)| *share == cores.len() as f64),
            "threads started later stay there, too"
        );
        let mut together: Vec<usize> = pinned.into_iter().flat_map(|(_, cores)| cores).collect();
        together.sort_unstable();
        assert_eq!(together, all);
        assert_eq!(core_list(&allowed()), all, "this thread is where it was");
    }

    #[test]
    fn ranks_are_left_where_they_are_if_told_so_or_too_many_or_placed_by_the_launcher() {
        let all = core_list(&allowed());
        assert_eq!(shares(2, false, |_| ())[1], (all.len() as f64 / 2.0, all.clone()));
        assert_eq!(shares(2 * all.len(), true, |_| ())[0], (0.5, all.clone()));
        if all.len() > 1 {
            let placed = shares(2, true, |rank| restrict(&all[rank..=rank]));
            assert_eq!(placed, [(1.0, vec![all[0]]), (1.0, vec![all[1]])]);
        }
    }

    #[test]
    fn neighbouring_ranks_get_cores_of_one_numa_node_and_both_threads_of_a_core() {
        // Two nodes of two cores with two threads each, numbered as Linux does: all first threads come first.
        let system = tempfile::tempdir().unwrap();
        for core in 0..8_usize {
            let folder = system.path().join(format!("cpu{core}"));
            std::fs::create_dir_all(folder.join("topology")).unwrap();
            std::fs::create_dir(folder.join(format!("node{}", core % 2))).unwrap();
            std::fs::write(folder.join("topology/core_id"), format!("{}\n", core / 2 % 2)).unwrap();
            std::fs::write(folder.join("topology/physical_package_id"), "0\n").unwrap();
        }
        assert_eq!(sort_by_location((0..8).collect(), system.path()), [0, 4, 2, 6, 1, 5, 3, 7]);
        assert_eq!(
            sort_by_location(vec![3, 1, 2], Path::new("/nowhere")),
            [1, 2, 3],
            "by number where nothing is told"
        );
        assert_eq!(by_numa_node(&[0, 2, 3, 4], system.path()), [3, 1]);
        assert_eq!(by_numa_node(&[0, 1], Path::new("/nowhere")), [0; 0]);
    }
}
