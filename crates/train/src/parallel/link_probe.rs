//! All-to-alls that measure links for a moment.

use std::time::Instant;

use moeworks_comm::{CommError, Communicator, Reduce};

/// The number of measurements, of which the fastest counts.
const NUM_TIMES: usize = 3;

/// Returns the seconds of an all-to-all among `peers` with `bytes` for each pair of ranks, on the slowest rank of
/// `world`. All ranks of `world` call this at the same time, each with its own peers.
pub(crate) fn time_all_to_all(
    peers: &dyn Communicator,
    world: &dyn Communicator,
    bytes: usize,
) -> Result<f64, CommError> {
    let sent = vec![0_u8; bytes * peers.size()];
    let (mut received, mut least) = (sent.clone(), f64::INFINITY);
    for _ in 0..NUM_TIMES {
        world.barrier()?;
        let start = Instant::now();
        peers.all_to_all(&sent, &mut received)?;
        let mut seconds = [start.elapsed().as_secs_f64()];
        world.all_reduce(&mut seconds, Reduce::Max)?;
        least = least.min(seconds[0]);
    }
    Ok(least)
}
