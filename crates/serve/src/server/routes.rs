//! The paths of the API.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::http::header::{CACHE_CONTROL, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::StreamExt as _;
use serde_json::{Value, json};

use super::answers::Job;
use super::app::App;
use super::connections::Serving as _;
use super::{moe, page, stream, texts};
use crate::api::{ApiError, ErrorKind, openapi, quoted};

/// The header with the id of a request, as it stands in the log.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Seconds after which a client that was sent away may come again.
const RETRY_SECONDS: HeaderValue = HeaderValue::from_static("1");

/// The hash of the key that a request came with.
#[derive(Clone, Copy)]
struct Tenant(Option<blake3::Hash>);

/// The id of a request, for logs.
#[derive(Clone, Debug)]
struct RequestId(String);

/// Makes the paths of the API.
pub(crate) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/", get(page::page))
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat_completions))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/tokenizer_info", get(tokenizer_info))
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/version", get(version))
        .route("/openapi.json", get(openapi))
        .route("/metrics", get(metrics))
        .route("/moe/load", get(moe_load))
        .fallback(no_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(Arc::clone(&app), let_in))
        .with_state(app)
}

/// Lets requests in that mean this server and have a key; probes and the page, which asks for one itself, need none.
async fn let_in(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let (since, id) = (Instant::now(), RequestId(app.new_id("req")));
    let (method, path) = (request.method().to_string(), quoted(request.uri().path()));
    let mut response = pass(&app, request, next, id.clone()).await;
    let (status, seconds, request) = (response.status().as_u16(), since.elapsed().as_secs_f64(), &id.0);
    tracing::info!(request, method, path, status, seconds, "request");
    // It is made of digits and letters.
    if let Ok(value) = HeaderValue::from_str(&id.0) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}

async fn pass(app: &App, mut request: Request, next: Next, id: RequestId) -> Response {
    let checked = app.hosts.check(request.version(), request.headers()).and_then(|()| {
        let is_open = matches!(request.uri().path(), "/health" | "/ready" | "/");
        if is_open { Ok(None) } else { app.options.keys.check(request.headers()) }
    });
    match checked {
        Ok(tenant) => {
            request.extensions_mut().insert(Tenant(tenant));
            request.extensions_mut().insert(id);
            next.run(request).await
        }
        Err(error) => error.into_response(),
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.kind.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, as_json(&self.to_json())).into_response();
        let headers = response.headers_mut();
        match self.kind {
            ErrorKind::QueueFull | ErrorKind::Unavailable | ErrorKind::Loading => {
                drop(headers.insert(RETRY_AFTER, RETRY_SECONDS));
            }
            ErrorKind::WrongKey => drop(headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"))),
            // What is left of the body is not read.
            ErrorKind::LargeBody | ErrorKind::Timeout | ErrorKind::MediaType => {
                headers.insert(CONNECTION, HeaderValue::from_static("close"));
            }
            _ => {}
        }
        response
    }
}

pub(crate) fn as_json(value: &Value) -> Response {
    ([(CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

async fn no_route(request: Request) -> ApiError {
    ApiError::new(ErrorKind::NoRoute, format!("there is nothing at {}", quoted(request.uri().path())))
}

async fn wrong_method(request: Request) -> ApiError {
    let (method, path) = (request.method().as_str(), request.uri().path());
    ApiError::new(ErrorKind::WrongMethod, format!("{} does not take {}", quoted(path), quoted(method)))
}

/// Reads a body of JSON, up to the server's limits of size and time.
async fn read_body(app: &App, request: Request) -> Result<Bytes, ApiError> {
    let content_type = request.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let media_type = content_type.split(';').next().unwrap_or_default().trim();
    // A page of another site can send other types without asking.
    if !media_type.eq_ignore_ascii_case("application/json") {
        let message = format!("Content-Type {}: must be application/json", quoted(media_type));
        return Err(ApiError::new(ErrorKind::MediaType, message));
    }
    let most = app.options.max_body_bytes;
    let length = request.headers().get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if length.is_some_and(|length| length > most as u64) {
        return Err(too_large(most));
    }
    read_limited(request.into_body(), most, app.options.body_timeout).await
}

fn too_large(most: usize) -> ApiError {
    ApiError::new(ErrorKind::LargeBody, format!("the body is larger than {most} bytes"))
}

/// Reads a body of at most `most` bytes in at most `time`.
pub(crate) async fn read_limited(body: Body, most: usize, time: Duration) -> Result<Bytes, ApiError> {
    let read = async {
        let (mut pieces, mut body) = (body.into_data_stream(), Vec::new());
        while let Some(piece) = pieces.next().await {
            let piece =
                piece.map_err(|_| ApiError::new(ErrorKind::Invalid, "the body: ended early or is malformed"))?;
            if body.len() + piece.len() > most {
                return Err(too_large(most));
            }
            body.extend_from_slice(&piece);
        }
        Ok(Bytes::from(body))
    };
    let seconds = time.as_secs();
    let late = |_| ApiError::new(ErrorKind::Timeout, format!("the body took longer than {seconds} seconds"));
    tokio::time::timeout(time, read).await.map_err(late)?
}

/// Does work that takes a while on a thread of its own.
async fn on_thread<T: Send + 'static>(
    app: &Arc<App>,
    work: impl FnOnce(&App) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let app = Arc::clone(app);
    let done = tokio::task::spawn_blocking(move || work(&app)).await;
    done.unwrap_or_else(|_| Err(ApiError::new(ErrorKind::Internal, "the request could not be read: this is a bug")))
}

/// Reads a request.
type Reader = fn(&App, &[u8], Option<blake3::Hash>) -> Result<Job, ApiError>;

async fn completions(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    answer(app, request, Job::completion).await
}

async fn chat_completions(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    answer(app, request, Job::chat).await
}

async fn answer(app: Arc<App>, request: Request, read: Reader) -> Result<Response, ApiError> {
    let since = Instant::now();
    let ticket = app.begin()?;
    let tenant = request.extensions().get::<Tenant>().and_then(|tenant| tenant.0);
    let request_id = request.extensions().get::<RequestId>().cloned();
    let body = read_body(&app, request).await?;
    let job = on_thread(&app, move |app| read(app, &body, tenant)).await?;
    let request_id = request_id.map_or_else(String::new, |id| id.0);
    tracing::info!(request = request_id, id = job.envelope.id, "begun");
    let mut answers = job.begin(ticket, since).await?;
    if answers.common.is_stream {
        let headers = [(CONTENT_TYPE, "text/event-stream; charset=utf-8"), (CACHE_CONTROL, "no-cache")];
        let events = stream::events(answers, app.options.ping_interval);
        return Ok((headers, Body::from_stream(events)).into_response());
    }
    while answers.next().await?.is_some() {}
    Ok(as_json(&answers.envelope.whole(&answers.choices, answers.usage)))
}

async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    app.check_ready()?;
    let body = read_body(&app, request).await?;
    Ok(as_json(&on_thread(&app, move |app| texts::tokenize(&app.served, &body)).await?))
}

async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    app.check_ready()?;
    let body = read_body(&app, request).await?;
    Ok(as_json(&on_thread(&app, move |app| texts::detokenize(&app.served, &body)).await?))
}

async fn tokenizer_info(State(app): State<Arc<App>>) -> Response {
    as_json(&texts::tokenizer_info(&app.served))
}

/// The JSON of a name of the model.
fn model_json(app: &App, name: &str) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": app.created,
        "owned_by": "moeworks",
        "root": app.served.name(),
        "parent": null,
        "max_model_len": app.served.context(),
    })
}

async fn models(State(app): State<Arc<App>>) -> Response {
    let models: Vec<Value> = app.served.names.iter().map(|name| model_json(&app, name)).collect();
    as_json(&json!({"object": "list", "data": models}))
}

async fn model(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Response, ApiError> {
    app.served.check_name(Some(&name))?;
    Ok(as_json(&model_json(&app, &name)))
}

async fn health(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    match app.is_alive() {
        true => Ok(as_json(&json!({"status": "ok"}))),
        false => Err(ApiError::new(ErrorKind::Unavailable, app.why_not_alive())),
    }
}

async fn ready(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    app.check_ready().map(|()| as_json(&json!({"status": "ready"})))
}

async fn openapi() -> Response {
    as_json(&openapi::document())
}

async fn version() -> Response {
    as_json(&json!({"version": env!("CARGO_PKG_VERSION")}))
}

async fn moe_load(State(app): State<Arc<App>>) -> Response {
    as_json(&moe::load(&app))
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], app.metrics.text()).into_response()
}
