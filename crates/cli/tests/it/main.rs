//! What a user of the program sees, and the shape of the workspace.

mod bad_input;
mod bench;
mod bench_comm;
mod chat;
mod data;
mod device;
mod extremes;
mod in_a_row;
mod layers;
mod models;
mod numbers;
mod overwriting;
mod plan;
mod program;
mod rank_failures;
mod ranks;
mod routing;
mod schemes;
mod simulate;
mod special_tokens;
mod stopping;
mod streams;
mod study;
mod switch;
mod training;
mod usage;
