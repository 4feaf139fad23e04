//! Integration tests of the models, one binary.

mod cache;
mod common;
mod decoder;
mod fixtures;
mod folders;
mod generation;
mod gguf;
mod safetensors;
mod switch;
mod tokenizer;
mod transformers;
mod upcycle;
