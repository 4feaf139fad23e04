//! Serving many texts at once.
//!
//! Each turn of the loop is decided first and carried out then: [`Scheduler::next_turn`] makes a [`Turn`], a plain value that says which
//! sequence passes which tokens and which blocks hold its keys and values.

pub mod api;
mod blocks;
mod hash;
mod scheduler;
pub mod server;

pub use blocks::{BlockId, BlockPool};
pub use hash::BlockHash;
pub use scheduler::{
    BlockCopy, Counts, Limits, LimitsError, NewSequence, Refused, Scheduler, SequenceId, Turn, TurnPart,
};
