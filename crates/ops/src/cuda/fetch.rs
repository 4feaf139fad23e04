//! Small results for the host, which it waits for alone: the GPU goes on meanwhile with what it is asked for later.

use std::panic::panic_any;

use moeworks_tensor::Tensor;

use super::nvidia::Download;
use super::{Backend, Gpu};

/// A tensor that is on its way to the host.
pub(crate) enum Fetched {
    UnderWay(Download),
    /// It comes when it is looked at.
    Later(Tensor),
}

impl Fetched {
    /// Its bytes, when they are there.
    pub(crate) fn bytes(self) -> Vec<u8> {
        match self {
            Self::UnderWay(download) => download.wait(),
            Self::Later(tensor) => tensor.bytes().to_vec(),
        }
    }
}

impl Gpu {
    /// Begins to copy a tensor to the host, as it is behind what the GPU was asked for before.
    pub(crate) fn fetch(&self, tensor: Tensor) -> Fetched {
        self.flush();
        let Backend::Nvidia(device) = &self.device.backend else { return Fetched::Later(tensor) };
        // SAFETY: the tensor's block has as many bytes, and when it is dropped goes to what the stream is asked for later.
        let download = unsafe { device.download_soon(self.address(&tensor), tensor.stored_bytes()) };
        match download.unwrap_or_else(|error| panic_any(error)) {
            Some(download) => {
                self.device.meter.downloaded(tensor.stored_bytes());
                Fetched::UnderWay(download)
            }
            None => Fetched::Later(tensor),
        }
    }
}
