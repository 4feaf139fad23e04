//! Tests of a server: of the parts that decide, and over TCP with an engine that answers with the alphabet.

mod answers;
mod batch_invariance;
mod engine;
mod experts;
mod fake_engine;
mod faults;
mod forms;
mod gateway;
mod hardening;
mod http;
mod logprobs;
mod random_turns;
mod scheduler;
mod simulated;
mod tls;
mod tools;
