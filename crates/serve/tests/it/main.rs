//! Tests of the parts of a server that decide.

mod random_turns;
mod scheduler;
mod simulated;
