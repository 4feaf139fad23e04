//! Times of communication: each collective by size, beside a copy in memory and the MPI library's own call, and the
//! links between ranks.

use std::time::Instant;

use moeworks_comm::mpi::{EqualPieces, RawMpi};
use moeworks_comm::{CommError, Communicator, Reduce};
use moeworks_plan::Link;

/// A collective that is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Nothing moves.
    Barrier,
    /// No collective: ranks in pairs send the bytes to and fro, and half of that counts. A rank without another does
    /// nothing.
    Message,
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
    pub const ALL: [Self; 7] = [
        Self::Barrier,
        Self::Message,
        Self::Broadcast,
        Self::AllGather,
        Self::AllToAll,
        Self::ReduceScatter,
        Self::AllReduce,
    ];

    /// Returns how many collectives one run makes.
    fn per_run(self) -> f64 {
        if self == Self::Message { 2.0 } else { 1.0 }
    }
}

/// The time of a collective, as the slowest rank sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// The collective.
    pub collective: Collective,
    /// Bytes that each rank holds, before or after.
    pub bytes: usize,
    /// The median of many.
    pub seconds: f64,
    /// The MPI library's own call, where ranks are processes.
    pub raw_seconds: Option<f64>,
    /// All ranks copying as many bytes in their memory at the same time.
    pub copy_seconds: f64,
}

/// Seconds to spend on each case.
const CASE_SECONDS: f64 = 0.3;

/// An implementation that is compared. They take turns on the same memory, so that what else the machine does, and
/// where the memory lies, meets all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Implementation {
    Ours,
    Copy,
    Raw,
}

/// The operands of a case.
struct Case<'a> {
    comm: &'a dyn Communicator,
    raw: Option<&'a RawMpi>,
    collective: Collective,
    send: Vec<f32>,
    recv: Vec<f32>,
    /// For each rank its numbers of `send`.
    shares: Vec<usize>,
    /// The shares in the form that the MPI library takes: counts of numbers to add up, or of bytes to send.
    pieces: EqualPieces,
    /// The ranks that send to each other in [`Collective::Message`].
    pairs: Vec<(usize, usize)>,
}

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
    let mut case = Case::new((comm, raw), collective, bytes);
    let ways: &[Implementation] = if raw.is_some() {
        &[Implementation::Ours, Implementation::Copy, Implementation::Raw]
    } else {
        &[Implementation::Ours, Implementation::Copy]
    };
    let seconds = medians(comm, ways.len(), &mut |index| case.run(ways[index]))?;
    let per_run = collective.per_run();
    Ok(Timing {
        collective,
        bytes: size_of_val(&*case.send),
        seconds: seconds[0] / per_run,
        raw_seconds: seconds.get(2).map(|seconds| seconds / per_run),
        copy_seconds: seconds[1],
    })
}

impl<'a> Case<'a> {
    fn new((comm, raw): (&'a dyn Communicator, Option<&'a RawMpi>), collective: Collective, bytes: usize) -> Self {
        let size = comm.size();
        let share = bytes.div_ceil(4 * size);
        let data = vec![1.0_f32; share * size];
        let piece = if collective == Collective::AllToAll { size_of::<f32>() * share } else { share };
        Self {
            comm,
            raw,
            collective,
            send: data.clone(),
            recv: data,
            shares: vec![share; size],
            pieces: EqualPieces::new(size, piece),
            pairs: (1..size).step_by(2).map(|rank| (rank - 1, rank)).collect(),
        }
    }

    fn run(&mut self, way: Implementation) -> Result<(), CommError> {
        match way {
            Implementation::Ours => return self.run_ours(),
            Implementation::Copy => {
                self.recv.copy_from_slice(&self.send);
                std::hint::black_box(&mut self.recv);
            }
            Implementation::Raw => self.run_raw(),
        }
        Ok(())
    }

    fn run_ours(&mut self) -> Result<(), CommError> {
        let (comm, share) = (self.comm, self.shares[0]);
        let (send, recv) = (&self.send, &mut self.recv);
        match self.collective {
            Collective::Barrier => comm.barrier(),
            Collective::Message => to_and_fro(comm, recv, &self.pairs),
            Collective::Broadcast => comm.broadcast(recv, 0),
            Collective::AllGather => comm.all_gather(&send[..share], recv),
            Collective::AllToAll => comm.all_to_all(send, recv),
            Collective::ReduceScatter => comm.reduce_scatter(send, &self.shares, &mut recv[..share], Reduce::Sum),
            Collective::AllReduce => comm.all_reduce(recv, Reduce::Sum),
        }
    }

    fn run_raw(&mut self) {
        let Some(raw) = self.raw else { return };
        let (size, share) = (self.comm.size(), self.shares[0]);
        let sent: &[u8] = bytemuck::cast_slice(&self.send);
        let received: &mut [u8] = bytemuck::cast_slice_mut(&mut self.recv);
        match self.collective {
            Collective::Barrier => raw.barrier(),
            Collective::Message => raw_to_and_fro(raw, received, (self.comm.rank(), &self.pairs)),
            Collective::Broadcast => raw.broadcast(received, 0),
            Collective::AllGather => raw.all_gather(&sent[..4 * share], received, size),
            Collective::AllToAll => raw.all_to_all(sent, received, &self.pieces),
            Collective::ReduceScatter => raw.reduce_scatter(&self.send, &mut self.recv[..share], &self.pieces),
            Collective::AllReduce => raw.all_reduce(&mut self.recv),
        }
    }
}

/// Each pair's first rank sends, and gets it back.
fn to_and_fro<T: bytemuck::Pod>(
    comm: &dyn Communicator,
    data: &mut [T],
    pairs: &[(usize, usize)],
) -> Result<(), CommError> {
    let rank = comm.rank();
    for &(a, b) in pairs {
        if rank == a {
            comm.send(data, b, 0)?;
            comm.receive(data, b, 0)?;
        } else if rank == b {
            comm.receive(data, a, 0)?;
            comm.send(data, a, 0)?;
        }
    }
    Ok(())
}

/// Sends between pairs by the MPI library's own calls.
fn raw_to_and_fro(raw: &RawMpi, data: &mut [u8], (rank, pairs): (usize, &[(usize, usize)])) {
    for &(a, b) in pairs {
        if rank == a {
            raw.send(data, b);
            raw.receive(data, b);
        } else if rank == b {
            raw.receive(data, a);
            raw.send(data, a);
        }
    }
}

/// For each of `num_ways` ways the median of many batches, each as long as on the slowest rank. `run` is told which
/// one.
fn medians(
    comm: &dyn Communicator,
    num_ways: usize,
    run: &mut dyn FnMut(usize) -> Result<(), CommError>,
) -> Result<Vec<f64>, CommError> {
    let mut one_batch = |way: usize, num_runs: usize| -> Result<f64, CommError> {
        comm.barrier()?;
        let start = Instant::now();
        for _ in 0..num_runs {
            run(way)?;
        }
        Ok(start.elapsed().as_secs_f64() / num_runs as f64)
    };
    let mut slowest = 0.0_f64;
    for way in 0..num_ways {
        one_batch(way, 2)?;
        slowest = slowest.max(one_batch(way, 3)?);
    }
    // All ranks do the same number of runs: a batch is long beside the barrier before it, and there are enough of
    // them.
    let mut agreed = [slowest];
    comm.all_reduce(&mut agreed, Reduce::Max)?;
    let num_runs = (300e-6 / agreed[0]).clamp(1.0, 1000.0) as usize;
    let batch_seconds = agreed[0] * (num_runs * num_ways) as f64;
    let num_batches = (CASE_SECONDS / batch_seconds).clamp(5.0, 101.0) as usize;
    let mut times = vec![0.0; num_batches * num_ways];
    for batch in 0..num_batches {
        for turn in 0..num_ways {
            // To and fro: what comes first leaves the memory in the caches of what comes next.
            let way = if batch % 2 == 0 { turn } else { num_ways - 1 - turn };
            times[way * num_batches + batch] = one_batch(way, num_runs)?;
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
    let mut data = vec![0_u8; bytes];
    Ok(medians(comm, 1, &mut |_| to_and_fro(comm, &mut data, pairs))?[0] / 2.0)
}
