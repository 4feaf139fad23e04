//! Training: data, optimizer, checkpoints, the loop and its records.

pub mod config;
mod corpus;
mod cpu_time;
pub mod data;
mod error;
pub mod events;
pub mod lr_schedule;
pub mod metrics;
pub mod optimizer;
mod parallel;
pub mod report;
pub mod routing;
mod setup;
mod state;
pub mod study;
pub mod trace;
mod trainer;

pub use error::TrainError;
pub use parallel::Ranks;
pub use setup::{context, machine_bytes};
pub use state::{Progress, resumed_config};
pub use trainer::{Event, IfTaken, Outcome, Requests, RunFolder, Trainer};
