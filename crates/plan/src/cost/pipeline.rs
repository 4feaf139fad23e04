//! Dispatch, experts and combine in chunks: the transfer of one chunk overlaps the computation of another.
//!
//! Transfers use one link, all dispatches before the first combine. Computations use one device, in the order of the
//! chunks. Each starts as soon as it can (PipeMoE, INFOCOM 2023; ScheMoE, EuroSys 2024).

/// Returns the seconds of `chunks` chunks. Dispatch and combine of each take `transfer_s`, its experts `compute_s`.
#[must_use]
pub fn overlapped_seconds(chunks: usize, transfer_s: f64, compute_s: f64) -> f64 {
    let mut computed = vec![0.0; chunks];
    let mut device = 0.0_f64;
    for (i, done) in computed.iter_mut().enumerate() {
        device = device.max((i + 1) as f64 * transfer_s) + compute_s;
        *done = device;
    }
    computed.iter().fold(chunks as f64 * transfer_s, |link: f64, &done| link.max(done) + transfer_s)
}

/// The times of a layer's dispatch and experts, split into a fixed part per chunk and a part in proportion to the
/// size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chunked {
    /// Seconds of a dispatch (and of a combine) that do not depend on its bytes.
    pub transfer_start_s: f64,
    /// Seconds in proportion to the bytes, of the whole layer.
    pub transfer_s: f64,
    /// Seconds of an expert computation that do not depend on its rows.
    pub compute_start_s: f64,
    /// Seconds in proportion to the rows, of the whole layer.
    pub compute_s: f64,
}

impl Chunked {
    /// Returns the seconds in `chunks` chunks.
    #[must_use]
    pub fn seconds(&self, chunks: usize) -> f64 {
        let r = chunks as f64;
        let transfer = self.transfer_start_s + self.transfer_s / r;
        overlapped_seconds(chunks, transfer, self.compute_start_s + self.compute_s / r)
    }

    /// Returns the number of chunks up to `most` that takes the least time; the lowest at ties.
    #[must_use]
    pub fn best_chunks(&self, most: usize) -> usize {
        (1..=most.max(1)).min_by(|&a, &b| self.seconds(a).total_cmp(&self.seconds(b))).unwrap_or(1)
    }
}
