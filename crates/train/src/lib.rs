//! Training: data, optimizer, checkpoints, the loop and its records.

pub mod config;
mod corpus;
pub mod data;
mod error;
pub mod events;
pub mod metrics;
pub mod optimizer;
mod processor;
mod ranks;
pub mod report;
pub mod routing;
pub mod schedule;
mod setup;
mod state;
pub mod study;
pub mod trace;
mod trainer;

pub use error::TrainError;
pub use ranks::Ranks;
pub use setup::{context, machine_bytes};
pub use state::{Progress, resumed_config};
pub use trainer::{Event, IfTaken, Outcome, Requests, RunFolder, Trainer};
