//! A communication as a plain value: the call and the memory that moves.

use std::fmt;

use crate::CommError;
use crate::number::{NumberKind, Reduce};

/// A call of a rank. Sizes are in bytes; ranks are those of the communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Waits until all ranks are here.
    Barrier,
    /// Splits the group into groups of its ranks.
    Split,
    /// Copies the root's memory to all ranks.
    Broadcast {
        /// The rank that has the data.
        root: usize,
        /// The size of the data.
        bytes: usize,
    },
    /// Gathers a piece from each rank, the same result on all ranks.
    AllGatherV,
    /// Sends a separate piece from each rank to each rank.
    AllToAllV,
    /// Reduces the memory and gives rank r share r of the result.
    ReduceScatter {
        /// The number type.
        number: NumberKind,
        /// The reduction.
        reduce: Reduce,
    },
    /// Reduces the memory in place, the same result on all ranks.
    AllReduce {
        /// The number type.
        number: NumberKind,
        /// The reduction.
        reduce: Reduce,
        /// The size of the data.
        bytes: usize,
    },
    /// Sends memory to another rank.
    Send {
        /// The receiver.
        to: usize,
        /// The tag that selects the message.
        tag: u32,
        /// The size of the message.
        bytes: usize,
    },
    /// Receives memory from another rank.
    Receive {
        /// The sender.
        from: usize,
        /// The tag that selects the message.
        tag: u32,
        /// The size of the message.
        bytes: usize,
    },
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Barrier => write!(f, "barrier"),
            Self::Split => write!(f, "split"),
            Self::Broadcast { root, bytes } => write!(f, "broadcast of {bytes} bytes from rank {root}"),
            Self::AllGatherV => write!(f, "all-gather-v"),
            Self::AllToAllV => write!(f, "all-to-all-v"),
            Self::ReduceScatter { number, reduce } => write!(f, "reduce-scatter ({reduce:?} of {number:?})"),
            Self::AllReduce { number, reduce, bytes } => {
                write!(f, "all-reduce of {bytes} bytes ({reduce:?} of {number:?})")
            }
            Self::Send { to, tag, bytes } => write!(f, "send of {bytes} bytes to rank {to} (tag {tag})"),
            Self::Receive { from, tag, bytes } => write!(f, "receive of {bytes} bytes from rank {from} (tag {tag})"),
        }
    }
}

impl Call {
    /// Encodes the call in four words, for comparison with those of other processes.
    pub(crate) fn to_words(self) -> [u64; 4] {
        let reduction = |number: NumberKind, reduce: Reduce| (number as u64) << 8 | reduce as u64;
        match self {
            Self::Barrier => [0; 4],
            Self::Split => [1, 0, 0, 0],
            Self::Broadcast { root, bytes } => [2, root as u64, bytes as u64, 0],
            Self::AllGatherV => [3, 0, 0, 0],
            Self::AllToAllV => [4, 0, 0, 0],
            Self::ReduceScatter { number, reduce } => [5, reduction(number, reduce), 0, 0],
            Self::AllReduce { number, reduce, bytes } => [6, reduction(number, reduce), bytes as u64, 0],
            Self::Send { to, tag, bytes } => [7, to as u64, u64::from(tag), bytes as u64],
            Self::Receive { from, tag, bytes } => [8, from as u64, u64::from(tag), bytes as u64],
        }
    }

    /// Decodes a call from four words; `None` if they are not the encoding of any call.
    pub(crate) fn from_words([kind, a, b, c]: [u64; 4]) -> Option<Self> {
        let number = NumberKind::ALL.get((a >> 8) as usize).copied();
        let reduce = Reduce::ALL.get((a & 0xff) as usize).copied();
        Some(match kind {
            0 => Self::Barrier,
            1 => Self::Split,
            2 => Self::Broadcast { root: a as usize, bytes: b as usize },
            3 => Self::AllGatherV,
            4 => Self::AllToAllV,
            5 => Self::ReduceScatter { number: number?, reduce: reduce? },
            6 => Self::AllReduce { number: number?, reduce: reduce?, bytes: b as usize },
            7 => Self::Send { to: a as usize, tag: b as u32, bytes: c as usize },
            8 => Self::Receive { from: a as usize, tag: b as u32, bytes: c as usize },
            _ => return None,
        })
    }
}

/// A call and the sizes of the pieces that move.
#[derive(Clone, Copy, Debug)]
pub struct Operation<'a> {
    /// The call.
    pub call: Call,
    /// Bytes for each rank in an all-to-all, or bytes of each rank's share of the input in a reduce-scatter;
    /// otherwise empty.
    pub send_counts: &'a [usize],
    /// Bytes from each rank in an all-to-all or all-gather; otherwise empty.
    pub recv_counts: &'a [usize],
}

impl Operation<'_> {
    /// Makes an operation without counts.
    #[must_use]
    pub fn plain(call: Call) -> Self {
        Self { call, send_counts: &[], recv_counts: &[] }
    }

    /// Checks that the call fits its memory and its group of `size` ranks. `rank` is this rank's number in the group,
    /// `world_rank` the one that errors name.
    #[inline(always)]
    pub(crate) fn check(&self, memory: &Memory, rank: usize, size: usize, world_rank: usize) -> Result<(), CommError> {
        match self.misfit(memory, rank, size) {
            None => Ok(()),
            Some(misfit) => Err(CommError::BadCall { rank: world_rank, call: self.call, text: misfit.to_string() }),
        }
    }

    #[inline(always)]
    fn misfit(&self, memory: &Memory, rank: usize, size: usize) -> Option<Misfit> {
        let (send, recv) = (memory.send_bytes, memory.recv_bytes);
        match self.call {
            Call::Barrier | Call::Split | Call::AllReduce { .. } => None,
            Call::Broadcast { root, .. } => rank_misfit(root, size),
            Call::AllGatherV => counts_misfit("receive", self.recv_counts, size, recv).or_else(|| {
                let count = self.recv_counts[rank];
                (count != send).then_some(Misfit::Given { bytes: send, count })
            }),
            Call::AllToAllV => counts_misfit("send", self.send_counts, size, send)
                .or_else(|| counts_misfit("receive", self.recv_counts, size, recv)),
            Call::ReduceScatter { .. } => counts_misfit("send", self.send_counts, size, send).or_else(|| {
                let share = self.send_counts[rank];
                (share != recv).then_some(Misfit::Share { share, bytes: recv })
            }),
            Call::Send { to: peer, tag, .. } | Call::Receive { from: peer, tag, .. } => {
                rank_misfit(peer, size).or_else(|| (tag > MAX_TAG).then_some(Misfit::Tag { tag }))
            }
        }
    }
}

/// The largest tag that every MPI library allows.
const MAX_TAG: u32 = 32_767;

/// The reason why a call does not fit its memory or its group. It becomes text only on failure, because short calls
/// have no time for formatting.
#[derive(Clone, Copy, Debug, thiserror::Error)]
enum Misfit {
    #[error("rank {rank} is out of range: the group has {size} ranks")]
    Rank { rank: usize, size: usize },
    #[error("tag {tag} is out of range: at most {MAX_TAG}")]
    Tag { tag: u32 },
    #[error("this rank gives {bytes} bytes, but its count is {count}")]
    Given { bytes: usize, count: usize },
    #[error("this rank's share is {share} bytes, but its memory has {bytes}")]
    Share { share: usize, bytes: usize },
    #[error("{num} {what} counts, but the group has {size} ranks")]
    Counts { num: usize, what: &'static str, size: usize },
    #[error("the {what} counts add up to {sum} bytes, but the memory has {bytes}")]
    Sum { what: &'static str, sum: usize, bytes: usize },
    #[error("the sum of the {what} counts overflows")]
    Overflow { what: &'static str },
}

#[inline]
fn rank_misfit(rank: usize, size: usize) -> Option<Misfit> {
    (rank >= size).then_some(Misfit::Rank { rank, size })
}

#[inline(always)]
fn counts_misfit(what: &'static str, counts: &[usize], size: usize, bytes: usize) -> Option<Misfit> {
    if counts.len() != size {
        return Some(Misfit::Counts { num: counts.len(), what, size });
    }
    match counts.iter().try_fold(0_usize, |sum, &count| sum.checked_add(count)) {
        Some(sum) if sum == bytes => None,
        Some(sum) => Some(Misfit::Sum { what, sum, bytes }),
        None => Some(Misfit::Overflow { what }),
    }
}

/// The memory that an operation reads and writes. In-place calls (broadcast, all-reduce) use `recv` alone.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// The start of the sent region.
    pub send: *const u8,
    /// The bytes of the sent region.
    pub send_bytes: usize,
    /// The start of the received region.
    pub recv: *mut u8,
    /// The bytes of the received region.
    pub recv_bytes: usize,
}

// SAFETY: these are plain addresses; each place that reads or writes through them states why it may.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Makes the memory of two regions.
    #[must_use]
    pub fn new(send: &[u8], recv: &mut [u8]) -> Self {
        Self { send: send.as_ptr(), send_bytes: send.len(), recv: recv.as_mut_ptr(), recv_bytes: recv.len() }
    }
}
