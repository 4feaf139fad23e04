//! Tests of the operations through their public face.

mod adamw;
mod attention;
mod common;
mod elementwise;
mod embedding;
mod fixtures;
mod head_loss;
mod rms_norm;
mod rope;
