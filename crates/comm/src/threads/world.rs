//! The state that all ranks of a run share: the failure, the sleeping threads, and waiting.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use std::{hint, thread};

use crate::CommError;
use crate::in_flight::{InFlight, locked};
use crate::operation::Call;
use crate::wait_timer::WaitTimer;

/// The time that a rank spins before it sleeps, if every rank has a core of its own. It is longer than waking a
/// sleeper takes: otherwise two ranks would wake each other by turns in many short calls.
const SPIN: Duration = Duration::from_micros(200);

/// The time after which a sleeping rank checks whether it is still worth waiting.
const NAP: Duration = Duration::from_millis(50);

pub(crate) struct World {
    signals: Vec<WakeSignal>,
    failure: OnceLock<CommError>,
    has_failed: AtomicBool,
    timeout_ns: AtomicU64,
    has_core_each: bool,
}

/// The signal that wakes the sleeping threads of one rank.
#[derive(Default)]
#[repr(align(128))] // Two cache lines: neighbours are fetched in pairs.
struct WakeSignal {
    sleepers: AtomicUsize,
    has_left: AtomicBool,
    num_wakes: Mutex<u64>,
    woken: Condvar,
    in_flight: Arc<InFlight>,
}

/// The rank that waits, and its call.
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
            signals: (0..num_ranks).map(|_| WakeSignal::default()).collect(),
            failure: OnceLock::new(),
            has_failed: AtomicBool::new(false),
            timeout_ns: AtomicU64::new(nanoseconds(timeout)),
            has_core_each: num_ranks <= cores,
        }
    }

    pub(crate) fn set_timeout(&self, timeout: Duration) {
        self.timeout_ns.store(nanoseconds(timeout), Ordering::Relaxed);
    }

    /// Ends the run with this error, unless it has ended before. Returns the error that it ended with.
    pub(crate) fn fail(&self, error: CommError) -> CommError {
        let first = self.failure.get_or_init(|| error).clone();
        self.has_failed.store(true, Ordering::SeqCst);
        self.wake_all();
        first
    }

    pub(crate) fn failure(&self) -> Option<CommError> {
        if !self.has_failed.load(Ordering::Acquire) {
            return None;
        }
        self.failure.get().cloned()
    }

    /// Notes that a rank makes no more calls.
    pub(crate) fn leave(&self, rank: usize) {
        self.signals[rank].has_left.store(true, Ordering::SeqCst);
        self.wake_all();
    }

    fn wake_all(&self) {
        self.wake(0..self.signals.len());
    }

    /// Wakes the ranks that sleep. The values that they wait for were written before.
    pub(crate) fn wake(&self, ranks: impl IntoIterator<Item = usize>) {
        // Either this thread sees the sleeper, or the sleeper, which checks once more after it has registered itself,
        // sees the values.
        fence(Ordering::SeqCst);
        for rank in ranks {
            let signal = &self.signals[rank];
            if signal.sleepers.load(Ordering::SeqCst) > 0 {
                *locked(&signal.num_wakes) += 1;
                signal.woken.notify_all();
            }
        }
    }

    /// Returns the operations that a rank has in flight.
    pub(crate) fn in_flight(&self, rank: usize) -> &Arc<InFlight> {
        &self.signals[rank].in_flight
    }

    /// Waits until `is_ready`. `missing` returns the ranks that it waits for, by their numbers in the whole run.
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
            // The awaited rank needs this core.
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
        let signal = &self.signals[rank];
        let guard = locked(&signal.num_wakes);
        let seen = *guard;
        signal.sleepers.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if !is_ready() && !self.has_failed.load(Ordering::SeqCst) {
            let result = signal.woken.wait_timeout_while(guard, NAP, |num_wakes| *num_wakes == seen);
            drop(result.unwrap_or_else(PoisonError::into_inner));
        }
        signal.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Ends the run if a missing rank has left, or if ranks have been missing for too long.
    fn check_missing(
        &self,
        waiter: Waiter,
        waited: Duration,
        missing: &dyn Fn() -> Vec<usize>,
    ) -> Result<(), CommError> {
        let ranks = missing();
        if let Some(&rank) = ranks.iter().find(|&&rank| self.signals[rank].has_left.load(Ordering::SeqCst)) {
            // A rank may have left between its last post and this check: only one that is still missing did not post.
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
