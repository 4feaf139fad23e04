//! What users of the crate see.

mod config;
mod fp8;
mod listed;
mod lost_ranks;
mod offload;
mod real_text;
mod steps;
