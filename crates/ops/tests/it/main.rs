//! Tests of the operations through their public face.

mod adamw;
mod attention;
mod attention_biased;
mod attention_ragged;
mod columns;
mod common;
mod elementwise;
mod embedding;
mod expert_biases;
mod expert_cache;
mod fixtures;
#[cfg(target_arch = "x86_64")]
mod gemm_plan;
mod graphs;
mod head_loss;
mod heads;
mod layer_norm;
mod pieces;
mod qkv_norm_rope_append;
mod rms_norm;
mod rope;
