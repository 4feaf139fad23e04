//! Asynchronous copies of small results to the host, each waited for on its own: the GPU meanwhile goes on with work
//! that is queued later.

use std::panic::panic_any;

use moeworks_tensor::Tensor;

use crate::Gpu;
use crate::backend::Backend;
use crate::nvidia::Download;

/// A tensor that is being copied to the host.
pub struct Fetched(State);

enum State {
    InFlight(Download),
    /// Copied when it is read.
    OnAccess(Tensor),
}

impl Fetched {
    /// Waits for the bytes.
    #[must_use]
    pub fn bytes(self) -> Vec<u8> {
        match self.0 {
            State::InFlight(download) => download.wait(),
            State::OnAccess(tensor) => tensor.bytes().to_vec(),
        }
    }
}

impl Gpu {
    /// Begins to copy a tensor to the host, as it is after the work that was queued before.
    #[must_use]
    pub fn fetch(&self, tensor: Tensor) -> Fetched {
        self.flush();
        let Backend::Nvidia(device) = &self.device.backend else { return Fetched(State::OnAccess(tensor)) };
        // SAFETY: the tensor's block has as many bytes, and when it is dropped goes to work that is queued later.
        let download = unsafe { device.download_async(self.address(&tensor), tensor.stored_bytes()) };
        match download.unwrap_or_else(|error| panic_any(error)) {
            Some(download) => {
                self.device.meter.downloaded(tensor.stored_bytes());
                Fetched(State::InFlight(download))
            }
            None => Fetched(State::OnAccess(tensor)),
        }
    }
}
