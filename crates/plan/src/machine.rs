//! A measured machine, as a file, and the time of a training step on it.
//!
//! `moeworks bench machine` writes the file: products by size, memory, links between ranks that are threads, and two
//! constants fitted on two small reference steps. [`predict_step`] adds up a step of another configuration from it.

mod cluster;
mod file;
mod predict;

pub use cluster::MachineShare;
pub use file::{Machine, MachineError, Overhead, ProductRate};
pub use predict::{PredictedStep, StepSizes, predict_step};

#[cfg(test)]
mod tests;
