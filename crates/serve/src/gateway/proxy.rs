//! Passing a request on, and its answer back.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::header::{
    AUTHORIZATION, CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderName, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE,
    TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, request};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use futures_util::future::{Either, select};
use http_body_util::Full;
use serde_json::json;

use super::affinity::Key;
use super::answer::{Begun, begin};
use super::client::ClientError;
use super::load::load;
use super::metrics::count;
use super::replicas::{Chosen, Replica};
use super::{Gateway, Ticket, no_replica};
use crate::api::{ApiError, ErrorKind};
use crate::server::routes::{as_json, read_limited};

/// Headers that concern a connection and not what is said by it (RFC 9110, section 7.6.1).
const OF_CONNECTION: [HeaderName; 7] =
    [CONNECTION, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE];

/// Makes the paths of a gateway: its own, and all others, which are those of the replicas.
pub(super) fn router(gateway: Arc<Gateway>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .route("/moe/load", get(moe_load))
        .fallback(pass_on)
        .layer(from_fn_with_state(Arc::clone(&gateway), let_in))
        .with_state(gateway)
}

/// Lets requests in that mean this gateway.
async fn let_in(State(gateway): State<Arc<Gateway>>, request: Request, next: Next) -> Response {
    match gateway.hosts.check(request.version(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

async fn health() -> Response {
    as_json(&json!({"status": "ok"}))
}

async fn ready(State(gateway): State<Arc<Gateway>>) -> Result<Response, ApiError> {
    gateway.check_ready().map(|()| as_json(&json!({"status": "ready", "replicas": gateway.replicas.num_up()})))
}

async fn metrics(State(gateway): State<Arc<Gateway>>) -> Response {
    let text = gateway.metrics.text(&gateway.replicas, gateway.num_requests.load(Ordering::SeqCst));
    ([(axum::http::header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

async fn moe_load(State(gateway): State<Arc<Gateway>>, request: Request) -> Result<Response, ApiError> {
    let ticket = gateway.begin()?;
    let load = load(&gateway, request.headers().get(AUTHORIZATION)).await;
    drop(ticket);
    load
}

/// A request as each replica that is asked gets it.
struct Outgoing {
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
}

impl Outgoing {
    fn new(head: request::Parts, body: Bytes) -> Self {
        let mut headers = head.headers;
        OF_CONNECTION.iter().chain(&[HOST, CONTENT_LENGTH, EXPECT]).for_each(|name| drop(headers.remove(name)));
        headers.remove("keep-alive");
        let path = head.uri.path_and_query().map_or("/", |path| path.as_str());
        Self { method: head.method, uri: path.parse().unwrap_or_default(), headers, body }
    }

    fn to(&self, replica: &Replica) -> Result<hyper::Request<Full<Bytes>>, ApiError> {
        let mut request = hyper::Request::new(Full::new(self.body.clone()));
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = self.headers.clone();
        let host = HeaderValue::from_str(&replica.endpoint.authority);
        let host = host.map_err(|error| ApiError::new(ErrorKind::Internal, error.to_string()))?;
        request.headers_mut().insert(HOST, host);
        Ok(request)
    }

    /// The key that says which replica is to have it: a page that is read again and again comes from the same one.
    fn key(&self, num_bytes: usize) -> Option<Key> {
        match self.method == Method::POST {
            true => Key::of_body(&self.body, num_bytes),
            false => Some(Key::of("")),
        }
    }
}

async fn pass_on(State(gateway): State<Arc<Gateway>>, request: Request) -> Result<Response, ApiError> {
    let ticket = gateway.begin()?;
    let (head, body) = request.into_parts();
    let body = read_limited(body, gateway.options.max_body_bytes, gateway.options.body_timeout).await?;
    let outgoing = Outgoing::new(head, body);
    let mut is_cut = gateway.is_cut.subscribe();
    let (answer, cut) = (pin!(ask_replicas(&gateway, ticket, &outgoing)), pin!(is_cut.wait_for(|is_cut| *is_cut)));
    match select(answer, cut).await {
        Either::Left((answer, _)) => answer,
        Either::Right(_) => Err(ApiError::new(ErrorKind::Unavailable, "the gateway is shutting down")),
    }
}

/// Asks replicas, one after the other, until one begins to answer.
async fn ask_replicas(gateway: &Arc<Gateway>, ticket: Ticket, outgoing: &Outgoing) -> Result<Response, ApiError> {
    let key = outgoing.key(gateway.options.prefix_bytes);
    let (mut tried, mut num_broken, mut refusal) = (Vec::new(), 0, None);
    while let Some(chosen) = gateway.replicas.choose(key, &tried) {
        tried.push(chosen.index);
        if tried.len() == 1 && key.is_some() && outgoing.method == Method::POST {
            count(if chosen.is_first_choice { &gateway.metrics.kept } else { &gateway.metrics.moved });
        }
        match ask(gateway, &chosen, outgoing).await {
            Ok(begun) if is_refusal(begun.status()) => refusal = Some(begun.response(gateway, None, None)),
            Ok(begun) => {
                count(&gateway.metrics.of(chosen.index).answered);
                return Ok(begun.response(gateway, Some(chosen), Some(ticket)));
            }
            // Nobody saw the request.
            Err(ClientError::Connect) => {}
            // It may be the request that ends replicas: not all of them are to have it.
            Err(ClientError::Broken) if num_broken == gateway.options.retries => break,
            Err(ClientError::Broken) => num_broken += 1,
        }
    }
    count(&gateway.metrics.unanswered);
    refusal.ok_or_else(|| if num_broken > 0 { lost() } else { no_replica() })
}

fn lost() -> ApiError {
    ApiError::new(ErrorKind::Unavailable, "the replica went away before it answered")
}

/// Returns whether another replica may take the request: this one's queue is full, or it ends.
fn is_refusal(status: StatusCode) -> bool {
    status == StatusCode::TOO_MANY_REQUESTS || status == StatusCode::SERVICE_UNAVAILABLE
}

/// Asks one replica, up to the first bytes of its answer.
async fn ask(gateway: &Arc<Gateway>, chosen: &Chosen, outgoing: &Outgoing) -> Result<Begun, ClientError> {
    let Chosen { index, replica, .. } = chosen;
    let request = outgoing.to(replica).map_err(|_| ClientError::Connect)?;
    let begun = begin(gateway, replica, &request).await;
    match &begun {
        Ok(begun) if begun.status() == StatusCode::SERVICE_UNAVAILABLE => drop(replica.set_up(false)),
        Ok(_) => {}
        Err(_) => {
            count(&gateway.metrics.of(*index).failed);
            if replica.set_up(false) {
                tracing::warn!("{} does not answer", replica.endpoint);
            }
        }
    }
    begun
}

/// Takes the headers of a connection out of an answer's.
pub(super) fn own_headers(headers: &HeaderMap) -> HeaderMap {
    let mut own = headers.clone();
    OF_CONNECTION.iter().for_each(|name| drop(own.remove(name)));
    own.remove("keep-alive");
    own
}

/// An answer with a status, headers and a body.
pub(super) fn response(status: StatusCode, headers: HeaderMap, body: Body) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}
