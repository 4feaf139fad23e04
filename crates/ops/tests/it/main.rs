//! Tests of the operations through their public face.

mod adamw;
mod attention;
mod attention_biased;
mod columns;
mod common;
mod cuda;
mod elementwise;
mod embedding;
mod expert_biases;
mod expert_room;
mod fixtures;
mod head_loss;
mod heads;
mod layer_norm;
mod pieces;
mod place_heads;
mod rms_norm;
mod rope;
mod steps;
