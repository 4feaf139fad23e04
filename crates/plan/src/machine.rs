//! A measured machine, as a file, and the time of a training step on it.
//!
//! `moeworks bench machine` writes the file: the rates of the parts of a training step by size, memory, links between
//! ranks that are threads, and a few constants fitted on small reference steps. [`predict_step`] adds up a step of
//! another configuration from it.

mod cluster;
mod file;
mod predict;
mod rates;

pub use cluster::{LayerRest, MachineShare};
pub use file::{AttentionRate, ExpertRate, Machine, MachineError, OutputLayerRate, Overhead, ProductRate, UpdateRate};
pub use predict::{LayerSizes, PredictedStep, StepSizes, predict_step};
pub use rates::PassRates;

#[cfg(test)]
mod tests;
