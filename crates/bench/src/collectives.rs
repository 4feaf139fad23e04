//! Times of communication: each collective by size, next to a memory copy and the MPI library's own call, and the
//! links between ranks.

use std::time::Instant;

use moeworks_comm::mpi::{EqualPieces, RawMpi};
use moeworks_comm::{CommError, Communicator, Reduce};
use moeworks_plan::Link;

/// The collectives that are timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// A barrier, which moves no data.
    Barrier,
    /// A pair of messages, not a collective: ranks in pairs send the bytes to each other and back, and half of that
    /// time counts. A rank without a partner does nothing.
    Message,
    /// Every rank gets the bytes of rank 0.
    Broadcast,
    /// Every rank gets a share of the bytes from each rank.
    AllGather,
    /// Every rank sends a share of its bytes to each rank.
    AllToAll,
    /// Every rank gets a share of the sum of the bytes as f32.
    ReduceScatter,
    /// Every rank gets the whole sum of the bytes as f32.
    AllReduce,
}

impl Collective {
    /// All collectives, in the order of a table.
    pub const ALL: [Self; 7] = [
        Self::Barrier,
        Self::Message,
        Self::Broadcast,
        Self::AllGather,
        Self::AllToAll,
        Self::ReduceScatter,
        Self::AllReduce,
    ];

    /// Returns the number of collectives in one run.
    fn per_run(self) -> f64 {
        if self == Self::Message { 2.0 } else { 1.0 }
    }
}

/// The time of a collective, as the slowest rank sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// The collective.
    pub collective: Collective,
    /// The bytes that each rank holds before or after the collective.
    pub bytes: usize,
    /// The median of many runs, in seconds.
    pub seconds: f64,
    /// The time of the MPI library's own call, if ranks are processes.
    pub raw_seconds: Option<f64>,
    /// The time in which all ranks copy as many bytes in memory at once.
    pub copy_seconds: f64,
}

/// The measurement time of each case, in seconds.
const CASE_SECONDS: f64 = 0.3;

/// The implementations that are compared. They run in turns on the same memory, so that other load of the machine and
/// the placement of the memory affect all of them alike.
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
    /// The number of elements of `send` for each rank.
    shares: Vec<usize>,
    /// The shares in the form that the MPI library takes: the number of elements to sum, or of bytes to send.
    pieces: EqualPieces,
    /// The pairs of ranks in [`Collective::Message`].
    pairs: Vec<RankPair>,
}

/// Two ranks that send messages to each other.
#[derive(Clone, Copy)]
struct RankPair {
    first: usize,
    second: usize,
}

/// Times a collective with `bytes` bytes, rounded up to whole shares. All ranks must call it.
///
/// # Errors
/// [`CommError`], as all calls.
pub fn time(
    comm: &dyn Communicator,
    raw: Option<&RawMpi>,
    collective: Collective,
    bytes: usize,
) -> Result<Timing, CommError> {
    let mut case = Case::new(comm, raw, collective, bytes);
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
    fn new(comm: &'a dyn Communicator, raw: Option<&'a RawMpi>, collective: Collective, bytes: usize) -> Self {
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
            pairs: (1..size).step_by(2).map(|rank| RankPair { first: rank - 1, second: rank }).collect(),
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
            Collective::Message => ping_pong(comm, recv, &self.pairs),
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
            Collective::Message => raw_ping_pong(raw, received, self.comm.rank(), &self.pairs),
            Collective::Broadcast => raw.broadcast(received, 0),
            Collective::AllGather => raw.all_gather(&sent[..4 * share], received, size),
            Collective::AllToAll => raw.all_to_all(sent, received, &self.pieces),
            Collective::ReduceScatter => raw.reduce_scatter(&self.send, &mut self.recv[..share], &self.pieces),
            Collective::AllReduce => raw.all_reduce(&mut self.recv),
        }
    }
}

/// Sends data from each pair's first rank to its partner and back.
fn ping_pong<T: bytemuck::Pod>(comm: &dyn Communicator, data: &mut [T], pairs: &[RankPair]) -> Result<(), CommError> {
    let rank = comm.rank();
    for &RankPair { first, second } in pairs {
        if rank == first {
            comm.send(data, second, 0)?;
            comm.receive(data, second, 0)?;
        } else if rank == second {
            comm.receive(data, first, 0)?;
            comm.send(data, first, 0)?;
        }
    }
    Ok(())
}

/// Sends data within pairs by the MPI library's own calls.
fn raw_ping_pong(raw: &RawMpi, data: &mut [u8], rank: usize, pairs: &[RankPair]) {
    for &RankPair { first, second } in pairs {
        if rank == first {
            raw.send(data, second);
            raw.receive(data, second);
        } else if rank == second {
            raw.receive(data, first);
            raw.send(data, first);
        }
    }
}

/// Returns for each of `num_ways` implementations the median of many batches, each with the time of the slowest rank.
/// `run` gets the index of the implementation.
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
    // All ranks make the same number of runs per batch, large enough that the barrier before it does not matter.
    let mut agreed = [slowest];
    comm.all_reduce(&mut agreed, Reduce::Max)?;
    let num_runs = (300e-6 / agreed[0]).clamp(1.0, 1000.0) as usize;
    let batch_seconds = agreed[0] * (num_runs * num_ways) as f64;
    let num_batches = (CASE_SECONDS / batch_seconds).clamp(5.0, 101.0) as usize;
    let mut times = vec![0.0; num_batches * num_ways];
    for batch in 0..num_batches {
        for turn in 0..num_ways {
            // The order alternates, because an implementation leaves data in the caches for the next one.
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

/// The two kinds of links between ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Links {
    /// The link between ranks of a node; `None` if each node has one rank.
    pub node: Option<Link>,
    /// The link between nodes while all ranks of a node send; `None` if there is one node.
    pub cluster: Option<Link>,
}

/// The size of a message whose time exceeds the latency by far, in bytes.
const LONG: usize = 4 << 20;

/// Measures the links: ranks in pairs send messages to each other and back, all pairs at the same time. All ranks
/// must call it.
///
/// # Errors
/// [`CommError`], as all calls.
pub fn links(comm: &dyn Communicator) -> Result<Links, CommError> {
    let nodes = comm.nodes();
    let ranks_of = |node: usize| (0..comm.size()).filter(|&rank| nodes[rank] == node).collect::<Vec<_>>();
    let (first, second) = (ranks_of(0), ranks_of(1));
    let pair = |(first, second)| RankPair { first, second };
    let in_node: Vec<RankPair> = first.chunks_exact(2).map(|ranks| pair((ranks[0], ranks[1]))).collect();
    let between: Vec<RankPair> = first.into_iter().zip(second).map(pair).collect();
    Ok(Links { node: link(comm, &in_node)?, cluster: link(comm, &between)? })
}

fn link(comm: &dyn Communicator, pairs: &[RankPair]) -> Result<Option<Link>, CommError> {
    if pairs.is_empty() {
        return Ok(None);
    }
    let latency_s = half_round_trip(comm, pairs, 8)?;
    let long = half_round_trip(comm, pairs, LONG)?;
    Ok(Some(Link { latency_s, bytes_per_s: LONG as f64 / (long - latency_s).max(1e-9) }))
}

fn half_round_trip(comm: &dyn Communicator, pairs: &[RankPair], bytes: usize) -> Result<f64, CommError> {
    let mut data = vec![0_u8; bytes];
    Ok(medians(comm, 1, &mut |_| ping_pong(comm, &mut data, pairs))?[0] / 2.0)
}
