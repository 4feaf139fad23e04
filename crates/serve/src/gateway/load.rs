//! `GET /moe/load` of a gateway: the load of each expert, summed over the replicas.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::header::{AUTHORIZATION, HOST};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::Response;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::Request;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::proxy::{own_headers, response};
use super::replicas::Replica;
use super::{Gateway, no_replica};
use crate::api::ApiError;
use crate::experts::LayerLoad;
use crate::server::moe::{LoadOfModel, load_json};
use crate::server::routes::as_json;

/// Bytes of a replica's load that are read.
const MAX_BYTES: usize = 16 << 20;

/// The answer of a replica.
struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

/// Answers with the sum over the replicas that are ready and say their load. `key` is the client's, which they check.
pub(super) async fn load(gateway: &Gateway, key: Option<&HeaderValue>) -> Result<Response, ApiError> {
    let mut asked = JoinSet::new();
    let replicas = gateway.replicas.all().iter().enumerate();
    for (index, replica) in replicas.filter(|(_, replica)| replica.is_up()) {
        let (replica, key, time) = (Arc::clone(replica), key.cloned(), gateway.options.connect_timeout);
        asked.spawn(async move { Some((index, timeout(time, ask(&replica, key, time)).await.ok()??)) });
    }
    let mut answers: Vec<(usize, Answer)> = asked.join_all().await.into_iter().flatten().collect();
    // The first replica's model is that of all.
    answers.sort_by_key(|(index, _)| *index);
    let mut sum: Option<Sum> = None;
    for load in answers.iter().filter_map(|(_, answer)| Load::read(answer)) {
        match &mut sum {
            None => sum = Some(Sum { load, num_replicas: 1 }),
            Some(sum) => sum.add(&load),
        }
    }
    match (sum, answers.into_iter().next()) {
        (Some(sum), _) => Ok(as_json(&sum.to_json())),
        // A key that replicas refuse is refused.
        (None, Some((_, answer))) => Ok(response(answer.status, answer.headers, answer.body.into())),
        (None, None) => Err(no_replica()),
    }
}

async fn ask(replica: &Replica, key: Option<HeaderValue>, time: Duration) -> Option<Answer> {
    let mut request = Request::get("/moe/load").header(HOST, &replica.endpoint.authority);
    if let Some(key) = key {
        request = request.header(AUTHORIZATION, key);
    }
    let request = request.body(Full::<Bytes>::default()).ok()?;
    let mut answer = replica.client.send(&request, time).await.ok()?;
    let (status, headers) = (answer.response.status(), own_headers(answer.response.headers()));
    let body = Limited::new(answer.body_mut(), MAX_BYTES).collect().await.ok()?.to_bytes();
    answer.finish(&replica.client);
    Some(Answer { status, headers, body })
}

/// The load of a replica.
struct Load {
    model: String,
    top_k: u64,
    layers: Vec<LayerLoad>,
    serving: Serving,
}

/// The figures beside the experts.
#[derive(Clone, Copy, Default)]
struct Serving {
    running: u64,
    waiting: u64,
    kv_cache_usage: f64,
    prompt_tokens: u64,
    generation_tokens: u64,
}

impl Load {
    /// Reads an answer; none where it is not one of this program.
    fn read(answer: &Answer) -> Option<Self> {
        let json: Value = serde_json::from_slice(&answer.body).ok().filter(|_| answer.status.is_success())?;
        let layers: Option<Vec<LayerLoad>> = json["layers"].as_array()?.iter().map(layer).collect();
        let serving = &json["serving"];
        Some(Self {
            model: json["model"].as_str()?.to_owned(),
            top_k: json["top_k"].as_u64()?,
            layers: layers?,
            serving: Serving {
                running: serving["running"].as_u64()?,
                waiting: serving["waiting"].as_u64()?,
                kv_cache_usage: serving["kv_cache_usage"].as_f64()?,
                prompt_tokens: serving["prompt_tokens"].as_u64()?,
                generation_tokens: serving["generation_tokens"].as_u64()?,
            },
        })
    }
}

fn layer(json: &Value) -> Option<LayerLoad> {
    Some(LayerLoad {
        layer: usize::try_from(json["layer"].as_u64()?).ok()?,
        num_tokens: json["tokens"].as_u64()?,
        tokens_per_expert: json["tokens_per_expert"].as_array()?.iter().map(Value::as_u64).collect::<Option<_>>()?,
    })
}

/// The loads of several replicas together.
struct Sum {
    load: Load,
    num_replicas: u64,
}

impl Sum {
    /// Adds the load of another replica. One with other layers or experts serves another model and is left out.
    fn add(&mut self, more: &Load) {
        let shape = |layers: &[LayerLoad]| -> Vec<(usize, usize)> {
            layers.iter().map(|layer| (layer.layer, layer.tokens_per_expert.len())).collect()
        };
        let Load { layers, serving, .. } = &mut self.load;
        if shape(layers) != shape(&more.layers) {
            return;
        }
        self.num_replicas += 1;
        for (sum, more) in layers.iter_mut().zip(&more.layers) {
            sum.num_tokens = sum.num_tokens.saturating_add(more.num_tokens);
            for (sum, more) in sum.tokens_per_expert.iter_mut().zip(&more.tokens_per_expert) {
                *sum = sum.saturating_add(*more);
            }
        }
        serving.running = serving.running.saturating_add(more.serving.running);
        serving.waiting = serving.waiting.saturating_add(more.serving.waiting);
        serving.prompt_tokens = serving.prompt_tokens.saturating_add(more.serving.prompt_tokens);
        serving.generation_tokens = serving.generation_tokens.saturating_add(more.serving.generation_tokens);
        serving.kv_cache_usage += more.serving.kv_cache_usage;
    }

    /// The JSON, as a replica has it, with the number of replicas.
    fn to_json(&self) -> Value {
        let Self { load: Load { model, top_k, layers, serving }, num_replicas } = self;
        let Serving { running, waiting, kv_cache_usage, prompt_tokens, generation_tokens } = *serving;
        let serving = json!({
            "running": running,
            "waiting": waiting,
            "kv_cache_usage": kv_cache_usage / *num_replicas as f64,
            "prompt_tokens": prompt_tokens,
            "generation_tokens": generation_tokens,
        });
        let mut json = load_json(&LoadOfModel { model, top_k: *top_k, layers, ranks: None, serving });
        json["replicas"] = (*num_replicas).into();
        json
    }
}
