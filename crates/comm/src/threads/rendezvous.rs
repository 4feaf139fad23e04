//! One operation of a group: each rank posts its call and the addresses of its memory.
//!
//! After a rank has posted, the others may read its memory until it revokes it, which it does when all have said that
//! they are done. If the run fails it revokes at once, but first waits for the last reader.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::thread;

use crate::operation::{Call, Memory, Operation};

const EMPTY: u8 = 0;
const POSTED: u8 = 1;
const REVOKED: u8 = 2;

/// A rank's call with its memory.
pub(crate) struct Post {
    pub(crate) call: Call,
    pub(crate) send_counts: Box<[usize]>,
    pub(crate) recv_counts: Box<[usize]>,
    pub(crate) memory: Memory,
    /// The colour and the key of a split.
    pub(crate) part: Option<(Option<u32>, usize)>,
}

impl Post {
    pub(crate) fn new(operation: &Operation<'_>, memory: Memory) -> Self {
        let (send_counts, recv_counts) = (operation.send_counts.into(), operation.recv_counts.into());
        Self { call: operation.call, send_counts, recv_counts, memory, part: None }
    }
}

#[derive(Default)]
#[repr(align(128))] // Two cache lines: neighbours are fetched in pairs.
struct Seat {
    state: AtomicU8,
    is_done: AtomicBool,
    num_readers: AtomicUsize,
    post: UnsafeCell<Option<Post>>,
}

/// The seats of the ranks, with their progress.
pub(crate) struct Rendezvous {
    seats: Box<[Seat]>,
    num_posted: AtomicUsize,
    num_done: AtomicUsize,
}

// SAFETY: a seat's post is written by its one rank while the seat is empty and nobody reads it (`join`), and only
// read after it was marked as posted.
unsafe impl Sync for Rendezvous {}
// SAFETY: the pointers in posts are addresses; their users say why they may use them.
unsafe impl Send for Rendezvous {}

impl Rendezvous {
    pub(crate) fn new(num_seats: usize) -> Self {
        Self {
            seats: (0..num_seats).map(|_| Seat::default()).collect(),
            num_posted: AtomicUsize::new(0),
            num_done: AtomicUsize::new(0),
        }
    }

    pub(crate) fn num_seats(&self) -> usize {
        self.seats.len()
    }

    /// Takes a seat. Returns whether all are taken now.
    ///
    /// # Safety
    /// It is called once for a seat, by its rank; the memory stays valid until [`revoke`](Self::revoke) has returned.
    pub(crate) unsafe fn join(&self, seat: usize, post: Post) -> bool {
        let place = &self.seats[seat];
        // SAFETY: nobody reads a post before the seat is marked, and nobody else writes it.
        unsafe { *place.post.get() = Some(post) };
        place.state.store(POSTED, Ordering::SeqCst);
        self.num_posted.fetch_add(1, Ordering::SeqCst) + 1 == self.seats.len()
    }

    pub(crate) fn is_posted(&self, seat: usize) -> bool {
        self.seats[seat].state.load(Ordering::SeqCst) == POSTED
    }

    pub(crate) fn are_all_posted(&self) -> bool {
        self.num_posted.load(Ordering::Acquire) == self.seats.len()
    }

    /// Notes that a rank uses nobody's memory any more. Returns the number of such ranks.
    pub(crate) fn set_done(&self, seat: usize) -> usize {
        self.seats[seat].is_done.store(true, Ordering::SeqCst);
        self.num_done.fetch_add(1, Ordering::SeqCst) + 1
    }

    pub(crate) fn num_done(&self) -> usize {
        self.num_done.load(Ordering::SeqCst)
    }

    fn unfinished_seats(&self) -> Vec<usize> {
        (0..self.seats.len()).filter(|&seat| !self.seats[seat].is_done.load(Ordering::SeqCst)).collect()
    }

    /// Returns the seats that the others wait for: of those that are not done, the empty ones if there are any,
    /// otherwise all.
    pub(crate) fn awaited_seats(&self) -> Vec<usize> {
        let unfinished = self.unfinished_seats();
        let is_empty = |seat: &usize| self.seats[*seat].state.load(Ordering::SeqCst) == EMPTY;
        let empty: Vec<usize> = unfinished.iter().copied().filter(is_empty).collect();
        if empty.is_empty() { unfinished } else { empty }
    }

    /// Returns a seat's post, also after its rank revoked it; `None` if there is none yet. The memory that it names
    /// may be gone.
    pub(crate) fn post(&self, seat: usize) -> Option<&Post> {
        let place = &self.seats[seat];
        if place.state.load(Ordering::SeqCst) == EMPTY {
            return None;
        }
        // SAFETY: it was written before the mark, and is not written again while the rendezvous lives.
        unsafe { (*place.post.get()).as_ref() }
    }

    /// Opens a seat's memory for reading. Its rank cannot finish revoking it before the result is dropped.
    pub(crate) fn read(&self, seat: usize) -> Option<Reading<'_>> {
        let place = &self.seats[seat];
        place.num_readers.fetch_add(1, Ordering::SeqCst);
        let mut reading = Reading { place, memory: None };
        // Either this sees the mark, or `revoke` sees this reader.
        if place.state.load(Ordering::SeqCst) != POSTED {
            return None;
        }
        reading.memory = self.post(seat).map(|post| post.memory);
        reading.memory.is_some().then_some(reading)
    }

    /// Withdraws a rank's memory and waits for the ranks that are reading it.
    pub(crate) fn revoke(&self, seat: usize) {
        let place = &self.seats[seat];
        place.state.store(REVOKED, Ordering::SeqCst);
        while place.num_readers.load(Ordering::SeqCst) > 0 {
            thread::yield_now();
        }
    }
}

/// Another rank's memory, which stays valid while this lives.
pub(crate) struct Reading<'a> {
    place: &'a Seat,
    memory: Option<Memory>,
}

impl Reading<'_> {
    /// Returns the start of the sent region.
    pub(crate) fn sent(&self) -> *const u8 {
        self.memory.map_or(std::ptr::null(), |memory| memory.send)
    }

    /// Returns the start of the memory of an in-place call.
    pub(crate) fn in_place(&self) -> *const u8 {
        self.memory.map_or(std::ptr::null(), |memory| memory.recv.cast_const())
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.place.num_readers.fetch_sub(1, Ordering::SeqCst);
    }
}
