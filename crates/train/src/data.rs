//! Batches of a training run, made from tokens.
//!
//! [`moeworks_infer::data`] finds, reads and tokenises text. [`Mix`] lists the sources and their weights. [`Dataset`]
//! cuts their tokens into training and validation windows and selects the windows of a batch. That selection is a
//! pure function of (tokens, seed, position), so that a resumed run gets the same batches.

mod blend;
mod dataset;
mod error;
mod mix;
mod order;
mod windows;

pub use blend::{Blend, BlendCursor};
pub use dataset::{Dataset, DatasetOptions, NamedTokens, Part};
pub use error::DatasetError;
pub use mix::Mix;
pub use order::Permutation;
pub use windows::{Split, Windows};
