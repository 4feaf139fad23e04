//! A thread pool with a fork-join of about a microsecond.
//!
//! Workers spin for the next job for a short while, then park, so that an idle program costs nothing. A job is a
//! number of tasks, taken in order from a shared counter; the caller works too. Any thread may run any task, so a
//! task's result must depend on its number alone: that makes results the same on any number of threads.

use std::cell::{Cell, UnsafeCell};
use std::hint;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

/// The time that a worker spins before it parks: longer than the gap between two operations of a training step.
const SPIN: Duration = Duration::from_micros(100);

/// The state word: the job's number in the high half, whether the job takes helpers, and the number of threads
/// working on it.
const OPEN: u64 = 1 << 31;
const ACTIVE: u64 = OPEN - 1;

type Task<'a> = dyn Fn(usize) + Sync + 'a;

struct Job {
    task: *const Task<'static>,
    num_tasks: usize,
}

struct Shared {
    state: AtomicU64,
    next_task: AtomicUsize,
    job: UnsafeCell<Option<Job>>,
    has_panicked: AtomicBool,
    is_closing: AtomicBool,
    parked: Vec<AtomicBool>,
}

// SAFETY: `job` is written only by the thread that holds `Pool::caller`, while the state word says that no job is
// open and nobody is at work; workers read it only between joining an open job and leaving it. The task behind the
// pointer is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: the only field that is not `Send` by itself is the pointer in `job`, used as said above.
unsafe impl Send for Shared {}

struct Pool {
    shared: Arc<Shared>,
    workers: Vec<Thread>,
    handles: Mutex<Vec<JoinHandle<()>>>,
    caller: Mutex<()>,
}

/// A handle to a pool of threads. Cloning shares the pool; the last handle's drop ends its threads.
#[derive(Clone)]
pub struct Threads {
    pool: Arc<Pool>,
}

thread_local! {
    /// Set while this thread runs a task, so that a nested call runs inline instead of waiting for itself.
    static IS_IN_TASK: Cell<bool> = const { Cell::new(false) };
}

impl Threads {
    /// Starts a pool of `num_threads` threads, of which the caller is one. 0 counts as 1.
    #[must_use]
    pub fn new(num_threads: usize) -> Self {
        let num_workers = num_threads.saturating_sub(1);
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            next_task: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            has_panicked: AtomicBool::new(false),
            is_closing: AtomicBool::new(false),
            parked: (0..num_workers).map(|_| AtomicBool::new(false)).collect(),
        });
        let mut handles = Vec::new();
        for index in 0..num_workers {
            let shared = Arc::clone(&shared);
            let builder = thread::Builder::new().name(format!("moeworks-{}", index + 1));
            // With fewer threads than asked for the results are the same, only later.
            if let Ok(handle) = builder.spawn(move || work(&shared, index)) {
                handles.push(handle);
            }
        }
        let workers = handles.iter().map(|handle| handle.thread().clone()).collect();
        Self { pool: Arc::new(Pool { shared, workers, handles: Mutex::new(handles), caller: Mutex::new(()) }) }
    }

    /// Returns the number of threads that work on a job, the caller included.
    #[must_use]
    pub fn count(&self) -> usize {
        self.pool.workers.len() + 1
    }

    /// Runs `task(0)` to `task(num_tasks - 1)`, each once, and returns when all are done. Called from inside a task,
    /// or while another thread uses the pool, it runs them on the calling thread alone. A panic in a task is passed
    /// on.
    pub fn run(&self, num_tasks: usize, task: impl Fn(usize) + Sync) {
        if num_tasks == 0 {
            return;
        }
        let is_nested = IS_IN_TASK.get();
        let guard = if num_tasks == 1 || is_nested || self.pool.workers.is_empty() {
            None
        } else {
            match self.pool.caller.try_lock() {
                Ok(guard) => Some(guard),
                Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
                Err(std::sync::TryLockError::WouldBlock) => None,
            }
        };
        match guard {
            Some(_guard) => self.pool.run(num_tasks, &task),
            None => (0..num_tasks).for_each(task),
        }
    }

    /// Cuts `data` into pieces of `piece_len` elements (the last may be shorter) and runs `task(index, piece)` on
    /// each.
    pub fn run_pieces<T: Send>(&self, data: &mut [T], piece_len: usize, task: impl Fn(usize, &mut [T]) + Sync) {
        assert!(piece_len > 0, "pieces of no element");
        let len = data.len();
        let base = SendPointer(data.as_mut_ptr());
        self.run(len.div_ceil(piece_len), |index| {
            let start = index * piece_len;
            let end = (start + piece_len).min(len);
            // SAFETY: the pieces of different tasks do not overlap, each task runs once, and `data` is borrowed
            // mutably until all have ended.
            let piece = unsafe { std::slice::from_raw_parts_mut(base.get().add(start), end - start) };
            task(index, piece);
        });
    }
}

/// A pointer that tasks on several threads may hold. Code that dereferences it states why that is sound.
pub(crate) struct SendPointer<T>(pub(crate) *mut T);

impl<T> Clone for SendPointer<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for SendPointer<T> {}

impl<T> SendPointer<T> {
    pub(crate) fn get(self) -> *mut T {
        self.0
    }
}

// SAFETY: the pointer itself is only an address; the uses state why theirs are sound.
unsafe impl<T> Send for SendPointer<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for SendPointer<T> {}

impl Pool {
    fn run(&self, num_tasks: usize, task: &Task<'_>) {
        let shared = &*self.shared;
        // SAFETY: only the lifetime is erased. The pointer is used by workers that joined the job, and this function
        // does not return, nor unwind, before the job is closed and all of them have left.
        let task: *const Task<'static> = unsafe { std::mem::transmute(std::ptr::from_ref(task)) };
        // SAFETY: `caller` is held, no job is open and nobody is at work (the last call waited for it).
        unsafe { *shared.job.get() = Some(Job { task, num_tasks }) };
        shared.next_task.store(0, Ordering::Relaxed);
        let number = (shared.state.load(Ordering::Relaxed) >> 32).wrapping_add(1) & 0xffff_ffff;
        shared.state.store((number << 32) | OPEN, Ordering::SeqCst);
        for (parked, worker) in shared.parked.iter().zip(&self.workers) {
            if parked.load(Ordering::SeqCst) {
                worker.unpark();
            }
        }
        // SAFETY: the job was stored just above and is valid until this function returns.
        let result = unsafe { run_tasks(shared) };
        shared.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0_u32;
        while shared.state.load(Ordering::Acquire) & ACTIVE != 0 {
            spins += 1;
            // A worker that lost its core may take long: let it have this one.
            if spins > 10_000 { thread::yield_now() } else { hint::spin_loop() }
        }
        let worker_panicked = shared.has_panicked.swap(false, Ordering::Relaxed);
        match result {
            Err(payload) => panic::resume_unwind(payload),
            Ok(()) => assert!(!worker_panicked, "a task panicked on another thread"),
        }
    }
}

/// Takes tasks until none is left.
///
/// # Safety
/// A job must be stored whose task lives until this returns.
unsafe fn run_tasks(shared: &Shared) -> thread::Result<()> {
    // SAFETY: nobody writes the job while it is open or somebody is at it, which the caller is.
    let job = unsafe { (*shared.job.get()).as_ref() };
    let Some(job) = job else { return Ok(()) };
    IS_IN_TASK.set(true);
    let result = panic::catch_unwind(AssertUnwindSafe(|| {
        loop {
            let index = shared.next_task.fetch_add(1, Ordering::Relaxed);
            if index >= job.num_tasks {
                break;
            }
            // SAFETY: the task lives until this function returns: the condition of the function.
            unsafe { (*job.task)(index) };
        }
    }));
    IS_IN_TASK.set(false);
    if result.is_err() {
        // The others stop at their next task.
        shared.next_task.store(usize::MAX / 2, Ordering::Relaxed);
    }
    result
}

fn work(shared: &Shared, index: usize) {
    let mut last_job = 0;
    loop {
        let Some(state) = wait_for_job(shared, index, last_job) else { return };
        last_job = state >> 32;
        if shared.state.compare_exchange(state, state + 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            // Somebody else joined or the job was closed in between: look again at the same job.
            last_job = last_job.wrapping_sub(1);
            continue;
        }
        // SAFETY: the job was open when this thread was counted in; the caller waits until it is counted out.
        if unsafe { run_tasks(shared) }.is_err() {
            shared.has_panicked.store(true, Ordering::Relaxed);
        }
        shared.state.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Returns the state word of an open job other than `last_job`; `None` when the pool ends.
fn wait_for_job(shared: &Shared, index: usize, last_job: u64) -> Option<u64> {
    let ready = || {
        let state = shared.state.load(Ordering::SeqCst);
        (state & OPEN != 0 && state >> 32 != last_job).then_some(state)
    };
    loop {
        let start = Instant::now();
        loop {
            for _ in 0..64 {
                if let Some(state) = ready() {
                    return Some(state);
                }
                hint::spin_loop();
            }
            if shared.is_closing.load(Ordering::Relaxed) {
                return None;
            }
            if start.elapsed() > SPIN {
                break;
            }
        }
        shared.parked[index].store(true, Ordering::SeqCst);
        if ready().is_none() && !shared.is_closing.load(Ordering::SeqCst) {
            thread::park();
        }
        shared.parked[index].store(false, Ordering::SeqCst);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.is_closing.store(true, Ordering::SeqCst);
        for worker in &self.workers {
            worker.unpark();
        }
        for handle in self.handles.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // A worker never panics outside a task, and task panics are caught.
            let _ = handle.join();
        }
    }
}

#[cfg(test)]
#[path = "threads_tests.rs"]
mod tests;
