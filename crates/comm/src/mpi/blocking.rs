//! Blocking calls of a group of processes, with as little as possible around the library's own. A short call takes
//! 0.1 to 0.5 µs; the watchdog's note and the checks must stay below a tenth of it.

use std::ffi::c_int;
use std::ptr;

use super::api::{Handle, Status};
use super::group::{Group, ONE_STEP_BYTES, shares};
use super::pieces::starts;
use super::versions::Versions;
use crate::CommError;
use crate::in_flight::locked;
use crate::number::Reduction;
use crate::operation::{Call, Memory, Operation};
use crate::short_list::{MAX_SHORT, with_short_list};

impl Group {
    /// # Safety
    /// The promises of `Communicator::run` hold.
    pub(crate) unsafe fn run(&self, operation: &Operation<'_>, memory: &Memory) -> Result<(), CommError> {
        let call = &operation.call;
        let _in_operation = self.enter(call);
        // SAFETY: the caller's promise, for each.
        unsafe {
            match *call {
                Call::Barrier | Call::Split => self.check(call, (self.functions().barrier)(self.comm)),
                Call::Broadcast { root, .. } => self.broadcast(call, memory, root),
                Call::AllGatherV => self.all_gather_v(call, operation.recv_counts, memory),
                Call::AllToAllV => self.all_to_all_v(call, operation.send_counts, operation.recv_counts, memory),
                Call::ReduceScatter { .. } if self.is_left_to_library(call, memory.send_bytes, false) => {
                    self.library_reduce_scatter(call, operation.send_counts, memory)
                }
                Call::ReduceScatter { number, reduce } => {
                    self.reduce_scatter(call, operation.send_counts, memory, Reduction { number, reduce })
                }
                Call::AllReduce { bytes, .. } if self.is_left_to_library(call, bytes, false) => {
                    self.library_all_reduce(call, memory)
                }
                Call::AllReduce { number, reduce, bytes } if bytes <= ONE_STEP_BYTES => {
                    self.all_reduce_at_once(call, memory, Reduction { number, reduce })
                }
                Call::AllReduce { number, reduce, .. } => self.all_reduce(call, memory, Reduction { number, reduce }),
                Call::Send { to, tag, .. } => self.send(call, memory, to, tag),
                Call::Receive { from, tag, .. } => self.receive(call, memory, from, tag),
            }
        }
    }

    /// Calls `work` with a region of `bytes` bytes as a count of an MPI type.
    #[inline]
    fn as_whole(
        &self,
        call: &Call,
        bytes: usize,
        work: impl FnOnce(c_int, Handle) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        if bytes <= self.process.limit {
            return work(bytes as c_int, self.byte());
        }
        let (count, unit) = self.whole(call, bytes)?;
        work(count, unit.handle)
    }

    unsafe fn broadcast(&self, call: &Call, memory: &Memory, root: usize) -> Result<(), CommError> {
        self.as_whole(call, memory.recv_bytes, |count, unit| {
            // SAFETY: the caller's promise; `count` units are `recv_bytes` bytes.
            self.check(call, unsafe { (self.functions().bcast)(memory.recv, count, unit, root as c_int, self.comm) })
        })
    }

    #[inline(always)]
    unsafe fn all_gather_v(&self, call: &Call, counts: &[usize], memory: &Memory) -> Result<(), CommError> {
        let own = counts[self.rank];
        if memory.recv_bytes <= self.process.limit && counts.iter().all(|&count| count == own) {
            // The library is faster when it need not look at counts.
            // SAFETY: as below.
            return self.check(call, unsafe {
                let (functions, byte, own) = (self.functions(), self.byte(), own as c_int);
                (functions.allgather)(memory.send, own, byte, memory.recv, own, byte, self.comm)
            });
        }
        self.as_pieces(call, counts, memory.recv_bytes, |counts, starts, unit| {
            let (functions, comm) = (self.functions(), self.comm);
            // SAFETY: the caller's promise; the pieces are those of the counts, which were held against the memory.
            self.check(call, unsafe {
                let own = *counts.add(self.rank);
                (functions.allgatherv)(memory.send, own, unit, memory.recv, counts, starts, unit, comm)
            })
        })
    }

    /// Calls `work` with the pieces of a region of `bytes` bytes as the library takes them: counts, starts and type.
    /// The arrays are written in place, because moving them would take as long as the rest of a short call.
    #[inline(always)]
    fn as_pieces(
        &self,
        call: &Call,
        counts: &[usize],
        bytes: usize,
        work: impl FnOnce(*const c_int, *const c_int, Handle) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        if counts.len() > MAX_SHORT || bytes > self.process.limit {
            let pieces = self.pieces(call, counts)?;
            let unit = self.unit(call, &pieces)?;
            return work(pieces.counts.as_ptr(), pieces.starts.as_ptr(), unit.handle);
        }
        let mut pieces = [[0; MAX_SHORT]; 2];
        let [lens, begins] = &mut pieces;
        for (((len, begin), &count), start) in lens.iter_mut().zip(begins).zip(counts).zip(starts(counts)) {
            (*len, *begin) = (count as c_int, start as c_int);
        }
        work(pieces[0].as_ptr(), pieces[1].as_ptr(), self.byte())
    }

    #[inline(always)]
    unsafe fn all_to_all_v(
        &self,
        call: &Call,
        send_counts: &[usize],
        recv_counts: &[usize],
        memory: &Memory,
    ) -> Result<(), CommError> {
        let (functions, comm) = (self.functions(), self.comm);
        self.as_pieces(call, send_counts, memory.send_bytes, |sends, send_starts, send_unit| {
            self.as_pieces(call, recv_counts, memory.recv_bytes, |recvs, recv_starts, recv_unit| {
                let (from, to) = (memory.send, memory.recv);
                // SAFETY: the caller's promise; the pieces are those of the counts, which were held against the
                // memory.
                self.check(call, unsafe {
                    (functions.alltoallv)(from, sends, send_starts, send_unit, to, recvs, recv_starts, recv_unit, comm)
                })
            })
        })
    }

    /// Fetches all ranks' versions of this rank's share and reduces them in the order of ranks.
    unsafe fn reduce_scatter(
        &self,
        call: &Call,
        counts: &[usize],
        memory: &Memory,
        how: Reduction,
    ) -> Result<(), CommError> {
        let (own, size) = (memory.recv_bytes, self.size());
        let share = memory.send.wrapping_add(counts[..self.rank].iter().sum());
        let mut versions = Versions::new(locked(&self.process.spare), own, size, share);
        let there = Memory { recv: versions.start(), recv_bytes: own * size, ..*memory };
        // SAFETY: the caller's promise; the versions have room for one share from each rank.
        unsafe {
            with_short_list(size, |_| own, |owns| self.all_to_all_v(call, counts, owns, &there))?;
            versions.reduce(how, memory.recv);
        }
        Ok(())
    }

    /// Lets the library take the sum, of which each rank gets a share.
    unsafe fn library_reduce_scatter(&self, call: &Call, counts: &[usize], memory: &Memory) -> Result<(), CommError> {
        let (float, sum) = (self.process.mpi.constants.float, self.process.mpi.constants.sum);
        let (functions, number) = (self.functions(), |rank: usize| (counts[rank] / size_of::<f32>()) as c_int);
        with_short_list(counts.len(), number, |numbers| {
            // SAFETY: the caller's promise; the counts were held against the memory.
            self.check(call, unsafe {
                (functions.reduce_scatter)(memory.send, memory.recv, numbers.as_ptr(), float, sum, self.comm)
            })
        })
    }

    /// Lets the library take the sum in place.
    unsafe fn library_all_reduce(&self, call: &Call, memory: &Memory) -> Result<(), CommError> {
        let constants = &self.process.mpi.constants;
        let in_place = ptr::without_provenance(constants.in_place);
        let (count, float, sum) = ((memory.recv_bytes / size_of::<f32>()) as c_int, constants.float, constants.sum);
        // SAFETY: the caller's promise; `count` numbers are `recv_bytes` bytes.
        self.check(call, unsafe { (self.functions().allreduce)(in_place, memory.recv, count, float, sum, self.comm) })
    }

    unsafe fn all_reduce_at_once(&self, call: &Call, memory: &Memory, how: Reduction) -> Result<(), CommError> {
        let mut versions = Versions::new(locked(&self.process.spare), memory.recv_bytes, self.size(), memory.recv);
        let (count, byte, there) = (memory.recv_bytes as c_int, self.byte(), versions.start());
        // SAFETY: the caller's promise; the versions have room for `count` bytes from each rank.
        self.check(call, unsafe {
            (self.functions().allgather)(memory.recv, count, byte, there, count, byte, self.comm)
        })?;
        // SAFETY: as above.
        unsafe { versions.reduce(how, memory.recv) };
        Ok(())
    }

    unsafe fn all_reduce(&self, call: &Call, memory: &Memory, how: Reduction) -> Result<(), CommError> {
        let shares = shares(memory.recv_bytes, self.size());
        let own = shares[self.rank];
        let start: usize = shares[..self.rank].iter().sum();
        let there = Memory {
            send: memory.recv,
            send_bytes: memory.recv_bytes,
            // SAFETY: the own share lies within the memory.
            recv: unsafe { memory.recv.add(start) },
            recv_bytes: own,
        };
        // SAFETY: the caller's promise. The own share is written after all versions of it have come.
        unsafe { self.reduce_scatter(call, &shares, &there, how)? };
        // In place: MPI reads this rank's share from its place in the result.
        let in_place = Memory { send: ptr::without_provenance(self.process.mpi.constants.in_place), ..*memory };
        // SAFETY: as above.
        unsafe { self.all_gather_v(call, &shares, &in_place) }
    }

    unsafe fn send(&self, call: &Call, memory: &Memory, to: usize, tag: u32) -> Result<(), CommError> {
        self.as_whole(call, memory.send_bytes, |count, unit| {
            let functions = self.functions();
            // SAFETY: the caller's promise; `count` units are `send_bytes` bytes.
            let code = unsafe { (functions.send)(memory.send, count, unit, to as c_int, tag as c_int, self.comm) };
            self.check(call, code)
        })
    }

    unsafe fn receive(&self, call: &Call, memory: &Memory, from: usize, tag: u32) -> Result<(), CommError> {
        let mut status: Status = Status::default();
        self.as_whole(call, memory.recv_bytes, |count, unit| {
            let (functions, from, tag) = (self.functions(), from as c_int, tag as c_int);
            // SAFETY: the caller's promise; `status` has room for any library's.
            self.check(call, unsafe {
                (functions.recv)(memory.recv, count, unit, from, tag, self.comm, &raw mut status)
            })?;
            self.check_received(call, &status, count, unit)
        })
    }
}
