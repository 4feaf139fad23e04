//! Training: data, optimizer, checkpoints, the loop and its records.

pub mod schedule;
