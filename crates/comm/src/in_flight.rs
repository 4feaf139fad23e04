//! Operations that are started now and finished later. All operations that a rank has in flight progress while it
//! waits for any of them, so that ranks may finish them in different orders.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::CommError;
use crate::operation::Call;
use crate::started::RawPending;

/// One rank's part of an operation, as steps.
pub(crate) trait Steps: Send {
    /// Goes as far as possible without waiting. Returns whether the operation has ended.
    fn advance(&mut self) -> Result<bool, CommError>;
    /// Returns whether the operation could progress since it last did.
    fn can_advance(&self) -> bool;
    /// Waits for the end, while the other operations in flight progress.
    fn finish(&mut self) -> Result<(), CommError>;
    /// Waits for the end with pauses, if waiting takes a core otherwise.
    fn finish_idle(&mut self) -> Result<(), CommError> {
        self.finish()
    }
    /// Ends the operation in any case. Nobody uses its memory afterwards.
    fn close(&mut self);
}

type Shared = Arc<Mutex<dyn Steps>>;

/// The operations that a rank has started and not finished.
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

    /// Returns whether collectives are in flight. All ranks of a group agree on it, unlike on messages, which some
    /// ranks send and others do not.
    pub(crate) fn has_collectives(&self) -> bool {
        self.num_collectives.load(Ordering::Relaxed) > 0
    }

    /// Makes all operations progress. An error concerns the whole run and is returned where the operation is
    /// finished.
    pub(crate) fn advance(&self) {
        for operation in self.list() {
            // An operation that is locked is being advanced by the holder of the lock.
            if let Ok(mut steps) = operation.try_lock() {
                let _ = steps.advance();
            }
        }
    }

    /// Returns whether any operation could progress.
    pub(crate) fn can_advance(&self) -> bool {
        self.list().iter().any(|operation| operation.try_lock().is_ok_and(|steps| steps.can_advance()))
    }

    /// Copies the list, so that its lock is not held while an operation progresses.
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

/// A started operation. It is also in its rank's list of those in flight.
pub(crate) struct Handle {
    started: Shared,
    in_flight: Arc<InFlight>,
    is_collective: bool,
}

impl Handle {
    /// Adds an operation that was started by `call` to the list.
    pub(crate) fn new(call: Call, mut started: impl Steps + 'static, in_flight: &Arc<InFlight>) -> Self {
        // Data that is there already need not be waited for. An error is returned at the end.
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

    fn finish_idle(&mut self) -> Result<(), CommError> {
        self.in_flight.remove(&self.started, self.is_collective);
        locked(&self.started).finish_idle()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.in_flight.remove(&self.started, self.is_collective);
        // Another thread of this rank may still be advancing it; the memory must not be used after this.
        locked(&self.started).close();
    }
}

/// Locks a mutex, also after a thread panicked while it held it: the guarded value is valid between any two
/// statements.
pub(crate) fn locked<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
