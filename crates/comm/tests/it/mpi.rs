//! Ranks as processes under every MPI launcher that exists. Where there is none these tests say so and pass. A
//! launcher starts this test program again, with the one ignored test below, which plays the case that it is given.
//! told.

use std::fmt::Display;
use std::io::Write as _;
use std::ops::Range;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use moeworks_comm::mpi::{EqualPieces, MpiOptions, RawMpi, run_mpi};
use moeworks_comm::{CommError, Communicator, Pending, Reduce};

use crate::collectives::{column, received_by, sent_by, word};
#[cfg(target_os = "linux")]
use crate::hosts;
use crate::launcher::{self, CASE, LOG, Launcher, text};
use crate::paths::check_paths;

/// The case of sums whose bits are those of threads.
const IN_ORDER: &str = "collectives with sums in order";

/// The test that plays a rank.
const PLAYER: &str = "mpi::plays_a_rank";

fn launchers() -> Vec<Launcher> {
    launcher::launchers(PLAYER)
}

impl Launcher {
    fn expect_success(&self, num_ranks: usize, case: &str) {
        let output = self.run(num_ranks, case, Path::new("/dev/null"));
        assert!(output.status.success(), "{case} on {num_ranks} ranks, {}: {}", self.name(), text(&output));
    }

    fn expect_failure(&self, num_ranks: usize, case: &str, part: &str) {
        let start = Instant::now();
        let log = env::temp_dir().join(format!("moeworks-test-{}-{}", std::process::id(), case.replace(' ', "-")));
        fs::write(&log, "").expect("a file for reports");
        let output = self.run(num_ranks, case, &log);
        let text = text(&output) + &fs::read_to_string(&log).expect("the file for reports");
        fs::remove_file(&log).expect("the file for reports goes");
        assert!(!output.status.success(), "{case}, {}: {text}", self.name());
        assert!(text.contains(part), "{case}, {}: \"{part}\" in {text}", self.name());
        assert!(start.elapsed() < Duration::from_secs(30), "{case}, {}: in time", self.name());
    }

    fn name(&self) -> impl Display {
        let library = self.library.as_ref().map_or(String::new(), |path| format!(" with {}", path.display()));
        format!("{}{library}", self.program.display())
    }
}

#[test]
fn collectives_give_among_processes_what_they_give_among_threads() {
    for launcher in launchers() {
        for num_ranks in [1, 2, 3, 4] {
            launcher.expect_success(num_ranks, "collectives");
        }
        launcher.expect_success(8, "collectives without checks");
        for num_ranks in [2, 5] {
            launcher.expect_success(num_ranks, IN_ORDER);
        }
        launcher.expect_success(5, "paths over nodes of two ranks");
        launcher.expect_success(5, "paths over nodes of two ranks without checks");
        launcher.expect_success(3, "collectives beyond the limit of an int");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn the_library_is_the_launchers_wherever_that_lies() {
    let launchers = launcher::all_launchers(PLAYER);
    let own: Vec<&Launcher> = launchers.iter().filter(|launcher| launcher.library.is_none()).collect();
    for (launcher, other) in own.iter().flat_map(|a| own.iter().map(move |b| (*a, b))) {
        let folder = other.program.parent().map(Path::to_path_buf);
        Launcher { first_on_path: folder, ..launcher.clone() }.expect_success(2, "collectives");
    }
    // Under another launcher Open MPI's library sees one process; MPICH's ends with a message of its own.
    let library = |launcher: &Launcher| launcher.program.with_file_name("../lib/libmpi.so.40");
    let library = launchers.iter().filter(|launcher| launcher.is_open_mpi).map(library).find(|path| path.exists());
    if let (Some(launcher), Some(_)) = (launchers.iter().find(|launcher| !launcher.is_open_mpi), &library) {
        let mixed = Launcher { library, ..launcher.clone() };
        mixed.expect_failure(2, "collectives", "it belongs to another MPI");
    }
}

#[test]
fn the_librarys_own_calls_give_right_results_in_parts_of_a_run() {
    for launcher in launchers() {
        launcher.expect_success(3, "raw calls");
    }
}

#[test]
fn processes_that_disagree_are_named() {
    for launcher in launchers() {
        launcher.expect_failure(4, "another call", "rank 2 disagrees with the others");
        launcher.expect_failure(3, "another size", "rank 1 sends 3 bytes to rank 0, which expects 1");
        launcher.expect_failure(3, "another configuration", "rank 2 has another configuration than rank 0");
    }
}

#[test]
fn when_a_process_fails_all_end_with_a_line_that_names_it() {
    for launcher in launchers() {
        launcher.expect_failure(4, "panic", "rank 2: rank 2 died: panicked: disk on fire");
        launcher.expect_failure(4, "error", "rank 1: cannot start the ranks: no such file");
    }
}

#[test]
fn when_a_process_is_killed_all_end_with_a_line_that_names_it() {
    for launcher in launchers() {
        // MPICH's launcher knows only the process.
        let said =
            if launcher.is_open_mpi { "rank 2" } else { "rank 2 died: its process ended in the middle of the run" };
        launcher.expect_failure(4, "kill", said);
    }
}

#[test]
fn a_process_that_hangs_or_is_stopped_is_named_by_the_watchdog() {
    for launcher in launchers() {
        launcher.expect_failure(3, "hang", "rank 1 hung: nothing from it for");
        launcher.expect_failure(3, "stop", "rank 1 hung: nothing from it for");
        launcher.expect_failure(3, "stop while others may wait long", "rank 1 hung: nothing from it for");
        launcher.expect_failure(3, "stop alone on a node", "rank 1 hung: nothing from it for");
    }
}

#[test]
#[ignore = "a rank: started by a launcher"]
fn plays_a_rank() {
    let case = env::var(CASE).expect("the launcher says the case");
    let mut options = MpiOptions::default().with_timeout(Duration::from_secs(20));
    match case.as_str() {
        "hang" | "stop" | "stop while others may wait long" => options = options.with_timeout(Duration::from_secs(1)),
        "stop alone on a node" => options = options.with_timeout(Duration::from_secs(2)).with_ranks_per_node(1),
        IN_ORDER => options = options.with_order(true).with_checks(false),
        "collectives without checks" | "raw calls" => options = options.with_checks(false),
        "collectives beyond the limit of an int" => options = options.with_limit(1000),
        "paths over nodes of two ranks" => options = options.with_ranks_per_node(2),
        "paths over nodes of two ranks without checks" => options = options.with_ranks_per_node(2).with_checks(false),
        #[cfg(target_os = "linux")]
        "hosts" => options = options.with_timeout(hosts::TIMEOUT),
        "stop of a host" => options = options.with_timeout(Duration::from_secs(5)),
        _ => {}
    }
    let log = fs::OpenOptions::new().append(true).open(env::var_os(LOG).expect("a file")).expect("a file for reports");
    let report = move |rank: usize, error: &dyn Display| {
        let _ = (&log).write_all(format!("rank {rank}: {error}\n").as_bytes());
        eprintln!("rank {rank}: {error}");
    };
    run_mpi(&options, report, |comm| play(comm, &case)).expect("only a run of one rank fails here");
}

fn play(comm: &dyn Communicator, case: &str) -> Result<(), CommError> {
    match (case, comm.rank()) {
        ("another call", 2) => comm.barrier(),
        ("another call", _) => comm.all_reduce(&mut [1.0_f32; 3], Reduce::Sum),
        ("another size", rank) => {
            let counts = if rank == 1 { [3, 1, 1] } else { [1; 3] };
            comm.all_to_all_v(&vec![0_u8; counts.iter().sum()], &counts, &mut [0; 3], &[1; 3])
        }
        ("another configuration", rank) => comm.check_same("configuration", &[u8::from(rank == 2); 32]),
        ("panic", 2) => panic!("disk on fire"),
        ("error", 1) => Err(CommError::Start("no such file".into())),
        ("kill", 2) => end_by_signal("KILL"),
        ("stop", 1) => end_by_signal("STOP"),
        ("stop while others may wait long", rank) => stop_while_others_wait(comm, rank == 1),
        ("stop alone on a node", rank) => {
            assert_eq!(comm.nodes(), [0, 1, 2]);
            stop_while_others_wait(comm, rank == 1)
        }
        #[cfg(target_os = "linux")]
        ("stop of a host", rank) => stop_while_others_wait(comm, comm.nodes()[rank] == 1),
        ("hang", 1) => loop {
            thread::sleep(Duration::from_secs(1));
        },
        ("panic" | "error" | "kill" | "stop" | "hang", _) => loop {
            comm.all_reduce(&mut [1.0_f32; 3000], Reduce::Max)?;
            comm.barrier()?;
        },
        ("paths over nodes of two ranks" | "paths over nodes of two ranks without checks", _) => check_paths(comm),
        #[cfg(target_os = "linux")]
        ("hosts", _) => hosts::play(comm),
        ("raw calls", rank) => raw_calls(comm, rank as u32 % 2),
        _ => collectives(comm, case == IN_ORDER),
    }
}

/// Makes every call of the library itself among the ranks that pass the same color, and compares with results
/// computed by hand.
fn raw_calls(comm: &dyn Communicator, color: u32) -> Result<(), CommError> {
    let raw = RawMpi::from_run().map_err(CommError::from)?.split(color, comm.rank());
    let part = comm.split(Some(color), comm.rank())?.expect("a colour was given");
    let (rank, size) = (part.rank(), part.size());
    raw.barrier();
    let mut data = [if rank == 0 { 7 } else { 0 }; 3];
    raw.broadcast(&mut data, 0);
    assert_eq!(data, [7; 3]);
    let mut gathered = vec![0; size];
    raw.all_gather(&[rank as u8], &mut gathered, size);
    assert_eq!(gathered, (0..size as u8).collect::<Vec<_>>());
    let pieces = EqualPieces::new(size, 1);
    let to_each: Vec<u8> = (0..size).map(|to| (10 * rank + to) as u8).collect();
    raw.all_to_all(&to_each, &mut gathered, &pieces);
    assert_eq!(gathered, (0..size).map(|from| (10 * from + rank) as u8).collect::<Vec<_>>());
    let mut sums: Vec<f32> = (0..size).map(|to| (rank + to) as f32).collect();
    let mut own = [0.0];
    raw.reduce_scatter(&sums, &mut own, &pieces);
    let ranks = (size * (size - 1) / 2) as f32;
    assert_eq!(own, [ranks + (size * rank) as f32]);
    raw.all_reduce(&mut sums);
    assert_eq!(sums, (0..size).map(|to| ranks + (size * to) as f32).collect::<Vec<_>>());
    if size > 1 && rank < 2 {
        let mut message = [40 + rank as u8];
        if rank == 0 {
            raw.send(&message, 1);
        } else {
            raw.receive(&mut message, 0);
        }
        assert_eq!(message, [40]);
    }
    comm.barrier()
}

fn stop_while_others_wait(comm: &dyn Communicator, stops: bool) -> Result<(), CommError> {
    comm.barrier()?;
    // By now heartbeats have gone both ways.
    thread::sleep(Duration::from_secs(1));
    comm.set_timeout(Duration::from_secs(3600));
    if stops { end_by_signal("STOP") } else { comm.barrier() }
}

fn end_by_signal(signal: &str) -> Result<(), CommError> {
    let own = std::process::id().to_string();
    Command::new("kill").args([&format!("-{signal}"), &own]).status().expect("kill runs");
    thread::sleep(Duration::from_secs(60));
    Ok(())
}

fn collectives(comm: &dyn Communicator, keeps_order: bool) -> Result<(), CommError> {
    let (rank, size) = (comm.rank(), comm.size());
    assert_eq!(comm.nodes(), vec![0; size]);
    for unit in [1, 16, 1000] {
        // Pieces of unequal lengths, some empty.
        let counts: Vec<Vec<usize>> =
            (0..size).map(|from| (0..size).map(|to| (from * 3 + to) % 4 * unit).collect()).collect();
        exchange(comm, &counts)?;
        reductions(comm, &counts[0], keeps_order)?;
    }
    // A rank with nothing to send: the address of an empty slice means nothing.
    let counts: Vec<Vec<usize>> = (0..size).map(|from| vec![from * 7; size]).collect();
    exchange(comm, &counts)?;
    let mut data: Vec<u32> = (0..5000).map(|i| word(rank, 0, i)).collect();
    comm.broadcast(&mut data, size - 1)?;
    assert!(data.iter().enumerate().all(|(i, &x)| x == word(size - 1, 0, i)));
    messages(comm)?;
    let part = comm.split(Some((rank % 2) as u32), size - rank)?.expect("a colour was given");
    assert_eq!(part.world_ranks(), (0..size).rev().filter(|other| other % 2 == rank % 2).collect::<Vec<_>>());
    let mut ranks = vec![0; part.size()];
    part.all_gather(&[rank], &mut ranks)?;
    assert_eq!(ranks, part.world_ranks());
    assert!(comm.split(None, 0)?.is_none());
    comm.barrier()
}

fn exchange(comm: &dyn Communicator, counts: &[Vec<usize>]) -> Result<(), CommError> {
    let rank = comm.rank();
    let (sends, recvs) = (&counts[rank], column(counts, rank));
    let (sent, expected) = (sent_by(rank, counts), received_by(rank, counts));
    let mut recv = vec![0; expected.len()];
    comm.all_to_all_v(&sent, sends, &mut recv, &recvs)?;
    assert_eq!(recv, expected);
    let mut pending = Vec::new();
    for _ in 0..3 {
        pending.push(comm.start_all_to_all_v(sent.clone(), sends, vec![0; expected.len()], &recvs)?);
    }
    if rank % 2 == 1 {
        pending.reverse();
    }
    for pending in pending {
        assert_eq!(pending.finish()?.1, expected);
    }
    let mut all = vec![0; counts.iter().map(|row| row[0]).sum()];
    let lens = column(counts, 0);
    let own: Vec<u32> = (0..lens[rank]).map(|i| word(rank, 0, i)).collect();
    comm.all_gather_v(&own, &mut all, &lens)?;
    assert_eq!(all, received_by(0, counts));
    let (_, all) = comm.start_all_gather_v(own, vec![0; all.len()], &lens)?.finish()?;
    assert_eq!(all, received_by(0, counts));
    Ok(())
}

/// Numbers whose sum depends on the order in which they are added.
fn rough(rank: usize, index: usize) -> f32 {
    ((rank * 7919 + index * 104_729) % 1000) as f32 * 10_f32.powi((index % 7) as i32 - 3) / 7.0
}

fn reductions(comm: &dyn Communicator, lens: &[usize], keeps_order: bool) -> Result<(), CommError> {
    let (rank, size) = (comm.rank(), comm.size());
    let len: usize = lens.iter().sum();
    let data: Vec<f32> = (0..len).map(|i| rough(rank, i)).collect();
    let sums = Sums {
        in_order: (0..len).map(|i| (1..size).fold(rough(0, i), |sum, r| sum + rough(r, i))).collect(),
        keeps_order,
    };
    let start: usize = lens[..rank].iter().sum();
    let own = start..start + lens[rank];
    let mut share = vec![0.0; lens[rank]];
    comm.reduce_scatter(&data, lens, &mut share, Reduce::Sum)?;
    sums.check(&share, own.clone());
    let (_, share) = comm.start_reduce_scatter(data.clone(), lens, share, Reduce::Sum)?.finish()?;
    sums.check(&share, own);
    let mut all = data.clone();
    comm.all_reduce(&mut all, Reduce::Sum)?;
    sums.check(&all, 0..len);
    same_on_all_ranks(comm, &all)?;
    let mut again = data.clone();
    comm.all_reduce(&mut again, Reduce::Sum)?;
    assert_eq!(again, all, "the same bits each time");
    // Two in flight at once, finished in different orders: each has a second half that the other ranks wait for.
    let mut pending =
        vec![comm.start_all_reduce(data.clone(), Reduce::Sum)?, comm.start_all_reduce(data, Reduce::Sum)?];
    if rank % 2 == 1 {
        pending.reverse();
    }
    comm.barrier()?;
    let results = pending.into_iter().map(Pending::finish).collect::<Result<Vec<_>, _>>()?;
    sums.check(&results[0], 0..len);
    assert_eq!(results[0], results[1], "the same bits each time");
    same_on_all_ranks(comm, &results[0])
}

/// The expected sums: these bits, or these up to rounding where the library may add in another order.
struct Sums {
    in_order: Vec<f32>,
    keeps_order: bool,
}

impl Sums {
    fn check(&self, sums: &[f32], part: Range<usize>) {
        let expected = &self.in_order[part];
        if self.keeps_order {
            return assert_eq!(sums, expected);
        }
        assert_eq!(sums.len(), expected.len());
        // All numbers are positive, so that no order loses more.
        assert!(sums.iter().zip(expected).all(|(a, b)| (a - b).abs() <= 1e-6 * b), "{sums:?} for {expected:?}");
    }
}

fn same_on_all_ranks(comm: &dyn Communicator, sums: &[f32]) -> Result<(), CommError> {
    let mut of_root = sums.to_vec();
    comm.broadcast(&mut of_root, 0)?;
    assert_eq!(of_root, sums, "the bits of rank 0");
    Ok(())
}

fn messages(comm: &dyn Communicator) -> Result<(), CommError> {
    let (rank, size) = (comm.rank(), comm.size());
    let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
    let first = comm.start_send(vec![rank as u32; 4000], next, 1)?;
    let second = comm.start_send(vec![10 + rank as u32; 4000], next, 2)?;
    let late = comm.start_receive(vec![0_u32; 4000], before, 2)?;
    let mut data = [0_u32; 4000];
    comm.receive(&mut data, before, 1)?;
    assert_eq!((data[0], late.finish()?[3999]), (before as u32, 10 + before as u32));
    first.finish()?;
    second.finish().map(drop)
}
