//! Measurements of kernels, MoE layers, routing, decoding, training steps and communication, each compared with the
//! limit of the machine.
//!
//! A measurement is a function that returns values or passes them to a callback; `moeworks bench` prints them. The
//! rates of the machine itself are measured in [`moeworks_ops::peak`].

mod case;
mod choices;
pub mod cluster;
pub mod collectives;
pub mod decode;
mod error;
pub mod gradient_sums;
pub mod kernels;
pub mod layers;
pub mod machine;
pub mod machine_file;
mod moe_layer;
mod moe_requests;
pub mod overlap;
pub mod pass;
pub mod pipeline;
pub mod ranks;
pub mod rebalance;
mod routing_parts;
pub mod routing_schemes;
pub mod timing;
pub mod training;
pub mod travel;

pub use case::{CaseResult, Cost, Limit};
pub use choices::{ChoiceCounts, Choices};
pub use error::BenchError;
pub use moe_requests::MoeRequests;
