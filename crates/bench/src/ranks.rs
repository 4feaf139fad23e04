//! The ranks for measurements of communication.

use std::time::Duration;

use moeworks_comm::mpi::{MpiOptions, is_launched, run_mpi};
use moeworks_comm::{CommError, Communicator, RankOptions, try_run_ranks};

use crate::error::BenchError;

/// The time that ranks wait for each other. On a busy machine some measure much longer than others.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(300);

/// Runs `work` on all ranks and returns the result of rank 0. The ranks are the processes of an MPI launcher, or
/// `num_ranks` threads; 0 means one per core and at least two.
///
/// # Errors
/// [`BenchError`] where a rank fails, or where `num_ranks` is given though a launcher started the ranks.
pub fn on_ranks<T: Send>(
    num_ranks: usize,
    work: impl Fn(&dyn Communicator) -> Result<Option<T>, CommError> + Sync,
) -> Result<Option<T>, BenchError> {
    if is_launched() {
        if num_ranks > 0 {
            let problem = "--ranks: the processes that the launcher started are the ranks; leave it out";
            return Err(BenchError::Request(problem.to_owned()));
        }
        let report = |rank: usize, error: &dyn std::fmt::Display| eprintln!("moeworks: rank {rank}: {error}");
        // Calls are not compared between ranks first, even in a debug build, as in programs where speed matters.
        let options = MpiOptions::default().with_checks(false).with_timeout(TIMEOUT);
        return Ok(run_mpi(&options, report, work)?);
    }
    let num_ranks = if num_ranks == 0 { num_cores().max(2) } else { num_ranks };
    let results = try_run_ranks(&RankOptions::new(num_ranks).with_timeout(TIMEOUT), work)?;
    Ok(results.into_iter().flatten().next())
}

/// Returns the number of cores that this process may use.
#[must_use]
pub fn num_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
