//! A tensor's memory: in the host, on a device, or in both while nobody writes.
//!
//! Either side is made when it is first asked for, from the other if that holds the contents. Writing to one side drops the
//! other, so that the two never differ. Code that knows nothing of devices thus works on every tensor, at the cost of a copy.

use std::sync::{Mutex, OnceLock, PoisonError};

use crate::pool::{MemoryPool, PooledBytes};

/// A block of a device's memory that holds a tensor's bytes. Dropping it frees the block.
pub trait DeviceMemory: Send + Sync {
    /// Where the block begins, in the device's own numbering.
    fn address(&self) -> u64;

    /// A number that blocks of one device have in common, and those of no other.
    fn device(&self) -> usize;

    /// Copies the first `to.len()` bytes to the host, after everything that was asked of the device before.
    fn download(&self, to: &mut [u8]);
}

/// A block of device memory of any kind.
pub type DeviceBlock = Box<dyn DeviceMemory>;

/// The blocks of a tensor that is read on devices: almost always one, and one for each further device.
#[derive(Default)]
pub(crate) struct DeviceBlocks {
    first: OnceLock<DeviceBlock>,
    others: Mutex<Vec<DeviceBlock>>,
}

impl DeviceBlocks {
    /// The address of the block on a device, which `make` makes if there is none.
    pub(crate) fn address(&self, device: usize, make: impl FnOnce() -> DeviceBlock) -> u64 {
        let mut make = Some(make);
        let mut made = || make.take().expect("a block is made once")();
        let first = self.first.get_or_init(&mut made);
        if first.device() == device {
            return first.address();
        }
        let mut others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(block) = others.iter().find(|block| block.device() == device) {
            return block.address();
        }
        let block = made();
        let address = block.address();
        others.push(block);
        address
    }

    fn of(block: DeviceBlock) -> Self {
        Self { first: OnceLock::from(block), ..Self::default() }
    }

    /// Whether there is a block on this device alone.
    fn is_only_on(&mut self, device: usize) -> bool {
        let others = self.others.get_mut().unwrap_or_else(PoisonError::into_inner);
        others.is_empty() && self.first.get().is_some_and(|block| block.device() == device)
    }
}

/// Pooled host memory and its twin on a device.
pub(crate) struct Mirrored {
    pool: MemoryPool,
    bytes: usize,
    host: OnceLock<PooledBytes>,
    device: DeviceBlocks,
}

impl Mirrored {
    /// With contents in the host.
    pub(crate) fn in_host(pool: &MemoryPool, bytes: usize, block: PooledBytes) -> Self {
        Self { pool: pool.clone(), bytes, host: OnceLock::from(block), device: DeviceBlocks::default() }
    }

    /// With contents on a device.
    pub(crate) fn on_device(pool: &MemoryPool, bytes: usize, block: DeviceBlock) -> Self {
        Self { pool: pool.clone(), bytes, host: OnceLock::new(), device: DeviceBlocks::of(block) }
    }

    /// The bytes in the host.
    pub(crate) fn bytes(&self) -> &[u8] {
        let block = self.host.get_or_init(|| {
            let (mut block, _) = self.pool.take(self.bytes);
            if let Some(device) = self.device.first.get() {
                device.download(&mut block.bytes_mut()[..self.bytes]);
            }
            block
        });
        &block.bytes()[..self.bytes]
    }

    /// The bytes in the host, for writing; they are then there alone.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes();
        self.device = DeviceBlocks::default();
        self.host.get_mut().map_or(&mut [], |block| &mut block.bytes_mut()[..self.bytes])
    }

    /// The address on a device; `upload` makes a block there with the bytes that it is given.
    pub(crate) fn address(&self, device: usize, upload: impl FnOnce(&[u8]) -> DeviceBlock) -> u64 {
        self.device.address(device, || upload(self.bytes()))
    }

    /// The address on a device, for writing; the contents are then there alone.
    pub(crate) fn address_mut(&mut self, device: usize, upload: impl FnOnce(&[u8]) -> DeviceBlock) -> u64 {
        if !self.device.is_only_on(device) {
            self.bytes_mut();
        }
        let address = self.address(device, upload);
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
