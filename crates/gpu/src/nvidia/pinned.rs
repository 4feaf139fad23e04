//! Copies between the host and a device through a ring of page-locked memory, piece by piece.
//!
//! From pageable memory the driver copies at a fraction of the bus's rate, and the caller waits. The device reads
//! page-locked memory by itself while the host fills the next piece (CUDA programming guide, "Page-locked host
//! memory"). The source is read before a call returns, so it may be written to at once.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// The most bytes of a piece.
const PIECE_BYTES: usize = 8 << 20;
/// The number of pieces that fit: two are filled or emptied while others are in flight.
const NUM_PIECES: usize = 4;
/// Bytes of all pieces.
pub(super) const PINNED_BYTES: usize = NUM_PIECES * PIECE_BYTES;
/// The most pieces of a download in flight. One more must find a place that is not theirs: see [`Ring`].
const MAX_DOWNLOADS: usize = 2;
const _: () = assert!(MAX_DOWNLOADS + 2 <= NUM_PIECES, "pieces in flight, one more, and the unused end of the ring");

/// The fewest bytes of a piece that several threads fill or empty: one thread reaches a third of the bus's rate.
const MIN_SHARED_BYTES: usize = 1 << 20;
const THREADS: usize = 4;

/// Copies between page-locked memory and a device, in the order of the calls.
pub(super) trait CopyEngine {
    /// The event at the end of a copy.
    type Event;
    type Error;

    /// Begins to copy a piece to `address`. It must not be written to before the event.
    fn start_upload(&self, piece: &[u8], address: u64) -> Result<Self::Event, Self::Error>;

    /// Begins to fill a piece from `address`. It must not be used before the event.
    fn start_download(&self, piece: &mut [u8], address: u64) -> Result<Self::Event, Self::Error>;

    fn wait_for(&self, event: Self::Event) -> Result<(), Self::Error>;
}

/// Page-locked memory, lent out piece by piece.
pub(super) struct PinnedRing<E> {
    start: *mut u8,
    ring: Mutex<Ring<E>>,
}
// SAFETY: the memory is this value's own, and whoever uses a part of it holds the lock; events are handles of any
// thread.
unsafe impl<E: Send> Send for PinnedRing<E> {}
// SAFETY: as above.
unsafe impl<E: Send> Sync for PinnedRing<E> {}

impl<E> PinnedRing<E> {
    /// Makes a ring of this memory.
    ///
    /// # Safety
    ///
    /// [`PINNED_BYTES`] bytes from `start` on are nobody else's while this value lives, and have been written once.
    pub(super) unsafe fn new(start: *mut u8) -> Self {
        Self { start, ring: Mutex::new(Ring { len: PINNED_BYTES, next: 0, in_flight: VecDeque::new() }) }
    }

    /// The address of the memory.
    pub(super) fn start(&self) -> *mut u8 {
        self.start
    }

    /// Takes the events of copies that may still be in flight.
    pub(super) fn take_in_flight(&self) -> Vec<E> {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        ring.in_flight.drain(..).map(|(_, event)| event).collect()
    }

    /// Queues a copy of `bytes` to `address`. They have been read when this returns.
    pub(super) fn upload<C: CopyEngine<Event = E>>(
        &self,
        engine: &C,
        bytes: &[u8],
        address: u64,
    ) -> Result<(), C::Error> {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        for (index, from) in bytes.chunks(PIECE_BYTES).enumerate() {
            let place = self.free_place(engine, &mut ring, from.len())?;
            // SAFETY: no copy in flight uses this part, and the lock is held.
            let piece = unsafe { self.piece(&place) };
            copy(from, piece);
            let event = engine.start_upload(piece, address + (index * PIECE_BYTES) as u64)?;
            ring.in_flight.push_back((place, event));
        }
        Ok(())
    }

    /// Fills `to` from `address`, after the work that was queued before.
    pub(super) fn download<C: CopyEngine<Event = E>>(
        &self,
        engine: &C,
        to: &mut [u8],
        address: u64,
    ) -> Result<(), C::Error> {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let mut downloads: VecDeque<(&[u8], &mut [u8], E)> = VecDeque::new();
        let finish = |(piece, to, event): (&[u8], &mut [u8], E)| {
            engine.wait_for(event)?;
            copy(piece, to);
            Ok(())
        };
        for (index, to) in to.chunks_mut(PIECE_BYTES).enumerate() {
            if downloads.len() == MAX_DOWNLOADS {
                downloads.pop_front().map_or(Ok(()), finish)?;
            }
            let place = self.free_place(engine, &mut ring, to.len())?;
            // SAFETY: no copy in flight uses this part, nor do the downloads of this call, and the lock is held.
            let piece = unsafe { self.piece(&place) };
            let event = engine.start_download(piece, address + (index * PIECE_BYTES) as u64)?;
            downloads.push_back((piece, to, event));
        }
        downloads.into_iter().try_for_each(finish)
    }

    /// Returns a place of so many bytes that no copy uses any more.
    fn free_place<C: CopyEngine<Event = E>>(
        &self,
        engine: &C,
        ring: &mut Ring<E>,
        bytes: usize,
    ) -> Result<Range<usize>, C::Error> {
        let (place, in_the_way) = ring.next(bytes);
        in_the_way.into_iter().try_for_each(|event| engine.wait_for(event))?;
        Ok(place)
    }

    /// Lends a piece of the memory.
    ///
    /// # Safety
    ///
    /// Nobody else uses this part of the memory while the result lives.
    #[allow(clippy::mut_from_ref)] // the caller answers for it
    unsafe fn piece(&self, place: &Range<usize>) -> &mut [u8] {
        assert!(place.start <= place.end && place.end <= PINNED_BYTES, "a piece of the memory");
        // SAFETY: inside the memory, which is this value's; the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(place.start), place.len()) }
    }
}

/// Places in a ring: each follows the one before, or is at the start if there is no room behind it.
struct Ring<E> {
    len: usize,
    next: usize,
    /// The places that copies use until their events, in the order in which they began.
    in_flight: VecDeque<(Range<usize>, E)>,
}

impl<E> Ring<E> {
    /// Returns the next place of `bytes` bytes, and the events that must have happened before it is used. Places that
    /// were given before and are not in flight do not overlap it as long as all of them and the unused end fit the
    /// ring.
    fn next(&mut self, bytes: usize) -> (Range<usize>, Vec<E>) {
        let start = if self.next + bytes > self.len { 0 } else { self.next };
        let place = start..start + bytes;
        self.next = place.end;
        let is_in_the_way = |other: &Range<usize>| other.start < place.end && place.start < other.end;
        let last = self.in_flight.iter().rposition(|(other, _)| is_in_the_way(other));
        let events = self.in_flight.drain(..last.map_or(0, |last| last + 1)).map(|(_, event)| event).collect();
        (place, events)
    }
}

/// Copies between two slices of one length.
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
    struct LazyDevice {
        memory: RefCell<Vec<u8>>,
        waiting: RefCell<VecDeque<(usize, Copy)>>,
        begun: RefCell<usize>,
    }

    enum Copy {
        Up(*const u8, usize, usize),
        Down(*mut u8, usize, usize),
    }

    impl LazyDevice {
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
                // SAFETY: pieces are there as long as the memory of the test.
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

    impl CopyEngine for LazyDevice {
        type Event = usize;
        type Error = Infallible;

        fn start_upload(&self, piece: &[u8], address: u64) -> Result<usize, Infallible> {
            Ok(self.begin(Copy::Up(piece.as_ptr(), piece.len(), address as usize)))
        }

        fn start_download(&self, piece: &mut [u8], address: u64) -> Result<usize, Infallible> {
            Ok(self.begin(Copy::Down(piece.as_mut_ptr(), piece.len(), address as usize)))
        }

        fn wait_for(&self, event: usize) -> Result<(), Infallible> {
            self.run_until(event);
            Ok(())
        }
    }

    #[test]
    fn copies_of_any_size_arrive_though_the_device_is_as_late_as_it_may_be() {
        const BYTES: usize = 5 * PINNED_BYTES / 2;
        let mut memory = vec![0_u8; PINNED_BYTES];
        // SAFETY: the memory is the ring's alone until the end of the test.
        let ring = unsafe { PinnedRing::new(memory.as_mut_ptr()) };
        let device = LazyDevice { memory: RefCell::new(vec![0; BYTES]), ..LazyDevice::default() };
        let mut expected = vec![0_u8; BYTES];
        let random = Random::new(5, Purpose::Test, 0);
        let sizes = [1, 1000, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, PINNED_BYTES, BYTES, 3_000_000];
        for turn in 0..60_u64 {
            let len = sizes[random.below(3 * turn, sizes.len() as u64) as usize];
            let at = random.below(3 * turn + 1, (BYTES - len + 1) as u64) as usize;
            if random.below(3 * turn + 2, 3) > 0 {
                let mut bytes: Vec<u8> = (0..len).map(|i| (i as u64 * 31 + turn) as u8).collect();
                expected[at..at + len].copy_from_slice(&bytes);
                let Ok(()) = ring.upload(&device, &bytes, at as u64);
                // The program goes on with its memory.
                bytes.fill(0xee);
            } else {
                let mut found = vec![0; len];
                let Ok(()) = ring.download(&device, &mut found, at as u64);
                assert!(found == expected[at..at + len], "turn {turn}: {len} bytes from {at} on");
            }
        }
        device.run_until(usize::MAX);
        assert!(*device.memory.borrow() == expected);
        assert!(ring.take_in_flight().len() <= 60 * NUM_PIECES);
    }
}
