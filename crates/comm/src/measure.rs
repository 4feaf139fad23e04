//! How long communications take: each collective by size, beside a copy in memory and the MPI library's own call, and the
//! links between ranks.

use std::time::Instant;

use moeworks_plan::Link;

use crate::mpi::RawMpi;
use crate::{CommError, Communicator, Reduce};

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Nothing moves.
    Barrier,
    /// Everybody gets the bytes of rank 0.
    Broadcast,
    /// Everybody gets a share of the bytes from each.
    AllGather,
    /// Everybody sends a share of its bytes to each.
    AllToAll,
    /// The sum of the bytes as f32, a share to each.
    ReduceScatter,
    /// The sum of the bytes as f32, all of it to each.
    AllReduce,
}

impl Collective {
    /// All, in the order of a table.
    pub const ALL: [Self; 6] =
        [Self::Barrier, Self::Broadcast, Self::AllGather, Self::AllToAll, Self::ReduceScatter, Self::AllReduce];
}

/// The time of a collective, as the slowest rank sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// What.
    pub collective: Collective,
    /// Bytes that each rank holds, before or after.
    pub bytes: usize,
    /// The median of many.
    pub seconds: f64,
    /// The MPI library's own call, where there is one of the kind.
    pub raw_seconds: Option<f64>,
    /// All ranks copying as many bytes in their memory at the same time.
    pub copy_seconds: f64,
}

/// Seconds to spend on each case.
const CASE_SECONDS: f64 = 0.3;

/// One way to do something. Ways that are compared take turns, so that what else the machine does meets all of them.
type Way<'a> = &'a mut dyn FnMut() -> Result<(), CommError>;

/// Times a collective with `bytes` bytes (rounded up to whole shares) on all ranks: a call that all of them make.
///
/// # Errors
/// [`CommError`], as all calls.
pub fn time(
    comm: &dyn Communicator,
    raw: Option<&RawMpi>,
    collective: Collective,
    bytes: usize,
) -> Result<Timing, CommError> {
    let size = comm.size();
    let share = bytes.div_ceil(4 * size);
    let len = share * size;
    let (send, mut recv) = (vec![1.0_f32; len], vec![1.0_f32; len]);
    let (mut raw_recv, mut copied) = (recv.clone(), recv.clone());
    let mut run = || match collective {
        Collective::Barrier => comm.barrier(),
        Collective::Broadcast => comm.broadcast(&mut recv, 0),
        Collective::AllGather => comm.all_gather(&send[..share], &mut recv),
        Collective::AllToAll => comm.all_to_all(&send, &mut recv),
        Collective::ReduceScatter => comm.reduce_scatter(&send, &vec![share; size], &mut recv[..share], Reduce::Sum),
        Collective::AllReduce => comm.all_reduce(&mut recv, Reduce::Sum),
    };
    let mut copy = || {
        copied.copy_from_slice(&send);
        std::hint::black_box(&mut copied);
        Ok(())
    };
    let mut ways: Vec<Way<'_>> = vec![&mut run, &mut copy];
    let mut raw_run;
    if let Some(raw) = raw.filter(|_| collective != Collective::ReduceScatter) {
        raw_run = || {
            run_raw(raw, collective, &send[..], &mut raw_recv, share);
            Ok(())
        };
        ways.push(&mut raw_run);
    }
    let seconds = medians(comm, &mut ways)?;
    let raw_seconds = seconds.get(2).copied();
    Ok(Timing { collective, bytes: 4 * len, seconds: seconds[0], raw_seconds, copy_seconds: seconds[1] })
}

fn run_raw(raw: &RawMpi, collective: Collective, send: &[f32], recv: &mut [f32], share: usize) {
    let num_ranks = send.len().checked_div(share).unwrap_or(1);
    let bytes: &[u8] = bytemuck::cast_slice(send);
    match collective {
        Collective::Barrier | Collective::ReduceScatter => raw.barrier(),
        Collective::Broadcast => raw.broadcast(bytemuck::cast_slice_mut(recv), 0),
        Collective::AllGather => raw.all_gather(&bytes[..4 * share], bytemuck::cast_slice_mut(recv), num_ranks),
        Collective::AllToAll => raw.all_to_all(bytes, bytemuck::cast_slice_mut(recv), num_ranks),
        Collective::AllReduce => raw.all_reduce(recv),
    }
}

/// For each way the median of many batches, each as long as on the slowest rank.
fn medians(comm: &dyn Communicator, ways: &mut [Way<'_>]) -> Result<Vec<f64>, CommError> {
    let one_batch = |way: &mut Way<'_>, num_runs: usize| -> Result<f64, CommError> {
        comm.barrier()?;
        let start = Instant::now();
        for _ in 0..num_runs {
            way()?;
        }
        Ok(start.elapsed().as_secs_f64() / num_runs as f64)
    };
    let mut slowest = 0.0_f64;
    for way in &mut *ways {
        one_batch(way, 2)?;
        slowest = slowest.max(one_batch(way, 3)?);
    }
    // All ranks do the same number of runs: a batch is long beside the barrier before it, and there are enough of them.
    let mut agreed = [slowest];
    comm.all_reduce(&mut agreed, Reduce::Max)?;
    let num_runs = (300e-6 / agreed[0]).clamp(1.0, 1000.0) as usize;
    let batch_seconds = agreed[0] * (num_runs * ways.len()) as f64;
    let num_batches = (CASE_SECONDS / batch_seconds).clamp(5.0, 101.0) as usize;
    let mut times = vec![0.0; num_batches * ways.len()];
    for batch in 0..num_batches {
        for (index, way) in ways.iter_mut().enumerate() {
            times[index * num_batches + batch] = one_batch(way, num_runs)?;
        }
    }
    comm.all_reduce(&mut times, Reduce::Max)?;
    Ok(times.chunks_exact_mut(num_batches).map(median).collect())
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// The two kinds of links.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Links {
    /// Between ranks of a node; `None` where each stands alone.
    pub node: Option<Link>,
    /// Between nodes, while all ranks of a node send; `None` where there is one node.
    pub cluster: Option<Link>,
}

/// Bytes of a message that is long beside the latency.
const LONG: usize = 4 << 20;

/// Measures the links: ranks in pairs send to and fro, all pairs at the same time. A call that all ranks make.
///
/// # Errors
/// [`CommError`], as all calls.
pub fn links(comm: &dyn Communicator) -> Result<Links, CommError> {
    let nodes = comm.nodes();
    let ranks_of = |node: usize| (0..comm.size()).filter(|&rank| nodes[rank] == node).collect::<Vec<_>>();
    let (first, second) = (ranks_of(0), ranks_of(1));
    let in_node: Vec<(usize, usize)> = first.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect();
    let between: Vec<(usize, usize)> = first.into_iter().zip(second).collect();
    Ok(Links { node: link(comm, &in_node)?, cluster: link(comm, &between)? })
}

fn link(comm: &dyn Communicator, pairs: &[(usize, usize)]) -> Result<Option<Link>, CommError> {
    if pairs.is_empty() {
        return Ok(None);
    }
    let latency_s = half_round_trip(comm, pairs, 8)?;
    let long = half_round_trip(comm, pairs, LONG)?;
    Ok(Some(Link { latency_s, bytes_per_s: LONG as f64 / (long - latency_s).max(1e-9) }))
}

fn half_round_trip(comm: &dyn Communicator, pairs: &[(usize, usize)], bytes: usize) -> Result<f64, CommError> {
    let rank = comm.rank();
    let mut data = vec![0_u8; bytes];
    let mut run = || {
        for &(a, b) in pairs {
            if rank == a {
                comm.send(&data, b, 0)?;
                comm.receive(&mut data, b, 1)?;
            } else if rank == b {
                comm.receive(&mut data, a, 0)?;
                comm.send(&data, a, 1)?;
            }
        }
        Ok(())
    };
    Ok(medians(comm, &mut [&mut run])?[0] / 2.0)
}
