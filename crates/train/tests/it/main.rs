//! Tests of the crate's public interface.

mod any_model;
mod config;
mod data_mix;
mod domains;
mod expert_gradients;
mod fp8;
mod freeze;
mod links;
mod listed;
mod lost_ranks;
mod offload;
mod pages;
mod real_text;
mod rebalance;
mod steps;
