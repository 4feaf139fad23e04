//! What users of the crate see.

mod config;
mod real_text;
