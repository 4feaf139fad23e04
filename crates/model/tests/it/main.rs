//! Integration tests of the models, one binary.

mod blocks;
mod cache;
mod chat;
mod common;
mod decoder;
mod families_on_gpu;
mod fixtures;
mod folders;
mod generation;
mod gguf;
mod gpu;
mod layouts;
mod safetensors;
mod switch;
mod tokenizer;
mod transformers;
mod upcycle;
