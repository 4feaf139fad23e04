//! A watchdog for ranks that are processes: it reports a process of its node that ends before its run, and ranks that
//! hang.
//!
//! Death is noticed at once through the processes of the node. Hanging is noticed by a clock: each rank writes into a
//! page shared by its node whether it is in an operation, and a thread of each checks whether its own rank has been
//! in one for too long. The ranks of the node that are in none, or whose process shows no sign of life, are reported.
//! A process that stands still is noticed within the shortest timeout so far, even while ranks may take long, as for
//! a checkpoint; between nodes by [`Heartbeat`].

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use memmap2::MmapRaw;

use super::death_watch::DeathWatch;
use super::heartbeat::Heartbeat;
use crate::CommError;
use crate::operation::Call;
use crate::wait_timer::WaitTimer;

/// The interval between two checks.
const TICK: Duration = Duration::from_millis(100);

/// One rank's part of the page.
#[repr(C, align(64))]
struct Slot {
    /// An odd value while the rank is in an operation; it counts up.
    state: AtomicU64,
    /// A counter that grows while the process lives.
    heartbeat: AtomicU64,
    /// True if a rank of the node has reported why the run fails; used in the first slot.
    is_reported: AtomicBool,
}

/// The state of a rank whose run has ended.
const ENDED: u64 = u64::MAX - 1;

/// Memory that the ranks of a node share, with one slot for each.
pub(crate) struct Page {
    memory: MmapRaw,
    num_slots: usize,
}

impl Page {
    /// Creates the file behind the page.
    pub(crate) fn create(path: &Path, num_slots: usize) -> io::Result<()> {
        let mut options = OpenOptions::new();
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let file = options.read(true).write(true).create_new(true).open(path)?;
        file.set_len((num_slots * size_of::<Slot>()) as u64).inspect_err(|_| {
            // Without its length it is useless; that it may stay behind is the lesser evil.
            let _ = fs::remove_file(path);
        })
    }

    pub(crate) fn open(path: &Path, num_slots: usize) -> io::Result<Self> {
        let file: File = OpenOptions::new().read(true).write(true).open(path)?;
        let memory = MmapRaw::map_raw(&file)?;
        if memory.len() < num_slots * size_of::<Slot>() {
            return Err(io::Error::other("the page of the watchdogs is too short"));
        }
        Ok(Self { memory, num_slots })
    }

    fn slots(&self) -> &[Slot] {
        // SAFETY: the mapping has this length (`open`), starts at a page, lives as long as `self`, and all processes
        // use it through these atomics only.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast::<Slot>(), self.num_slots) }
    }
}

/// The callback by which the watchdog ends the run.
pub(crate) type OnFailure = dyn Fn(CommError) + Send + Sync;

pub(crate) struct Watch {
    page: Page,
    /// The index of this rank's slot.
    own: usize,
    /// Each rank of the node by its number in the whole run.
    ranks: Vec<usize>,
    /// The ranks on other nodes.
    others: Vec<usize>,
    /// The encoding of the call that this rank is in. Writing it costs less than a lock, and the watchdog reads it
    /// long after.
    call: [AtomicU64; 4],
    timeout_ns: AtomicU64,
    /// The shortest timeout so far: a process without a sign of life for so long stands still.
    shortest_ns: AtomicU64,
    is_over: AtomicBool,
}

/// The last sign of life of a rank.
struct Sign {
    heartbeat: u64,
    since: WaitTimer,
}

/// A mark that this rank is in an operation, until it is dropped.
pub(crate) struct InOperation<'a>(&'a AtomicU64);

impl Drop for InOperation<'_> {
    fn drop(&mut self) {
        count_up(self.0);
    }
}

/// Increments a state. Only this rank writes it, one thread at a time.
fn count_up(state: &AtomicU64) {
    state.store(state.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

impl Watch {
    pub(crate) fn new(page: Page, own: usize, ranks: Vec<usize>, num_ranks: usize, timeout: Duration) -> Self {
        let others = (0..num_ranks).filter(|rank| !ranks.contains(rank)).collect();
        let watch = Self {
            page,
            own,
            ranks,
            others,
            call: Default::default(),
            timeout_ns: AtomicU64::new(0),
            shortest_ns: AtomicU64::new(u64::MAX),
            is_over: AtomicBool::new(false),
        };
        watch.set_timeout(timeout);
        // The first sign of life: the process may be stopped before its watchdog looks.
        watch.page.slots()[own].heartbeat.fetch_add(1, Ordering::Relaxed);
        watch
    }

    pub(crate) fn set_timeout(&self, timeout: Duration) {
        let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        self.timeout_ns.store(timeout_ns, Ordering::Relaxed);
        self.shortest_ns.fetch_min(timeout_ns, Ordering::Relaxed);
    }

    pub(crate) fn enter(&self, call: &Call) -> InOperation<'_> {
        for (to, word) in self.call.iter().zip(call.to_words()) {
            to.store(word, Ordering::Relaxed);
        }
        let state = &self.page.slots()[self.own].state;
        count_up(state);
        InOperation(state)
    }

    /// Starts the thread that watches this rank's calls, the processes of the node's ranks with ids `pids` (empty if
    /// unknown) and, with a `heartbeat`, another node.
    pub(crate) fn spawn(
        self: &Arc<Self>,
        pids: &[usize],
        heartbeat: Option<Heartbeat>,
        on_failure: impl Fn(CommError) + Send + Sync + 'static,
    ) -> io::Result<JoinHandle<()>> {
        let watch = Arc::clone(self);
        let deaths = DeathWatch::new(pids);
        thread::Builder::new().name("watchdog".to_owned()).spawn(move || watch.run(deaths, heartbeat, &on_failure))
    }

    /// Notes that this rank ends as it should, and ends the thread.
    pub(crate) fn end(&self) {
        self.page.slots()[self.own].state.store(ENDED, Ordering::Relaxed);
        self.is_over.store(true, Ordering::Relaxed);
    }

    /// Marks the failure of the run as reported, and returns whether this rank is the first of its node to do so.
    pub(crate) fn is_first_to_report(&self) -> bool {
        !self.page.slots()[0].is_reported.swap(true, Ordering::SeqCst)
    }

    fn run(&self, mut deaths: DeathWatch, mut heartbeat: Option<Heartbeat>, on_failure: &OnFailure) {
        let own = &self.page.slots()[self.own];
        let mut seen = own.state.load(Ordering::Relaxed);
        let mut timer = WaitTimer::new();
        let mut signs: Vec<Sign> =
            self.page.slots().iter().map(|_| Sign { heartbeat: 0, since: WaitTimer::new() }).collect();
        while !self.is_over.load(Ordering::Relaxed) {
            if let Some(rank) = self.wait_for_death(&mut deaths) {
                let reason = "its process ended in the middle of the run (killed?)".to_owned();
                on_failure(CommError::Died { rank, reason });
            }
            own.heartbeat.fetch_add(1, Ordering::Relaxed);
            let state = own.state.load(Ordering::Relaxed);
            let waited = timer.tick();
            let shortest = Duration::from_nanos(self.shortest_ns.load(Ordering::Relaxed));
            let mut still = self.silent_ranks(&mut signs, shortest);
            let elsewhere = heartbeat.as_mut().and_then(Heartbeat::beat);
            // Datagrams may be lost for a while: they alone are no reason.
            still.extend(elsewhere.filter(|(_, silence)| waited.min(*silence) >= shortest).map(|(rank, _)| rank));
            if state != seen || state.is_multiple_of(2) {
                (seen, timer) = (state, WaitTimer::new());
                continue;
            }
            let (ranks, waited) = if waited >= Duration::from_nanos(self.timeout_ns.load(Ordering::Relaxed)) {
                (self.absent_ranks(), waited)
            } else {
                (still, shortest)
            };
            if !ranks.is_empty() && own.state.load(Ordering::Relaxed) == seen {
                let words = self.call.each_ref().map(|word| word.load(Ordering::Relaxed));
                let (waiting, call) = (self.ranks[self.own], Call::from_words(words).unwrap_or(Call::Barrier));
                on_failure(CommError::Hung { ranks, waiting, call, waited });
            }
        }
    }

    /// Waits for a tick. Returns a rank of this node whose process ended before its run did.
    fn wait_for_death(&self, deaths: &mut DeathWatch) -> Option<usize> {
        let index = deaths.wait(TICK)?;
        (self.page.slots()[index].state.load(Ordering::Relaxed) != ENDED).then(|| self.ranks[index])
    }

    /// Returns the ranks of this node whose processes showed signs of life and then none for `most`.
    fn silent_ranks(&self, signs: &mut [Sign], most: Duration) -> Vec<usize> {
        let mut still = Vec::new();
        for (index, (slot, sign)) in self.page.slots().iter().zip(signs).enumerate() {
            let heartbeat = slot.heartbeat.load(Ordering::Relaxed);
            if heartbeat != sign.heartbeat || heartbeat == 0 || slot.state.load(Ordering::Relaxed) == ENDED {
                *sign = Sign { heartbeat, since: WaitTimer::new() };
            } else if sign.since.tick() >= most {
                still.push(self.ranks[index]);
            }
        }
        still
    }

    /// Returns the ranks that do not take part: those of this node that are in no operation or whose process stands
    /// still; otherwise those of other nodes; otherwise all ranks, which wait for each other.
    fn absent_ranks(&self) -> Vec<usize> {
        let slots = self.page.slots();
        let heartbeats = || slots.iter().map(|slot| slot.heartbeat.load(Ordering::Relaxed)).collect::<Vec<_>>();
        let before = heartbeats();
        for _ in 0..10 {
            thread::sleep(TICK);
            // The others may be checking, too.
            slots[self.own].heartbeat.fetch_add(1, Ordering::Relaxed);
        }
        let after = heartbeats();
        let is_absent = |index: usize| {
            let is_idle = slots[index].state.load(Ordering::Relaxed).is_multiple_of(2);
            index != self.own && (is_idle || before[index] == after[index])
        };
        let absent: Vec<usize> = (0..slots.len()).filter(|&i| is_absent(i)).map(|i| self.ranks[i]).collect();
        match (absent.is_empty(), self.others.is_empty()) {
            (false, _) => absent,
            (true, false) => self.others.clone(),
            (true, true) => self.ranks.clone(),
        }
    }
}
