//! A group of processes: the calls that block.

use std::collections::hash_map::DefaultHasher;
use std::ffi::c_int;
use std::fmt::Display;
use std::hash::{Hash as _, Hasher as _};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use super::api::{Functions, Handle, Status};
use super::library::Mpi;
use super::pieces::{Pieces, Unit};
use super::watch::{InOperation, Watch};
use crate::CommError;
use crate::number::{NumberKind, Reduce};
use crate::operation::{Call, Memory, Operation};
use crate::under_way::{UnderWay, locked};

/// Up to here an all-reduce is one step, in which every rank reduces everything.
pub(crate) const ONE_STEP_BYTES: usize = 16 << 10;

/// Told the rank and why the run fails.
pub(crate) type Report = dyn Fn(usize, &dyn Display) + Send + Sync;

/// What the groups of a process share.
pub(crate) struct Process {
    /// This rank's number in the whole run.
    pub(crate) rank: usize,
    pub(crate) report: Arc<Report>,
    pub(crate) mpi: &'static Mpi,
    pub(crate) watch: Arc<Watch>,
    pub(crate) under_way: Arc<UnderWay>,
    pub(crate) failure: OnceLock<CommError>,
    /// Memory for versions of numbers that are reduced.
    pub(crate) spare: Mutex<Vec<u64>>,
    /// The greatest count that is said as one `int`.
    pub(crate) limit: usize,
    /// Whether calls are compared before they are made.
    pub(crate) is_checked: bool,
}

/// A communicator of the library. It lives until MPI is finalised: freeing it would be a call of all its ranks.
pub(crate) struct Group {
    pub(crate) process: Arc<Process>,
    pub(crate) comm: Handle,
    /// The same ranks again: for what is sent beside the calls.
    pub(crate) beside: Handle,
    pub(crate) rank: usize,
    /// Each rank's number in the whole run.
    pub(crate) members: Vec<usize>,
    /// Each rank's node.
    pub(crate) nodes: Vec<usize>,
    pub(crate) num_calls: AtomicU32,
    scratch: Mutex<[Pieces; 2]>,
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
        let mut group = Self { process, comm, beside: 0, rank, members, nodes, num_calls, scratch: Mutex::default() };
        let mut beside = 0;
        // SAFETY: a call of all ranks of the group, as is making it.
        group.check(Call::Split, unsafe { (group.functions().comm_dup)(comm, &raw mut beside) })?;
        group.beside = beside;
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

    /// In the call, for the watchdog.
    pub(crate) fn enter(&self, call: Call) -> InOperation<'_> {
        self.process.watch.enter(call)
    }

    /// A number for what belongs to this call alone, the same on all ranks.
    pub(crate) fn next_tag(&self) -> c_int {
        (self.num_calls.fetch_add(1, Ordering::Relaxed) % 32_768) as c_int
    }

    /// An error code of the library as an error.
    pub(crate) fn check(&self, call: Call, code: c_int) -> Result<(), CommError> {
        if code == 0 {
            return Ok(());
        }
        let rank = self.members[self.rank];
        Err(self.fail(CommError::Library { rank, call, text: self.functions().explain(code) }))
    }

    pub(crate) fn fail(&self, error: CommError) -> CommError {
        self.process.failure.get_or_init(|| error).clone()
    }

    /// The failure of the run, if there was one.
    pub(crate) fn still_going(&self) -> Result<(), CommError> {
        self.process.failure.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    pub(crate) fn too_long(&self, call: Call) -> CommError {
        let text =
            format!("more than {} pieces of bytes without a common divisor: send less at a time", self.process.limit);
        self.fail(CommError::BadCall { rank: self.members[self.rank], call, text })
    }

    /// # Safety
    /// As `Communicator::run`.
    pub(crate) unsafe fn run(&self, operation: &Operation<'_>, memory: &Memory) -> Result<(), CommError> {
        let _in_operation = self.enter(operation.call);
        let call = operation.call;
        // SAFETY: the caller's promise, for each.
        unsafe {
            match call {
                Call::Barrier | Call::Split => self.check(call, (self.functions().barrier)(self.comm)),
                Call::Broadcast { root, .. } => self.broadcast(call, memory, root),
                Call::AllGatherV => self.all_gather_v(call, operation.recv_counts, memory),
                Call::AllToAllV => self.all_to_all_v(call, operation.send_counts, operation.recv_counts, memory),
                Call::ReduceScatter { number, reduce } => {
                    self.reduce_scatter(call, operation.send_counts, memory, (number, reduce))
                }
                Call::AllReduce { number: NumberKind::F32, reduce: Reduce::Sum, bytes }
                    if self.size() == 2 && bytes <= self.process.limit =>
                {
                    self.sum_of_two(call, memory)
                }
                Call::AllReduce { number, reduce, bytes } if bytes <= ONE_STEP_BYTES => {
                    self.all_reduce_at_once(call, memory, (number, reduce))
                }
                Call::AllReduce { number, reduce, .. } => self.all_reduce(call, memory, (number, reduce)),
                Call::Send { to, tag, .. } => self.send(call, memory, to, tag),
                Call::Receive { from, tag, .. } => self.receive(call, memory, from, tag),
            }
        }
    }

    /// The pieces and type of a single region.
    pub(crate) fn whole(&self, call: Call, bytes: usize) -> Result<(c_int, Unit), CommError> {
        if bytes <= self.process.limit {
            return Ok((bytes as c_int, Unit::byte(self.process.mpi)));
        }
        let pieces = Pieces::of(&[bytes], self.process.limit).ok_or_else(|| self.too_long(call))?;
        Ok((pieces.counts[0], self.unit(call, &pieces)?))
    }

    pub(crate) fn unit(&self, call: Call, pieces: &Pieces) -> Result<Unit, CommError> {
        Unit::new(self.process.mpi, pieces.unit)
            .map_err(|code| self.check(call, code).err().unwrap_or_else(|| self.too_long(call)))
    }

    unsafe fn broadcast(&self, call: Call, memory: &Memory, root: usize) -> Result<(), CommError> {
        let (count, unit) = self.whole(call, memory.recv_bytes)?;
        // SAFETY: the caller's promise; `count` units are `recv_bytes` bytes.
        self.check(call, unsafe { (self.functions().bcast)(memory.recv, count, unit.handle, root as c_int, self.comm) })
    }

    unsafe fn all_gather_v(&self, call: Call, counts: &[usize], memory: &Memory) -> Result<(), CommError> {
        let own = counts[self.rank];
        if memory.recv_bytes <= self.process.limit && counts.iter().all(|&count| count == own) {
            // The library is faster where it need not look at counts.
            // SAFETY: as below.
            return self.check(call, unsafe {
                let (functions, byte, own) = (self.functions(), self.byte(), own as c_int);
                (functions.allgather)(memory.send, own, byte, memory.recv, own, byte, self.comm)
            });
        }
        let mut scratch = locked(&self.scratch);
        let [pieces, _] = &mut *scratch;
        if !pieces.set(counts, self.process.limit) {
            return Err(self.too_long(call));
        }
        let (unit, own) = (self.unit(call, pieces)?, pieces.counts[self.rank]);
        // SAFETY: the caller's promise; the pieces are those of `counts`, which were held against the memory.
        self.check(call, unsafe {
            (self.functions().allgatherv)(
                memory.send,
                own,
                unit.handle,
                memory.recv,
                pieces.counts.as_ptr(),
                pieces.starts.as_ptr(),
                unit.handle,
                self.comm,
            )
        })
    }

    unsafe fn all_to_all_v(
        &self,
        call: Call,
        send_counts: &[usize],
        recv_counts: &[usize],
        memory: &Memory,
    ) -> Result<(), CommError> {
        let mut scratch = locked(&self.scratch);
        let [send, recv] = &mut *scratch;
        let limit = self.process.limit;
        if !(send.set(send_counts, limit) && recv.set(recv_counts, limit)) {
            return Err(self.too_long(call));
        }
        let (send_unit, recv_unit) = (self.unit(call, send)?, self.unit(call, recv)?);
        // SAFETY: the caller's promise; the pieces are those of the counts, which were held against the memory.
        self.check(call, unsafe {
            (self.functions().alltoallv)(
                memory.send,
                send.counts.as_ptr(),
                send.starts.as_ptr(),
                send_unit.handle,
                memory.recv,
                recv.counts.as_ptr(),
                recv.starts.as_ptr(),
                recv_unit.handle,
                self.comm,
            )
        })
    }

    /// Everybody gets all versions of its share and sums them in the order of ranks.
    unsafe fn reduce_scatter(
        &self,
        call: Call,
        counts: &[usize],
        memory: &Memory,
        how: (NumberKind, Reduce),
    ) -> Result<(), CommError> {
        let mut versions = Versions::new(self, memory.recv_bytes);
        let there = Memory { recv: versions.start(), recv_bytes: memory.recv_bytes * self.size(), ..*memory };
        // SAFETY: the caller's promise; the versions have room for one share from each rank.
        unsafe {
            self.all_to_all_v(call, counts, &vec![memory.recv_bytes; self.size()], &there)?;
            versions.reduce(how, memory.recv);
        }
        Ok(())
    }

    /// Two numbers give the same sum in either order: the library may add them up as it likes.
    unsafe fn sum_of_two(&self, call: Call, memory: &Memory) -> Result<(), CommError> {
        let constants = &self.process.mpi.constants;
        let in_place = std::ptr::without_provenance(constants.in_place);
        let (count, float, sum) = ((memory.recv_bytes / size_of::<f32>()) as c_int, constants.float, constants.sum);
        // SAFETY: the caller's promise; `count` numbers are `recv_bytes` bytes.
        self.check(call, unsafe { (self.functions().allreduce)(in_place, memory.recv, count, float, sum, self.comm) })
    }

    unsafe fn all_reduce_at_once(
        &self,
        call: Call,
        memory: &Memory,
        how: (NumberKind, Reduce),
    ) -> Result<(), CommError> {
        let mut versions = Versions::new(self, memory.recv_bytes);
        let count = memory.recv_bytes as c_int;
        // SAFETY: the caller's promise; the versions have room for `count` bytes from each rank.
        self.check(call, unsafe {
            let byte = self.byte();
            (self.functions().allgather)(memory.recv, count, byte, versions.start(), count, byte, self.comm)
        })?;
        // SAFETY: as above.
        unsafe { versions.reduce(how, memory.recv) };
        Ok(())
    }

    unsafe fn all_reduce(&self, call: Call, memory: &Memory, how: (NumberKind, Reduce)) -> Result<(), CommError> {
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
        // In place: MPI takes the own share from where it is to be.
        let in_place = Memory { send: std::ptr::without_provenance(self.process.mpi.constants.in_place), ..*memory };
        // SAFETY: as above.
        unsafe { self.all_gather_v(call, &shares, &in_place) }
    }

    unsafe fn send(&self, call: Call, memory: &Memory, to: usize, tag: u32) -> Result<(), CommError> {
        let (count, unit) = self.whole(call, memory.send_bytes)?;
        // SAFETY: the caller's promise.
        self.check(call, unsafe {
            (self.functions().send)(memory.send, count, unit.handle, to as c_int, tag as c_int, self.comm)
        })
    }

    unsafe fn receive(&self, call: Call, memory: &Memory, from: usize, tag: u32) -> Result<(), CommError> {
        let (count, unit) = self.whole(call, memory.recv_bytes)?;
        let mut status: Status = Status::default();
        // SAFETY: the caller's promise; `status` has room for any library's.
        self.check(call, unsafe {
            let functions = self.functions();
            (functions.recv)(memory.recv, count, unit.handle, from as c_int, tag as c_int, self.comm, &raw mut status)
        })?;
        self.check_received(call, &status, count, &unit)
    }

    /// A message that is shorter than was asked for is no error to MPI.
    pub(crate) fn check_received(
        &self,
        call: Call,
        status: &Status,
        count: c_int,
        unit: &Unit,
    ) -> Result<(), CommError> {
        let mut received = 0;
        // SAFETY: a status that the library has filled in.
        self.check(call, unsafe {
            (self.functions().get_count)(std::ptr::from_ref(status), unit.handle, &raw mut received)
        })?;
        if received == count {
            return Ok(());
        }
        let Call::Receive { from, bytes, .. } = call else { return Ok(()) };
        let (from, to) = (self.members[from], self.members[self.rank]);
        let text = format!("rank {from} sends less to rank {to} than the {bytes} bytes which it expects");
        Err(self.fail(CommError::Disagreement { ranks: vec![from, to], text }))
    }
}

/// All ranks' versions of the same numbers, in memory that is used again and again.
pub(crate) struct Versions {
    /// In words of eight bytes, so that they are aligned for every number.
    words: Vec<u64>,
    bytes: usize,
    num_ranks: usize,
    process: Arc<Process>,
}

impl Versions {
    /// Room for `bytes` bytes from each rank, with what was there before.
    pub(crate) fn new(group: &Group, bytes: usize) -> Self {
        let process = Arc::clone(&group.process);
        let mut words = std::mem::take(&mut *locked(&process.spare));
        let len = (bytes * group.size()).div_ceil(8);
        if words.len() < len {
            words.resize(len, 0);
        }
        Self { words, bytes, num_ranks: group.size(), process }
    }

    pub(crate) fn start(&mut self) -> *mut u8 {
        self.words.as_mut_ptr().cast()
    }

    /// # Safety
    /// `target` is valid for writing the bytes of one version, and aligned for the number.
    pub(crate) unsafe fn reduce(&self, (number, reduce): (NumberKind, Reduce), target: *mut u8) {
        let start = self.words.as_ptr().cast::<u8>();
        let sources: Vec<*const u8> = (0..self.num_ranks).map(|rank| start.wrapping_add(rank * self.bytes)).collect();
        // SAFETY: the versions lie one after another, each a whole number of numbers.
        unsafe { number.reduce(reduce, &sources, &[target], self.bytes) };
    }
}

impl Drop for Versions {
    fn drop(&mut self) {
        let mut spare = locked(&self.process.spare);
        if spare.len() < self.words.len() {
            std::mem::swap(&mut *spare, &mut self.words);
        }
    }
}

/// The bytes of an all-reduce that each rank reduces, in whole cache lines.
pub(crate) fn shares(bytes: usize, num_ranks: usize) -> Vec<usize> {
    let share = bytes.div_ceil(num_ranks).next_multiple_of(64);
    (0..num_ranks).map(|rank| share.min(bytes - (share * rank).min(bytes))).collect()
}

/// What stands for counts where they are compared.
pub(crate) fn hash(counts: &[usize]) -> u64 {
    let mut hasher = DefaultHasher::new();
    counts.hash(&mut hasher);
    hasher.finish()
}
