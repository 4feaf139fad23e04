//! Keeping a rank on its share of a machine's cores.

/// Keeps this thread, and those that it starts from now on, on the share of the machine's cores that falls to rank `place` of
/// `num_ranks` on this machine: a run of neighbouring cores, which share caches and memory, taken from those that this process
/// may use. Where there are fewer cores than ranks, or on systems other than Linux, nothing is pinned. Gives the number of
/// cores for the rank's threads, at least one.
pub fn pin(place: usize, num_ranks: usize) -> usize {
    let cores = allowed();
    let num_ranks = num_ranks.max(1);
    if cores.len() < num_ranks {
        let machine = std::thread::available_parallelism().map_or(1, usize::from);
        return (machine / num_ranks).max(1);
    }
    let share = &cores[cores.len() * place / num_ranks..cores.len() * (place + 1) / num_ranks];
    restrict(share);
    share.len().max(1)
}

/// The cores that this thread may use, in order; empty where that is not known.
#[cfg(target_os = "linux")]
fn allowed() -> Vec<usize> {
    // SAFETY: a set of cores is plain bits, all of which may be zero.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is valid for writing as many bytes as are said. 0 is this thread.
    let code = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) };
    if code != 0 {
        return Vec::new();
    }
    // SAFETY: numbers below the size of the set.
    (0..libc::CPU_SETSIZE as usize).filter(|&core| unsafe { libc::CPU_ISSET(core, &set) }).collect()
}

#[cfg(target_os = "linux")]
fn restrict(cores: &[usize]) {
    // SAFETY: as in `allowed`.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for &core in cores {
        // SAFETY: as in `allowed`, where the number comes from.
        unsafe { libc::CPU_SET(core, &mut set) };
    }
    // SAFETY: `set` is valid for reading as many bytes as are said. Refused, the thread stays where it may be: only slower.
    unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) };
}

#[cfg(not(target_os = "linux"))]
fn allowed() -> Vec<usize> {
    Vec::new()
}

#[cfg(not(target_os = "linux"))]
fn restrict(_cores: &[usize]) {}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_the_cores_without_overlap() {
        let all = allowed();
        let share_of = |place, num_ranks| {
            std::thread::spawn(move || {
                let count = pin(place, num_ranks);
                (count, std::thread::spawn(allowed).join().unwrap())
            })
            .join()
            .unwrap()
        };
        let num_ranks = all.len().min(2);
        let shares: Vec<_> = (0..num_ranks).map(|place| share_of(place, num_ranks)).collect();
        assert!(shares.iter().all(|(count, cores)| *count == cores.len()), "threads started later stay there, too");
        assert_eq!(shares.iter().flat_map(|(_, cores)| cores.clone()).collect::<Vec<_>>(), all);
        assert_eq!(share_of(0, 10 * all.len()), (1, all.clone()), "more ranks than cores: none is pinned");
        assert_eq!(allowed(), all, "this thread is where it was");
    }
}
