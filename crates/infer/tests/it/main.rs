//! Integration tests of models in use, one binary.

mod chat;
mod common;
mod data_files;
mod generation;
mod gpu;
mod streams;
