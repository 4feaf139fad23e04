//! Integration tests of models in use, one binary.

mod answers;
mod chat;
mod common;
mod data_files;
mod evaluation;
mod generation;
mod gpu;
mod sandbox;
mod streams;
