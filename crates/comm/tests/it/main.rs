//! Integration tests of the communication between ranks.

mod agreement;
mod collectives;
mod failures;
#[cfg(target_os = "linux")]
mod hosts;
mod measuring;
mod metering;
#[cfg(unix)]
mod mpi;
mod paths;
mod shaping;
mod started;
