//! The ranks of a run: threads of this process, or the processes of an MPI launcher.

use std::time::Duration;

use moeworks_comm::{CommError, Communicator, RankOptions, try_run_ranks};
use moeworks_train::config::RunConfig;
use moeworks_train::{Ranks, TrainError};

use crate::failure::{Failure, say_error};
use crate::host::Call;

/// The time that a hanging rank may delay the program's end after the others have failed.
pub(crate) const GRACE: Duration = Duration::from_secs(5);

/// The largest number of ranks that are threads of one process, and of threads of a rank.
pub(crate) use moeworks_infer::compute::MAX_THREADS;

/// Returns the error text for more ranks than that.
pub(crate) fn too_many_ranks() -> String {
    format!("but threads of one process can be at most {MAX_THREADS}; start processes with mpirun for more")
}

/// The exit code of a run whose ranks failed.
pub(crate) const FAILED: u8 = 2;

/// The ranks of a run.
#[derive(Clone, Copy)]
pub(crate) struct RunRanks<'a> {
    /// The configuration, with the number of ranks and the division of work among them.
    pub(crate) config: &'a RunConfig,
    /// True if a trace will be written.
    pub(crate) is_traced: bool,
}

/// Runs `work` on every rank of the configuration, and returns the result of rank 0, or of this process under MPI. A
/// run of one rank has no `Ranks`.
pub(crate) fn on_ranks<R: Send>(
    call: &Call<'_>,
    RunRanks { config, is_traced }: RunRanks<'_>,
    work: impl Fn(Option<Ranks>) -> Result<R, TrainError> + Sync,
) -> Result<R, TrainError> {
    let num_ranks = config.parallel.num_ranks();
    let as_rank = |comm: &dyn Communicator| work(Some(Ranks::of_config(comm, config, is_traced)?));
    #[cfg(unix)]
    if is_one_of_many() {
        use moeworks_comm::mpi::{MpiOptions, run_mpi};
        let options = MpiOptions::default().with_order(config.parallel.ordered_sums);
        return run_mpi(&options, say_of_rank, |comm| {
            Ranks::check_program(comm)?;
            as_rank(comm)
        });
    }
    if num_ranks == 1 {
        return work(None);
    }
    if num_ranks > MAX_THREADS {
        let layout = config.parallel.layout();
        return Err(CommError::Start(format!("{layout} is {num_ranks} ranks, {}", too_many_ranks())).into());
    }
    let mut options = RankOptions::new(num_ranks);
    if let Some(end) = call.end() {
        options = options.on_stuck(GRACE, move |error| {
            say_error(error);
            end(FAILED);
        });
    }
    let mut results = try_run_ranks(&options, as_rank)?;
    Ok(results.swap_remove(0))
}

/// The commands that several processes of a launcher carry out together.
const TOGETHER: [&str; 5] = ["train", "generate", "chat", "evaluate", "serve"];

/// Ends this process and the others that a launcher started for a command, after one rank of each node has printed
/// the error. Returns if there are no others, or if they have met and the error was printed.
pub(crate) fn fail_together(call: &Call<'_>, message: &str) {
    let command = call.words().iter().skip(1).find(|word| !word.as_encoded_bytes().starts_with(b"-"));
    #[cfg(unix)]
    if command.is_some_and(|command| TOGETHER.iter().any(|name| command == name)) && is_one_of_many() {
        use moeworks_comm::mpi::{MpiOptions, run_mpi};
        let failed = |_: &dyn Communicator| Err::<(), _>(Failure::input(message));
        // The result only tells that the ranks cannot meet, or have met before.
        let _ = run_mpi(&MpiOptions::default(), say_of_rank, failed);
    }
}

#[cfg(unix)]
pub(crate) fn say_of_rank(rank: usize, error: &dyn std::fmt::Display) {
    say_error(format_args!("rank {rank}: {error}"));
}

/// Returns whether a launcher started this process together with others.
#[cfg(unix)]
pub(crate) fn is_one_of_many() -> bool {
    moeworks_comm::mpi::is_launched() && !crate::environment::is_launched_alone()
}

/// Returns false: only Unix has launchers.
#[cfg(not(unix))]
pub(crate) fn is_one_of_many() -> bool {
    false
}
