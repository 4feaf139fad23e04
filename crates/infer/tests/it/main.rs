//! Integration tests of models in use, one binary.

mod answers;
mod chat;
mod common;
mod constraint;
mod data_files;
mod evaluation;
mod generation;
mod gpu;
#[path = "../../../model/tests/it/odd_tokenizers.rs"]
mod odd_tokenizers;
mod sandbox;
#[path = "../../../model/tests/it/small_model.rs"]
mod small_model;
mod streams;
mod tool_calls;
