//! What users of the crate see.

mod config;
mod lost_ranks;
mod real_text;
