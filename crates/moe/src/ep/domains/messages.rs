//! Messages inside a domain: bytes gathered level by level, the outermost first, and sums that go back the same way.
//!
//! A rank first gathers from the ranks at its place in the other nodes of the domain (level 0), then hands on inside
//! the node what it has (level 1): a byte goes to each node once.

use std::time::Instant;

use moeworks_comm::{CommError, Communicator, Pending, Reduce};
use moeworks_plan::LinkClass;

use super::codec::{Codec, Values};
use super::traffic::Bytes;
use super::{Domain, Traffic};

/// The ranks of a domain at one level, at the same places in all others.
pub(super) struct LevelComm {
    comm: Box<dyn Communicator>,
    /// The links of the level.
    class: LinkClass,
    /// This rank's place.
    offset: usize,
}

impl LevelComm {
    pub(super) fn new(comm: Box<dyn Communicator>) -> Self {
        let is_one_node = comm.nodes().windows(2).all(|pair| pair[0] == pair[1]);
        let class = if is_one_node { LinkClass::Node } else { LinkClass::Cluster };
        Self { class, offset: comm.rank(), comm }
    }

    fn size(&self) -> usize {
        self.comm.size()
    }
}

/// A gathering under way at its first level.
pub(super) struct PendingGather {
    first: Pending<(Vec<u8>, Vec<u8>)>,
}

/// The numbers that a rank sums in a domain, and where what is left out is kept.
pub(super) struct Summed<'a> {
    /// The members' parts, one after another.
    pub(super) numbers: Vec<f32>,
    /// The numbers of each member's part.
    pub(super) counts: &'a [usize],
    /// The share of the numbers that travel.
    pub(super) keep: f64,
    /// The key of what is left out.
    pub(super) key: [usize; 2],
}

impl Domain {
    /// Returns the sizes at `level` of what comes from each rank, where `of_members` has those of all members.
    fn counts(&self, level: usize, of_members: &[usize]) -> Vec<usize> {
        let inner: usize = self.levels[..level].iter().map(LevelComm::size).product();
        let (mut rest, mut stride) = (0, inner);
        for (at, level_comm) in self.levels.iter().enumerate().skip(level) {
            rest += if at > level { level_comm.offset * stride } else { 0 };
            stride *= level_comm.size();
        }
        let from = |offset: usize| of_members[rest + offset * inner..rest + (offset + 1) * inner].iter().sum();
        (0..self.levels[level].size()).map(from).collect()
    }

    /// Returns the levels with more than one rank.
    fn wide_levels(&self) -> impl DoubleEndedIterator<Item = usize> + '_ {
        (0..self.levels.len()).filter(|&level| self.levels[level].size() > 1)
    }

    /// Starts to gather `own` from all members, of the sizes `of_members`.
    pub(super) fn start_gather(&self, own: Vec<u8>, of_members: &[usize]) -> Result<PendingGather, CommError> {
        let level = self.wide_levels().next().unwrap_or(0);
        let counts = self.counts(level, of_members);
        let received = vec![0_u8; counts.iter().sum()];
        Ok(PendingGather { first: self.levels[level].comm.start_all_gather_v(own, received, &counts)? })
    }

    /// Finishes a gathering. Returns what the members gave, in their order.
    pub(super) fn finish_gather(
        &self,
        pending: PendingGather,
        of_members: &[usize],
        traffic: &Traffic,
    ) -> Result<Vec<u8>, CommError> {
        let mut bytes = pending.first.finish()?.1;
        for level in self.wide_levels().skip(1) {
            let (start, counts) = (Instant::now(), self.counts(level, of_members));
            let mut received = vec![0_u8; counts.iter().sum()];
            let LevelComm { comm, class, .. } = &self.levels[level];
            comm.all_gather_v(&bytes, &mut received, &counts)?;
            let most = (bytes.len() * (comm.size() - 1)).max(received.len() - bytes.len());
            traffic.note(Bytes::of_class(*class, most), start.elapsed());
            bytes = received;
        }
        Ok(bytes)
    }

    /// Sums numbers over all members.
    pub(super) fn sum(&self, numbers: &mut [f32]) -> Result<(), CommError> {
        self.wide_levels().try_for_each(|level| self.levels[level].comm.all_reduce(numbers, Reduce::Sum))
    }

    /// Sums the members' parts, each on the member that it is of. Returns this rank's.
    pub(super) fn sum_parts(&self, summed: Summed<'_>, traffic: &Traffic) -> Result<Vec<f32>, CommError> {
        let Summed { mut numbers, counts: of_members, keep, key } = summed;
        for level in self.wide_levels().rev() {
            let (start, counts) = (Instant::now(), self.counts(level, of_members));
            let LevelComm { comm, class, offset } = &self.levels[level];
            if keep < 1.0 {
                numbers = self.sum_largest(level, &numbers, &counts, Kept { keep, key })?;
                continue;
            }
            let mut sums = vec![0.0; counts[*offset]];
            comm.reduce_scatter(&numbers, &counts, &mut sums, Reduce::Sum)?;
            let most = (numbers.len() - sums.len()).max(sums.len() * (comm.size() - 1));
            traffic.note(Bytes::of_class(*class, size_of::<f32>() * most), start.elapsed());
            numbers = sums;
        }
        Ok(numbers)
    }

    /// Sums parts at one level, of which the largest numbers travel. The rest is added to the next ones.
    fn sum_largest(
        &self,
        level: usize,
        numbers: &[f32],
        counts: &[usize],
        Kept { keep, key: [layer, tensor] }: Kept,
    ) -> Result<Vec<f32>, CommError> {
        let LevelComm { comm, offset, .. } = &self.levels[level];
        let mut memory = self.memory();
        let rest = memory.rests.entry([layer, tensor, level]).or_default();
        if rest.len() != numbers.len() {
            *rest = vec![0.0; numbers.len()];
        }
        rest.iter_mut().zip(numbers).for_each(|(rest, x)| *rest += x);
        let codec = |to: usize| Codec::new(counts[to], keep, Values::Levels);
        let (mut sent, mut sent_counts, mut start, mut own) = (Vec::new(), vec![0; counts.len()], 0, 0..0);
        for to in 0..counts.len() {
            let part = start..start + counts[to];
            start = part.end;
            if to == *offset {
                own = part;
                continue;
            }
            let mut message = vec![0; codec(to).bytes()];
            codec(to).encode(&rest[part.clone()], &mut message);
            // Subtracting what the other rank will add leaves the rest.
            let negated = &mut rest[part];
            negated.iter_mut().for_each(|x| *x = -*x);
            codec(to).add(&message, negated);
            negated.iter_mut().for_each(|x| *x = -*x);
            sent_counts[to] = message.len();
            sent.extend(message);
        }
        let mut sums = rest[own.clone()].to_vec();
        rest[own].fill(0.0);
        let of_own = codec(*offset);
        let received_counts: Vec<usize> =
            (0..counts.len()).map(|from| if from == *offset { 0 } else { of_own.bytes() }).collect();
        let mut received = vec![0_u8; received_counts.iter().sum()];
        drop(memory);
        comm.all_to_all_v(&sent, &sent_counts, &mut received, &received_counts)?;
        received.chunks_exact(of_own.bytes().max(1)).for_each(|message| of_own.add(message, &mut sums));
        Ok(sums)
    }
}

/// The share of numbers that travel, and the layer and tensor that they are of.
#[derive(Clone, Copy)]
struct Kept {
    keep: f64,
    key: [usize; 2],
}
