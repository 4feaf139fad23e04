//! A model in use whose layers are spread over ranks, consecutive layers on each.
//!
//! The root has the embedding, the first layers and the output projection. It decides about each pass, and sends the
//! residual stream after its layers to the next rank, which sends it on after its own; the last rank returns it to
//! the root. The keys and values of a layer are on the rank that has the layer. Logits are those of one rank, to the
//! bit.

mod message;
mod report;
mod server;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use moeworks_comm::{CommError, Communicator, Pending};
use moeworks_ops::Context;
use moeworks_tensor::{DType, Tensor};

use self::message::{CacheUse, Header, PassMessage, TAG_HEADER, TAG_REPORT, TAG_STREAM, TAG_WORDS};
pub use self::server::serve_stage;
use crate::config::ModelConfig;
use crate::kv_cache::{Identity, KvCache};
use crate::layers::layer::ResidualStream;
use crate::layers::{Pass, Sequences};
use crate::paged_kv_cache::{BlockCopy, PagedKvCache};
use crate::stage::RoutingHook;

/// The rank that decides about passes.
const ROOT: usize = 0;

/// The time that ranks wait for each other: requests may come after any time. A process that stands still is found
/// earlier, by the watchdog of the launcher's ranks.
const PATIENCE: Duration = Duration::from_secs(u32::MAX as u64);

/// The root's handle to the ranks that have the other layers of a model in use. Clones share it.
#[derive(Clone)]
pub struct RemoteStages {
    inner: Arc<Inner>,
}

struct Inner {
    comm: Box<dyn Communicator>,
    caches: Mutex<KnownCaches>,
    failure: Mutex<Option<CommError>>,
}

/// The caches that the other ranks have parts of.
#[derive(Default)]
struct KnownCaches {
    next: u32,
    known: Vec<KnownCache>,
}

struct KnownCache {
    number: u32,
    identity: Weak<()>,
}

/// A pass through the other stages under way.
pub(crate) struct StagesPass {
    /// The messages to the next rank.
    sending: Sending,
    /// `[T, D]`: the shape of the stream that comes back.
    shape: [usize; 2],
    is_watched: bool,
}

/// The parts of a message on their way to another rank.
pub(super) struct Sending {
    words: [Pending<Vec<u32>>; 2],
    stream: Vec<Pending<Tensor>>,
}

/// The cache of a pass.
pub(crate) enum PassCache<'a> {
    None,
    Growing(&'a KvCache),
    Paged {
        cache: &'a PagedKvCache,
        /// The copies of blocks to be made before the pass.
        copies: Vec<BlockCopy>,
    },
}

impl RemoteStages {
    /// Creates the handle of the root, which is rank 0 of `comm`; the stages are on its ranks in their order. Panics
    /// on another rank, or if there is one rank.
    #[must_use]
    pub fn new(comm: Box<dyn Communicator>) -> Self {
        assert!(comm.rank() == ROOT && comm.size() > 1, "the root of several stages");
        comm.set_timeout(PATIENCE);
        Self { inner: Arc::new(Inner { comm, caches: Mutex::default(), failure: Mutex::default() }) }
    }

    /// Returns the number of stages, that of the root included.
    #[must_use]
    pub fn num_stages(&self) -> usize {
        self.inner.comm.size()
    }

    /// Returns the first communication error, if any. No pass succeeds after it.
    #[must_use]
    pub fn failure(&self) -> Option<CommError> {
        lock(&self.inner.failure).clone()
    }

    /// Tells the other ranks, from stage to stage, that no more passes come, so that their [`serve_stage`] returns.
    ///
    /// # Errors
    /// [`CommError`] if a rank died or hangs, now or in an earlier pass.
    pub fn end(&self) -> Result<(), CommError> {
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        self.inner.comm.send(&Header::END.to_words(), 1, TAG_HEADER)
    }

    /// Starts to send the stream after the root's layers on its way through the other stages. With `is_watched` the
    /// ranks report what their MoE layers decide.
    ///
    /// # Errors
    /// [`CommError`] if a rank died or hangs, now or in an earlier pass.
    pub(crate) fn send(
        &self,
        pass: &Pass<'_>,
        stream: ResidualStream,
        cache: PassCache<'_>,
        is_watched: bool,
    ) -> Result<StagesPass, CommError> {
        let shape = [stream.x.rows(), stream.x.cols()];
        let message = PassMessage {
            sequences: pass.sequences,
            ids: pass.token_ids().to_vec(),
            segments: pass.segments.iter().flat_map(|segments| segments.as_slice()).cloned().collect(),
            cache: self.cache_use(cache, pass.sequences),
            forgotten: self.forgotten(),
            is_watched,
        };
        let sending = self.attempt(|| send(&*self.inner.comm, 1, message.to_words(), stream))?;
        Ok(StagesPass { sending, shape, is_watched })
    }

    /// Waits for the stream after the last layer of a pass, and shows `hook` the routing of the other ranks' MoE
    /// layers.
    ///
    /// # Errors
    /// [`CommError`] if a rank died or hangs, now or in an earlier pass.
    pub(crate) fn receive(
        &self,
        ctx: &Context,
        config: &ModelConfig,
        pass: StagesPass,
        hook: Option<RoutingHook<'_>>,
    ) -> Result<Tensor, CommError> {
        let StagesPass { sending, shape, is_watched } = pass;
        let (comm, last) = (&*self.inner.comm, self.num_stages() - 1);
        self.attempt(|| {
            sending.finish()?;
            let x = comm.start_receive(ctx.empty(&shape, DType::F32), last, TAG_STREAM)?;
            if is_watched {
                self.receive_reports(ctx, config, hook)?;
            }
            x.finish()
        })
    }

    fn receive_reports(
        &self,
        ctx: &Context,
        config: &ModelConfig,
        mut hook: Option<RoutingHook<'_>>,
    ) -> Result<(), CommError> {
        let comm = &*self.inner.comm;
        for rank in 1..self.num_stages() {
            let mut len = [0_u64];
            comm.receive(&mut len, rank, TAG_REPORT)?;
            if len[0] == 0 {
                continue;
            }
            let mut numbers = vec![0.0_f64; len[0] as usize];
            comm.receive(&mut numbers, rank, TAG_REPORT)?;
            let layers = report::read(ctx, &config.moe(), numbers);
            let layers = layers.ok_or_else(|| comm.abort("a stage reports choices that no router makes"))?;
            for (layer, saved) in layers {
                if let Some(hook) = &mut hook {
                    hook(layer, &saved);
                }
            }
        }
        Ok(())
    }

    fn cache_use(&self, cache: PassCache<'_>, sequences: Sequences) -> CacheUse {
        match cache {
            PassCache::None => CacheUse::None,
            PassCache::Growing(cache) => {
                let number = self.number_of(cache.identity());
                CacheUse::Growing { number, num_sequences: sequences.count, len: sequences.start }
            }
            PassCache::Paged { cache, copies } => {
                let (num_blocks, block_len, kv_type) = (cache.num_blocks(), cache.block_len(), cache.kv_type());
                CacheUse::Paged { number: self.number_of(cache.identity()), num_blocks, block_len, kv_type, copies }
            }
        }
    }

    /// Returns the number by which the other ranks know a cache.
    fn number_of(&self, identity: &Identity) -> u32 {
        let mut caches = lock(&self.inner.caches);
        let is_it = |cache: &&KnownCache| std::ptr::eq(cache.identity.as_ptr(), Arc::as_ptr(identity));
        if let Some(cache) = caches.known.iter().find(is_it) {
            return cache.number;
        }
        let number = caches.next;
        caches.next = number.wrapping_add(1);
        caches.known.push(KnownCache { number, identity: Arc::downgrade(identity) });
        number
    }

    /// Returns the numbers of the caches that are no more, each once.
    fn forgotten(&self) -> Vec<u32> {
        let mut caches = lock(&self.inner.caches);
        let mut forgotten = Vec::new();
        caches.known.retain(|cache| {
            let is_live = cache.identity.strong_count() > 0;
            if !is_live {
                forgotten.push(cache.number);
            }
            is_live
        });
        forgotten
    }

    /// Runs `call` unless a communication failed before, and notes the first failure.
    fn attempt<R>(&self, call: impl FnOnce() -> Result<R, CommError>) -> Result<R, CommError> {
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        call().inspect_err(|error| *lock(&self.inner.failure) = Some(error.clone()))
    }
}

/// Starts to send a pass to rank `to`: its description and the stream.
fn send(comm: &dyn Communicator, to: usize, words: Vec<u32>, stream: ResidualStream) -> Result<Sending, CommError> {
    let ResidualStream { x, router_logits } = stream;
    let header = Header { num_words: words.len() as u32, logits_width: router_logits.as_ref().map_or(0, Tensor::cols) };
    let header = comm.start_send(header.to_words().to_vec(), to, TAG_HEADER)?;
    let words = [header, comm.start_send(words, to, TAG_WORDS)?];
    Ok(Sending { words, stream: send_stream(comm, to, [Some(x), router_logits])? })
}

fn send_stream(
    comm: &dyn Communicator,
    to: usize,
    tensors: [Option<Tensor>; 2],
) -> Result<Vec<Pending<Tensor>>, CommError> {
    tensors.into_iter().flatten().map(|tensor| comm.start_send(tensor, to, TAG_STREAM)).collect()
}

impl Sending {
    fn finish(self) -> Result<(), CommError> {
        self.words.into_iter().try_for_each(|sent| sent.finish().map(drop))?;
        self.stream.into_iter().try_for_each(|sent| sent.finish().map(drop))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for RemoteStages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layers on {} ranks", self.num_stages())
    }
}
