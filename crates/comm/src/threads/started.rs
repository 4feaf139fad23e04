//! Execution of an operation between ranks that share memory: the receiver copies straight from the sender's memory.

use std::sync::Arc;
use std::thread;

use super::agreement;
use super::group::Group;
use super::rendezvous::{Reading, Rendezvous};
use super::world::Waiter;
use crate::CommError;
use crate::in_flight::Steps;
use crate::number::{NumberKind, Reduce};
use crate::operation::{Call, Memory};

/// The size up to which an all-reduce is one step, in which every rank reduces everything.
const ONE_STEP_BYTES: usize = 16 << 10;

/// One rank's part in a rendezvous, from its post until its memory is revoked.
pub(crate) struct Started {
    pub(crate) group: Arc<Group>,
    pub(crate) rendezvous: Arc<Rendezvous>,
    /// The ranks of the seats: all of the group, or a sender and a receiver.
    pub(crate) seats: Seats,
    /// This rank's seat.
    pub(crate) seat: usize,
    pub(crate) phase: Phase,
    pub(crate) copied: Vec<bool>,
    /// The condition that it waits for, since it last progressed.
    pub(super) until: Option<Until>,
}

#[derive(Clone, Copy)]
pub(crate) enum Seats {
    All,
    Pair { from: usize, to: usize },
}

/// The progress of a rank.
pub(crate) enum Phase {
    /// It reads what others sent.
    Reading,
    /// It has reduced everything into a copy, which is written when nobody reads the memory any more.
    Writing(Vec<u64>),
    /// It waits until this number of ranks are done, so that nobody reads its memory any more.
    Leaving(usize),
    Finished,
}

/// The condition that a rank waits for.
#[derive(Clone, Copy)]
pub(super) enum Until {
    Posted(usize),
    AnyPosted,
    AllPosted,
    Done(usize),
}

impl Started {
    fn num_seats(&self) -> usize {
        self.rendezvous.num_seats()
    }

    fn rank_of(&self, seat: usize) -> usize {
        self.group.world_rank(match (self.seats, seat) {
            (Seats::All, seat) => seat,
            (Seats::Pair { from, .. }, 0) => from,
            (Seats::Pair { to, .. }, _) => to,
        })
    }

    pub(crate) fn world_rank(&self) -> usize {
        self.rank_of(self.seat)
    }

    fn waiter(&self) -> Waiter {
        Waiter { rank: self.world_rank(), call: self.call() }
    }

    fn call(&self) -> Call {
        self.rendezvous.post(self.seat).map_or(Call::Barrier, |post| post.call)
    }

    fn memory(&self) -> Memory {
        self.rendezvous.post(self.seat).map_or(Memory::new(&[], &mut []), |post| post.memory)
    }

    pub(crate) fn wake(&self) {
        let own = self.rank_of(self.seat);
        self.group.world.wake((0..self.num_seats()).map(|seat| self.rank_of(seat)).filter(|&rank| rank != own));
    }

    /// Goes as far as possible without waiting. Returns the condition that it then waits for; `None` at the end.
    fn progress(&mut self) -> Result<Option<Until>, CommError> {
        loop {
            self.until = None;
            let until = match &self.phase {
                Phase::Reading => self.read()?,
                Phase::Writing(_) => self.write(),
                Phase::Leaving(num_done) => self.leave(*num_done),
                Phase::Finished => return Ok(None),
            };
            if until.is_some() {
                self.until = until;
                return Ok(until);
            }
        }
    }

    /// Does the first phase of each call.
    fn read(&mut self) -> Result<Option<Until>, CommError> {
        match self.call() {
            Call::Barrier | Call::Split if !self.rendezvous.are_all_posted() => return Ok(Some(Until::AllPosted)),
            Call::Barrier | Call::Split => {
                // The last rank to come has not compared its call with the others yet.
                agreement::check_all(&self.group, &self.rendezvous, self.seat)?;
                self.phase = Phase::Finished;
            }
            Call::Broadcast { root, .. } if root == self.seat => self.phase = Phase::Leaving(self.num_seats() - 1),
            Call::Broadcast { root, .. } => return self.copy_whole(root, |reading| reading.in_place()),
            Call::Send { .. } => self.phase = Phase::Leaving(1),
            Call::Receive { .. } => return self.copy_whole(0, |reading| reading.sent()),
            Call::AllGatherV | Call::AllToAllV => return self.copy_pieces(),
            Call::ReduceScatter { .. } | Call::AllReduce { .. } => return self.reduce(),
        }
        Ok(None)
    }

    /// Opens the memory of a rank that has posted, after checking that both make the same call.
    fn open<'m>(&self, rendezvous: &'m Rendezvous, from: usize) -> Result<Option<Reading<'m>>, CommError> {
        agreement::check(&self.group, rendezvous, self.seat, from)?;
        Ok(rendezvous.read(from))
    }

    fn copy_whole(
        &mut self,
        from: usize,
        start: impl Fn(&Reading<'_>) -> *const u8,
    ) -> Result<Option<Until>, CommError> {
        if !self.rendezvous.is_posted(from) {
            return Ok(Some(Until::Posted(from)));
        }
        let rendezvous = Arc::clone(&self.rendezvous);
        let Some(reading) = self.open(&rendezvous, from)? else { return Ok(Some(Until::Posted(from))) };
        self.copy_in(start(&reading), 0, self.memory().recv_bytes);
        drop(reading);
        self.done(Phase::Finished);
        Ok(None)
    }

    /// Copies the pieces of the ranks that have posted and were not copied from yet.
    fn copy_pieces(&mut self) -> Result<Option<Until>, CommError> {
        let all = self.num_seats();
        for step in 0..all {
            // Each rank starts with its own piece and goes on from there, so that ranks read from different ones.
            let from = (self.seat + step) % all;
            if self.copied[from] || !self.rendezvous.is_posted(from) {
                continue;
            }
            let Some(reading) = self.open(&self.rendezvous, from)? else { continue };
            let (source, start, bytes) = self.piece(from, &reading);
            self.copy_in(source, start, bytes);
            drop(reading);
            self.copied[from] = true;
        }
        if !self.copied.iter().all(|&copied| copied) {
            return Ok(Some(Until::AnyPosted));
        }
        self.done(Phase::Leaving(all));
        Ok(None)
    }

    /// Returns the address of the piece from a rank, its start in this rank's memory, and its bytes.
    fn piece(&self, from: usize, reading: &Reading<'_>) -> (*const u8, usize, usize) {
        let (Some(mine), Some(theirs)) = (self.rendezvous.post(self.seat), self.rendezvous.post(from)) else {
            return (std::ptr::null(), 0, 0);
        };
        let start = mine.recv_counts[..from].iter().sum();
        let offset: usize = match mine.call {
            Call::AllToAllV => theirs.send_counts[..self.seat].iter().sum(),
            _ => 0,
        };
        (reading.sent().wrapping_add(offset), start, mine.recv_counts[from])
    }

    /// Copies `bytes` bytes to `start` in the receive buffer, from another rank's memory or from this rank's own.
    fn copy_in(&self, source: *const u8, start: usize, bytes: usize) {
        // SAFETY: the source's owner does not finish revoking while the caller's `Reading` lives. Both ranks have
        // agreed on the sizes, which `Operation::check` compared with the memory. Nobody but this rank uses its
        // receive buffer.
        unsafe { std::ptr::copy_nonoverlapping(source, self.memory().recv.add(start), bytes) };
    }

    fn reduce(&mut self) -> Result<Option<Until>, CommError> {
        let rendezvous = Arc::clone(&self.rendezvous);
        if !rendezvous.are_all_posted() {
            return Ok(Some(Until::AllPosted));
        }
        let mut readings = Vec::with_capacity(self.num_seats());
        for seat in 0..self.num_seats() {
            // A rank that has revoked its memory has failed, and with it the run: `finish` sees that.
            let Some(reading) = self.open(&rendezvous, seat)? else { return Ok(Some(Until::AllPosted)) };
            readings.push(reading);
        }
        match self.call() {
            Call::ReduceScatter { number, reduce } => self.reduce_piece(readings, number, reduce),
            Call::AllReduce { number, reduce, bytes } if bytes <= ONE_STEP_BYTES => {
                self.reduce_all(readings, number, reduce);
            }
            Call::AllReduce { number, reduce, .. } => self.reduce_share(readings, number, reduce),
            _ => {}
        }
        Ok(None)
    }

    fn reduce_piece(&mut self, readings: Vec<Reading<'_>>, number: NumberKind, reduce: Reduce) {
        let counts = self.rendezvous.post(self.seat).map_or(&[][..], |post| &post.send_counts);
        let start: usize = counts[..self.seat].iter().sum();
        let sources: Vec<*const u8> = readings.iter().map(|r| r.sent().wrapping_add(start)).collect();
        let memory = self.memory();
        // SAFETY: the sources stay valid while `readings` live and are only read by all; `recv` is this rank's alone.
        // Sizes were agreed on; typed calls gave aligned memory.
        unsafe { number.reduce(reduce, &sources, &[memory.recv], memory.recv_bytes) };
        drop(readings);
        self.done(Phase::Leaving(self.num_seats()));
    }

    fn reduce_all(&mut self, readings: Vec<Reading<'_>>, number: NumberKind, reduce: Reduce) {
        let bytes = self.memory().recv_bytes;
        let sources: Vec<*const u8> = readings.iter().map(Reading::in_place).collect();
        // Words of eight bytes are aligned for every number.
        let mut sums = vec![0_u64; bytes.div_ceil(8)];
        // SAFETY: as above; nobody writes to the memory before all have read it (`write`).
        unsafe { number.reduce(reduce, &sources, &[sums.as_mut_ptr().cast()], bytes) };
        drop(readings);
        self.done(Phase::Writing(sums));
    }

    /// Reduces this rank's share into everybody's memory. The memory is still in cache when it is written, and each
    /// byte goes back and forth once, as in a copy.
    fn reduce_share(&mut self, readings: Vec<Reading<'_>>, number: NumberKind, reduce: Reduce) {
        let (start, bytes) = self.share();
        let targets: Vec<*mut u8> = readings.iter().map(|r| r.in_place().cast_mut().wrapping_add(start)).collect();
        let sources: Vec<*const u8> = targets.iter().map(|target| target.cast_const()).collect();
        // SAFETY: as above; this share of everybody's memory, which each has given to be written, is this rank's
        // alone: the shares do not overlap, and nobody leaves before all are done.
        unsafe { number.reduce(reduce, &sources, &targets, bytes) };
        drop(readings);
        self.done(Phase::Leaving(self.num_seats()));
    }

    /// Returns the start and the bytes of the share of an all-reduce that this rank reduces, in whole cache lines.
    fn share(&self) -> (usize, usize) {
        let total = self.memory().recv_bytes;
        let share = total.div_ceil(self.num_seats()).next_multiple_of(64);
        let start = (share * self.seat).min(total);
        (start, share.min(total - start))
    }

    fn write(&mut self) -> Option<Until> {
        let all = self.num_seats();
        if self.rendezvous.num_done() < all {
            return Some(Until::Done(all));
        }
        if let Phase::Writing(sums) = std::mem::replace(&mut self.phase, Phase::Finished) {
            self.copy_in(sums.as_ptr().cast(), 0, self.memory().recv_bytes);
        }
        None
    }

    fn leave(&mut self, num_done: usize) -> Option<Until> {
        if self.rendezvous.num_done() < num_done {
            return Some(Until::Done(num_done));
        }
        self.phase = Phase::Finished;
        None
    }

    /// Notes that this rank reads nobody's memory any more.
    fn done(&mut self, next: Phase) {
        self.phase = next;
        let num_done = self.rendezvous.set_done(self.seat);
        let awaited = match self.call() {
            Call::Broadcast { .. } => self.num_seats() - 1,
            Call::Receive { .. } => 1,
            _ => self.num_seats(),
        };
        if num_done == awaited {
            self.wake();
        }
    }

    fn is_met(&self, until: Until) -> bool {
        let rendezvous = &self.rendezvous;
        match until {
            Until::Posted(seat) => rendezvous.is_posted(seat),
            Until::AnyPosted => (0..self.num_seats()).any(|seat| !self.copied[seat] && rendezvous.is_posted(seat)),
            Until::AllPosted => rendezvous.are_all_posted(),
            Until::Done(num_done) => rendezvous.num_done() >= num_done,
        }
    }

    /// Returns the ranks that have not come yet, or are not done, by their numbers in the whole run.
    fn missing(&self) -> Vec<usize> {
        self.rendezvous.awaited_seats().into_iter().map(|seat| self.rank_of(seat)).collect()
    }
}

impl Steps for Started {
    fn advance(&mut self) -> Result<bool, CommError> {
        match self.group.world.failure() {
            Some(error) => Err(error),
            None => Ok(self.progress()?.is_none()),
        }
    }

    fn can_advance(&self) -> bool {
        self.until.is_some_and(|until| self.is_met(until))
    }

    fn finish(&mut self) -> Result<(), CommError> {
        let group = Arc::clone(&self.group);
        let waiter = self.waiter();
        while let Some(until) = self.progress()? {
            group.world.wait(waiter, &|| self.is_met(until), &|| self.missing())?;
            // The condition may hold although a rank died, and its memory is gone.
            if let Some(error) = group.world.failure() {
                return Err(error);
            }
        }
        Ok(())
    }

    fn close(&mut self) {
        if matches!(self.phase, Phase::Finished) {
            return;
        }
        if self.group.world.failure().is_none() && !thread::panicking() {
            // It was dropped before its end, but the others wait for it. The rank's next call returns an error.
            let _ = self.finish();
        }
        self.rendezvous.revoke(self.seat);
        self.phase = Phase::Finished;
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        self.close();
    }
}
