//! Ranks as threads of this process: nothing has to be installed, and each byte that moves is copied once.

mod agreement;
mod group;
mod rendezvous;
mod run;
mod started;
mod world;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub(crate) use group::numbered_by_appearance;
use group::{Group, Key};
use rendezvous::Post;
pub(crate) use run::reason_of_panic;
pub use run::{RankOptions, describe_panics_by, run_ranks, try_run_ranks};
use started::{Phase, Seats, Started};

use crate::in_flight::{Handle, Steps as _, locked};
use crate::operation::{Call, Memory, Operation};
use crate::started::RawPending;
use crate::{CommError, Communicator};

/// The communicator of a rank that is a thread.
struct ThreadComm {
    group: Arc<Group>,
    rank: usize,
    num_calls: AtomicU64,
    /// The number of messages so far, by direction (whether sent), other rank and tag.
    num_messages: Mutex<HashMap<(bool, usize, u32), u64>>,
}

impl ThreadComm {
    fn new(group: Arc<Group>, rank: usize) -> Self {
        Self { group, rank, num_calls: AtomicU64::new(0), num_messages: Mutex::default() }
    }

    fn next_message(&self, is_sent: bool, peer: usize, tag: u32) -> u64 {
        let mut messages = locked(&self.num_messages);
        let number = messages.entry((is_sent, peer, tag)).or_default();
        *number += 1;
        *number
    }

    /// Returns the key of this call's rendezvous, its seats, and this rank's seat.
    fn place(&self, call: Call) -> (Key, Seats, usize) {
        let rank = self.rank;
        match call {
            Call::Send { to, tag, .. } => {
                let key = Key::Pair { from: rank, to, tag, number: self.next_message(true, to, tag) };
                (key, Seats::Pair { from: rank, to }, 0)
            }
            Call::Receive { from, tag, .. } => {
                let key = Key::Pair { from, to: rank, tag, number: self.next_message(false, from, tag) };
                (key, Seats::Pair { from, to: rank }, 1)
            }
            _ => (Key::All(self.num_calls.fetch_add(1, Ordering::Relaxed)), Seats::All, rank),
        }
    }

    /// # Safety
    /// The promises of [`Communicator::start`] hold, for the memory of `post`.
    unsafe fn join(&self, post: Post) -> Result<Started, CommError> {
        if let Some(error) = self.group.world.failure() {
            return Err(error);
        }
        let call = post.call;
        let (key, seats, seat) = self.place(call);
        let num_seats = if matches!(seats, Seats::All) { self.group.size() } else { 2 };
        let rendezvous = self.group.rendezvous(key, num_seats);
        // SAFETY: a seat belongs to its rank, and a key is used once. `Started` revokes the memory before it ends.
        let is_last = unsafe { rendezvous.join(seat, post) };
        let copied = vec![false; num_seats];
        let group = Arc::clone(&self.group);
        let started = Started { group, rendezvous, seats, seat, phase: Phase::Reading, copied, until: None };
        agreement::check_all(&self.group, &started.rendezvous, seat)?;
        if is_last || matches!(call, Call::Broadcast { root, .. } if root == seat) {
            started.wake();
        }
        Ok(started)
    }

    /// # Safety
    /// The promises of [`Communicator::start`] hold.
    unsafe fn start_here(&self, operation: &Operation<'_>, memory: Memory) -> Result<Started, CommError> {
        let world_rank = self.group.world_rank(self.rank);
        operation
            .check(&memory, self.rank, self.group.size(), world_rank)
            .map_err(|error| self.group.world.fail(error))?;
        // SAFETY: the caller's promise.
        unsafe { self.join(Post::new(operation, memory)) }
    }
}

impl Communicator for ThreadComm {
    fn rank(&self) -> usize {
        self.rank
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

    unsafe fn start(&self, operation: &Operation<'_>, memory: Memory) -> Result<Box<dyn RawPending>, CommError> {
        // SAFETY: the caller's promise.
        let started = unsafe { self.start_here(operation, memory) }?;
        let in_flight = self.group.world.in_flight(started.world_rank());
        Ok(Box::new(Handle::new(operation.call, started, in_flight)))
    }

    unsafe fn run(&self, operation: &Operation<'_>, memory: Memory) -> Result<(), CommError> {
        // SAFETY: the caller's promise.
        unsafe { self.start_here(operation, memory) }?.finish()
    }

    fn split(&self, color: Option<u32>, key: usize) -> Result<Option<Box<dyn Communicator>>, CommError> {
        let number = self.num_calls.load(Ordering::Relaxed);
        let mut post = Post::new(&Operation::plain(Call::Split), Memory::new(&[], &mut []));
        post.part = Some((color, key));
        // SAFETY: the memory is empty.
        let mut started = unsafe { self.join(post) }?;
        started.finish()?;
        let Some(color) = color else { return Ok(None) };
        let mut ranks: Vec<(usize, usize)> = (0..self.group.size())
            .filter_map(|rank| match started.rendezvous.post(rank)?.part? {
                (other, key) if other == Some(color) => Some((key, rank)),
                _ => None,
            })
            .collect();
        ranks.sort_unstable();
        let ranks: Vec<usize> = ranks.into_iter().map(|(_, rank)| rank).collect();
        let group = self.group.part(number, color, &ranks);
        let rank = ranks.iter().position(|&rank| rank == self.rank).unwrap_or(0);
        Ok(Some(Box::new(Self::new(group, rank))))
    }

    fn set_timeout(&self, timeout: Duration) {
        self.group.world.set_timeout(timeout);
    }

    fn fail(&self, error: CommError) -> CommError {
        self.group.world.fail(error)
    }
}
