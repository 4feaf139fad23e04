//! Integration tests of the communication between ranks.

mod agreement;
mod collectives;
mod failures;
mod measuring;
#[cfg(unix)]
mod mpi;
mod paths;
mod started;
