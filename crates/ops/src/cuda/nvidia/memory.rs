//! A device's memory: blocks that are kept for what comes later in the stream, and copies from the host.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::sys::{self, CUmemPool_attribute};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result};
use moeworks_tensor::{DeviceBlock, DeviceMemory};

use super::late::Slots;
use super::staging::{Engine, STAGING_BYTES, Staging};
use super::{GpuError, Nvidia, describe, failed};

/// What blocks of memory keep alive: the context and its streams.
pub(super) struct Shared {
    pub(super) context: Arc<CudaContext>,
    pub(super) stream: Arc<CudaStream>,
    /// Where copies go that nothing else waits for.
    pub(super) copies: Arc<CudaStream>,
    /// The driver's for the device.
    pub(super) number: usize,
    free: Mutex<FreeBlocks>,
    /// What copies of either stream go by way of: those of one do not wait for the other's.
    staging: LazyStaging,
    staging_of_copies: LazyStaging,
    /// What small results go by way of that are waited for alone.
    pub(super) late: Slots,
}

/// Memory that is had at the first copy, or none where the system gives none.
#[derive(Default)]
struct LazyStaging(OnceLock<Option<Staging<Event>>>);

impl LazyStaging {
    /// The context must be this thread's.
    fn get(&self) -> Option<&Staging<Event>> {
        let make = || {
            // SAFETY: no flags; the memory is given back once.
            let start: *mut u8 = unsafe { result::malloc_host(STAGING_BYTES, 0) }.ok()?.cast();
            // SAFETY: as many bytes are this process's own.
            unsafe {
                start.write_bytes(0, STAGING_BYTES);
                Some(Staging::new(start))
            }
        };
        self.0.get_or_init(make).as_ref()
    }

    /// Gives the memory back when the copies of `stream` that are under way are over. The context must be this thread's.
    fn give_back(&mut self, stream: &CudaStream) {
        let Some(staging) = self.0.take().flatten() else { return };
        for event in staging.take_under_way() {
            _ = stream.wait_for(event);
        }
        // SAFETY: the driver gave the memory, and no copy is under way. A device that failed has nothing to give back.
        _ = unsafe { result::free_host(staging.start().cast()) };
    }
}

/// A moment of a stream.
pub(super) struct Event(sys::CUevent);
// SAFETY: the driver's handles may be used from any thread in whose context they are.
unsafe impl Send for Event {}

impl Event {
    /// The moment when what the stream was asked for until now is over. The context must be this thread's.
    pub(super) fn of(stream: &CudaStream) -> Result<Self, DriverError> {
        let event = Self(result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?);
        // SAFETY: the event and the stream are this context's.
        unsafe { result::event::record(event.0, stream.cu_stream()) }?;
        Ok(event)
    }
}

impl Event {
    /// Waits for it. The context must be this thread's.
    pub(super) fn wait(&self) -> Result<(), DriverError> {
        // SAFETY: the event is there until it is dropped.
        unsafe { result::event::synchronize(self.0) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event is this value's own; the driver keeps it for as long as something waits for it ("cuEventDestroy"). Of a
        // device that failed there is nothing to give back.
        _ = unsafe { result::event::destroy(self.0) };
    }
}

impl Engine for CudaStream {
    type Event = Event;
    type Error = DriverError;

    fn begin_up(&self, piece: &[u8], address: u64) -> Result<Event, DriverError> {
        // SAFETY: the block at the address is as long; the piece stays as it is until the event.
        unsafe { result::memcpy_htod_async(address, piece, self.cu_stream()) }?;
        Event::of(self)
    }

    fn begin_down(&self, piece: &mut [u8], address: u64) -> Result<Event, DriverError> {
        // SAFETY: as above, and nobody reads the piece before the event.
        unsafe { result::memcpy_dtoh_async(piece, address, self.cu_stream()) }?;
        Event::of(self)
    }

    fn wait_for(&self, event: Event) -> Result<(), DriverError> {
        event.wait()
    }
}

/// Blocks that nothing uses after what the stream was asked for already, by their size: what is asked of it later may have them at once. A
/// call of the driver for each tensor would take longer than many kernels do, and addresses that come again spare graphs changes.
#[derive(Default)]
struct FreeBlocks {
    by_size: HashMap<usize, Vec<sys::CUdeviceptr>>,
}

/// Sizes of blocks that are kept are multiples of an eighth of the power of two below them. Larger ones go back to the driver, which cuts and
/// joins them: they are few, and two of one size come seldom.
const MOST_BYTES: usize = 64 << 20;
const LEAST_BYTES: usize = 512;

/// How large a block for so many bytes is that is kept afterwards.
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
        let (staging, staging_of_copies, late) = Default::default();
        Ok(Self { context, stream, copies, number, free, staging, staging_of_copies, late })
    }

    fn free(&self) -> MutexGuard<'_, FreeBlocks> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Brings what nothing uses into an order that does not depend on what was freed first: a step that asks for the same blocks as the one
    /// before gets the same addresses.
    pub(super) fn settle(&self) {
        self.free().by_size.values_mut().for_each(|blocks| blocks.sort_unstable());
    }

    /// Gives back to the driver what nothing uses.
    fn give_back(&self) {
        let blocks: Vec<_> = self.free().by_size.drain().flat_map(|(_, blocks)| blocks).collect();
        if self.context.bind_to_thread().is_err() {
            return;
        }
        for address in blocks {
            // SAFETY: the block came from the driver, was in the list once and is not used by what comes later in the stream. A device
            // that failed has nothing to give back.
            _ = unsafe { result::free_async(address, self.stream.cu_stream()) };
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.give_back();
        if self.context.bind_to_thread().is_ok() {
            self.staging.give_back(&self.stream);
            self.staging_of_copies.give_back(&self.copies);
            self.late.give_back();
        }
    }
}

/// Freed memory stays with the process, so that a step in steady state asks the driver for nothing.
fn keep_freed_memory(context: &CudaContext) -> Result<(), DriverError> {
    let mut threshold = u64::MAX;
    // SAFETY: the attribute is a 64-bit number, and the driver copies it.
    unsafe {
        let pool = result::device::get_default_mem_pool(context.cu_device())?;
        let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        result::mem_pool::set_attribute(pool, attribute, (&raw mut threshold).cast())
    }
}

/// A copy to the GPU that is under way beside everything else. When this is dropped, what is asked of the GPU afterwards waits for it.
pub(crate) struct Copied {
    shared: Arc<Shared>,
    event: Event,
}

impl Drop for Copied {
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
    pub(in crate::cuda) fn block(&self, bytes: usize) -> Result<DeviceBlock, GpuError> {
        Ok(Box::new(self.reused(bytes)?))
    }

    /// A block for what the stream is asked for from now on.
    fn reused(&self, bytes: usize) -> Result<Block, GpuError> {
        let size = size_of_block(bytes);
        let free = size.and_then(|size| self.shared.free().by_size.get_mut(&size).and_then(Vec::pop));
        if let Some(address) = free {
            return Ok(Block { shared: Arc::clone(&self.shared), address, reused_as: size });
        }
        let mut block = self.allocate_or_give_back(size.unwrap_or(bytes), &self.shared.stream)?;
        block.reused_as = size;
        Ok(block)
    }

    /// A block, for which what is kept for later makes way if there is no other memory. What was given back can be had when the stream is
    /// done with it.
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

    pub(in crate::cuda) fn upload(&self, bytes: &[u8]) -> Result<DeviceBlock, GpuError> {
        let block = self.reused(bytes.len())?;
        self.copy(bytes, &block, (&self.shared.stream, &self.shared.staging))?;
        Ok(Box::new(block))
    }

    /// The same for what stays long: its memory goes back to the driver afterwards, for whatever comes.
    pub(in crate::cuda) fn upload_to_stay(&self, bytes: &[u8]) -> Result<DeviceBlock, GpuError> {
        let block = self.allocate_or_give_back(bytes.len(), &self.shared.stream)?;
        self.copy(bytes, &block, (&self.shared.stream, &self.shared.staging))?;
        Ok(Box::new(block))
    }

    /// Copies these bytes to a block by a stream, by way of its memory for that.
    fn copy(&self, bytes: &[u8], to: &Block, (stream, staging): (&CudaStream, &LazyStaging)) -> Result<(), GpuError> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.bind()?;
        if let Some(staging) = staging.get() {
            return staging.upload(stream, bytes, to.address).map_err(failed("copying to the GPU"));
        }
        // SAFETY: the block is as long. From pageable memory the call returns when the bytes have been read.
        unsafe { result::memcpy_htod_async(to.address, bytes, stream.cu_stream()) }
            .map_err(failed("copying to the GPU"))?;
        if self.reads_host_pages {
            // There the device may read the host's pages later: the caller may write to them as soon as this returns.
            stream.synchronize().map_err(failed("copying to the GPU"))?;
        }
        Ok(())
    }

    /// The same beside everything else; what is asked of the device after the copy's value is dropped comes after it.
    pub(in crate::cuda) fn upload_ahead(&self, bytes: &[u8]) -> Result<(DeviceBlock, Copied), GpuError> {
        let copies = &self.shared.copies;
        let block = self.allocate_or_give_back(bytes.len(), copies)?;
        self.copy(bytes, &block, (copies, &self.shared.staging_of_copies))?;
        let event = Event::of(copies).map_err(failed("cuEventRecord"))?;
        let copied = Copied { shared: Arc::clone(&self.shared), event };
        Ok((Box::new(block), copied))
    }
}

/// Memory that is kept for later when dropped, or goes back to the stream's pool, after what was queued before.
struct Block {
    shared: Arc<Shared>,
    address: sys::CUdeviceptr,
    /// The size by which it is kept for later, if it is.
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
            if let Some(staging) = self.shared.staging.get() {
                return staging.download(&**stream, to, self.address);
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
        // SAFETY: the block came from this stream's pool and is freed once. A device that failed has nothing to give back.
        let freed =
            context.bind_to_thread().and_then(|()| unsafe { result::free_async(self.address, stream.cu_stream()) });
        _ = freed;
    }
}

#[cfg(test)]
mod tests {
    use super::size_of_block;

    #[test]
    fn blocks_that_are_kept_are_at_most_an_eighth_larger_than_asked_for() {
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
