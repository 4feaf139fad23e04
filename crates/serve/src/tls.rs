//! TLS of connections, by certificates and keys in files.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};

/// Bytes of a file at most.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// The only protocol that is spoken within TLS.
const ALPN: &[u8] = b"http/1.1";

/// A file that cannot be used, with the reason.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The file cannot be read.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// It is not a file, or too large to be one of certificates.
    #[error("must be a file of at most {MAX_FILE_BYTES} bytes")]
    NoFile,
    /// It has no certificate.
    #[error("has no certificate; it must begin with -----BEGIN CERTIFICATE----- (PEM)")]
    NoCertificate,
    /// It has no key.
    #[error("has no private key without a password; it must have a line -----BEGIN PRIVATE KEY----- (PEM)")]
    NoKey,
    /// The certificate or key cannot be used.
    #[error("{0}")]
    Refused(rustls::Error),
}

/// The side of TLS that has a certificate.
#[derive(Clone)]
pub struct ServerTls(TlsAcceptor);

/// The side of TLS that checks certificates.
#[derive(Clone)]
pub struct ClientTls(TlsConnector);

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ServerTls")
    }
}

impl fmt::Debug for ClientTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClientTls")
    }
}

/// The certificates of a file in PEM, at least one.
///
/// # Errors
/// If the file cannot be read, or has none.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes_of(path)?).collect();
    found.ok().filter(|found| !found.is_empty()).ok_or(TlsError::NoCertificate)
}

/// The first private key of a file in PEM.
///
/// # Errors
/// If the file cannot be read, or has none.
pub fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_slice(&bytes_of(path)?).map_err(|_| TlsError::NoKey)
}

fn bytes_of(path: &Path) -> Result<Vec<u8>, TlsError> {
    let metadata = std::fs::metadata(path)?;
    if !metadata.is_file() || metadata.len() > MAX_FILE_BYTES {
        return Err(TlsError::NoFile);
    }
    Ok(std::fs::read(path)?)
}

impl ServerTls {
    /// Shows these certificates, the server's own first.
    ///
    /// # Errors
    /// If the key is not that of the first certificate, or of a kind that is not known.
    pub fn new(chain: Vec<CertificateDer<'static>>, key: PrivateKeyDer<'static>) -> Result<Self, TlsError> {
        let builder = ServerConfig::builder_with_provider(Arc::new(default_provider()));
        let builder = builder.with_safe_default_protocol_versions().map_err(TlsError::Refused)?;
        let config = builder.with_no_client_auth().with_single_cert(chain, key);
        let mut config = config.map_err(TlsError::Refused)?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }

    /// Makes the first exchange on a connection, which takes this time at most; none if it fails.
    pub(crate) async fn accept(&self, stream: TcpStream, time: Duration) -> Option<server::TlsStream<TcpStream>> {
        tokio::time::timeout(time, self.0.accept(stream)).await.ok()?.ok()
    }
}

impl ClientTls {
    /// Trusts certificates that these have signed, and these themselves.
    ///
    /// # Errors
    /// If one of them cannot be trusted.
    pub fn new(trusted: Vec<CertificateDer<'static>>) -> Result<Self, TlsError> {
        let mut roots = RootCertStore::empty();
        for certificate in trusted {
            roots.add(certificate).map_err(TlsError::Refused)?;
        }
        let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()));
        let builder = builder.with_safe_default_protocol_versions().map_err(TlsError::Refused)?;
        let mut config = builder.with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = vec![ALPN.to_vec()];
        Ok(Self(TlsConnector::from(Arc::new(config))))
    }

    /// Makes the first exchange on a connection to `host`, a name or an address.
    pub(crate) async fn connect(&self, host: &str, stream: TcpStream) -> io::Result<client::TlsStream<TcpStream>> {
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(host).map_err(io::Error::other)?;
        self.0.connect(name, stream).await
    }
}
