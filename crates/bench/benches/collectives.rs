//! Times of collectives and links: `cargo bench -p moeworks-bench --bench collectives -- RANKS [MOST_BYTES]`, or the
//! built program under mpirun.

use std::fmt::Display;

use moeworks_bench::collectives::{Collective, links, time};
use moeworks_comm::mpi::{MpiOptions, RawMpi, is_launched, run_mpi};
use moeworks_comm::{CommError, Communicator, RankOptions, try_run_ranks};

fn main() -> Result<(), CommError> {
    let mut numbers = std::env::args().filter_map(|argument| argument.parse().ok());
    let (num_ranks, most_bytes) = (numbers.next().unwrap_or(2), numbers.next().unwrap_or(64 << 20));
    if is_launched() {
        let report = |rank: usize, error: &dyn Display| eprintln!("rank {rank}: {error}");
        return run_mpi(&MpiOptions::default().with_checks(false), report, |comm| {
            let raw = RawMpi::from_run().map_err(CommError::from)?;
            print_all(comm, Some(&raw), most_bytes)
        });
    }
    try_run_ranks(&RankOptions::new(num_ranks), |comm| print_all(comm, None, most_bytes)).map(drop)
}

fn print_all(comm: &dyn Communicator, raw: Option<&RawMpi>, most_bytes: usize) -> Result<(), CommError> {
    let is_first = comm.rank() == 0;
    if is_first {
        println!("{} ranks, {}", comm.size(), raw.map_or_else(|| "threads".to_owned(), RawMpi::version));
    }
    for collective in Collective::ALL {
        let sizes = [64, 1 << 10, 16 << 10, 256 << 10, 4 << 20, 64 << 20];
        for bytes in sizes.into_iter().filter(|&bytes| bytes <= most_bytes) {
            let timing = time(comm, raw, collective, bytes)?;
            if is_first {
                let of_raw = timing.raw_seconds.map_or_else(String::new, |own| format!("{:.2}", timing.seconds / own));
                let (name, us, of_copy) =
                    (format!("{collective:?}"), timing.seconds * 1e6, timing.seconds / timing.copy_seconds);
                println!(
                    "{name:14} {:9} B {us:10.2} us {of_copy:7.2} of a copy {of_raw:>6} of MPI's own",
                    timing.bytes
                );
            }
        }
    }
    let links = links(comm)?;
    if is_first {
        println!("{links:?}");
    }
    Ok(())
}
