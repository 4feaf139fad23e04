//! Listening at an address, and options that servers have in common.

use std::io;
use std::net::TcpListener;
use std::path::Path;
use std::time::Duration;

use moeworks_serve::tls::{ClientTls, ServerTls, TlsError, certificates, private_key};

use crate::args::TlsArgs;
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

/// Reads the certificate and the key of the command line, if there are any.
pub(crate) fn server_tls(args: &TlsArgs) -> Result<Option<ServerTls>, Failure> {
    let (Some(cert), Some(key)) = (&args.tls_cert, &args.tls_key) else { return Ok(None) };
    let chain = certificates(cert).map_err(|error| of_file("--tls-cert", cert, &error))?;
    let own_key = private_key(key).map_err(|error| of_file("--tls-key", key, &error))?;
    let tls = ServerTls::new(chain, own_key).map_err(|error| {
        let (cert, key) = (cert.display(), key.display());
        Failure::input(format!("--tls-cert {cert} --tls-key {key}: the two do not go together: {error}"))
    });
    tls.map(Some)
}

/// The scheme of the address of a program with this certificate.
pub(crate) fn scheme(tls: Option<&ServerTls>) -> &'static str {
    if tls.is_some() { "https" } else { "http" }
}

/// Reads the certificates that are trusted of servers, if there are any.
pub(crate) fn client_tls(file: Option<&Path>) -> Result<Option<ClientTls>, Failure> {
    let Some(path) = file else { return Ok(None) };
    let tls = certificates(path).and_then(ClientTls::new);
    tls.map(Some).map_err(|error| of_file("--tls-ca", path, &error))
}

fn of_file(option: &str, path: &Path, error: &TlsError) -> Failure {
    Failure::input(format!("{option} {}: {error}", path.display()))
}
