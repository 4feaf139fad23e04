//! The connections of a server, and its end.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use futures_util::future::{Either, select};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};

use super::StopSignal;
use crate::tls::ServerTls;

/// Bytes of the head of a request at most, and lines of it.
const MAX_HEAD_BYTES: usize = 64 << 10;
const MAX_HEADERS: usize = 100;
/// The time between two looks at whether requests have ended.
const POLL: Duration = Duration::from_millis(5);
/// The time between two looks at whether the engine goes on.
const ALIVE_POLL: Duration = Duration::from_millis(100);
/// The time that connections have to send what they still hold.
const CLOSING: Duration = Duration::from_secs(2);
/// The time in which a program that cannot go on still says so to new connections, such as those of probes.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// The pause after a connection that could not be accepted, as where there are no more file descriptors.
const PAUSE: Duration = Duration::from_millis(50);

/// A program that answers requests, as its connections see it.
pub(crate) trait Serving: Send + Sync + 'static {
    /// Connections at a time.
    fn max_connections(&self) -> usize;
    /// The certificate of this program; none where connections are plain.
    fn tls(&self) -> Option<&ServerTls>;
    /// The time that the head of a request takes at most, and the silence on a connection before it.
    fn head_timeout(&self) -> Duration;
    /// The time that requests have to end when the program is told to.
    fn shutdown_timeout(&self) -> Duration;
    /// Returns whether it can answer at all.
    fn is_alive(&self) -> bool;
    /// Takes no further requests.
    fn drain(&self);
    /// Requests under way.
    fn num_requests(&self) -> usize;
    /// Ends the requests under way with errors.
    fn end_requests(&self);
}

/// Serves connections until `stop`, then those requests that are under way.
pub(crate) async fn serve<S: Serving>(listener: TcpListener, router: Router, app: &Arc<S>, stop: &StopSignal) {
    let (closing, is_closing) = watch::channel(false);
    let places = Arc::new(Semaphore::new(app.max_connections()));
    {
        let accepting = pin!(accept(listener, router, app, Arc::clone(&places), is_closing));
        let ending = pin!(end(app, stop));
        select(accepting, ending).await;
    }
    // Whoever receives it is about to end, or has ended.
    let _ = closing.send(true);
    let all = u32::try_from(app.max_connections()).unwrap_or(u32::MAX);
    let _ = tokio::time::timeout(CLOSING, places.acquire_many(all)).await;
}

/// Waits for `stop` or the end of the engine, then for the requests under way, up to the time that they have. Those
/// that are left are ended.
async fn end<S: Serving>(app: &Arc<S>, stop: &StopSignal) {
    while !stop.is_stopped() && app.is_alive() {
        stop.told_within(ALIVE_POLL).await;
    }
    let has_failed = !app.is_alive();
    app.drain();
    let idle = async {
        while app.num_requests() > 0 {
            tokio::time::sleep(POLL).await;
        }
    };
    let _ = tokio::time::timeout(app.shutdown_timeout(), idle).await;
    app.end_requests();
    let told = async {
        while app.num_requests() > 0 {
            tokio::time::sleep(POLL).await;
        }
    };
    let _ = tokio::time::timeout(CLOSING, told).await;
    if has_failed {
        tokio::time::sleep(LAST_WORDS).await;
    }
}

async fn accept<S: Serving>(
    listener: TcpListener,
    router: Router,
    app: &Arc<S>,
    places: Arc<Semaphore>,
    is_closing: watch::Receiver<bool>,
) -> io::Result<()> {
    loop {
        // Further connections wait in the system's queue.
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return Ok(()) };
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let (router, is_closing) = (router.clone(), is_closing.clone());
        let (head_timeout, tls) = (app.head_timeout(), app.tls().cloned());
        tokio::spawn(async move {
            // Tokens are to arrive as they come.
            let _ = stream.set_nodelay(true);
            match tls {
                None => converse(stream, router, head_timeout, is_closing).await,
                Some(tls) => {
                    if let Some(stream) = tls.accept(stream, head_timeout).await {
                        converse(stream, router, head_timeout, is_closing).await;
                    }
                }
            }
            drop(place);
        });
    }
}

/// Serves the requests of a connection, until the client or the server ends.
async fn converse(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    router: Router,
    head_timeout: Duration,
    mut is_closing: watch::Receiver<bool>,
) {
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(head_timeout);
    builder.max_buf_size(MAX_HEAD_BYTES).max_headers(MAX_HEADERS);
    let connection = builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let mut connection = pin!(connection);
    let is_told = {
        let told = pin!(is_closing.wait_for(|is_closing| *is_closing));
        matches!(select(connection.as_mut(), told).await, Either::Right(_))
    };
    if is_told {
        connection.as_mut().graceful_shutdown();
        // What goes wrong on a connection concerns the client alone.
        let _ = connection.await;
    }
}
