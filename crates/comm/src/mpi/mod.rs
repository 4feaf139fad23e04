//! Ranks as processes that an MPI launcher started, on one machine or many.
//!
//! The MPI library is loaded at run time: the program is built without one, and works with Open MPI 4 and 5, MPICH
//! and its relatives, and any library with the standard ABI of MPI 5. Collectives are the library's own, except most
//! reductions. Only sums that the library takes quickly are left to it (`sums.rs`); other data is exchanged by
//! all-to-all and reduced here in the order of ranks, so that the bits are those of ranks as threads.

mod api;
mod blocking;
mod check;
mod death_watch;
mod group;
mod heartbeat;
mod hydra_guard;
mod library;
mod pieces;
mod raw;
mod run;
mod started;
mod sums;
mod versions;
mod watch;

use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

use api::UNDEFINED;
use group::Group;
pub use library::{LIBRARY_VARIABLE, is_launched};
pub use raw::{EqualPieces, RawMpi};
pub use run::{MpiOptions, run_mpi};
use started::Started;

use crate::in_flight::{Handle, Steps as _};
use crate::operation::{Call, Memory, Operation};
use crate::started::RawPending;
use crate::{CommError, Communicator};

/// The reason why MPI cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MpiError {
    /// No library was found.
    #[error("no MPI library was found; set {LIBRARY_VARIABLE} to the path of libmpi.so{}",
        failures.iter().map(|failure| format!("; {failure}")).collect::<String>())]
    NotFound {
        /// The loader's messages about the libraries that exist.
        failures: Vec<String>,
    },
    /// The library lacks a function.
    #[error("the MPI library has no {0}: Open MPI 4 or MPICH 3 or newer is needed")]
    Incomplete(String),
    /// The library does not belong to the launcher.
    #[error(
        "the launcher started {num_launched} processes, but the MPI library that was found sees one: it belongs to another MPI; set \
             {LIBRARY_VARIABLE} to the path of the launcher's libmpi.so"
    )]
    OfAnother {
        /// The number of processes that the launcher started.
        num_launched: usize,
    },
    /// The library is none of those whose constants are known.
    #[error("unknown MPI library \"{0}\": expected Open MPI, or one with the ABI of MPICH or of MPI 5")]
    Unknown(String),
}

impl From<MpiError> for CommError {
    fn from(error: MpiError) -> Self {
        Self::Start(error.to_string())
    }
}

/// The address given for empty regions. It means nothing to any library.
static NOWHERE: u64 = 0;

/// The communicator of a rank that is a process.
struct MpiComm {
    group: Arc<Group>,
}

impl MpiComm {
    /// Checks the call, and replaces the addresses of empty regions by one that the library accepts.
    #[inline(always)]
    fn prepare(&self, operation: &Operation<'_>, memory: &mut Memory) -> Result<(), CommError> {
        let group = &self.group;
        group.check_running()?;
        let world_rank = group.members[group.rank];
        operation.check(memory, group.rank, group.size(), world_rank).map_err(|error| group.fail(error))?;
        // An empty slice may have any address, also 1, which most libraries read as "in place".
        if memory.send_bytes == 0 {
            memory.send = std::ptr::from_ref(&NOWHERE).cast();
        }
        if memory.recv_bytes == 0 {
            memory.recv = std::ptr::from_ref(&NOWHERE).cast_mut().cast();
        }
        Ok(())
    }
}

impl Communicator for MpiComm {
    fn rank(&self) -> usize {
        self.group.rank
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn world_ranks(&self) -> &[usize] {
        &self.group.members
    }

    fn nodes(&self) -> &[usize] {
        &self.group.nodes
    }

    unsafe fn start(&self, operation: &Operation<'_>, mut memory: Memory) -> Result<Box<dyn RawPending>, CommError> {
        self.prepare(operation, &mut memory)?;
        // SAFETY: the caller's promise.
        let started = unsafe { Started::start(&self.group, operation, memory) }?;
        Ok(Box::new(Handle::new(operation.call, started, &self.group.process.in_flight)))
    }

    unsafe fn run(&self, operation: &Operation<'_>, mut memory: Memory) -> Result<(), CommError> {
        self.prepare(operation, &mut memory)?;
        let process = &self.group.process;
        if process.is_checked || process.in_flight.has_collectives() {
            // Operations in flight have to progress during this call, and the comparison of calls comes first. All
            // ranks of the group take this branch or none does: MPI does not match a blocking collective with a
            // non-blocking one. Messages need no such care, because any call of the library makes them progress.
            // SAFETY: the caller's promise.
            return unsafe { Started::start(&self.group, operation, memory) }?.finish();
        }
        // SAFETY: the caller's promise.
        unsafe { self.group.run(operation, &memory) }
    }

    fn split(&self, color: Option<u32>, key: usize) -> Result<Option<Box<dyn Communicator>>, CommError> {
        let group = &self.group;
        group.check_running()?;
        let _in_operation = group.enter(&Call::Split);
        let color = color.map_or(UNDEFINED, |color| (color & 0x7fff_ffff) as c_int);
        let mut comm = 0;
        let code =
            // SAFETY: a call of all ranks of the group; `comm` is valid for writing.
            unsafe { (group.functions().comm_split)(group.comm, color, key as c_int, &raw mut comm) };
        group.check(&Call::Split, code)?;
        if comm == group.process.mpi.constants.comm_null {
            return Ok(None);
        }
        let part = Group::from_comm(
            &group.process,
            comm,
            |rank| {
                let index = group.members.iter().position(|&member| member == rank);
                index.map_or(0, |index| group.nodes[index])
            },
            group.members[group.rank],
        )?;
        Ok(Some(Box::new(Self { group: Arc::new(part) })))
    }

    fn set_timeout(&self, timeout: Duration) {
        self.group.process.watch.set_timeout(timeout);
    }

    fn fail(&self, error: CommError) -> CommError {
        self.group.fail(error)
    }
}
