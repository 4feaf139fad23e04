//! The answer of a replica: whole, or a stream that has begun.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use futures_util::future::{Either, select};
use futures_util::stream::unfold;
use http_body_util::{BodyExt as _, Full};
use hyper::Request;
use tokio::sync::watch;
use tokio::time::timeout;

use super::client::{ClientError, ClientResponse};
use super::metrics::count;
use super::proxy::{own_headers, response};
use super::replicas::{Chosen, Replica};
use super::sse::WholeEvents;
use super::{Gateway, Ticket};
use crate::api::{ApiError, ErrorKind};

/// An answer that has begun.
pub(super) struct Begun {
    status: StatusCode,
    headers: HeaderMap,
    body: BegunBody,
}

enum BegunBody {
    Whole(Bytes),
    /// Events that came, and the rest.
    Stream {
        first: Vec<u8>,
        events: WholeEvents,
        rest: Box<ClientResponse>,
    },
}

/// Sends a request to a replica. A whole answer is waited for; a stream up to its first event, so that one that
/// breaks before can be asked for again.
pub(super) async fn begin(
    gateway: &Gateway,
    replica: &Replica,
    request: &Request<Full<Bytes>>,
) -> Result<Begun, ClientError> {
    let time = gateway.options.answer_timeout;
    let sent = replica.client.send(request, gateway.options.connect_timeout);
    let mut answer = timeout(time, sent).await.map_err(|_| ClientError::Broken)??;
    let (status, headers) = (answer.response.status(), own_headers(answer.response.headers()));
    let is_stream = headers.get(CONTENT_TYPE).is_some_and(|value| value.as_bytes().starts_with(b"text/event-stream"));
    if !is_stream {
        let whole = timeout(time, answer.body_mut().collect()).await;
        let whole = whole.ok().and_then(Result::ok).ok_or(ClientError::Broken)?.to_bytes();
        answer.finish(&replica.client);
        return Ok(Begun { status, headers, body: BegunBody::Whole(whole) });
    }
    let mut events = WholeEvents::default();
    loop {
        let piece = timeout(time, next_piece(&mut answer)).await.ok().flatten().ok_or(ClientError::Broken)?;
        let first = events.push(&piece);
        if !first.is_empty() {
            let body = BegunBody::Stream { first, events, rest: Box::new(answer) };
            return Ok(Begun { status, headers, body });
        }
    }
}

/// The next bytes of an answer; none at its end, or where it broke.
async fn next_piece(answer: &mut ClientResponse) -> Option<Bytes> {
    loop {
        match answer.body_mut().frame().await {
            Some(Ok(frame)) => {
                if let Ok(piece) = frame.into_data() {
                    return Some(piece);
                }
            }
            _ => return None,
        }
    }
}

impl Begun {
    pub(super) fn status(&self) -> StatusCode {
        self.status
    }

    /// Passes the answer on. The request counts until its last byte.
    pub(super) fn response(self, gateway: &Arc<Gateway>, chosen: Option<Chosen>, ticket: Option<Ticket>) -> Response {
        let Self { status, headers, body } = self;
        let body = match body {
            BegunBody::Whole(bytes) => Body::from(bytes),
            BegunBody::Stream { first, events, rest } => {
                let (gateway, is_cut) = (Arc::clone(gateway), gateway.is_cut.subscribe());
                let feed =
                    Feed { gateway, chosen, _ticket: ticket, first: Some(first), events, rest: Some(rest), is_cut };
                Body::from_stream(unfold(feed, |mut feed| async {
                    let piece = feed.next().await?;
                    Some((Ok::<_, Infallible>(piece), feed))
                }))
            }
        };
        response(status, headers, body)
    }
}

/// A stream on its way to a client.
struct Feed {
    gateway: Arc<Gateway>,
    chosen: Option<Chosen>,
    _ticket: Option<Ticket>,
    first: Option<Vec<u8>>,
    events: WholeEvents,
    /// The rest of the answer; none once it has ended.
    rest: Option<Box<ClientResponse>>,
    is_cut: watch::Receiver<bool>,
}

impl Feed {
    /// Waits for the next events; none if all is said.
    async fn next(&mut self) -> Option<Bytes> {
        if let Some(first) = self.first.take() {
            return Some(first.into());
        }
        let mut rest = self.rest.take()?;
        let time = self.gateway.options.answer_timeout;
        loop {
            let piece = {
                let piece = pin!(timeout(time, next_piece(&mut rest)));
                let cut = pin!(self.is_cut.wait_for(|is_cut| *is_cut));
                match select(piece, cut).await {
                    Either::Left((piece, _)) => piece.ok().flatten(),
                    Either::Right(_) => return Some(error_event("the gateway is shutting down")),
                }
            };
            let Some(piece) = piece else { break };
            let whole = self.events.push(&piece);
            if !whole.is_empty() {
                self.rest = Some(rest);
                return Some(whole.into());
            }
        }
        if self.events.is_done() {
            if let Some(chosen) = &self.chosen {
                rest.finish(&chosen.replica.client);
            }
            return None;
        }
        if let Some(chosen) = &self.chosen {
            count(&self.gateway.metrics.of(chosen.index).broken);
        }
        Some(error_event("the replica went away while it answered"))
    }
}

/// The event of a stream that ends here.
fn error_event(message: &str) -> Bytes {
    let error = ApiError::new(ErrorKind::Unavailable, message).to_json();
    format!("data: {error}\n\ndata: [DONE]\n\n").into()
}
