//! The state that handles of a GPU and blocks of its memory share.

use std::panic::panic_any;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use moeworks_tensor::{DeviceBlock, DeviceMemory};

use crate::backend::Backend;
use crate::graph::Capture;
use crate::traffic::Meter;

pub(crate) struct Device {
    /// Dropped before the backend, in whose context the graphs are.
    capture: Mutex<Capture>,
    pub(crate) backend: Backend,
    /// Bytes of blocks that are in use.
    held: AtomicUsize,
    /// Counts for these handles alone: others of the same GPU have their own.
    pub(crate) meter: Meter,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Device {
    pub(crate) fn new(backend: Backend) -> Self {
        Self { capture: Mutex::default(), backend, held: AtomicUsize::new(0), meter: Meter::default() }
    }

    pub(crate) fn capture(&self) -> MutexGuard<'_, Capture> {
        lock(&self.capture)
    }

    /// Launches everything that was captured.
    pub(crate) fn flush(&self) {
        // SAFETY: every captured launch came through `Gpu::launch`; blocks that were dropped since are retained until
        // now.
        unsafe { self.capture().flush(&self.backend, &self.meter) }.unwrap_or_else(|error| panic_any(error));
    }

    pub(crate) fn held_bytes(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// Wraps a block so that it counts as held and is retained while captured launches may use it.
    pub(crate) fn counted(self: &Arc<Self>, inner: DeviceBlock, bytes: usize) -> DeviceBlock {
        self.held.fetch_add(bytes, Ordering::Relaxed);
        Box::new(Block { device: Arc::clone(self), inner: Some(inner), bytes })
    }
}

/// A block of a GPU's memory that is retained while captured launches may use it.
struct Block {
    device: Arc<Device>,
    inner: Option<DeviceBlock>,
    bytes: usize,
}

impl Block {
    fn inner(&self) -> &DeviceBlock {
        self.inner.as_ref().expect("a block has its memory until it is dropped")
    }
}

impl DeviceMemory for Block {
    fn address(&self) -> u64 {
        self.inner().address()
    }

    fn device(&self) -> usize {
        self.inner().device()
    }

    fn download(&self, to: &mut [u8]) {
        self.device.flush();
        if !to.is_empty() {
            self.device.meter.downloaded(to.len());
        }
        self.inner().download(to);
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.device.held.fetch_sub(self.bytes, Ordering::Relaxed);
        let freed = self.inner.take().and_then(|block| self.device.capture().retain(block));
        drop(freed);
    }
}

/// A step that is being captured. If it panics, its remaining launches are discarded.
pub(crate) struct Capturing<'a>(&'a Device);

impl<'a> Capturing<'a> {
    pub(crate) fn begin(device: &'a Device) -> Self {
        if device.capture().begin() {
            device.backend.sort_free_blocks();
        }
        Self(device)
    }
}

impl Drop for Capturing<'_> {
    fn drop(&mut self) {
        let mut capture = self.0.capture();
        capture.end();
        if std::thread::panicking() {
            capture.discard();
        }
    }
}
