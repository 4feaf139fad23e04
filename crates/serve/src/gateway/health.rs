//! Looks at the replicas, again and again.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::Request;
use hyper::header::HOST;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::Gateway;
use super::replicas::Replica;

/// Bytes of a replica's answer to a look that are read.
const MAX_BYTES: usize = 64 << 10;

/// Looks at all replicas, for as long as the gateway lives.
pub(super) async fn watch(gateway: Arc<Gateway>) {
    loop {
        tokio::time::sleep(gateway.options.check_interval).await;
        look_at_all(&gateway).await;
    }
}

/// Looks at all replicas once.
pub(super) async fn look_at_all(gateway: &Gateway) {
    let mut looks = JoinSet::new();
    for replica in gateway.replicas.all() {
        looks.spawn(look_at(Arc::clone(replica), gateway.options.connect_timeout));
    }
    while looks.join_next().await.is_some() {}
}

async fn look_at(replica: Arc<Replica>, time: Duration) {
    let is_up = timeout(time, is_ready(&replica, time)).await.unwrap_or(false);
    if replica.set_up(is_up) {
        let endpoint = &replica.endpoint;
        if is_up { tracing::info!("{endpoint} is ready") } else { tracing::warn!("{endpoint} is not ready") }
    }
}

async fn is_ready(replica: &Replica, time: Duration) -> bool {
    let request = Request::get("/ready").header(HOST, &replica.endpoint.authority).body(Full::<Bytes>::default());
    let Ok(request) = request else { return false };
    let Ok(mut answer) = replica.client.send(&request, time).await else { return false };
    let is_ready = answer.response.status().is_success();
    if Limited::new(answer.body_mut(), MAX_BYTES).collect().await.is_ok() {
        answer.finish(&replica.client);
    }
    is_ready
}
