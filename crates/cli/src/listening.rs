//! Listening at an address, and options that servers have in common.

use std::io;
use std::net::TcpListener;
use std::time::Duration;

use crate::failure::Failure;

/// The most seconds of an option.
const MAX_SECONDS: f64 = 86_400.0;

/// The address that `--host` and `--port` name.
pub(crate) struct Address<'a> {
    pub(crate) host: &'a str,
    pub(crate) port: u16,
}

/// Listens at an address.
pub(crate) fn bind(address: &Address<'_>) -> Result<TcpListener, Failure> {
    let Address { host, port } = *address;
    TcpListener::bind((host, port)).map_err(|error| {
        let advice = match error.kind() {
            io::ErrorKind::AddrInUse => "; choose another --port, or 0 for any",
            _ => "",
        };
        Failure::input(format!("--host {host} --port {port}: {error}{advice}"))
    })
}

/// Reads a number of seconds.
pub(crate) fn seconds(option: &str, value: f64) -> Result<Duration, Failure> {
    if !(0.0..=MAX_SECONDS).contains(&value) {
        return Err(Failure::input(format!("{option} {value}: must be from 0 to {MAX_SECONDS} seconds")));
    }
    Ok(Duration::from_secs_f64(value))
}

/// Checks the text that stands before the names of metrics.
pub(crate) fn check_metrics_prefix(prefix: &str) -> Result<(), Failure> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    if !prefix.chars().all(is_name) || prefix.starts_with(|c: char| c.is_ascii_digit()) {
        return Err(Failure::input(format!("--metrics-prefix {prefix:?}: must be letters, digits, _ and :")));
    }
    Ok(())
}
