//! A communication as a plain value: what is called and what moves.

use std::fmt;

use crate::CommError;
use crate::number::{NumberKind, Reduce};

/// What a rank calls. Sizes are bytes, ranks those of the communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Wait until all are here.
    Barrier,
    /// Make communicators of parts.
    Split,
    /// Everybody gets the root's memory.
    Broadcast {
        /// Who has it.
        root: usize,
        /// How much there is.
        bytes: usize,
    },
    /// Everybody gets a piece from everybody, the same ones everywhere.
    AllGatherV,
    /// Everybody sends a piece of its own to everybody.
    AllToAllV,
    /// Rank r gets share r of the reduced memory.
    ReduceScatter {
        /// Of which numbers.
        number: NumberKind,
        /// How.
        reduce: Reduce,
    },
    /// Everybody gets the reduced memory, in place.
    AllReduce {
        /// Of which numbers.
        number: NumberKind,
        /// How.
        reduce: Reduce,
        /// How much there is.
        bytes: usize,
    },
    /// Memory to another rank.
    Send {
        /// Who gets it.
        to: usize,
        /// Which one, where there are several.
        tag: u32,
        /// How much.
        bytes: usize,
    },
    /// Memory from another rank.
    Receive {
        /// Who sends it.
        from: usize,
        /// Which one, where there are several.
        tag: u32,
        /// How much.
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
    /// The call in words, to compare with those of other processes.
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

    /// The call that words stand for; `None` if they stand for none.
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
    /// What is called.
    pub call: Call,
    /// Bytes to each rank (all-to-all), or of each rank's share of what this rank gives (reduce-scatter); else
    /// nothing.
    pub send_counts: &'a [usize],
    /// Bytes from each rank (all-to-all, all-gather); else nothing.
    pub recv_counts: &'a [usize],
}

impl Operation<'_> {
    /// An operation without counts.
    #[must_use]
    pub fn plain(call: Call) -> Self {
        Self { call, send_counts: &[], recv_counts: &[] }
    }

    /// Whether the call fits the memory it comes with, in a group of `size` ranks. `rank` is this rank there,
    /// `world_rank` its name in errors.
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
            Call::Broadcast { root, .. } => unknown(root, size),
            Call::AllGatherV => total("receive", self.recv_counts, size, recv).or_else(|| {
                let count = self.recv_counts[rank];
                (count != send).then_some(Misfit::Given { bytes: send, count })
            }),
            Call::AllToAllV => {
                total("send", self.send_counts, size, send).or_else(|| total("receive", self.recv_counts, size, recv))
            }
            Call::ReduceScatter { .. } => total("send", self.send_counts, size, send).or_else(|| {
                let share = self.send_counts[rank];
                (share != recv).then_some(Misfit::Share { share, bytes: recv })
            }),
            Call::Send { to: peer, tag, .. } | Call::Receive { from: peer, tag, .. } => {
                unknown(peer, size).or_else(|| (tag > MAX_TAG).then_some(Misfit::Tag))
            }
        }
    }
}

/// What every MPI library allows.
const MAX_TAG: u32 = 32_767;

/// Why a call does not fit its memory or its group: said only where there is something wrong, which short calls have
/// no time for.
#[derive(Clone, Copy, Debug, thiserror::Error)]
enum Misfit {
    #[error("there is no rank {rank} among {size}")]
    Rank { rank: usize, size: usize },
    #[error("tags go up to {MAX_TAG}")]
    Tag,
    #[error("this rank gives {bytes} bytes, but its count is {count}")]
    Given { bytes: usize, count: usize },
    #[error("this rank's share is {share} bytes, but its memory has {bytes}")]
    Share { share: usize, bytes: usize },
    #[error("{num} {what} counts for {size} ranks")]
    Counts { num: usize, what: &'static str, size: usize },
    #[error("the {what} counts add up to {sum} bytes, but the memory has {bytes}")]
    Sum { what: &'static str, sum: usize, bytes: usize },
    #[error("the sum of the {what} counts overflows")]
    Overflow { what: &'static str },
}

#[inline]
fn unknown(rank: usize, size: usize) -> Option<Misfit> {
    (rank >= size).then_some(Misfit::Rank { rank, size })
}

#[inline(always)]
fn total(what: &'static str, counts: &[usize], size: usize, bytes: usize) -> Option<Misfit> {
    if counts.len() != size {
        return Some(Misfit::Counts { num: counts.len(), what, size });
    }
    match counts.iter().try_fold(0_usize, |sum, &count| sum.checked_add(count)) {
        Some(sum) if sum == bytes => None,
        Some(sum) => Some(Misfit::Sum { what, sum, bytes }),
        None => Some(Misfit::Overflow { what }),
    }
}

/// The memory of an operation: what is read and what is written. In-place calls (broadcast, all-reduce) use `recv`
/// alone.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// Start of what is sent.
    pub send: *const u8,
    /// Its bytes.
    pub send_bytes: usize,
    /// Start of what is received.
    pub recv: *mut u8,
    /// Its bytes.
    pub recv_bytes: usize,
}

// SAFETY: addresses; whoever reads or writes there says why it may.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Two regions.
    #[must_use]
    pub fn new(send: &[u8], recv: &mut [u8]) -> Self {
        Self { send: send.as_ptr(), send_bytes: send.len(), recv: recv.as_mut_ptr(), recv_bytes: recv.len() }
    }
}
