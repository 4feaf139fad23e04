//! Integration tests of the models, one binary.

mod batch_invariance;
mod blocks;
mod cache;
mod common;
mod decoder;
mod families_on_gpu;
mod fixtures;
mod folders;
mod gguf;
mod gguf_keys;
mod gguf_parts;
mod gguf_tokenizer;
mod gpu;
mod hf_tokenizers;
mod layouts;
mod mistaken;
mod odd_tokenizers;
mod pages;
mod safetensors;
mod small_model;
mod special_tokens;
mod switch;
mod tokenizer;
mod transformers;
mod upcycle;
mod weight_list;
