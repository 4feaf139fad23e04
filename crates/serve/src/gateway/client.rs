//! Connections to a replica, which are kept and used again.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::replicas::Endpoint;
use crate::tls::ClientTls;

/// Idle connections that are kept.
const MAX_IDLE: usize = 64;
/// The time that they are kept: less than a server keeps them, so that none is closed while a request is on its way.
const MAX_IDLE_TIME: Duration = Duration::from_secs(10);

/// Makes requests to one server.
pub(crate) struct Client {
    endpoint: Endpoint,
    tls: Option<ClientTls>,
    idle: Mutex<Vec<Idle>>,
}

/// A connection that nobody uses.
struct Idle {
    connection: Connection,
    since: Instant,
}

type Connection = SendRequest<Full<Bytes>>;

/// A request that failed before its answer began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientError {
    /// There is no connection: nothing was sent.
    Connect,
    /// The server went away with the request.
    Broken,
}

/// An answer, with the connection that it comes by.
pub(crate) struct ClientResponse {
    pub(crate) response: Response<Incoming>,
    connection: Connection,
}

impl ClientResponse {
    /// Gives the connection back, where the answer was read to its end.
    pub(crate) fn finish(self, client: &Client) {
        client.keep(self.connection);
    }

    /// The answer's body, with what is needed to give the connection back behind it.
    pub(crate) fn body_mut(&mut self) -> &mut Incoming {
        self.response.body_mut()
    }
}

impl Client {
    pub(crate) fn new(endpoint: Endpoint, tls: Option<ClientTls>) -> Self {
        Self { endpoint, tls, idle: Mutex::new(Vec::new()) }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Idle>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the connections that nobody uses.
    pub(crate) fn forget_idle(&self) {
        self.idle().clear();
    }

    fn keep(&self, connection: Connection) {
        let mut idle = self.idle();
        if !connection.is_closed() && idle.len() < MAX_IDLE {
            idle.push(Idle { connection, since: Instant::now() });
        }
    }

    /// Sends a request and waits for the head of its answer.
    pub(crate) async fn send(
        &self,
        request: &Request<Full<Bytes>>,
        connect_timeout: Duration,
    ) -> Result<ClientResponse, ClientError> {
        while let Some(connection) = self.take_idle() {
            match Self::send_by(connection, request.clone()).await {
                // The server had closed the connection before it saw the request.
                Err(error) if error.is_canceled() => {}
                sent => return sent.map_err(|_| ClientError::Broken),
            }
        }
        let connection = self.connect(connect_timeout).await?;
        Self::send_by(connection, request.clone()).await.map_err(|_| ClientError::Broken)
    }

    fn take_idle(&self) -> Option<Connection> {
        let mut idle = self.idle();
        idle.retain(|one| !one.connection.is_closed() && one.since.elapsed() < MAX_IDLE_TIME);
        idle.pop().map(|one| one.connection)
    }

    async fn send_by(mut connection: Connection, request: Request<Full<Bytes>>) -> hyper::Result<ClientResponse> {
        connection.ready().await?;
        let response = connection.send_request(request).await?;
        Ok(ClientResponse { response, connection })
    }

    async fn connect(&self, time: Duration) -> Result<Connection, ClientError> {
        let connect = async {
            let stream = TcpStream::connect(&self.endpoint.authority).await.ok()?;
            // Requests are to arrive as they come.
            let _ = stream.set_nodelay(true);
            if !self.endpoint.is_tls {
                return speak_http(stream).await;
            }
            let (host, _) = self.endpoint.authority.rsplit_once(':')?;
            speak_http(self.tls.as_ref()?.connect(host, stream).await.ok()?).await
        };
        timeout(time, connect).await.ok().flatten().ok_or(ClientError::Connect)
    }
}

/// Begins HTTP on a connection; none if it is closed.
async fn speak_http(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Option<Connection> {
    let (sender, connection) = handshake(TokioIo::new(stream)).await.ok()?;
    tokio::spawn(async move {
        // Whoever waits for an answer is told what went wrong.
        let _ = connection.await;
    });
    Some(sender)
}
