//! The server: connections over HTTP/1.1, and one thread that makes the engine's turns.

pub(crate) mod access;
mod answers;
mod app;
mod base64;
mod choice;
pub(crate) mod connections;
mod driver;
mod failure;
mod forms;
mod loading;
mod logprobs;
mod metrics;
pub(crate) mod moe;
mod page;
mod reply;
pub(crate) mod routes;
mod served;
mod stream;
mod texts;
mod work;

use std::io;
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

pub use access::ApiKeys;
pub use failure::FailureSignal;
pub(crate) use forms::Forms;
pub use forms::NamedForm;
pub use loading::Loading;
pub use metrics::KvCacheInfo;
pub use served::ServedModel;
pub use work::TurnEngine;

use tokio::sync::Notify;

use self::access::Hosts;
use self::app::{App, EngineLink};
use self::driver::Driver;
use self::metrics::Metrics;
use crate::tls::ServerTls;

/// Threads that read and write connections. The engine needs the cores.
const IO_THREADS: usize = 2;
/// Threads that read requests, make tokens of texts and carry templates out.
const READING_THREADS: usize = 4;

/// The options of a server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The keys of clients; none for everybody.
    pub keys: ApiKeys,
    /// The certificate that is shown to clients; none for plain connections.
    pub tls: Option<ServerTls>,
    /// Names in the `Host` header that are accepted besides those of this machine.
    pub allowed_hosts: Vec<String>,
    /// Sequences that are answered at a time.
    pub max_running: usize,
    /// Sequences that wait besides; further ones are refused.
    pub max_waiting: usize,
    /// Blocks of keys and values, for metrics.
    pub num_blocks: usize,
    /// Facts about keys and values, for metrics.
    pub kv_cache: KvCacheInfo,
    /// Stands before the names of metrics.
    pub metrics_prefix: String,
    /// The time that requests have to end when the server is told to.
    pub shutdown_timeout: Duration,
    /// Bytes of a body at most.
    pub max_body_bytes: usize,
    /// Connections at a time.
    pub max_connections: usize,
    /// The time that the head of a request takes at most, and the silence on a connection before it.
    pub head_timeout: Duration,
    /// The time that a body takes at most.
    pub body_timeout: Duration,
    /// The time that an answer takes at most, waiting included; none for no limit.
    pub request_timeout: Option<Duration>,
    /// The silence in a stream after which a comment is sent.
    pub ping_interval: Duration,
    /// Tells the server that its engine cannot go on. The engine's thread may be stuck then.
    pub failure: FailureSignal,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            keys: ApiKeys::default(),
            tls: None,
            allowed_hosts: Vec::new(),
            max_running: 64,
            max_waiting: 1024,
            num_blocks: 0,
            kv_cache: KvCacheInfo::default(),
            metrics_prefix: "moeworks_".to_owned(),
            shutdown_timeout: Duration::from_secs(30),
            max_body_bytes: 10 << 20,
            max_connections: 1024,
            head_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(30),
            request_timeout: None,
            ping_interval: Duration::from_secs(15),
            failure: FailureSignal::default(),
        }
    }
}

/// Tells a server to end. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct StopSignal(Arc<Stop>);

#[derive(Debug, Default)]
struct Stop {
    is_told: AtomicBool,
    notify: Notify,
}

impl StopSignal {
    /// Tells the server to end; returns whether it was not told before.
    pub fn stop(&self) -> bool {
        let was_told = self.0.is_told.swap(true, Ordering::AcqRel);
        self.0.notify.notify_one();
        !was_told
    }

    /// Returns whether the server was told to end.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.0.is_told.load(Ordering::Acquire)
    }

    /// Waits until the server is told, but no longer than this.
    async fn told_within(&self, time: Duration) {
        let _ = tokio::time::timeout(time, self.0.notify.notified()).await;
    }
}

/// Sets a flag when it is dropped, also by a panic.
struct SetOnDrop(Arc<AtomicBool>);

impl Drop for SetOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Serves a model until `stop`, and the requests under way then.
///
/// # Errors
/// If the system gives no threads, the listener cannot be used, or the engine could not go on
/// ([`ServerOptions::failure`]).
///
/// # Panics
/// Passes on a panic of the engine.
pub fn serve(
    listener: TcpListener,
    served: ServedModel,
    engine: impl TurnEngine + Send,
    options: ServerOptions,
    stop: &StopSignal,
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(IO_THREADS)
        .max_blocking_threads(READING_THREADS)
        .enable_all()
        .build()?;
    listener.set_nonblocking(true)?;
    let hosts = Hosts::new(&options.allowed_hosts, listener.local_addr()?);
    let metrics = Metrics::new(&options.metrics_prefix, served.name(), options.num_blocks);
    let metrics = metrics.with_kv_cache(options.kv_cache.clone()).with_experts(engine.expert_load());
    let metrics = Arc::new(metrics);
    let (commands, inbox) = mpsc::channel();
    let is_gone = Arc::new(AtomicBool::new(false));
    let failure = options.failure.clone();
    let link = EngineLink { commands, metrics: Arc::clone(&metrics), is_gone: Arc::clone(&is_gone) };
    let app = Arc::new(App::new(served, options, hosts, link));
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("engine".to_owned()).spawn_scoped(scope, || {
            let _set_on_end = SetOnDrop(is_gone);
            Driver::new(engine, inbox, &metrics, &failure).run();
        })?;
        let served = runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            connections::serve(listener, routes::router(Arc::clone(&app)), &app, stop).await;
            io::Result::Ok(())
        });
        // Without the listener the engine was given no order to end.
        let _ = app.send(driver::Command::Stop);
        runtime.shutdown_timeout(Duration::from_secs(1));
        match thread.join() {
            Ok(()) => failure.reason().map_or(served, |reason| Err(io::Error::other(reason))),
            Err(payload) => std::panic::resume_unwind(payload),
        }
    })
}
