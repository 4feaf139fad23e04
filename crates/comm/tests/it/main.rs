//! Integration tests of the communication between ranks.

mod agreement;
mod collectives;
mod failures;
mod started;
