//! Integration tests of the communication between ranks.

mod agreement;
mod collectives;
mod failures;
#[cfg(unix)]
mod mpi;
mod paths;
mod started;
