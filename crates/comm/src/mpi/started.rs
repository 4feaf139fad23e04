//! Operations between processes that are started now and finished later, on the library's non-blocking calls.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{ptr, thread};

use super::api::{Constants, Handle, Status};
use super::check::Check;
use super::group::{Group, ONE_STEP_BYTES, shares};
use super::pieces::{Pieces, Unit};
use super::versions::{Taken, Versions};
use crate::CommError;
use crate::in_flight::Steps;
use crate::number::Reduction;
use crate::operation::{Call, Memory, Operation};

/// The time that a rank without work waits without pauses, and the shortest and the longest pause behind it.
const EAGER: Duration = Duration::from_millis(2);
const PAUSES: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(1)];

/// The work that remains when the requests are done.
enum NextStep {
    Nothing,
    /// Reduce the versions into this memory.
    Reduce(Versions<Taken>, Reduction, Target),
    /// Reduce this rank's share of an all-reduce, then exchange the shares.
    Share(Versions<Taken>, Reduction),
    /// Check that the whole message has come.
    Count(c_int, Unit),
    Finished,
}

/// The address of a result.
struct Target(*mut u8);

// SAFETY: an address in the memory of the operation, which only its rank's thread writes to.
unsafe impl Send for Target {}

/// One rank's part of an operation.
pub(crate) struct Started {
    group: Arc<Group>,
    call: Call,
    memory: Memory,
    check: Option<Check>,
    requests: Vec<Handle>,
    /// Arrays that the requests use, kept until they are done.
    pieces: Vec<Pieces>,
    next: NextStep,
    /// The tag of the messages with an all-reduce's shares.
    tag: c_int,
    /// A byte that goes from this rank to itself when nothing else does.
    byte: Box<[u8; 2]>,
}

impl Started {
    /// # Safety
    /// The promises of `Communicator::start` hold.
    pub(crate) unsafe fn start(
        group: &Arc<Group>,
        operation: &Operation<'_>,
        memory: Memory,
    ) -> Result<Self, CommError> {
        let mut started = Self {
            group: Arc::clone(group),
            call: operation.call,
            memory,
            check: Check::start(group, operation)?,
            requests: Vec::new(),
            pieces: Vec::new(),
            next: NextStep::Nothing,
            // Messages get no tag here, because not all ranks send the same ones.
            tag: if matches!(operation.call, Call::AllReduce { .. }) { group.next_tag() } else { 0 },
            byte: Box::default(),
        };
        // SAFETY: the caller's promise.
        unsafe { started.post(operation) }?;
        Ok(started)
    }

    unsafe fn post(&mut self, operation: &Operation<'_>) -> Result<(), CommError> {
        let memory = self.memory;
        let size = self.group.size();
        // SAFETY: the caller's promise for each; versions have room for one share from each rank.
        unsafe {
            match self.call {
                Call::Barrier | Call::Split => {
                    let group = Arc::clone(&self.group);
                    self.request(|request| (group.functions().ibarrier)(group.comm, request))
                }
                Call::Broadcast { root, .. } => self.broadcast(root),
                Call::AllGatherV => self.all_gather_v(operation.recv_counts),
                Call::AllToAllV => self.all_to_all_v(operation.send_counts, operation.recv_counts, memory),
                Call::ReduceScatter { .. } if self.group.is_left_to_library(&self.call, memory.send_bytes, true) => {
                    self.library_reduce_scatter(operation.send_counts)
                }
                Call::ReduceScatter { number, reduce } => {
                    let versions = self.versions(operation.send_counts, memory)?;
                    self.next = NextStep::Reduce(versions, Reduction { number, reduce }, Target(memory.recv));
                    Ok(())
                }
                Call::AllReduce { bytes, .. } if self.group.is_left_to_library(&self.call, bytes, true) => {
                    self.library_all_reduce()
                }
                Call::AllReduce { number, reduce, bytes } if bytes <= ONE_STEP_BYTES => {
                    self.gather_versions(Reduction { number, reduce })
                }
                Call::AllReduce { number, reduce, bytes } => {
                    let own = Memory { send: memory.recv, send_bytes: bytes, ..memory };
                    let versions = self.versions(&shares(bytes, size), own)?;
                    self.next = NextStep::Share(versions, Reduction { number, reduce });
                    Ok(())
                }
                Call::Send { to, tag, .. } => {
                    self.send(memory.send, memory.send_bytes, to, tag as c_int, self.group.comm)
                }
                Call::Receive { from, tag, bytes } => {
                    self.receive(memory.recv, bytes, from, tag as c_int, self.group.comm)?;
                    let (count, unit) = self.group.whole(&self.call, bytes)?;
                    self.next = NextStep::Count(count, unit);
                    Ok(())
                }
            }
        }
    }

    /// Starts a call of the library and keeps its request.
    fn request(&mut self, start: impl FnOnce(*mut Handle) -> c_int) -> Result<(), CommError> {
        let mut request = 0;
        self.group.check(&self.call, start(&raw mut request))?;
        self.requests.push(request);
        Ok(())
    }

    unsafe fn broadcast(&mut self, root: usize) -> Result<(), CommError> {
        let group = Arc::clone(&self.group);
        let memory = self.memory;
        let (count, unit) = group.whole(&self.call, memory.recv_bytes)?;
        // SAFETY: the caller's promise.
        self.request(|request| unsafe {
            (group.functions().ibcast)(memory.recv, count, unit.handle, root as c_int, group.comm, request)
        })
    }

    fn store_pieces(&mut self, counts: &[usize]) -> Result<(*const c_int, *const c_int, Unit), CommError> {
        let pieces = self.group.pieces(&self.call, counts)?;
        let unit = self.group.unit(&self.call, &pieces)?;
        let addresses = (pieces.counts.as_ptr(), pieces.starts.as_ptr());
        self.pieces.push(pieces);
        Ok((addresses.0, addresses.1, unit))
    }

    unsafe fn all_gather_v(&mut self, recv_counts: &[usize]) -> Result<(), CommError> {
        let group = Arc::clone(&self.group);
        let memory = self.memory;
        let (counts, starts, unit) = self.store_pieces(recv_counts)?;
        // SAFETY: the caller's promise; the pieces' arrays are kept, and do not move.
        self.request(|request| unsafe {
            let own = *counts.add(group.rank);
            (group.functions().iallgatherv)(
                memory.send,
                own,
                unit.handle,
                memory.recv,
                counts,
                starts,
                unit.handle,
                group.comm,
                request,
            )
        })
    }

    unsafe fn all_to_all_v(
        &mut self,
        send_counts: &[usize],
        recv_counts: &[usize],
        memory: Memory,
    ) -> Result<(), CommError> {
        let group = Arc::clone(&self.group);
        let (sends, send_starts, send_unit) = self.store_pieces(send_counts)?;
        let (recvs, recv_starts, recv_unit) = self.store_pieces(recv_counts)?;
        let memory = if memory.send_bytes + memory.recv_bytes == 0 { self.send_own_byte() } else { memory };
        // SAFETY: the caller's promise; the pieces' arrays are kept, and do not move.
        self.request(|request| unsafe {
            (group.functions().ialltoallv)(
                memory.send,
                sends,
                send_starts,
                send_unit.handle,
                memory.recv,
                recvs,
                recv_starts,
                recv_unit.handle,
                group.comm,
                request,
            )
        })
    }

    /// Turns an all-to-all in which nothing goes to or from this rank into one in which a byte goes from it to
    /// itself. Open MPI 4 does not number a non-blocking call in which a rank has nothing to do, and then matches its
    /// later calls with the wrong ones of other ranks.
    fn send_own_byte(&mut self) -> Memory {
        for pieces in &mut self.pieces {
            pieces.counts[self.group.rank] = 1;
        }
        let [from, to] = &mut *self.byte;
        Memory { send: from, send_bytes: 1, recv: to, recv_bytes: 1 }
    }

    /// Starts to fetch all ranks' versions of this rank's share of what `memory` sends.
    unsafe fn versions(&mut self, counts: &[usize], memory: Memory) -> Result<Versions<Taken>, CommError> {
        let own = counts[self.group.rank];
        let share = memory.send.wrapping_add(counts[..self.group.rank].iter().sum());
        let mut versions = Versions::new(Taken::from(&self.group), own, self.group.size(), share);
        let there = Memory { recv: versions.start(), recv_bytes: own * self.group.size(), ..memory };
        // SAFETY: the caller's promise; the versions' memory is kept with them, and does not move.
        unsafe { self.all_to_all_v(counts, &vec![own; self.group.size()], there) }?;
        Ok(versions)
    }

    /// Starts an all-reduce that the library takes.
    unsafe fn library_all_reduce(&mut self) -> Result<(), CommError> {
        let (group, memory) = (Arc::clone(&self.group), self.memory);
        let Constants { in_place, float, sum, .. } = group.process.mpi.constants;
        let (in_place, count) = (ptr::without_provenance(in_place), (memory.recv_bytes / size_of::<f32>()) as c_int);
        // SAFETY: the caller's promise; `count` numbers are `recv_bytes` bytes.
        self.request(|request| unsafe {
            (group.functions().iallreduce)(in_place, memory.recv, count, float, sum, group.comm, request)
        })
    }

    /// Starts a reduce-scatter that the library takes.
    unsafe fn library_reduce_scatter(&mut self, counts: &[usize]) -> Result<(), CommError> {
        let (group, memory) = (Arc::clone(&self.group), self.memory);
        let numbers: Vec<usize> = counts.iter().map(|bytes| bytes / size_of::<f32>()).collect();
        let (numbers, ..) = self.store_pieces(&numbers)?;
        let Constants { float, sum, .. } = group.process.mpi.constants;
        // SAFETY: the caller's promise; the counts were held against the memory, and their array is kept.
        self.request(|request| unsafe {
            (group.functions().ireduce_scatter)(memory.send, memory.recv, numbers, float, sum, group.comm, request)
        })
    }

    unsafe fn gather_versions(&mut self, how: Reduction) -> Result<(), CommError> {
        let group = Arc::clone(&self.group);
        let memory = self.memory;
        let mut versions = Versions::new(Taken::from(&group), memory.recv_bytes, group.size(), memory.recv);
        let (count, byte, there) = (memory.recv_bytes as c_int, group.byte(), versions.start());
        // SAFETY: the caller's promise; the versions' memory is kept with them.
        self.request(|request| unsafe {
            (group.functions().iallgather)(memory.recv, count, byte, there, count, byte, group.comm, request)
        })?;
        self.next = NextStep::Reduce(versions, how, Target(memory.recv));
        Ok(())
    }

    unsafe fn send(
        &mut self,
        start: *const u8,
        bytes: usize,
        to: usize,
        tag: c_int,
        comm: Handle,
    ) -> Result<(), CommError> {
        let group = Arc::clone(&self.group);
        let (count, unit) = group.whole(&self.call, bytes)?;
        // SAFETY: the caller's promise.
        self.request(|request| unsafe {
            (group.functions().isend)(start, count, unit.handle, to as c_int, tag, comm, request)
        })
    }

    unsafe fn receive(
        &mut self,
        start: *mut u8,
        bytes: usize,
        from: usize,
        tag: c_int,
        comm: Handle,
    ) -> Result<(), CommError> {
        let group = Arc::clone(&self.group);
        let (count, unit) = group.whole(&self.call, bytes)?;
        // SAFETY: the caller's promise.
        self.request(|request| unsafe {
            (group.functions().irecv)(start, count, unit.handle, from as c_int, tag, comm, request)
        })
    }

    /// Exchanges the reduced shares message by message: a collective started here would have a different place in the
    /// order of calls on each rank.
    fn exchange_shares(&mut self) -> Result<(), CommError> {
        let group = Arc::clone(&self.group);
        let shares = shares(self.memory.recv_bytes, group.size());
        let start = |rank: usize| self.memory.recv.wrapping_add(shares[..rank].iter().sum());
        let (own, starts) = (start(group.rank), (0..group.size()).map(start).collect::<Vec<_>>());
        for step in 1..group.size() {
            let (to, from) = ((group.rank + step) % group.size(), (group.rank + group.size() - step) % group.size());
            // SAFETY: shares do not overlap, and the memory stays valid until the end (`start`).
            unsafe {
                self.receive(starts[from], shares[from], from, self.tag, group.internal_comm)?;
                self.send(own, shares[group.rank], to, self.tag, group.internal_comm)?;
            }
        }
        Ok(())
    }

    /// Does the next step, when all requests are done.
    fn finish_step(&mut self, status: &Status) -> Result<(), CommError> {
        match std::mem::replace(&mut self.next, NextStep::Finished) {
            NextStep::Nothing | NextStep::Finished => {}
            NextStep::Count(count, unit) => self.group.check_received(&self.call, status, count, unit.handle)?,
            // SAFETY: the target is this operation's memory, which the requests use no more.
            NextStep::Reduce(versions, how, target) => unsafe { versions.reduce(how, target.0) },
            NextStep::Share(versions, how) => {
                let shares = shares(self.memory.recv_bytes, self.group.size());
                let start: usize = shares[..self.group.rank].iter().sum();
                // SAFETY: as above; the own share lies within the memory.
                unsafe { versions.reduce(how, self.memory.recv.add(start)) };
                self.next = NextStep::Nothing;
                self.exchange_shares()?;
            }
        }
        Ok(())
    }

    /// Tests a request, or waits for it. Returns the request unless it is done.
    fn test(&mut self, request: Handle, status: &mut Status, is_waiting: bool) -> Result<Option<Handle>, CommError> {
        let functions = self.group.functions();
        let (mut request, mut is_done) = (request, 0);
        // SAFETY: a request of this operation that is not done; the memory it uses is kept.
        let code = unsafe {
            if is_waiting {
                is_done = 1;
                (functions.wait)(&raw mut request, std::ptr::from_mut(status))
            } else {
                (functions.test)(&raw mut request, &raw mut is_done, std::ptr::from_mut(status))
            }
        };
        self.group.check(&self.call, code)?;
        Ok((is_done == 0).then_some(request))
    }

    /// Tests the requests, or waits for them. Returns whether all are done.
    fn test_requests(&mut self, status: &mut Status, is_waiting: bool) -> Result<bool, CommError> {
        if let Some(check) = &mut self.check {
            let mut requests = std::mem::take(&mut check.requests);
            while let Some(request) = requests.pop() {
                if let Some(request) = self.test(request, status, is_waiting)? {
                    requests.push(request);
                    break;
                }
            }
            let Some(check) = &mut self.check else { return Ok(false) };
            check.requests = requests;
            if !check.requests.is_empty() {
                return Ok(false);
            }
            check.verdict(&self.group)?;
            self.check = None;
        }
        while let Some(request) = self.requests.pop() {
            if let Some(request) = self.test(request, status, is_waiting)? {
                self.requests.push(request);
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn step(&mut self, is_waiting: bool) -> Result<bool, CommError> {
        self.group.check_running()?;
        let mut status = Status::default();
        while !matches!(self.next, NextStep::Finished) {
            if !self.test_requests(&mut status, is_waiting)? {
                return Ok(false);
            }
            self.finish_step(&status)?;
        }
        Ok(true)
    }
}

impl Steps for Started {
    fn advance(&mut self) -> Result<bool, CommError> {
        self.step(false)
    }

    fn can_advance(&self) -> bool {
        true
    }

    fn finish(&mut self) -> Result<(), CommError> {
        let group = Arc::clone(&self.group);
        let _in_operation = group.enter(&self.call);
        if group.process.in_flight.is_empty() {
            return self.step(true).map(drop);
        }
        // Other operations have steps of their own, which other ranks may wait for.
        let mut num_tries = 0_u32;
        while !self.step(false)? {
            group.process.in_flight.advance();
            num_tries += 1;
            if num_tries.is_multiple_of(16) {
                thread::yield_now();
            }
        }
        Ok(())
    }

    fn finish_idle(&mut self) -> Result<(), CommError> {
        let group = Arc::clone(&self.group);
        let _in_operation = group.enter(&self.call);
        let start = Instant::now();
        while !self.step(false)? {
            group.process.in_flight.advance();
            match start.elapsed() {
                waited if waited < EAGER => thread::yield_now(),
                waited => thread::sleep((waited / 16).clamp(PAUSES[0], PAUSES[1])),
            }
        }
        Ok(())
    }

    fn close(&mut self) {
        if matches!(self.next, NextStep::Finished) {
            return;
        }
        let failure = if thread::panicking() {
            let (rank, reason) = (self.group.process.rank, format!("panicked during {}", self.call));
            Some(CommError::Died { rank, reason })
        } else {
            self.group.check_running().and_then(|()| self.finish()).err()
        };
        if let Some(error) = failure {
            // The library may still write to memory that is about to be freed: nothing more may happen here.
            self.group.process.abort(&error);
        }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        self.close();
    }
}
