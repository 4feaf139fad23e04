//! What users of the crate see.

mod config;
mod lost_ranks;
mod offload;
mod real_text;
