//! A tensor's memory: in the host, on a device, or in both while nobody writes.
//!
//! Either side is made when it is first asked for, from the other if that holds the contents. Writing to one side drops the
//! other, so that the two never differ. Code that knows nothing of devices thus works on every tensor, at the cost of a copy.

use std::sync::OnceLock;

use crate::pool::{MemoryPool, PooledBytes};

/// A block of a device's memory that holds a tensor's bytes. Dropping it frees the block.
pub trait DeviceMemory: Send + Sync {
    /// Where the block begins, in the device's own numbering.
    fn address(&self) -> u64;

    /// Copies the first `to.len()` bytes to the host, after everything that was asked of the device before.
    fn download(&self, to: &mut [u8]);
}

/// A block of device memory of any kind.
pub type DeviceBlock = Box<dyn DeviceMemory>;

/// Pooled host memory and its twin on a device.
pub(crate) struct Mirrored {
    pool: MemoryPool,
    bytes: usize,
    host: OnceLock<PooledBytes>,
    device: OnceLock<DeviceBlock>,
}

impl Mirrored {
    /// With contents in the host.
    pub(crate) fn in_host(pool: &MemoryPool, bytes: usize, block: PooledBytes) -> Self {
        Self { pool: pool.clone(), bytes, host: OnceLock::from(block), device: OnceLock::new() }
    }

    /// With contents on a device.
    pub(crate) fn on_device(pool: &MemoryPool, bytes: usize, block: DeviceBlock) -> Self {
        Self { pool: pool.clone(), bytes, host: OnceLock::new(), device: OnceLock::from(block) }
    }

    /// The bytes in the host.
    pub(crate) fn bytes(&self) -> &[u8] {
        let block = self.host.get_or_init(|| {
            let (mut block, _) = self.pool.take(self.bytes);
            if let Some(device) = self.device.get() {
                device.download(&mut block.bytes_mut()[..self.bytes]);
            }
            block
        });
        &block.bytes()[..self.bytes]
    }

    /// The bytes in the host, for writing; they are then there alone.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes();
        self.device.take();
        self.host.get_mut().map_or(&mut [], |block| &mut block.bytes_mut()[..self.bytes])
    }

    /// The address on a device; `upload` makes a block with the bytes that it is given.
    pub(crate) fn address(&self, upload: impl FnOnce(&[u8]) -> DeviceBlock) -> u64 {
        self.device.get_or_init(|| upload(self.bytes())).address()
    }

    /// The address on a device, for writing; the contents are then there alone.
    pub(crate) fn address_mut(&mut self, upload: impl FnOnce(&[u8]) -> DeviceBlock) -> u64 {
        let address = self.address(upload);
        self.host.take();
        address
    }

    /// Whether the contents are in the host.
    pub(crate) fn is_in_host(&self) -> bool {
        self.host.get().is_some()
    }
}

#[cfg(test)]
#[path = "mirror_tests.rs"]
mod tests;
