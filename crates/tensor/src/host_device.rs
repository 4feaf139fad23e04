//! A tensor's memory: on the host, on a device, or on both while nobody writes.
//!
//! Either side is allocated on first use, and copied from the other if that holds the contents. Writing to one side
//! drops the other, so that the two never differ. Code that knows nothing of devices thus works on every tensor, at
//! the cost of a copy.

use std::sync::{Mutex, OnceLock, PoisonError};

use crate::pool::{MemoryPool, PooledBytes};

/// A block of a device's memory that holds a tensor's bytes. Dropping it frees the block.
pub trait DeviceMemory: Send + Sync {
    /// Returns the address of the block on the device.
    fn address(&self) -> u64;

    /// Returns the number of the device.
    fn device(&self) -> usize;

    /// Copies the first `to.len()` bytes to the host, after all work that was submitted to the device before.
    fn download(&self, to: &mut [u8]);
}

/// A block of device memory of any kind.
pub type DeviceBlock = Box<dyn DeviceMemory>;

/// The blocks of a tensor on devices that read it: nearly always one, plus one for each further device.
#[derive(Default)]
pub(crate) struct DeviceBlocks {
    first: OnceLock<DeviceBlock>,
    others: Mutex<Vec<DeviceBlock>>,
}

impl DeviceBlocks {
    /// Returns the address of the block on a device, which `make` allocates if there is none.
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

    /// Returns true if there is a block on this device and no other.
    fn is_only_on(&mut self, device: usize) -> bool {
        let others = self.others.get_mut().unwrap_or_else(PoisonError::into_inner);
        others.is_empty() && self.first.get().is_some_and(|block| block.device() == device)
    }
}

/// Pooled host memory, with copies on devices.
pub(crate) struct HostDeviceBytes {
    pool: MemoryPool,
    bytes: usize,
    host: OnceLock<PooledBytes>,
    device: DeviceBlocks,
}

impl HostDeviceBytes {
    /// Makes memory with its contents on the host.
    pub(crate) fn in_host(pool: &MemoryPool, bytes: usize, block: PooledBytes) -> Self {
        Self { pool: pool.clone(), bytes, host: OnceLock::from(block), device: DeviceBlocks::default() }
    }

    /// Makes memory with its contents on a device.
    pub(crate) fn on_device(pool: &MemoryPool, bytes: usize, block: DeviceBlock) -> Self {
        Self { pool: pool.clone(), bytes, host: OnceLock::new(), device: DeviceBlocks::of(block) }
    }

    /// Returns the bytes on the host.
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

    /// Returns the bytes on the host for writing; copies on devices are dropped.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes();
        self.device = DeviceBlocks::default();
        self.host.get_mut().map_or(&mut [], |block| &mut block.bytes_mut()[..self.bytes])
    }

    /// Returns the address on a device; `upload` allocates a block there with the bytes that it is given.
    pub(crate) fn address(&self, device: usize, upload: impl FnOnce(&[u8]) -> DeviceBlock) -> u64 {
        self.device.address(device, || upload(self.bytes()))
    }

    /// Returns the address on a device for writing; all other copies are dropped.
    pub(crate) fn address_mut(&mut self, device: usize, upload: impl FnOnce(&[u8]) -> DeviceBlock) -> u64 {
        if !self.device.is_only_on(device) {
            self.bytes_mut();
        }
        let address = self.address(device, upload);
        self.host.take();
        address
    }

    /// Returns true if the host has the contents.
    pub(crate) fn is_in_host(&self) -> bool {
        self.host.get().is_some()
    }
}

#[cfg(test)]
#[path = "host_device_tests.rs"]
mod tests;
