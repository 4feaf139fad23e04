//! Direct calls of the library, to measure the overhead of this crate.

use std::ffi::c_int;
use std::ptr;

use super::MpiError;
use super::api::{Handle, Status};
use super::library::{self, Mpi};

/// Direct calls of the library on one communicator, unchecked. All ranks must make the same calls with the same
/// lengths.
pub struct RawMpi {
    mpi: &'static Mpi,
    comm: Handle,
}

/// Counts and starts of equal pieces, one for each rank, prepared before anything is timed.
pub struct EqualPieces {
    counts: Vec<c_int>,
    starts: Vec<c_int>,
}

impl EqualPieces {
    /// Makes pieces of `len` elements for each of `num_ranks` ranks.
    #[must_use]
    pub fn new(num_ranks: usize, len: usize) -> Self {
        let starts = (0..num_ranks).map(|rank| (rank * len) as c_int).collect();
        Self { counts: vec![len as c_int; num_ranks], starts }
    }

    fn total(&self) -> usize {
        self.counts.iter().map(|&count| count as usize).sum()
    }
}

impl RawMpi {
    /// Opens the library on all ranks of the run that this process takes part in.
    ///
    /// # Errors
    /// Returns an error if no library can be loaded.
    pub fn from_run() -> Result<Self, MpiError> {
        library::load().map(|mpi| Self { mpi, comm: mpi.constants.comm_world })
    }

    /// Returns the library's name and version.
    #[must_use]
    pub fn version(&self) -> String {
        self.mpi.functions.version()
    }

    /// Calls `MPI_Comm_split`. The result calls the library on the ranks that pass the same `color`, in the order of
    /// `key`.
    #[must_use]
    pub fn split(&self, color: u32, key: usize) -> Self {
        let mut comm = 0;
        // SAFETY: a call of all ranks; `comm` is valid for writing.
        let code = unsafe {
            (self.mpi.functions.comm_split)(self.comm, (color & 0x7fff_ffff) as c_int, key as c_int, &raw mut comm)
        };
        assert_eq!(code, 0, "MPI_Comm_split");
        Self { mpi: self.mpi, comm }
    }

    /// Calls `MPI_Barrier`.
    pub fn barrier(&self) {
        // SAFETY: a call of all ranks.
        let code = unsafe { (self.mpi.functions.barrier)(self.comm) };
        assert_eq!(code, 0, "MPI_Barrier");
    }

    /// Calls `MPI_Bcast`.
    pub fn broadcast(&self, data: &mut [u8], root: usize) {
        let (functions, byte) = (&self.mpi.functions, self.mpi.constants.byte);
        // SAFETY: `data` is borrowed until the call returns, as in all that follow.
        let code = unsafe { (functions.bcast)(data.as_mut_ptr(), data.len() as c_int, byte, root as c_int, self.comm) };
        assert_eq!(code, 0, "MPI_Bcast");
    }

    /// Calls `MPI_Allgather`.
    pub fn all_gather(&self, send: &[u8], recv: &mut [u8], num_ranks: usize) {
        assert!(send.len() * num_ranks <= recv.len(), "room for all pieces");
        let (functions, byte, len) = (&self.mpi.functions, self.mpi.constants.byte, send.len() as c_int);
        // SAFETY: as above.
        let code = unsafe { (functions.allgather)(send.as_ptr(), len, byte, recv.as_mut_ptr(), len, byte, self.comm) };
        assert_eq!(code, 0, "MPI_Allgather");
    }

    /// Calls `MPI_Alltoallv` with equal pieces of bytes.
    pub fn all_to_all(&self, send: &[u8], recv: &mut [u8], pieces: &EqualPieces) {
        assert!(pieces.total() <= send.len().min(recv.len()), "room for all pieces");
        let (byte, counts, starts) = (self.mpi.constants.byte, pieces.counts.as_ptr(), pieces.starts.as_ptr());
        let (from, to) = (send.as_ptr(), recv.as_mut_ptr());
        // SAFETY: all pieces lie within both regions.
        let code =
            unsafe { (self.mpi.functions.alltoallv)(from, counts, starts, byte, to, counts, starts, byte, self.comm) };
        assert_eq!(code, 0, "MPI_Alltoallv");
    }

    /// Calls `MPI_Reduce_scatter` with equal pieces, for the sum of f32.
    pub fn reduce_scatter(&self, send: &[f32], recv: &mut [f32], pieces: &EqualPieces) {
        assert!(pieces.total() <= send.len() && pieces.counts[0] as usize <= recv.len(), "room for all pieces");
        let (functions, constants) = (&self.mpi.functions, &self.mpi.constants);
        let (from, to, counts) = (send.as_ptr().cast(), recv.as_mut_ptr().cast(), pieces.counts.as_ptr());
        // SAFETY: all pieces lie within what is sent, and one has room where it is received.
        let code = unsafe { (functions.reduce_scatter)(from, to, counts, constants.float, constants.sum, self.comm) };
        assert_eq!(code, 0, "MPI_Reduce_scatter");
    }

    /// Calls `MPI_Allreduce` in place, for the sum of f32.
    pub fn all_reduce(&self, data: &mut [f32]) {
        let (functions, constants) = (&self.mpi.functions, &self.mpi.constants);
        let in_place = ptr::without_provenance(constants.in_place);
        let (to, count) = (data.as_mut_ptr().cast(), data.len() as c_int);
        // SAFETY: as above.
        let code = unsafe { (functions.allreduce)(in_place, to, count, constants.float, constants.sum, self.comm) };
        assert_eq!(code, 0, "MPI_Allreduce");
    }

    /// Calls `MPI_Send`.
    pub fn send(&self, data: &[u8], to: usize) {
        let (functions, byte) = (&self.mpi.functions, self.mpi.constants.byte);
        // SAFETY: as above.
        let code = unsafe { (functions.send)(data.as_ptr(), data.len() as c_int, byte, to as c_int, 0, self.comm) };
        assert_eq!(code, 0, "MPI_Send");
    }

    /// Calls `MPI_Recv`.
    pub fn receive(&self, data: &mut [u8], from: usize) {
        let (functions, byte, mut status) = (&self.mpi.functions, self.mpi.constants.byte, Status::default());
        let (to, count) = (data.as_mut_ptr(), data.len() as c_int);
        // SAFETY: as above; `status` has room for any library's.
        let code = unsafe { (functions.recv)(to, count, byte, from as c_int, 0, self.comm, &raw mut status) };
        assert_eq!(code, 0, "MPI_Recv");
    }
}
