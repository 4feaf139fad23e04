//! Answers while a model is loaded: the port is there, and every request gets status 503 until the server takes over.

use std::convert::Infallible;
use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::header::{CONNECTION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;

use crate::api::{ApiError, ErrorKind};
use crate::tls::ServerTls;

/// Connections at a time.
const MAX_CONNECTIONS: usize = 64;
/// The time that the head of a request takes at most.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause after a connection that could not be accepted.
const PAUSE: Duration = Duration::from_millis(50);
/// Seconds after which a client may come again.
const RETRY_SECONDS: HeaderValue = HeaderValue::from_static("1");

/// A server that says that a model is loaded. It ends when it is dropped; connections that come then wait for the one
/// that follows.
pub struct Loading {
    runtime: Option<Runtime>,
}

impl Loading {
    /// Begins to answer the requests of a listener, with the certificate that the server will have.
    ///
    /// # Errors
    /// If the system gives no thread, or the listener cannot be used.
    pub fn begin(listener: &TcpListener, tls: Option<ServerTls>) -> io::Result<Self> {
        let listener = listener.try_clone()?;
        listener.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let guard = runtime.enter();
        let listener = tokio::net::TcpListener::from_std(listener)?;
        drop(guard);
        runtime.spawn(accept(listener, tls));
        Ok(Self { runtime: Some(runtime) })
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_millis(500));
        }
    }
}

async fn accept(listener: tokio::net::TcpListener, tls: Option<ServerTls>) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let tls = tls.clone();
        tokio::spawn(async move {
            match tls {
                None => converse(stream).await,
                Some(tls) => {
                    if let Some(stream) = tls.accept(stream, HEAD_TIMEOUT).await {
                        converse(stream).await;
                    }
                }
            }
            drop(place);
        });
    }
}

async fn converse(stream: impl AsyncRead + AsyncWrite + Unpin) {
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
    // What goes wrong on a connection concerns the client alone.
    let _ = builder.serve_connection(TokioIo::new(stream), service_fn(answer)).await;
}

async fn answer(_: Request<Incoming>) -> Result<Response<String>, Infallible> {
    let error = ApiError::new(ErrorKind::Loading, "the model is loading: try again later");
    let mut response = Response::new(error.to_json().to_string());
    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(RETRY_AFTER, RETRY_SECONDS);
    headers.insert(CONNECTION, HeaderValue::from_static("close"));
    Ok(response)
}
