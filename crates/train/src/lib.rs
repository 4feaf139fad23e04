//! Training: configuration, data, optimizer, checkpoints, the training loop and its records.
//!
//! A [`Trainer`] trains any model that is a [`Task`]; the language model of `moeworks train` is
//! [`LanguageModel`](language_model::LanguageModel).

pub mod advise;
pub mod auto_layout;
mod checkpoint;
pub mod config;
mod cpu_time;
pub mod data;
mod error;
pub mod events;
pub mod language_model;
pub mod layout_check;
pub mod lr_schedule;
pub mod metrics;
pub mod optimizer;
mod parallel;
pub mod pipeline;
pub mod rebalance;
pub mod report;
pub mod routing;
pub mod study;
pub mod task;
pub mod trace;
mod trainer;

pub use checkpoint::Progress;
pub use error::TrainError;
pub use language_model::{context, machine_bytes, resumed_config};
pub use parallel::{Ranks, placements};
pub use task::Task;
pub use trainer::{
    Event, IfTaken, Outcome, Requests, ResumeOptions, RunFolder, StartOptions, Trainer, TrainerSettings,
};
