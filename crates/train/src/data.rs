//! From tokens to the batches of a run.
//!
//! Text is found, read and tokenised by [`moeworks_infer::data`]. [`Mix`] says which sources there are and how much each counts;
//! [`Dataset`] cuts their tokens into training and validation windows and says which windows make up a batch. Only the last of these
//! matters while training runs, and it is a pure function of (tokens, seed, position): a resumed run asks for the same position and gets
//! the same batch, however far it is.

mod blend;
mod dataset;
mod error;
mod mix;
mod order;
mod windows;

pub use blend::{Blend, BlendCursor};
pub use dataset::{Dataset, DatasetOptions, Part};
pub use error::DatasetError;
pub use mix::Mix;
pub use order::Permutation;
pub use windows::{Split, Windows};
