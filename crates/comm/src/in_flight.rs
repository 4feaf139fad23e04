//! Operations that were started and are finished later. All that a rank has under way go on whenever it waits for one
//! of them, so that ranks may finish them in different orders.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::CommError;
use crate::operation::Call;
use crate::started::RawPending;

/// An operation as the steps of one rank.
pub(crate) trait Steps: Send {
    /// Goes as far as it can without waiting; whether that is the end.
    fn advance(&mut self) -> Result<bool, CommError>;
    /// Whether it could go on since it last did.
    fn can_advance(&self) -> bool;
    /// Waits for the end; meanwhile the others that are under way go on.
    fn finish(&mut self) -> Result<(), CommError>;
    /// Ends it one way or the other: afterwards nobody uses its memory.
    fn close(&mut self);
}

type Shared = Arc<Mutex<dyn Steps>>;

/// What a rank has started and not yet asked the end of.
#[derive(Default)]
pub(crate) struct InFlight {
    list: Mutex<Vec<Shared>>,
    len: AtomicUsize,
    num_collectives: AtomicUsize,
}

impl InFlight {
    pub(crate) fn is_empty(&self) -> bool {
        self.len.load(Ordering::Relaxed) == 0
    }

    /// Whether calls of several ranks are under way: the same on all ranks of a group, unlike messages, which some
    /// ranks send and others do not.
    pub(crate) fn has_collectives(&self) -> bool {
        self.num_collectives.load(Ordering::Relaxed) > 0
    }

    /// Makes all go on. An error is the whole run's: it comes out where an operation is finished.
    pub(crate) fn advance(&self) {
        for operation in self.list() {
            // Whoever holds it makes it go on.
            if let Ok(mut steps) = operation.try_lock() {
                let _ = steps.advance();
            }
        }
    }

    /// Whether one of them could go on.
    pub(crate) fn can_advance(&self) -> bool {
        self.list().iter().any(|operation| operation.try_lock().is_ok_and(|steps| steps.can_advance()))
    }

    /// A copy: the list's lock is not held while an operation goes on.
    fn list(&self) -> Vec<Shared> {
        if self.is_empty() { Vec::new() } else { locked(&self.list).clone() }
    }

    fn add(&self, operation: Shared, is_collective: bool) {
        locked(&self.list).push(operation);
        self.len.fetch_add(1, Ordering::Relaxed);
        self.num_collectives.fetch_add(usize::from(is_collective), Ordering::Relaxed);
    }

    fn remove(&self, operation: &Shared, is_collective: bool) {
        let mut list = locked(&self.list);
        if let Some(index) = list.iter().position(|other| Arc::ptr_eq(other, operation)) {
            list.remove(index);
            self.len.fetch_sub(1, Ordering::Relaxed);
            self.num_collectives.fetch_sub(usize::from(is_collective), Ordering::Relaxed);
        }
    }
}

/// A started operation, which is also in its rank's list of those under way.
pub(crate) struct Handle {
    started: Shared,
    in_flight: Arc<InFlight>,
    is_collective: bool,
}

impl Handle {
    /// Of a `call` that was started.
    pub(crate) fn new(call: Call, mut started: impl Steps + 'static, in_flight: &Arc<InFlight>) -> Self {
        // What is there already need not be waited for. An error comes out at the end.
        let _ = started.advance();
        let started: Shared = Arc::new(Mutex::new(started));
        let is_collective = !matches!(call, Call::Send { .. } | Call::Receive { .. });
        in_flight.add(Arc::clone(&started), is_collective);
        Self { started, in_flight: Arc::clone(in_flight), is_collective }
    }
}

impl RawPending for Handle {
    fn is_finished(&mut self) -> Result<bool, CommError> {
        self.in_flight.advance();
        locked(&self.started).advance()
    }

    fn finish(&mut self) -> Result<(), CommError> {
        self.in_flight.remove(&self.started, self.is_collective);
        locked(&self.started).finish()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.in_flight.remove(&self.started, self.is_collective);
        // Another thread of this rank may still hold it, to make it go on: the memory must not be needed after this.
        locked(&self.started).close();
    }
}

/// The lock, also after a thread has panicked with it: what it guards is whole between any two statements.
pub(crate) fn locked<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
