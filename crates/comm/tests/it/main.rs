//! Integration tests of the communication between ranks.

mod agreement;
mod collectives;
mod failures;
#[cfg(target_os = "linux")]
mod hosts;
#[cfg(unix)]
mod launcher;
mod metering;
#[cfg(unix)]
mod mpi;
#[cfg(target_os = "linux")]
mod namespaces;
mod paths;
mod started;
mod throttle;
