//! Counts of copies and launches.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts of copies between the host and a GPU, of their bytes, and of launches. The host waits for each download.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Copies to the GPU.
    pub uploads: u64,
    /// Bytes copied to the GPU.
    pub uploaded_bytes: u64,
    /// Copies to the host.
    pub downloads: u64,
    /// Bytes copied to the host.
    pub downloaded_bytes: u64,
    /// Kernels that were launched one by one.
    pub launches: u64,
    /// Graphs of kernels that were launched.
    pub graphs: u64,
    /// Products that NVIDIA's library computed.
    pub by_library: u64,
}

impl Traffic {
    /// Returns the counts since `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            uploads: self.uploads - earlier.uploads,
            uploaded_bytes: self.uploaded_bytes - earlier.uploaded_bytes,
            downloads: self.downloads - earlier.downloads,
            downloaded_bytes: self.downloaded_bytes - earlier.downloaded_bytes,
            launches: self.launches - earlier.launches,
            graphs: self.graphs - earlier.graphs,
            by_library: self.by_library - earlier.by_library,
        }
    }
}

/// Counts copies and launches.
#[derive(Default)]
pub(crate) struct Meter([AtomicU64; 7]);

impl Meter {
    pub(crate) fn uploaded(&self, bytes: usize) {
        self.count(0, bytes);
    }

    pub(crate) fn downloaded(&self, bytes: usize) {
        self.count(2, bytes);
    }

    pub(crate) fn launched(&self) {
        self.0[4].fetch_add(1, Relaxed);
    }

    pub(crate) fn launched_graph(&self) {
        self.0[5].fetch_add(1, Relaxed);
    }

    pub(crate) fn took_product(&self) {
        self.0[6].fetch_add(1, Relaxed);
    }

    fn count(&self, first: usize, bytes: usize) {
        self.0[first].fetch_add(1, Relaxed);
        self.0[first + 1].fetch_add(bytes as u64, Relaxed);
    }

    pub(crate) fn traffic(&self) -> Traffic {
        let [uploads, uploaded_bytes, downloads, downloaded_bytes, launches, graphs, by_library] =
            std::array::from_fn(|i| self.0[i].load(Relaxed));
        Traffic { uploads, uploaded_bytes, downloads, downloaded_bytes, launches, graphs, by_library }
    }
}
