//! Asynchronous copies of small results to the host. Each is queued behind the kernel that makes the result and
//! waited for on its own.
//!
//! A result that is copied only when it is read comes after everything that was queued meanwhile. Drawn tokens cannot
//! wait for that: the next step is queued before the host knows them.

use std::panic::panic_any;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::result;

use super::memory::{Event, Shared};
use super::{Nvidia, failed};
use crate::GpuError;

/// The most copies that may be in flight.
const SLOTS: usize = 16;
/// The most bytes of a copy.
const SLOT_BYTES: usize = 4096;

/// Page-locked memory in slots; allocated at the first copy, or none if the system gives none.
#[derive(Default)]
pub(super) struct DownloadSlots {
    start: OnceLock<Option<Start>>,
    free: Mutex<Vec<usize>>,
}

struct Start(*mut u8);
// SAFETY: the memory may be used from any thread; a slot is used by who took it alone.
unsafe impl Send for Start {}
// SAFETY: as above.
unsafe impl Sync for Start {}

impl DownloadSlots {
    /// Takes a free slot and returns its number and address. The context must be this thread's.
    fn take(&self) -> Option<(usize, *mut u8)> {
        let make = || {
            self.free().extend(0..SLOTS);
            // SAFETY: no flags; the memory is given back once.
            let start: *mut u8 = unsafe { result::malloc_host(SLOTS * SLOT_BYTES, 0) }.ok()?.cast();
            // SAFETY: as many bytes are this process's own.
            unsafe { start.write_bytes(0, SLOTS * SLOT_BYTES) };
            Some(Start(start))
        };
        let start = self.start.get_or_init(make).as_ref()?;
        let slot = self.free().pop()?;
        // SAFETY: the slot is one of those that there is memory for.
        Some((slot, unsafe { start.0.add(slot * SLOT_BYTES) }))
    }

    fn free(&self) -> std::sync::MutexGuard<'_, Vec<usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the memory back. No copy is in flight, as each keeps the owner of the slots. The context must be this
    /// thread's.
    pub(super) fn give_back(&mut self) {
        if let Some(Start(start)) = self.start.take().flatten() {
            // SAFETY: the driver gave the memory. A device that failed has nothing to give back.
            _ = unsafe { result::free_host(start.cast()) };
        }
    }
}

/// A copy to the host in flight.
pub(crate) struct Download {
    shared: Arc<Shared>,
    event: Option<Event>,
    slot: usize,
    at: *const u8,
    len: usize,
}
// SAFETY: the slot is this value's alone, and memory that any thread may use.
unsafe impl Send for Download {}
// SAFETY: shared, it does nothing.
unsafe impl Sync for Download {}

impl Download {
    /// Waits for the bytes.
    pub(crate) fn wait(mut self) -> Vec<u8> {
        self.wait_for_event().unwrap_or_else(|error| panic_any(error));
        // SAFETY: the copies that wrote as many bytes of the slot are over.
        unsafe { std::slice::from_raw_parts(self.at, self.len) }.to_vec()
    }

    fn wait_for_event(&mut self) -> Result<(), GpuError> {
        let Some(event) = self.event.take() else { return Ok(()) };
        self.shared.context.bind_to_thread().map_err(failed("cuCtxSetCurrent"))?;
        event.wait().map_err(failed("copying from the GPU"))
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        // The slot may be reused only when nothing writes to it; a device that failed writes nothing.
        _ = self.wait_for_event();
        self.shared.download_slots.free().push(self.slot);
    }
}

impl Nvidia {
    /// Begins to copy bytes at an address to the host; none if there is no free slot or too many bytes.
    ///
    /// # Safety
    ///
    /// The bytes are there, and stay until work that is queued later.
    pub(crate) unsafe fn download_async(&self, address: u64, len: usize) -> Result<Option<Download>, GpuError> {
        if len > SLOT_BYTES {
            return Ok(None);
        }
        self.bind()?;
        let Some((slot, at)) = self.shared.download_slots.take() else { return Ok(None) };
        let mut download = Download { shared: Arc::clone(&self.shared), event: None, slot, at, len };
        let stream = &self.shared.stream;
        // SAFETY: the caller's promise; the slot has room for them, and nobody reads it before the event.
        unsafe { result::memcpy_dtoh_async(std::slice::from_raw_parts_mut(at, len), address, stream.cu_stream()) }
            .map_err(failed("copying from the GPU"))?;
        download.event = Some(Event::record(stream).map_err(failed("cuEventRecord"))?);
        Ok(Some(download))
    }
}
