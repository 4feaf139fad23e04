//! `moeworks train --auto-layout`: the planner's best few layouts make some real steps, and the run goes on in the
//! fastest. When its steps leave what was measured, it is stopped at a checkpoint and layouts are tried again.
//!
//! Ranks are threads, or the processes of a launcher, which all go through the same choices: the root decides, and
//! sends each decision to the others.

mod choose;
mod follow;
mod place;

use std::path::PathBuf;
use std::time::Instant;

use moeworks_bench::ranks::num_cores;
use moeworks_infer::data::DataError;
#[cfg(unix)]
use moeworks_train::Ranks;
use moeworks_train::config::RunConfig;
use moeworks_train::{Outcome, Requests, TrainError, resumed_config};

use super::{End, Outside, Start, one_rank};
use crate::args::TrainArgs;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::host::Call;
use crate::ranks::{MAX_THREADS, too_many_ranks};
#[cfg(unix)]
use crate::ranks::{is_one_of_many, say_of_rank};
pub(super) use follow::Follow;
use place::Place;

/// Choices of a layout in a call at most.
const MOST_CHOICES: usize = 8;

/// A call of `train --auto-layout`.
struct AutoLayout<'a> {
    args: &'a TrainArgs,
    call: &'a Call<'a>,
    place: Place<'a>,
    num_ranks: usize,
}

/// A start of the run in a chosen layout.
struct Chosen {
    start: Start,
    follow: Follow,
}

/// A stop of the run because its steps left what was measured.
struct Again {
    reason: String,
    run_dir: PathBuf,
}

/// Trains in the layout that measured steps show to be the fastest.
pub(super) fn run(args: &TrainArgs, start: Start, call: &Call<'_>) -> Result<ExitCode, Failure> {
    if !(args.layout_tolerance >= 0.0 && args.layout_tolerance.is_finite()) {
        return Err(Failure::input(format!(
            "--layout-tolerance {}: must be a number of at least 0",
            args.layout_tolerance
        )));
    }
    #[cfg(unix)]
    if is_one_of_many() {
        use moeworks_comm::mpi::{MpiOptions, run_mpi};
        let options = MpiOptions::default().with_order(start.config().parallel.ordered_sums);
        return run_mpi(&options, say_of_rank, |comm| {
            Ranks::check_program(comm)?;
            let num_ranks = num_processes(args, start.config(), comm.size())?;
            AutoLayout { args, call, place: Place::Process(comm), num_ranks }.run(start)
        });
    }
    let num_ranks = num_threads(args, start.config())?;
    AutoLayout { args, call, place: Place::Threads(call), num_ranks }.run(start)
}

/// Returns the number of ranks that are threads: the given one, that of the settings, or one for each core.
fn num_threads(args: &TrainArgs, config: &RunConfig) -> Result<usize, Failure> {
    let num_ranks = match (args.auto_layout.unwrap_or(0), config.parallel.num_ranks()) {
        (0, 1) => num_cores().max(2),
        (0, configured) => configured,
        (given, _) => given,
    };
    if num_ranks > MAX_THREADS {
        return Err(Failure::input(format!("--auto-layout {num_ranks}: {}", too_many_ranks())));
    }
    Ok(num_ranks)
}

/// Returns the number of processes, unless the option or the settings ask for another number of ranks.
#[cfg(unix)]
fn num_processes(args: &TrainArgs, config: &RunConfig, num_started: usize) -> Result<usize, Failure> {
    let given = args.auto_layout.unwrap_or(0);
    let wanted = if given == 0 { config.parallel.num_ranks() } else { given };
    if wanted == num_started || (given == 0 && wanted == 1) {
        return Ok(num_started);
    }
    let asked = if given == 0 { config.parallel.layout().to_string() } else { format!("--auto-layout {given}") };
    Err(Failure::input(format!(
        "{asked}: mpirun started {num_started} processes, each of which is a rank; leave the number out for all of them"
    )))
}

impl AutoLayout<'_> {
    /// Chooses a layout and trains in it, until the run ends in one.
    fn run(&self, mut start: Start) -> Result<ExitCode, Failure> {
        let started = Instant::now();
        self.place.agree(|| match &start {
            Start::New { folder, .. } => Ok(folder.check()?),
            Start::Resumed { .. } => Ok(()),
        })?;
        let mut reason = "the start of the run".to_owned();
        for choice in 1..=MOST_CHOICES {
            let Some(chosen) = self.choose(start, &reason, choice == MOST_CHOICES)? else {
                return Ok(ExitCode::from(self.call.interrupts().exit_code()));
            };
            let end = match self.train(&chosen) {
                Err(TrainError::Data(DataError::Stopped)) => {
                    return Ok(ExitCode::from(self.call.interrupts().exit_code()));
                }
                end => end?,
            };
            let Some(again) = self.again(&chosen.follow, end.as_ref())? else {
                let seconds = started.elapsed().as_secs_f64();
                return end.map_or(Ok(ExitCode::SUCCESS), |end| end.show(self.call, seconds));
            };
            if self.place.is_root() {
                notice!("Layouts are tried again: {}.", again.reason);
            }
            let config = resumed_config(&again.run_dir, Ok)?;
            (reason, start) = (again.reason, Start::Resumed { config, run_dir: again.run_dir });
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Trains in the chosen layout. Returns the end of the run on the root.
    fn train(&self, chosen: &Chosen) -> Result<Option<End>, TrainError> {
        let requests = Requests::default();
        let receiving = self.call.give_signals_to(&requests);
        let _receiving = receiving.map_err(|failure| TrainError::Task(failure.message.into()))?;
        let outside = Outside { requests: &requests, trace: None, follow: Some(&chosen.follow) };
        self.place.on_ranks(chosen.start.config(), |ranks| one_rank(&chosen.start, ranks, outside))
    }

    /// Returns why layouts are to be tried again, and the run that goes on; none if the run has ended. `end` is known
    /// to the root, which decides.
    fn again(&self, follow: &Follow, end: Option<&End>) -> Result<Option<Again>, Failure> {
        let is_stopped = |end: &&End| end.outcome == Outcome::Stopped;
        let reason = self.place.agree(|| Ok(end.filter(is_stopped).and_then(|_| follow.reason())))?;
        let Some(reason) = reason else { return Ok(None) };
        let run_dir = self.place.agree_on_path(|| end.map_or_else(PathBuf::new, |end| end.run_dir.clone()))?;
        Ok(Some(Again { reason, run_dir }))
    }
}
