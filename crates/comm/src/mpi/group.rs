//! A group of processes, and the state that all groups of a process share.

use std::collections::hash_map::DefaultHasher;
use std::ffi::c_int;
use std::fmt::Display;
use std::hash::{Hash as _, Hasher as _};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::Duration;

use super::api::{Functions, Handle, Status};
use super::hydra_guard::HydraGuard;
use super::library::Mpi;
use super::pieces::{Pieces, Unit};
use super::run::BeforeAbort;
use super::sums::LibrarySums;
use super::versions::Line;
use super::watch::{InOperation, Watch};
use crate::CommError;
use crate::in_flight::InFlight;
use crate::operation::Call;

/// The size up to which an all-reduce is one step, in which every rank reduces everything.
pub(crate) const ONE_STEP_BYTES: usize = 16 << 10;

/// The time that an error of the library is held back, so that the death watch can first name a process that ended:
/// ten ticks, for busy machines.
const DEATH_REPORT_GRACE: Duration = Duration::from_secs(1);

/// The callback that reports the rank and the reason of a failure.
pub(crate) type Report = dyn Fn(usize, &dyn Display) + Send + Sync;

/// The state that all groups of a process share.
pub(crate) struct Process {
    /// This rank's number in the whole run.
    pub(crate) rank: usize,
    pub(crate) report: Arc<Report>,
    pub(crate) mpi: &'static Mpi,
    pub(crate) watch: Arc<Watch>,
    pub(crate) in_flight: Arc<InFlight>,
    pub(crate) failure: OnceLock<CommError>,
    /// Spare memory for the versions of numbers that are reduced.
    pub(crate) spare: Mutex<Vec<Line>>,
    /// The greatest count passed as one `int`.
    pub(crate) limit: usize,
    /// True if ranks compare calls before they make them.
    pub(crate) is_checked: bool,
    pub(crate) sums: LibrarySums,
    /// The guard process that outlives this one if it ends too early.
    pub(crate) hydra_guard: Option<HydraGuard>,
    /// The callback before this process ends a failed run.
    pub(crate) before_abort: Option<BeforeAbort>,
}

/// A communicator of the library. It lives until MPI is finalised, since freeing it would be a call of all its ranks.
pub(crate) struct Group {
    pub(crate) process: Arc<Process>,
    pub(crate) comm: Handle,
    /// A duplicate of the communicator, for messages that must not mix with those of calls.
    pub(crate) internal_comm: Handle,
    pub(crate) rank: usize,
    /// Each rank's number in the whole run.
    pub(crate) members: Vec<usize>,
    /// Each rank's node.
    pub(crate) nodes: Vec<usize>,
    pub(crate) num_calls: AtomicU32,
}

impl Group {
    pub(crate) fn new(
        process: Arc<Process>,
        comm: Handle,
        members: Vec<usize>,
        nodes: Vec<usize>,
        rank: usize,
    ) -> Result<Self, CommError> {
        let num_calls = AtomicU32::new(0);
        let mut group = Self { process, comm, internal_comm: 0, rank, members, nodes, num_calls };
        let mut internal_comm = 0;
        // SAFETY: a call of all ranks of the group, as is making it.
        group.check(&Call::Split, unsafe { (group.functions().comm_dup)(comm, &raw mut internal_comm) })?;
        group.internal_comm = internal_comm;
        Ok(group)
    }

    pub(crate) fn functions(&self) -> &'static Functions {
        &self.process.mpi.functions
    }

    pub(crate) fn size(&self) -> usize {
        self.members.len()
    }

    pub(crate) fn byte(&self) -> Handle {
        self.process.mpi.constants.byte
    }

    /// Notes for the watchdog that this rank is in a call.
    pub(crate) fn enter(&self, call: &Call) -> InOperation<'_> {
        self.process.watch.enter(call)
    }

    /// Returns whether the library takes a reduction of `bytes` bytes of each rank.
    #[inline]
    pub(crate) fn is_left_to_library(&self, call: &Call, bytes: usize, is_started: bool) -> bool {
        bytes / size_of::<f32>() <= self.process.limit && self.process.sums.takes(call, bytes, self.size(), is_started)
    }

    /// Returns a tag for this call alone, the same on all ranks.
    pub(crate) fn next_tag(&self) -> c_int {
        (self.num_calls.fetch_add(1, Ordering::Relaxed) % 32_768) as c_int
    }

    /// Converts an error code of the library.
    #[inline]
    pub(crate) fn check(&self, call: &Call, code: c_int) -> Result<(), CommError> {
        if code == 0 { Ok(()) } else { Err(self.library_error(call, code)) }
    }

    /// Makes the error of a failed call. The library may notice before the watchdog that a process ended, but not
    /// which one: it waits, so that the watchdog can report that and end the run.
    #[cold]
    fn library_error(&self, call: &Call, code: c_int) -> CommError {
        thread::sleep(DEATH_REPORT_GRACE);
        let rank = self.members[self.rank];
        self.fail(CommError::Library { rank, call: *call, text: self.functions().explain(code) })
    }

    pub(crate) fn fail(&self, error: CommError) -> CommError {
        self.process.failure.get_or_init(|| error).clone()
    }

    /// Fails if the run has failed.
    pub(crate) fn check_running(&self) -> Result<(), CommError> {
        self.process.failure.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    pub(crate) fn too_long(&self, call: &Call) -> CommError {
        let text = format!(
            "more than {} bytes without a common divisor of the counts: send less at a time",
            self.process.limit
        );
        self.fail(CommError::BadCall { rank: self.members[self.rank], call: *call, text })
    }

    /// Returns count and type of a single region.
    pub(crate) fn whole(&self, call: &Call, bytes: usize) -> Result<(c_int, Unit), CommError> {
        if bytes <= self.process.limit {
            return Ok((bytes as c_int, Unit::byte(self.process.mpi)));
        }
        let pieces = self.pieces(call, &[bytes])?;
        Ok((pieces.counts[0], self.unit(call, &pieces)?))
    }

    #[inline]
    pub(crate) fn pieces(&self, call: &Call, counts: &[usize]) -> Result<Pieces, CommError> {
        Pieces::new(counts, self.process.limit).ok_or_else(|| self.too_long(call))
    }

    pub(crate) fn unit(&self, call: &Call, pieces: &Pieces) -> Result<Unit, CommError> {
        Unit::new(self.process.mpi, pieces.unit)
            .map_err(|code| self.check(call, code).err().unwrap_or_else(|| self.too_long(call)))
    }

    /// Fails if a message is shorter than requested, which MPI does not treat as an error.
    #[inline]
    pub(crate) fn check_received(
        &self,
        call: &Call,
        status: &Status,
        count: c_int,
        unit: Handle,
    ) -> Result<(), CommError> {
        // Asking the library takes as long as all other work on a short message.
        match *call {
            Call::Receive { bytes, .. } if self.process.mpi.constants.status.proves(status, bytes) => Ok(()),
            _ => self.ask_received(call, status, count, unit),
        }
    }

    #[cold]
    fn ask_received(&self, call: &Call, status: &Status, count: c_int, unit: Handle) -> Result<(), CommError> {
        let mut received = 0;
        // SAFETY: a status that the library has filled in.
        self.check(call, unsafe { (self.functions().get_count)(std::ptr::from_ref(status), unit, &raw mut received) })?;
        if received == count {
            return Ok(());
        }
        let Call::Receive { from, bytes, .. } = *call else { return Ok(()) };
        let (from, to) = (self.members[from], self.members[self.rank]);
        let text = format!("rank {from} sends fewer than the {bytes} bytes that rank {to} expects");
        Err(self.fail(CommError::Disagreement { ranks: vec![from, to], text }))
    }
}

/// Returns the bytes of an all-reduce that each rank reduces, in whole cache lines.
pub(crate) fn shares(bytes: usize, num_ranks: usize) -> Vec<usize> {
    let share = bytes.div_ceil(num_ranks).next_multiple_of(64);
    (0..num_ranks).map(|rank| share.min(bytes - (share * rank).min(bytes))).collect()
}

/// Returns a hash of counts, for comparison between ranks.
pub(crate) fn hash(counts: &[usize]) -> u64 {
    let mut hasher = DefaultHasher::new();
    counts.hash(&mut hasher);
    hasher.finish()
}
