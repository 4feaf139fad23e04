//! A gateway: one address before several servers of the same model.
//!
//! A request goes to the replica that is likeliest to have the beginning of its prompt in its prefix cache, unless
//! that one has much more under way than the others. It is sent again only where its answer has not begun; a stream
//! that breaks ends with an error event.

mod affinity;
mod answer;
mod client;
mod health;
mod load;
mod metrics;
mod proxy;
mod replicas;
mod sse;
#[cfg(test)]
mod tests;

use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::watch;

pub use replicas::{Endpoint, EndpointError};

use crate::api::{ApiError, ErrorKind};
use crate::server::StopSignal;
use crate::server::access::Hosts;
use crate::server::connections::{self, Serving};
use crate::tls::{ClientTls, ServerTls};
use metrics::Metrics;
use replicas::Replicas;

/// Threads that pass bytes on.
const IO_THREADS: usize = 2;

/// The options of a gateway.
#[derive(Clone, Debug)]
pub struct GatewayOptions {
    /// The servers; at least one.
    pub replicas: Vec<Endpoint>,
    /// The certificate that is shown to clients; none for plain connections.
    pub tls: Option<ServerTls>,
    /// The certificates that are trusted of servers at `https://`; without them there is no connection to these.
    pub replica_tls: Option<ClientTls>,
    /// Names in the `Host` header that are accepted besides those of this machine.
    pub allowed_hosts: Vec<String>,
    /// Stands before the names of metrics.
    pub metrics_prefix: String,
    /// Bytes of a prompt's beginning that decide which replica has it; 0 for none.
    pub prefix_bytes: usize,
    /// Requests under way at most; further ones get status 429.
    pub max_requests: usize,
    /// Further replicas that get a request whose replica went away before it began to answer.
    pub retries: usize,
    /// The time between two looks at a replica.
    pub check_interval: Duration,
    /// The time that a replica has to take a connection, or to say that it is ready.
    pub connect_timeout: Duration,
    /// The silence of a replica after which its answer counts as broken.
    pub answer_timeout: Duration,
    /// The time that requests have to end when the gateway is told to.
    pub shutdown_timeout: Duration,
    /// Bytes of a body at most.
    pub max_body_bytes: usize,
    /// Connections at a time.
    pub max_connections: usize,
    /// The time that the head of a request takes at most, and the silence on a connection before it.
    pub head_timeout: Duration,
    /// The time that a body takes at most.
    pub body_timeout: Duration,
}

impl Default for GatewayOptions {
    fn default() -> Self {
        Self {
            replicas: Vec::new(),
            tls: None,
            replica_tls: None,
            allowed_hosts: Vec::new(),
            metrics_prefix: "moeworks_".to_owned(),
            prefix_bytes: 1024,
            max_requests: 4096,
            retries: 1,
            check_interval: Duration::from_secs(1),
            connect_timeout: Duration::from_secs(2),
            answer_timeout: Duration::from_secs(600),
            shutdown_timeout: Duration::from_secs(30),
            max_body_bytes: 10 << 20,
            max_connections: 4096,
            head_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(30),
        }
    }
}

/// The state that all requests share.
pub(crate) struct Gateway {
    options: GatewayOptions,
    hosts: Hosts,
    replicas: Arc<Replicas>,
    metrics: Metrics,
    num_requests: AtomicUsize,
    is_draining: AtomicBool,
    /// True once what is left is to end.
    is_cut: watch::Sender<bool>,
}

/// A request under way. It counts until it is dropped.
pub(crate) struct Ticket(Arc<Gateway>);

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.num_requests.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Gateway {
    fn new(options: GatewayOptions, hosts: Hosts) -> Self {
        let replicas = Arc::new(Replicas::new(&options.replicas, options.replica_tls.as_ref()));
        let metrics = Metrics::new(&options.metrics_prefix, options.replicas.len());
        Self {
            options,
            hosts,
            replicas,
            metrics,
            num_requests: AtomicUsize::new(0),
            is_draining: AtomicBool::new(false),
            is_cut: watch::Sender::new(false),
        }
    }

    /// Begins a request.
    fn begin(self: &Arc<Self>) -> Result<Ticket, ApiError> {
        let before = self.num_requests.fetch_add(1, Ordering::SeqCst);
        let ticket = Ticket(Arc::clone(self));
        // After it counts, so that a gateway that ends either waits for it or refuses it.
        if self.is_draining.load(Ordering::SeqCst) {
            return Err(ApiError::new(ErrorKind::Unavailable, "the gateway is shutting down"));
        }
        if before >= self.options.max_requests {
            metrics::count(&self.metrics.refused);
            return Err(ApiError::new(ErrorKind::QueueFull, "too many requests are under way: try again later"));
        }
        Ok(ticket)
    }

    /// Checks that requests are taken and somebody can answer them.
    fn check_ready(&self) -> Result<(), ApiError> {
        if self.is_draining.load(Ordering::SeqCst) {
            return Err(ApiError::new(ErrorKind::Unavailable, "the gateway is shutting down"));
        }
        if self.replicas.num_up() == 0 { Err(no_replica()) } else { Ok(()) }
    }
}

fn no_replica() -> ApiError {
    ApiError::new(ErrorKind::Unavailable, "no replica is ready")
}

impl Serving for Gateway {
    fn max_connections(&self) -> usize {
        self.options.max_connections
    }

    fn tls(&self) -> Option<&ServerTls> {
        self.options.tls.as_ref()
    }

    fn head_timeout(&self) -> Duration {
        self.options.head_timeout
    }

    fn shutdown_timeout(&self) -> Duration {
        self.options.shutdown_timeout
    }

    fn is_alive(&self) -> bool {
        true
    }

    fn drain(&self) {
        self.is_draining.store(true, Ordering::SeqCst);
    }

    fn num_requests(&self) -> usize {
        self.num_requests.load(Ordering::SeqCst)
    }

    fn end_requests(&self) {
        self.is_cut.send_replace(true);
    }
}

/// Passes requests on until `stop`, and those under way then.
///
/// # Errors
/// If the system gives no threads, or the listener cannot be used.
pub fn serve(listener: TcpListener, options: GatewayOptions, stop: &StopSignal) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(IO_THREADS).enable_all().build()?;
    listener.set_nonblocking(true)?;
    let hosts = Hosts::new(&options.allowed_hosts, listener.local_addr()?);
    let gateway = Arc::new(Gateway::new(options, hosts));
    let served = runtime.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        // The first look comes before the first request.
        health::look_at_all(&gateway).await;
        tokio::spawn(health::watch(Arc::clone(&gateway)));
        connections::serve(listener, proxy::router(Arc::clone(&gateway)), &gateway, stop).await;
        io::Result::Ok(())
    });
    runtime.shutdown_timeout(Duration::from_secs(1));
    served
}
