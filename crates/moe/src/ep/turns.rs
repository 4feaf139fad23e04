//! Two passes of one rank that take turns, so that the exchange of tokens of one travels while the other computes.
//!
//! A turn ends where a pass is about to wait for an exchange, and never by time. So all ranks of a group take the
//! same turns and make their calls in one order, which communicators ask for. One of the passes runs at a time: the
//! other needs neither cores nor a lock of its own.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

/// The stack of the second pass's thread, as large as that of a rank.
const STACK_BYTES: usize = 16 << 20;

/// The turns of two passes, numbered 0 and 1.
pub(super) struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// The pass whose turn it is.
    at_work: usize,
    has_ended: [bool; 2],
    has_panicked: bool,
}

/// The panic of a pass that was stopped because the other one panicked.
struct Stopped;

/// The part of one pass. Dropped, it gives the rest to the other pass, also while a panic unwinds.
struct Part<'t> {
    turns: &'t Turns,
    own: usize,
}

impl Turns {
    /// Makes turns of which the first is that of pass 0.
    pub(super) fn new() -> Self {
        let state = State { at_work: 0, has_ended: [false; 2], has_panicked: false };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Ends the turn of the pass at work, which calls this, and returns when its next turn comes: at once if the
    /// other pass has ended.
    pub(super) fn yield_turn(&self) {
        let mut state = self.state();
        let own = state.at_work;
        if !state.has_ended[1 - own] {
            state.at_work = 1 - own;
            self.changed.notify_all();
            self.wait(state, own);
        }
    }

    /// Runs both passes, `first` on this thread; it has the first turn. Where the system gives no thread for the
    /// other, that runs afterwards.
    pub(super) fn run<A, B: Send>(&self, first: impl FnOnce() -> A, second: impl FnOnce() -> B + Send) -> (A, B) {
        let second = Mutex::new(Some(second));
        let run_second = || {
            let _part = Part { turns: self, own: 1 };
            self.wait(self.state(), 1);
            let second = second.lock().unwrap_or_else(PoisonError::into_inner).take();
            second.map(|second| second())
        };
        let (first, done) = thread::scope(|scope| {
            let name = thread::current().name().unwrap_or("rank").to_owned();
            let builder = thread::Builder::new().name(name).stack_size(STACK_BYTES);
            let thread = builder.spawn_scoped(scope, run_second).ok();
            self.state().has_ended[1] = thread.is_none();
            let first = catch_unwind(AssertUnwindSafe(|| {
                let _part = Part { turns: self, own: 0 };
                first()
            }));
            (first, thread.map_or(Ok(None), thread::ScopedJoinHandle::join))
        });
        let (first, done) = match (first, done) {
            (Ok(first), Ok(done)) => (first, done),
            (Err(first), Err(second)) => resume_unwind(cause(first, second)),
            (Err(panic), _) | (_, Err(panic)) => resume_unwind(panic),
        };
        let run_now = || {
            let second = second.lock().unwrap_or_else(PoisonError::into_inner).take();
            second.expect("a pass that has not run is still there")()
        };
        (first, done.unwrap_or_else(run_now))
    }

    fn wait(&self, mut state: MutexGuard<'_, State>, own: usize) {
        while state.at_work != own {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.has_panicked {
            drop(state);
            resume_unwind(Box::new(Stopped));
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Part<'_> {
    fn drop(&mut self) {
        let mut state = self.turns.state();
        state.has_ended[self.own] = true;
        state.has_panicked |= thread::panicking();
        state.at_work = 1 - self.own;
        self.turns.changed.notify_all();
    }
}

/// Returns the panic that came first of two, of which the other is that of the stopped pass.
fn cause(first: Box<dyn Any + Send>, second: Box<dyn Any + Send>) -> Box<dyn Any + Send> {
    if first.is::<Stopped>() { second } else { first }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(passes: [usize; 2]) -> Vec<(usize, usize)> {
        let (turns, log) = (Turns::new(), Mutex::new(Vec::new()));
        let pass = |own: usize| {
            for step in 0..passes[own] {
                log.lock().unwrap().push((own, step));
                turns.yield_turn();
            }
            own
        };
        assert_eq!(turns.run(|| pass(0), || pass(1)), (0, 1));
        log.into_inner().unwrap()
    }

    #[test]
    fn passes_take_turns_until_one_ends_and_the_other_goes_on() {
        assert_eq!(log([2, 4]), [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2), (1, 3)]);
        assert_eq!(log([3, 1]), [(0, 0), (1, 0), (0, 1), (0, 2)]);
        assert_eq!(log([0, 2]), [(1, 0), (1, 1)]);
    }

    #[test]
    fn a_panic_of_either_pass_stops_the_other_and_is_passed_on() {
        for culprit in 0..2 {
            let (turns, reached) = (Turns::new(), Mutex::new(0));
            let pass = |own: usize| {
                turns.yield_turn();
                assert_ne!(own, culprit, "out of paper");
                turns.yield_turn();
                *reached.lock().unwrap() += 1;
            };
            let panic = catch_unwind(AssertUnwindSafe(|| turns.run(|| pass(0), || pass(1)))).unwrap_err();
            let said = panic.downcast_ref::<String>().expect("the message of the one that failed");
            assert!(said.contains("out of paper"), "{said}");
            assert_eq!(*reached.lock().unwrap(), 0, "the other was stopped");
        }
    }
}
