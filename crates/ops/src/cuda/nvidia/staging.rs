//! Copies between the host and a device by way of memory that the system does not move ("page-locked"), in pieces that take turns.
//!
//! From memory of a program the driver copies at a fraction of the bus's rate, and whoever asks has to wait; from page-locked memory the
//! device fetches by itself, while the host fills the next piece (CUDA programming guide, "Page-locked host memory"). What a program asks
//! to be copied is read before the call returns: it may be written to at once.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Bytes of a piece at most, and pieces that there is room for: two are filled or emptied while others are under way.
const PIECE_BYTES: usize = 8 << 20;
const NUM_PIECES: usize = 4;
/// Bytes of all pieces.
pub(super) const STAGING_BYTES: usize = NUM_PIECES * PIECE_BYTES;
/// Pieces of a download that are under way at a time. One more must find room that is none of theirs: see [`Turns`].
const MAX_COMING: usize = 2;
const _: () = assert!(MAX_COMING + 2 <= NUM_PIECES, "pieces under way, one more, and what is left over at the end");

/// From so many bytes on several threads fill or empty a piece: one reaches a third of the bus's rate.
const MIN_SHARED_BYTES: usize = 1 << 20;
const THREADS: usize = 4;

/// What copies between page-locked memory and a device, in the order of the calls.
pub(super) trait Engine {
    /// When a copy is over.
    type Event;
    /// Why there is none.
    type Error;

    /// Begins to copy a piece to `address`. It must not be written to before the event.
    fn begin_up(&self, piece: &[u8], address: u64) -> Result<Self::Event, Self::Error>;

    /// Begins to fill a piece from `address`. It must not be used before the event.
    fn begin_down(&self, piece: &mut [u8], address: u64) -> Result<Self::Event, Self::Error>;

    fn wait_for(&self, event: Self::Event) -> Result<(), Self::Error>;
}

/// Page-locked memory, lent out piece by piece.
pub(super) struct Staging<E> {
    start: *mut u8,
    turns: Mutex<Turns<E>>,
}
// SAFETY: the memory is this value's own, and whoever uses a part of it holds the lock; events are handles of any thread.
unsafe impl<E: Send> Send for Staging<E> {}
// SAFETY: as above.
unsafe impl<E: Send> Sync for Staging<E> {}

impl<E> Staging<E> {
    /// # Safety
    ///
    /// [`STAGING_BYTES`] bytes from `start` on are nobody else's for as long as this value is there, and were written once.
    pub(super) unsafe fn new(start: *mut u8) -> Self {
        Self { start, turns: Mutex::new(Turns { len: STAGING_BYTES, next: 0, under_way: VecDeque::new() }) }
    }

    /// Where the memory starts.
    pub(super) fn start(&self) -> *mut u8 {
        self.start
    }

    /// The copies that may still be under way.
    pub(super) fn take_under_way(&self) -> Vec<E> {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        turns.under_way.drain(..).map(|(_, event)| event).collect()
    }

    /// Copies `bytes` to `address`: they have been read when this returns, and the copy is over when the engine comes to it.
    pub(super) fn upload<C: Engine<Event = E>>(&self, engine: &C, bytes: &[u8], address: u64) -> Result<(), C::Error> {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        for (index, from) in bytes.chunks(PIECE_BYTES).enumerate() {
            let place = self.free_place(engine, &mut turns, from.len())?;
            // SAFETY: nothing that is under way uses this part, and the lock is held.
            let piece = unsafe { self.piece(&place) };
            copy(from, piece);
            let event = engine.begin_up(piece, address + (index * PIECE_BYTES) as u64)?;
            turns.under_way.push_back((place, event));
        }
        Ok(())
    }

    /// Fills `to` from `address`, after what the engine was asked for before.
    pub(super) fn download<C: Engine<Event = E>>(
        &self,
        engine: &C,
        to: &mut [u8],
        address: u64,
    ) -> Result<(), C::Error> {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        let mut coming: VecDeque<(&[u8], &mut [u8], E)> = VecDeque::new();
        let finish = |(piece, to, event): (&[u8], &mut [u8], E)| {
            engine.wait_for(event)?;
            copy(piece, to);
            Ok(())
        };
        for (index, to) in to.chunks_mut(PIECE_BYTES).enumerate() {
            if coming.len() == MAX_COMING {
                coming.pop_front().map_or(Ok(()), finish)?;
            }
            let place = self.free_place(engine, &mut turns, to.len())?;
            // SAFETY: nothing that is under way uses this part, nor do the pieces that are coming, and the lock is held.
            let piece = unsafe { self.piece(&place) };
            let event = engine.begin_down(piece, address + (index * PIECE_BYTES) as u64)?;
            coming.push_back((piece, to, event));
        }
        coming.into_iter().try_for_each(finish)
    }

    /// A place of so many bytes that no copy uses any more.
    fn free_place<C: Engine<Event = E>>(
        &self,
        engine: &C,
        turns: &mut Turns<E>,
        bytes: usize,
    ) -> Result<Range<usize>, C::Error> {
        let (place, in_the_way) = turns.next(bytes);
        in_the_way.into_iter().try_for_each(|event| engine.wait_for(event))?;
        Ok(place)
    }

    /// # Safety
    ///
    /// Nobody else uses this part of the memory while the result lives.
    #[allow(clippy::mut_from_ref)] // the caller answers for it
    unsafe fn piece(&self, place: &Range<usize>) -> &mut [u8] {
        assert!(place.start <= place.end && place.end <= STAGING_BYTES, "a piece of the memory");
        // SAFETY: inside the memory, which is this value's; the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(place.start), place.len()) }
    }
}

/// Places in a ring: each follows the one before, or is at the start if there is no room behind it.
struct Turns<E> {
    len: usize,
    next: usize,
    /// Those that copies use until their events, in the order in which they began.
    under_way: VecDeque<(Range<usize>, E)>,
}

impl<E> Turns<E> {
    /// The next place of so many bytes, and what must be over before it is used. Places that were given before and that are not said to
    /// be under way are not in its way as long as all of them and what may be left over at the end fit the ring.
    fn next(&mut self, bytes: usize) -> (Range<usize>, Vec<E>) {
        let start = if self.next + bytes > self.len { 0 } else { self.next };
        let place = start..start + bytes;
        self.next = place.end;
        let is_in_the_way = |other: &Range<usize>| other.start < place.end && place.start < other.end;
        let last = self.under_way.iter().rposition(|(other, _)| is_in_the_way(other));
        let events = self.under_way.drain(..last.map_or(0, |last| last + 1)).map(|(_, event)| event).collect();
        (place, events)
    }
}

/// Copies from one to the other of two slices of one length.
fn copy(from: &[u8], to: &mut [u8]) {
    if from.len() < MIN_SHARED_BYTES {
        return to.copy_from_slice(from);
    }
    let share = from.len().div_ceil(THREADS);
    std::thread::scope(|scope| {
        for (from, to) in from.chunks(share).zip(to.chunks_mut(share)) {
            scope.spawn(|| to.copy_from_slice(from));
        }
    });
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::convert::Infallible;

    use moeworks_tensor::{Purpose, Random};

    use super::*;

    /// A device that copies as late as it may: a copy waits until its event is waited for.
    #[derive(Default)]
    struct Late {
        memory: RefCell<Vec<u8>>,
        waiting: RefCell<VecDeque<(usize, Copy)>>,
        begun: RefCell<usize>,
    }

    enum Copy {
        Up(*const u8, usize, usize),
        Down(*mut u8, usize, usize),
    }

    impl Late {
        fn begin(&self, copy: Copy) -> usize {
            *self.begun.borrow_mut() += 1;
            let event = *self.begun.borrow();
            self.waiting.borrow_mut().push_back((event, copy));
            event
        }

        fn run_until(&self, event: usize) {
            let mut memory = self.memory.borrow_mut();
            while self.waiting.borrow().front().is_some_and(|(first, _)| *first <= event) {
                let Some((_, copy)) = self.waiting.borrow_mut().pop_front() else { return };
                // SAFETY: pieces are there as long as the staging memory of the test.
                unsafe {
                    match copy {
                        Copy::Up(from, len, at) => {
                            memory[at..at + len].copy_from_slice(std::slice::from_raw_parts(from, len));
                        }
                        Copy::Down(to, len, at) => to.copy_from(memory[at..].as_ptr(), len),
                    }
                }
            }
        }
    }

    impl Engine for Late {
        type Event = usize;
        type Error = Infallible;

        fn begin_up(&self, piece: &[u8], address: u64) -> Result<usize, Infallible> {
            Ok(self.begin(Copy::Up(piece.as_ptr(), piece.len(), address as usize)))
        }

        fn begin_down(&self, piece: &mut [u8], address: u64) -> Result<usize, Infallible> {
            Ok(self.begin(Copy::Down(piece.as_mut_ptr(), piece.len(), address as usize)))
        }

        fn wait_for(&self, event: usize) -> Result<(), Infallible> {
            self.run_until(event);
            Ok(())
        }
    }

    #[test]
    fn copies_of_any_size_arrive_though_the_device_is_as_late_as_it_may_be() {
        const BYTES: usize = 5 * STAGING_BYTES / 2;
        let mut memory = vec![0_u8; STAGING_BYTES];
        // SAFETY: the memory is the staging's alone until the end of the test.
        let staging = unsafe { Staging::new(memory.as_mut_ptr()) };
        let device = Late { memory: RefCell::new(vec![0; BYTES]), ..Late::default() };
        let mut expected = vec![0_u8; BYTES];
        let random = Random::new(5, Purpose::Test, 0);
        let sizes = [1, 1000, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, STAGING_BYTES, BYTES, 3_000_000];
        for turn in 0..60_u64 {
            let len = sizes[random.below(3 * turn, sizes.len() as u64) as usize];
            let at = random.below(3 * turn + 1, (BYTES - len + 1) as u64) as usize;
            if random.below(3 * turn + 2, 3) > 0 {
                let mut bytes: Vec<u8> = (0..len).map(|i| (i as u64 * 31 + turn) as u8).collect();
                expected[at..at + len].copy_from_slice(&bytes);
                let Ok(()) = staging.upload(&device, &bytes, at as u64);
                // The program goes on with its memory.
                bytes.fill(0xee);
            } else {
                let mut found = vec![0; len];
                let Ok(()) = staging.download(&device, &mut found, at as u64);
                assert!(found == expected[at..at + len], "turn {turn}: {len} bytes from {at} on");
            }
        }
        device.run_until(usize::MAX);
        assert!(*device.memory.borrow() == expected);
        assert!(staging.take_under_way().len() <= 60 * NUM_PIECES);
    }
}
