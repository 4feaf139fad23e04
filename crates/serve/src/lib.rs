//! Serving many texts at once.
//!
//! Each turn of the loop is decided first and carried out then: [`Scheduler::next_turn`] makes a [`Turn`], a plain
//! value that says which sequence passes which tokens and which blocks hold its keys and values; [`Engine`] carries
//! it out with a model.

pub mod api;
pub mod batch;
mod blocks;
mod engine;
mod experts;
pub mod gateway;
mod hash;
mod rebalance;
mod scheduler;
pub mod server;
pub mod tls;

pub use blocks::{BlockId, BlockPool};
pub use engine::{Engine, EngineError, Output, PromptOutput, Request, WantedLogprobs};
pub use experts::{ExpertLoad, LayerLoad, RankLoad, RoutedExperts};
pub use hash::BlockHash;
pub use rebalance::{RebalanceOptions, RebalanceSource};
pub use scheduler::{
    BlockCopy, Counts, Limits, LimitsError, NewSequence, Refused, Scheduler, SequenceId, Turn, TurnPart,
};
