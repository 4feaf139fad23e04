//! The library's own calls, for measuring what this crate adds to them.

use std::ffi::c_int;
use std::ptr;

use super::MpiError;
use super::api::{Handle, Status};
use super::library::{self, Mpi};

/// The library's own calls among the ranks of one of its communicators, unchecked: all ranks must make the same calls
/// with the same lengths.
pub struct RawMpi {
    mpi: &'static Mpi,
    comm: Handle,
}

/// Pieces of equal length, one for each rank, as the library wants them: prepared before anything is timed.
pub struct EqualPieces {
    counts: Vec<c_int>,
    starts: Vec<c_int>,
}

impl EqualPieces {
    /// Pieces of `len` elements for each of `num_ranks` ranks.
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
    /// The library of the run that this process takes part in, among all its ranks.
    ///
    /// # Errors
    /// There is none.
    pub fn of_run() -> Result<Self, MpiError> {
        library::load().map(|mpi| Self { mpi, comm: mpi.constants.comm_world })
    }

    /// Returns the library's name and version.
    #[must_use]
    pub fn version(&self) -> String {
        self.mpi.functions.version()
    }

    /// `MPI_Comm_split`: the library's calls among those that give the same `color`, in the order of `key`.
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

    /// `MPI_Barrier`.
    pub fn barrier(&self) {
        // SAFETY: a call of all ranks.
        let code = unsafe { (self.mpi.functions.barrier)(self.comm) };
        assert_eq!(code, 0, "MPI_Barrier");
    }

    /// `MPI_Bcast`.
    pub fn broadcast(&self, data: &mut [u8], root: usize) {
        let (functions, byte) = (&self.mpi.functions, self.mpi.constants.byte);
        // SAFETY: `data` is borrowed until the call returns, as in all that follow.
        let code = unsafe { (functions.bcast)(data.as_mut_ptr(), data.len() as c_int, byte, root as c_int, self.comm) };
        assert_eq!(code, 0, "MPI_Bcast");
    }

    /// `MPI_Allgather`.
    pub fn all_gather(&self, send: &[u8], recv: &mut [u8], num_ranks: usize) {
        assert!(send.len() * num_ranks <= recv.len(), "room for all pieces");
        let (functions, byte, len) = (&self.mpi.functions, self.mpi.constants.byte, send.len() as c_int);
        // SAFETY: as above.
        let code = unsafe { (functions.allgather)(send.as_ptr(), len, byte, recv.as_mut_ptr(), len, byte, self.comm) };
        assert_eq!(code, 0, "MPI_Allgather");
    }

    /// `MPI_Alltoallv` of equal pieces of bytes.
    pub fn all_to_all(&self, send: &[u8], recv: &mut [u8], pieces: &EqualPieces) {
        assert!(pieces.total() <= send.len().min(recv.len()), "room for all pieces");
        let (byte, counts, starts) = (self.mpi.constants.byte, pieces.counts.as_ptr(), pieces.starts.as_ptr());
        let (from, to) = (send.as_ptr(), recv.as_mut_ptr());
        // SAFETY: all pieces lie within both regions.
        let code =
            unsafe { (self.mpi.functions.alltoallv)(from, counts, starts, byte, to, counts, starts, byte, self.comm) };
        assert_eq!(code, 0, "MPI_Alltoallv");
    }

    /// `MPI_Reduce_scatter` of equal pieces, the sum of f32.
    pub fn reduce_scatter(&self, send: &[f32], recv: &mut [f32], pieces: &EqualPieces) {
        assert!(pieces.total() <= send.len() && pieces.counts[0] as usize <= recv.len(), "room for all pieces");
        let (functions, constants) = (&self.mpi.functions, &self.mpi.constants);
        let (from, to, counts) = (send.as_ptr().cast(), recv.as_mut_ptr().cast(), pieces.counts.as_ptr());
        // SAFETY: all pieces lie within what is sent, and one has room where it is received.
        let code = unsafe { (functions.reduce_scatter)(from, to, counts, constants.float, constants.sum, self.comm) };
        assert_eq!(code, 0, "MPI_Reduce_scatter");
    }

    /// `MPI_Allreduce`, the sum of f32 in place.
    pub fn all_reduce(&self, data: &mut [f32]) {
        let (functions, constants) = (&self.mpi.functions, &self.mpi.constants);
        let in_place = ptr::without_provenance(constants.in_place);
        let (to, count) = (data.as_mut_ptr().cast(), data.len() as c_int);
        // SAFETY: as above.
        let code = unsafe { (functions.allreduce)(in_place, to, count, constants.float, constants.sum, self.comm) };
        assert_eq!(code, 0, "MPI_Allreduce");
    }

    /// `MPI_Send`.
    pub fn send(&self, data: &[u8], to: usize) {
        let (functions, byte) = (&self.mpi.functions, self.mpi.constants.byte);
        // SAFETY: as above.
        let code = unsafe { (functions.send)(data.as_ptr(), data.len() as c_int, byte, to as c_int, 0, self.comm) };
        assert_eq!(code, 0, "MPI_Send");
    }

    /// `MPI_Recv`.
    pub fn receive(&self, data: &mut [u8], from: usize) {
        let (functions, byte, mut status) = (&self.mpi.functions, self.mpi.constants.byte, Status::default());
        let (to, count) = (data.as_mut_ptr(), data.len() as c_int);
        // SAFETY: as above; `status` has room for any library's.
        let code = unsafe { (functions.recv)(to, count, byte, from as c_int, 0, self.comm, &raw mut status) };
        assert_eq!(code, 0, "MPI_Recv");
    }
}
