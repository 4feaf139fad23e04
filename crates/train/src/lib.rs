//! Training: data, optimizer, checkpoints, the loop and its records.

pub mod config;
pub mod data;
pub mod events;
pub mod metrics;
pub mod report;
pub mod schedule;
pub mod store;
