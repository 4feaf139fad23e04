//! Bytes and seconds of collectives, of overlapped chunks and of whole steps.

pub mod collectives;
pub mod estimate;
pub mod fabric;
pub mod memory;
pub(crate) mod passes;
pub mod pipeline;
pub mod training;
pub mod tutel;
