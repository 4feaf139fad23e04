//! A device's memory: blocks that are reused in the order of the stream, and copies from the host.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::sys::{self, CUmemPool_attribute};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result};
use moeworks_tensor::{DeviceBlock, DeviceMemory};

use super::async_copy::DownloadSlots;
use super::pinned::{CopyEngine, PINNED_BYTES, PinnedRing};
use super::{Nvidia, describe, failed};
use crate::GpuError;

/// The context and its streams, which blocks of memory keep alive.
pub(super) struct Shared {
    pub(super) context: Arc<CudaContext>,
    pub(super) stream: Arc<CudaStream>,
    /// The stream of prefetches, for which nothing else waits.
    pub(super) copies: Arc<CudaStream>,
    /// The driver's number of the device.
    pub(super) number: usize,
    free: Mutex<FreeBlocks>,
    /// Page-locked memory for the copies of `stream`.
    pinned: LazyPinned,
    /// Page-locked memory for the prefetches, which thus do not wait for other copies.
    pinned_for_copies: LazyPinned,
    /// Page-locked memory for small results that are waited for one by one.
    pub(super) download_slots: DownloadSlots,
}

/// Page-locked memory that is allocated at the first copy; none if the system gives none.
#[derive(Default)]
struct LazyPinned(OnceLock<Option<PinnedRing<Event>>>);

impl LazyPinned {
    /// Returns the memory. The context must be this thread's.
    fn get(&self) -> Option<&PinnedRing<Event>> {
        let make = || {
            // SAFETY: no flags; the memory is given back once.
            let start: *mut u8 = unsafe { result::malloc_host(PINNED_BYTES, 0) }.ok()?.cast();
            // SAFETY: as many bytes are this process's own.
            unsafe {
                start.write_bytes(0, PINNED_BYTES);
                Some(PinnedRing::new(start))
            }
        };
        self.0.get_or_init(make).as_ref()
    }

    /// Gives the memory back when the copies of `stream` in flight are over. The context must be this thread's.
    fn give_back(&mut self, stream: &CudaStream) {
        let Some(ring) = self.0.take().flatten() else { return };
        for event in ring.take_in_flight() {
            _ = stream.wait_for(event);
        }
        // SAFETY: the driver gave the memory, and no copy is in flight. A device that failed has nothing to give
        // back.
        _ = unsafe { result::free_host(ring.start().cast()) };
    }
}

/// A point in a stream's work.
pub(super) struct Event(sys::CUevent);
// SAFETY: the driver's handles may be used from any thread in whose context they are.
unsafe impl Send for Event {}

impl Event {
    /// The point when the work that was queued until now is done. The context must be this thread's.
    pub(super) fn record(stream: &CudaStream) -> Result<Self, DriverError> {
        let event = Self(result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?);
        // SAFETY: the event and the stream are this context's.
        unsafe { result::event::record(event.0, stream.cu_stream()) }?;
        Ok(event)
    }
}

impl Event {
    /// Waits until the stream has reached it. The context must be this thread's.
    pub(super) fn wait(&self) -> Result<(), DriverError> {
        // SAFETY: the event is there until it is dropped.
        unsafe { result::event::synchronize(self.0) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event is this value's own; the driver keeps it for as long as something waits for it
        // ("cuEventDestroy"). A device that failed has nothing to give back.
        _ = unsafe { result::event::destroy(self.0) };
    }
}

impl CopyEngine for CudaStream {
    type Event = Event;
    type Error = DriverError;

    fn start_upload(&self, piece: &[u8], address: u64) -> Result<Event, DriverError> {
        // SAFETY: the block at the address is as long; the piece stays as it is until the event.
        unsafe { result::memcpy_htod_async(address, piece, self.cu_stream()) }?;
        Event::record(self)
    }

    fn start_download(&self, piece: &mut [u8], address: u64) -> Result<Event, DriverError> {
        // SAFETY: as above, and nobody reads the piece before the event.
        unsafe { result::memcpy_dtoh_async(piece, address, self.cu_stream()) }?;
        Event::record(self)
    }

    fn wait_for(&self, event: Event) -> Result<(), DriverError> {
        event.wait()
    }
}

/// Free blocks by size. Queued work may still use them, but work that is queued later may have them at once. A call
/// of the driver for each tensor would take longer than many kernels do, and recurring addresses spare changes of
/// graphs.
#[derive(Default)]
struct FreeBlocks {
    by_size: HashMap<usize, Vec<sys::CUdeviceptr>>,
}

/// The size of the largest blocks that are reused. Larger ones go back to the driver, which splits and merges them:
/// they are few, and two of one size are rare.
const MOST_BYTES: usize = 64 << 20;
/// The size of the smallest blocks.
const LEAST_BYTES: usize = 512;

/// Returns the size of a reusable block for `bytes` bytes: a multiple of an eighth of the power of two below it.
fn size_of_block(bytes: usize) -> Option<usize> {
    let bytes = bytes.max(LEAST_BYTES);
    (bytes <= MOST_BYTES).then(|| bytes.next_multiple_of(1 << bytes.ilog2() >> 3))
}

impl Shared {
    pub(super) fn new(context: Arc<CudaContext>, number: usize) -> Result<Self, GpuError> {
        let new_stream = || context.new_stream().map_err(failed("cuStreamCreate"));
        let (stream, copies) = (new_stream()?, new_stream()?);
        keep_freed_memory(&context).map_err(failed("setting up the memory pool"))?;
        let free = Mutex::default();
        let (pinned, pinned_for_copies, download_slots) = Default::default();
        Ok(Self { context, stream, copies, number, free, pinned, pinned_for_copies, download_slots })
    }

    fn free(&self) -> MutexGuard<'_, FreeBlocks> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sorts the free blocks, so that their order does not depend on which were freed first. A step that allocates
    /// like the one before then gets the same addresses.
    pub(super) fn sort_free_blocks(&self) {
        self.free().by_size.values_mut().for_each(|blocks| blocks.sort_unstable());
    }

    /// Gives the free blocks back to the driver.
    fn give_back(&self) {
        let blocks: Vec<_> = self.free().by_size.drain().flat_map(|(_, blocks)| blocks).collect();
        if self.context.bind_to_thread().is_err() {
            return;
        }
        for address in blocks {
            // SAFETY: the block came from the driver, was in the list once and is not used by later work of the
            // stream. A device that failed has nothing to give back.
            _ = unsafe { result::free_async(address, self.stream.cu_stream()) };
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.give_back();
        if self.context.bind_to_thread().is_ok() {
            self.pinned.give_back(&self.stream);
            self.pinned_for_copies.give_back(&self.copies);
            self.download_slots.give_back();
        }
    }
}

/// Lets the driver's pool keep freed memory, so that a step in steady state allocates nothing from the system.
fn keep_freed_memory(context: &CudaContext) -> Result<(), DriverError> {
    let mut threshold = u64::MAX;
    // SAFETY: the attribute is a 64-bit number, and the driver copies it.
    unsafe {
        let pool = result::device::get_default_mem_pool(context.cu_device())?;
        let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        result::mem_pool::set_attribute(pool, attribute, (&raw mut threshold).cast())
    }
}

/// A copy to the GPU in flight beside everything else. When this is dropped, work that is queued afterwards waits for
/// the copy.
pub(crate) struct PendingCopy {
    shared: Arc<Shared>,
    event: Event,
}

impl Drop for PendingCopy {
    fn drop(&mut self) {
        let Shared { context, stream, .. } = &*self.shared;
        // SAFETY: the event and the stream are of this context. A device that failed has nothing to wait for.
        _ = context.bind_to_thread().and_then(|()| unsafe {
            let waits = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
            result::stream::wait_event(stream.cu_stream(), self.event.0, waits)
        });
    }
}

impl Nvidia {
    /// A block with unspecified contents, for work that is queued from now on.
    pub(crate) fn block(&self, bytes: usize) -> Result<DeviceBlock, GpuError> {
        Ok(Box::new(self.reuse(bytes)?))
    }

    /// A free block of that size, or a new one.
    fn reuse(&self, bytes: usize) -> Result<Block, GpuError> {
        let size = size_of_block(bytes);
        let free = size.and_then(|size| self.shared.free().by_size.get_mut(&size).and_then(Vec::pop));
        if let Some(address) = free {
            return Ok(Block { shared: Arc::clone(&self.shared), address, reused_as: size });
        }
        let mut block = self.allocate_or_give_back(size.unwrap_or(bytes), &self.shared.stream)?;
        block.reused_as = size;
        Ok(block)
    }

    /// A new block. If there is no memory for it, the free blocks are given back, and the stream is waited for, after
    /// which the driver has their memory.
    fn allocate_or_give_back(&self, bytes: usize, stream: &CudaStream) -> Result<Block, GpuError> {
        self.allocate(bytes, stream).or_else(|_| {
            self.shared.give_back();
            self.synchronize()?;
            self.allocate(bytes, stream)
        })
    }

    fn allocate(&self, bytes: usize, stream: &CudaStream) -> Result<Block, GpuError> {
        self.bind()?;
        // SAFETY: the stream is this context's. The driver refuses a size of 0.
        let address = unsafe { result::malloc_async(stream.cu_stream(), bytes.max(1)) };
        let address = address.map_err(|error| GpuError::Driver {
            call: format!("allocating {bytes} bytes"),
            message: describe(error),
        })?;
        Ok(Block { shared: Arc::clone(&self.shared), address, reused_as: None })
    }

    /// A block with a copy of these bytes, which are the caller's again when this returns.
    pub(crate) fn upload(&self, bytes: &[u8]) -> Result<DeviceBlock, GpuError> {
        let block = self.reuse(bytes.len())?;
        self.copy(bytes, &block, &self.shared.stream, &self.shared.pinned)?;
        Ok(Box::new(block))
    }

    /// Uploads bytes to a block that stays long: it goes back to the driver afterwards and is not reused for its
    /// size.
    pub(crate) fn upload_persistent(&self, bytes: &[u8]) -> Result<DeviceBlock, GpuError> {
        let block = self.allocate_or_give_back(bytes.len(), &self.shared.stream)?;
        self.copy(bytes, &block, &self.shared.stream, &self.shared.pinned)?;
        Ok(Box::new(block))
    }

    /// Copies these bytes to a block on a stream, by way of its page-locked memory.
    fn copy(&self, bytes: &[u8], to: &Block, stream: &CudaStream, pinned: &LazyPinned) -> Result<(), GpuError> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.bind()?;
        if let Some(ring) = pinned.get() {
            return ring.upload(stream, bytes, to.address).map_err(failed("copying to the GPU"));
        }
        // SAFETY: the block is as long. From pageable memory the call returns when the bytes have been read.
        unsafe { result::memcpy_htod_async(to.address, bytes, stream.cu_stream()) }
            .map_err(failed("copying to the GPU"))?;
        if self.reads_host_pages {
            // The device may read the host's pages later, but the caller may write to them as soon as this returns.
            stream.synchronize().map_err(failed("copying to the GPU"))?;
        }
        Ok(())
    }

    /// Begins to copy the bytes to a block beside everything else. Work that is queued after the [`PendingCopy`] is
    /// dropped waits for it.
    pub(crate) fn upload_async(&self, bytes: &[u8]) -> Result<(DeviceBlock, PendingCopy), GpuError> {
        let copies = &self.shared.copies;
        let block = self.allocate_or_give_back(bytes.len(), copies)?;
        self.copy(bytes, &block, copies, &self.shared.pinned_for_copies)?;
        let event = Event::record(copies).map_err(failed("cuEventRecord"))?;
        let pending = PendingCopy { shared: Arc::clone(&self.shared), event };
        Ok((Box::new(block), pending))
    }
}

/// A block that becomes free when dropped, or goes back to the stream's pool, after the work that was queued before.
struct Block {
    shared: Arc<Shared>,
    address: sys::CUdeviceptr,
    /// The size under which it becomes free; none if it goes back to the pool.
    reused_as: Option<usize>,
}

impl DeviceMemory for Block {
    fn address(&self) -> u64 {
        self.address
    }

    fn device(&self) -> usize {
        self.shared.number
    }

    fn download(&self, to: &mut [u8]) {
        if to.is_empty() {
            return;
        }
        let Shared { context, stream, .. } = &*self.shared;
        let copied = context.bind_to_thread().and_then(|()| {
            if let Some(ring) = self.shared.pinned.get() {
                return ring.download(&**stream, to, self.address);
            }
            // SAFETY: the block holds at least as many bytes, and the wait is over before `to` is used again.
            unsafe { result::memcpy_dtoh_async(to, self.address, stream.cu_stream()) }?;
            stream.synchronize()
        });
        copied.map_err(failed("copying from the GPU")).unwrap_or_else(|error| std::panic::panic_any(error));
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(size) = self.reused_as {
            self.shared.free().by_size.entry(size).or_default().push(self.address);
            return;
        }
        let Shared { context, stream, .. } = &*self.shared;
        // SAFETY: the block came from this stream's pool and is freed once. A device that failed has nothing to give
        // back.
        let freed =
            context.bind_to_thread().and_then(|()| unsafe { result::free_async(self.address, stream.cu_stream()) });
        _ = freed;
    }
}

#[cfg(test)]
mod tests {
    use super::size_of_block;

    #[test]
    fn blocks_that_are_reused_are_at_most_an_eighth_larger_than_asked_for() {
        for bytes in (0..27).flat_map(|bit| [(1_usize << bit) - 1, 1 << bit, (1 << bit) + 1, 3 << bit]) {
            let Some(size) = size_of_block(bytes) else {
                assert!(bytes > 64 << 20, "{bytes} bytes");
                continue;
            };
            assert!(size >= bytes.max(512) && size.is_multiple_of(64), "{bytes} bytes in {size}");
            assert!(size - bytes <= (bytes / 8 + 1).max(512), "{bytes} bytes in {size}");
            assert_eq!(size_of_block(size), Some(size));
        }
    }
}
