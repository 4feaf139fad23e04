//! What users of the crate see.

mod config;
mod fp8;
mod lost_ranks;
mod offload;
mod real_text;
mod steps;
