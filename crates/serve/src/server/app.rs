//! The state that all requests share.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use moeworks_infer::constraint::Vocabulary;
use moeworks_model::TokenTable;

use super::ServerOptions;
use super::access::Hosts;
use super::connections::Serving;
use super::driver::Command;
use super::forms::Forms;
use super::metrics::Metrics;
use super::served::ServedModel;
use crate::api::{ApiError, ErrorKind};
use crate::tls::ServerTls;

/// The state that all requests share.
pub(crate) struct App {
    pub(crate) served: ServedModel,
    pub(crate) options: ServerOptions,
    pub(crate) hosts: Hosts,
    pub(crate) metrics: Arc<Metrics>,
    /// Seconds since the beginning of 1970 at which the server began.
    pub(crate) created: u64,
    pub(crate) load: Load,
    commands: Mutex<Sender<Command>>,
    /// The bytes of tokens, made when they are first asked for.
    tokens: OnceLock<Arc<TokenTable>>,
    pub(crate) forms: Forms,
    /// Set where no further requests are taken.
    is_draining: AtomicBool,
    /// Set where the engine's thread has ended.
    is_engine_gone: Arc<AtomicBool>,
    /// Makes ids of requests: nobody is to guess those of others.
    id_key: [u8; 32],
    next_id: AtomicU64,
}

/// The requests and sequences under way.
#[derive(Debug, Default)]
pub(crate) struct Load {
    requests: AtomicUsize,
    sequences: AtomicUsize,
}

/// The parts of the state that the engine's thread shares.
pub(crate) struct EngineLink {
    pub(crate) commands: Sender<Command>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) is_gone: Arc<AtomicBool>,
}

impl App {
    pub(crate) fn new(served: ServedModel, options: ServerOptions, hosts: Hosts, link: EngineLink) -> Self {
        Self {
            served,
            options,
            hosts,
            metrics: link.metrics,
            created: now(),
            load: Load::default(),
            commands: Mutex::new(link.commands),
            tokens: OnceLock::new(),
            forms: Forms::default(),
            is_draining: AtomicBool::new(false),
            is_engine_gone: link.is_gone,
            id_key: random_key(),
            next_id: AtomicU64::new(0),
        }
    }

    /// The bytes of the model's tokens. The first call takes a while.
    pub(crate) fn tokens(&self) -> Arc<TokenTable> {
        Arc::clone(self.tokens.get_or_init(|| Arc::new(self.served.model.tokenizer.token_table())))
    }

    /// The tokens as forms look at them. The first call takes a while.
    pub(crate) fn vocabulary(&self) -> Arc<Vocabulary> {
        self.forms.vocabulary(|| self.tokens())
    }

    /// Checks that requests are taken.
    pub(crate) fn check_ready(&self) -> Result<(), ApiError> {
        let unavailable = |message| Err(ApiError::new(ErrorKind::Unavailable, message));
        match (self.is_alive(), self.is_draining.load(Ordering::SeqCst)) {
            (false, _) => Err(ApiError::new(ErrorKind::Unavailable, self.why_not_alive())),
            (_, true) => unavailable("the server is shutting down"),
            _ => Ok(()),
        }
    }

    /// Why the engine does not answer, where it does not.
    pub(crate) fn why_not_alive(&self) -> String {
        self.options.failure.reason().unwrap_or_else(|| "the engine has ended".to_owned())
    }

    /// Begins a request. It counts until the ticket is dropped.
    pub(crate) fn begin(self: &Arc<Self>) -> Result<Ticket, ApiError> {
        let ticket = Ticket { app: Arc::clone(self), num_sequences: 0 };
        self.load.requests.fetch_add(1, Ordering::SeqCst);
        // After it counts, so that a server that ends either waits for it or refuses it.
        self.check_ready()?;
        self.check_room(1)?;
        Ok(ticket)
    }

    /// Sequences under way at most.
    fn most_sequences(&self) -> usize {
        self.options.max_running.saturating_add(self.options.max_waiting)
    }

    fn check_room(&self, count: usize) -> Result<(), ApiError> {
        let most = self.most_sequences();
        if count > most {
            let message = format!("{count} answers in one request: this server takes at most {most} at a time");
            return Err(ApiError::new(ErrorKind::Invalid, message).of("n"));
        }
        if self.load.sequences.load(Ordering::Acquire).saturating_add(count) > most {
            return Err(ApiError::new(ErrorKind::QueueFull, "too many requests are waiting: try again later"));
        }
        Ok(())
    }

    /// Sends an order to the engine.
    pub(crate) fn send(&self, command: Command) -> Result<(), ApiError> {
        let commands = self.commands.lock().unwrap_or_else(PoisonError::into_inner);
        commands.send(command).map_err(|_| ApiError::new(ErrorKind::Unavailable, "the engine has ended"))
    }

    /// A new id of 24 digits.
    pub(crate) fn new_id(&self, prefix: &str) -> String {
        let number = self.next_id.fetch_add(1, Ordering::Relaxed);
        let hash = blake3::keyed_hash(&self.id_key, &number.to_le_bytes());
        format!("{prefix}-{}", &hash.to_hex()[..24])
    }

    /// A new seed of random numbers.
    pub(crate) fn new_seed(&self) -> u64 {
        let number = self.next_id.fetch_add(1, Ordering::Relaxed);
        let hash = blake3::keyed_hash(&self.id_key, &[&number.to_le_bytes()[..], b"seed"].concat());
        hash.as_bytes().iter().take(8).fold(0, |seed, &byte| seed << 8 | u64::from(byte))
    }
}

impl Serving for App {
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

    /// Returns whether the engine answers.
    fn is_alive(&self) -> bool {
        !self.is_engine_gone.load(Ordering::Acquire) && self.options.failure.reason().is_none()
    }

    fn drain(&self) {
        self.is_draining.store(true, Ordering::SeqCst);
    }

    fn num_requests(&self) -> usize {
        self.load.requests.load(Ordering::SeqCst)
    }

    fn end_requests(&self) {
        // An engine that has ended needs no order.
        let _ = self.send(Command::Stop);
    }
}

/// Seconds since the beginning of 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}

/// A request under way, with its sequences. They count until it is dropped.
pub(crate) struct Ticket {
    app: Arc<App>,
    num_sequences: usize,
}

impl Ticket {
    pub(crate) fn app(&self) -> &Arc<App> {
        &self.app
    }

    /// Takes room for sequences.
    ///
    /// # Errors
    /// If too many are under way.
    pub(crate) fn take(&mut self, count: usize) -> Result<(), ApiError> {
        self.app.check_room(count)?;
        let before = self.app.load.sequences.fetch_add(count, Ordering::AcqRel);
        self.num_sequences += count;
        // Another request may have taken the room since.
        if before.saturating_add(count) > self.app.most_sequences() { self.app.check_room(0) } else { Ok(()) }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.app.load.sequences.fetch_sub(self.num_sequences, Ordering::AcqRel);
        self.app.load.requests.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Bytes that nobody else knows: the standard library takes those of its tables from the system.
fn random_key() -> [u8; 32] {
    use std::hash::{BuildHasher as _, RandomState};
    let mut hasher = blake3::Hasher::new();
    for number in 0..8_u64 {
        hasher.update(&RandomState::new().hash_one(number).to_le_bytes());
    }
    *hasher.finalize().as_bytes()
}
