//! What all ranks of a run share: who died, who sleeps, and how to wait.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use std::{hint, thread};

use crate::CommError;
use crate::in_flight::{InFlight, locked};
use crate::operation::Call;
use crate::wait_timer::WaitTimer;

/// How long a rank looks for the others before it sleeps, where every rank has a core of its own: longer than it
/// takes to wake one that sleeps, or two would wake each other by turns in each of many short calls.
const SPIN: Duration = Duration::from_micros(200);

/// How long a sleeping rank sleeps before it looks whether it is still worth waiting.
const NAP: Duration = Duration::from_millis(50);

pub(crate) struct World {
    bells: Vec<Bell>,
    failure: OnceLock<CommError>,
    has_failed: AtomicBool,
    timeout_ns: AtomicU64,
    has_core_each: bool,
}

/// Where the threads of one rank sleep until they are woken.
#[derive(Default)]
#[repr(align(128))] // Two cache lines: neighbours are fetched in pairs.
struct Bell {
    sleepers: AtomicUsize,
    has_left: AtomicBool,
    num_rings: Mutex<u64>,
    rung: Condvar,
    in_flight: Arc<InFlight>,
}

/// Who waits, in which call.
#[derive(Clone, Copy)]
pub(crate) struct Waiter {
    /// Its number in the whole run.
    pub(crate) rank: usize,
    pub(crate) call: Call,
}

impl World {
    pub(crate) fn new(num_ranks: usize, timeout: Duration) -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Self {
            bells: (0..num_ranks).map(|_| Bell::default()).collect(),
            failure: OnceLock::new(),
            has_failed: AtomicBool::new(false),
            timeout_ns: AtomicU64::new(nanoseconds(timeout)),
            has_core_each: num_ranks <= cores,
        }
    }

    pub(crate) fn set_timeout(&self, timeout: Duration) {
        self.timeout_ns.store(nanoseconds(timeout), Ordering::Relaxed);
    }

    /// Ends the run with this error, unless it has ended before; gives the error that it ended with.
    pub(crate) fn fail(&self, error: CommError) -> CommError {
        let first = self.failure.get_or_init(|| error).clone();
        self.has_failed.store(true, Ordering::SeqCst);
        self.ring_all();
        first
    }

    pub(crate) fn failure(&self) -> Option<CommError> {
        if !self.has_failed.load(Ordering::Acquire) {
            return None;
        }
        self.failure.get().cloned()
    }

    /// Says that a rank will call nothing any more.
    pub(crate) fn leave(&self, rank: usize) {
        self.bells[rank].has_left.store(true, Ordering::SeqCst);
        self.ring_all();
    }

    fn ring_all(&self) {
        self.ring(0..self.bells.len());
    }

    /// Wakes those of the ranks that sleep. What they wait for was written before.
    pub(crate) fn ring(&self, ranks: impl IntoIterator<Item = usize>) {
        // Either this thread sees the sleeper, or the sleeper, which looks once more after it has put itself down as
        // one, sees what was written.
        fence(Ordering::SeqCst);
        for rank in ranks {
            let bell = &self.bells[rank];
            if bell.sleepers.load(Ordering::SeqCst) > 0 {
                *locked(&bell.num_rings) += 1;
                bell.rung.notify_all();
            }
        }
    }

    /// What a rank has started.
    pub(crate) fn in_flight(&self, rank: usize) -> &Arc<InFlight> {
        &self.bells[rank].in_flight
    }

    /// Waits until `is_ready`; `missing` says whom (numbers in the whole run) it waits for.
    pub(crate) fn wait(
        &self,
        waiter: Waiter,
        is_ready: &dyn Fn() -> bool,
        missing: &dyn Fn() -> Vec<usize>,
    ) -> Result<(), CommError> {
        let start = Instant::now();
        let in_flight = self.in_flight(waiter.rank);
        in_flight.advance();
        if self.spin(start, is_ready) {
            return Ok(());
        }
        let mut timer = WaitTimer::new();
        while !is_ready() {
            if let Some(error) = self.failure() {
                return Err(error);
            }
            self.check_missing(waiter, timer.tick(), missing)?;
            in_flight.advance();
            self.sleep(waiter.rank, &|| is_ready() || in_flight.can_advance());
        }
        Ok(())
    }

    fn spin(&self, start: Instant, is_ready: &dyn Fn() -> bool) -> bool {
        if !self.has_core_each {
            // Whoever is waited for needs this core.
            for _ in 0..4 {
                if is_ready() {
                    return true;
                }
                thread::yield_now();
            }
            return is_ready();
        }
        loop {
            for _ in 0..64 {
                if is_ready() {
                    return true;
                }
                hint::spin_loop();
            }
            if start.elapsed() > SPIN || self.has_failed.load(Ordering::Relaxed) {
                return is_ready();
            }
        }
    }

    fn sleep(&self, rank: usize, is_ready: &dyn Fn() -> bool) {
        let bell = &self.bells[rank];
        let guard = locked(&bell.num_rings);
        let heard = *guard;
        bell.sleepers.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if !is_ready() && !self.has_failed.load(Ordering::SeqCst) {
            let result = bell.rung.wait_timeout_while(guard, NAP, |num_rings| *num_rings == heard);
            drop(result.unwrap_or_else(PoisonError::into_inner));
        }
        bell.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Ends the run if those that are waited for have left, or have not come for too long.
    fn check_missing(
        &self,
        waiter: Waiter,
        waited: Duration,
        missing: &dyn Fn() -> Vec<usize>,
    ) -> Result<(), CommError> {
        let ranks = missing();
        if let Some(&rank) = ranks.iter().find(|&&rank| self.bells[rank].has_left.load(Ordering::SeqCst)) {
            // It may have left between its last word and this look: only who is still missing has not said it.
            if missing().contains(&rank) {
                return Err(self.fail(CommError::Left { rank, call: waiter.call }));
            }
        }
        if nanoseconds(waited) < self.timeout_ns.load(Ordering::Relaxed) || ranks.is_empty() {
            return Ok(());
        }
        Err(self.fail(CommError::Hung { ranks, waiting: waiter.rank, call: waiter.call, waited }))
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
