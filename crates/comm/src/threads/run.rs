//! Ranks as threads: starting them and collecting their results.

use std::any::Any;
use std::fmt::Display;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::ThreadComm;
use super::group::Group;
use super::world::World;
use crate::in_flight::locked;
use crate::{CommError, Communicator};

/// The stack of each rank's thread. Only touched pages cost memory.
const STACK_BYTES: usize = 16 << 20;

type Stuck = dyn Fn(&CommError) + Send + Sync;

/// The settings of a run: the number of ranks, their nodes and timeouts.
pub struct RankOptions {
    nodes: Vec<usize>,
    timeout: Duration,
    grace: Duration,
    on_stuck: Option<Box<Stuck>>,
}

impl RankOptions {
    /// Makes settings for `num_ranks` ranks on one node. A rank that does not come for 25 seconds is reported as
    /// hung.
    #[must_use]
    pub fn new(num_ranks: usize) -> Self {
        Self {
            nodes: vec![0; num_ranks],
            timeout: Duration::from_secs(25),
            grace: Duration::from_secs(5),
            on_stuck: None,
        }
    }

    /// Sets the node of each rank, with one entry for each, to try decisions for clusters.
    #[must_use]
    pub fn with_nodes(mut self, nodes: &[usize]) -> Self {
        self.nodes = nodes.to_vec();
        self
    }

    /// Sets how long a rank waits for others before it reports them as hung.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets a callback for ranks that hang, since a thread cannot be ended from outside. If a rank has not returned
    /// `grace` after the run failed, `on_stuck` is called once with the failure, and may end the process. Without it
    /// the run waits for the thread.
    #[must_use]
    pub fn on_stuck(mut self, grace: Duration, on_stuck: impl Fn(&CommError) + Send + Sync + 'static) -> Self {
        self.grace = grace;
        self.on_stuck = Some(Box::new(on_stuck));
        self
    }
}

/// Runs `rank` once on each of a number of threads and returns the results in the order of ranks. A rank that panics
/// or returns an error ends the communication of all others, which get an error that names it.
pub fn run_ranks<R, E>(
    options: &RankOptions,
    rank: impl Fn(&dyn Communicator) -> Result<R, E> + Sync,
) -> Vec<Result<R, E>>
where
    R: Send,
    E: From<CommError> + Display + Send,
{
    run(options, rank).0
}

/// Runs `rank` as [`run_ranks`] does, and returns the results of all or the one error that came first.
///
/// # Errors
/// Returns the error of the rank that failed first.
pub fn try_run_ranks<R, E>(
    options: &RankOptions,
    rank: impl Fn(&dyn Communicator) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E>
where
    R: Send,
    E: From<CommError> + Display + Send,
{
    let (mut results, failure) = run(options, rank);
    if let Some(CommError::Died { rank: first, .. }) = failure
        && results.get(first).is_some_and(Result::is_err)
    {
        results.swap(0, first);
    }
    results.into_iter().collect()
}

fn run<R, E>(
    options: &RankOptions,
    rank: impl Fn(&dyn Communicator) -> Result<R, E> + Sync,
) -> (Vec<Result<R, E>>, Option<CommError>)
where
    R: Send,
    E: From<CommError> + Display + Send,
{
    let num_ranks = options.nodes.len();
    let world = Arc::new(World::new(num_ranks, options.timeout));
    let group = Arc::new(Group::new(Arc::clone(&world), (0..num_ranks).collect(), &options.nodes));
    let end_count = EndCount::default();
    let results = thread::scope(|scope| {
        let start = |number| {
            let (world, group, rank, end_count) = (&world, Arc::clone(&group), &rank, &end_count);
            let body = move || {
                let result = run_one(world, ThreadComm::new(group, number), rank);
                end_count.add();
                result
            };
            let builder = thread::Builder::new().name(format!("rank-{number}")).stack_size(STACK_BYTES);
            builder.spawn_scoped(scope, body).map_err(|error| {
                end_count.add();
                world.fail(CommError::Start(format!("cannot start a thread for rank {number} of {num_ranks}: {error}")))
            })
        };
        let threads: Vec<_> = (0..num_ranks).map(start).collect();
        end_count.wait_for_all(num_ranks, &world, options);
        let join = |thread: Result<thread::ScopedJoinHandle<'_, Result<R, E>>, CommError>| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|payload| panic::resume_unwind(payload)),
            Err(error) => Err(E::from(error)),
        };
        threads.into_iter().map(join).collect()
    });
    (results, world.failure())
}

fn run_one<R, E>(world: &World, comm: ThreadComm, rank: &impl Fn(&dyn Communicator) -> Result<R, E>) -> Result<R, E>
where
    E: From<CommError> + Display,
{
    let number = comm.rank;
    let died = |reason| CommError::Died { rank: number, reason };
    match panic::catch_unwind(AssertUnwindSafe(|| rank(&comm))) {
        Ok(Ok(result)) => {
            world.leave(number);
            Ok(result)
        }
        Ok(Err(error)) => {
            world.fail(died(error.to_string()));
            Err(error)
        }
        Err(payload) => {
            let error = died(reason_of_panic(&*payload));
            world.fail(error.clone());
            Err(E::from(error))
        }
    }
}

/// A function that describes a panic's payload, if it knows its type.
type Describe = fn(&(dyn Any + Send)) -> Option<String>;

static DESCRIBE: OnceLock<Describe> = OnceLock::new();

/// Sets how to describe a panic whose payload is no text, such as the error of a device. Only the first call counts.
pub fn describe_panics_by(describe: Describe) {
    // A second way is not needed: there is one program, which knows its payloads.
    let _ = DESCRIBE.set(describe);
}

/// Returns the reason of a rank's panic.
pub(crate) fn reason_of_panic(payload: &(dyn Any + Send)) -> String {
    let known = DESCRIBE.get().and_then(|describe| describe(payload));
    known.unwrap_or_else(|| {
        let text = payload.downcast_ref::<&str>().copied();
        let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
        format!("panicked: {}", text.unwrap_or("without a message"))
    })
}

/// A counter of the ranks that have ended.
#[derive(Default)]
struct EndCount {
    num_ended: Mutex<usize>,
    changed: Condvar,
}

impl EndCount {
    fn add(&self) {
        *locked(&self.num_ended) += 1;
        self.changed.notify_all();
    }

    /// Waits for all ranks. Calls `on_stuck` if some do not return after the run has failed.
    fn wait_for_all(&self, num_ranks: usize, world: &World, options: &RankOptions) {
        let mut failed_at: Option<Instant> = None;
        let mut has_called = options.on_stuck.is_none();
        let mut num_ended = locked(&self.num_ended);
        while *num_ended < num_ranks {
            let wait = self.changed.wait_timeout(num_ended, Duration::from_millis(100));
            num_ended = wait.unwrap_or_else(PoisonError::into_inner).0;
            let Some(error) = world.failure() else { continue };
            let since = *failed_at.get_or_insert_with(Instant::now);
            if !has_called && since.elapsed() >= options.grace && *num_ended < num_ranks {
                has_called = true;
                options.on_stuck.iter().for_each(|call| call(&error));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_without_text_is_described_as_the_program_says() {
        describe_panics_by(|payload| payload.downcast_ref::<u32>().map(|code| format!("device error {code}")));
        assert_eq!(reason_of_panic(&7_u32), "device error 7");
        assert_eq!(reason_of_panic(&"index"), "panicked: index");
        assert_eq!(reason_of_panic(&String::from("length")), "panicked: length");
        assert_eq!(reason_of_panic(&1.5_f64), "panicked: without a message");
    }
}
