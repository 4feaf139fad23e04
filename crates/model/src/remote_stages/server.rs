//! A rank that computes its stage for the root.

use std::collections::HashMap;

use moeworks_comm::{CommError, Communicator, Pending};
use moeworks_moe::{MoeSaved, RemoteExperts};
use moeworks_ops::Context;
use moeworks_tensor::{DType, Tensor};

use super::message::{CacheUse, Header, PassMessage, TAG_HEADER, TAG_REPORT, TAG_STREAM, TAG_WORDS};
use super::{PATIENCE, ROOT, Sending, report, send, send_stream};
use crate::kv_cache::{KvCache, LayerKv};
use crate::layers::RouterRules;
use crate::layers::layer::ResidualStream;
use crate::layers::segments::Segments;
use crate::mode::Mode;
use crate::paged_kv_cache::PagedKvCache;
use crate::stage::{RoutingHook, Stage};
use crate::weights::DecoderWeights;

/// Computes the layers of `stage` for the root's passes, until the root [ends](super::RemoteStages::end) it. The
/// stage has the number of this rank in `comm`.
///
/// # Errors
/// [`CommError`] if a rank died, hangs, or sends what is no pass.
pub fn serve_stage(
    ctx: &Context,
    stage: &Stage,
    weights: &DecoderWeights,
    comm: &dyn Communicator,
) -> Result<(), CommError> {
    comm.set_timeout(PATIENCE);
    let mut server = Server { ctx, stage, weights, comm, caches: HashMap::new(), sent: Sent::default() };
    while let Some((message, stream)) = server.receive()? {
        let mut numbers = Vec::new();
        let stream = server.forward(&message, stream, &mut numbers);
        if let Some(failure) = stage.remote.as_ref().and_then(RemoteExperts::failure) {
            return Err(failure);
        }
        server.send(&message, stream, numbers)?;
    }
    server.sent.finish()
}

/// A cache of this rank's layers.
enum StageCache {
    Growing(KvCache),
    Paged(PagedKvCache),
}

struct Server<'a> {
    ctx: &'a Context,
    stage: &'a Stage,
    weights: &'a DecoderWeights,
    comm: &'a dyn Communicator,
    /// The caches by the root's numbers.
    caches: HashMap<u32, StageCache>,
    sent: Sent,
}

/// The messages of the last pass, which may still be on their way.
#[derive(Default)]
struct Sent {
    onward: Option<Sending>,
    back: Vec<Pending<Tensor>>,
    report_len: Option<Pending<Vec<u64>>>,
    report: Option<Pending<Vec<f64>>>,
}

impl Sent {
    fn finish(self) -> Result<(), CommError> {
        self.onward.map_or(Ok(()), Sending::finish)?;
        self.back.into_iter().try_for_each(|sent| sent.finish().map(drop))?;
        self.report_len.map_or(Ok(()), |sent| sent.finish().map(drop))?;
        self.report.map_or(Ok(()), |sent| sent.finish().map(drop))
    }
}

impl Server<'_> {
    /// Returns the rank of the next stage; none if this is the last one.
    fn next(&self) -> Option<usize> {
        Some(self.comm.rank() + 1).filter(|&next| next < self.comm.size())
    }

    /// Waits for the next pass; none if there are no more, which the next stage is told.
    fn receive(&self) -> Result<Option<(PassMessage, ResidualStream)>, CommError> {
        let (comm, before) = (self.comm, self.comm.rank() - 1);
        let header = comm.start_receive(vec![0_u32; Header::LEN], before, TAG_HEADER)?.finish_idle()?;
        let header = Header::from_words(&header);
        if header == Header::END {
            self.next().map_or(Ok(()), |next| comm.send(&Header::END.to_words(), next, TAG_HEADER))?;
            return Ok(None);
        }
        let words = comm.start_receive(vec![0_u32; header.num_words as usize], before, TAG_WORDS)?.finish()?;
        let message = PassMessage::from_words(&words);
        let message = message.ok_or_else(|| comm.abort("the stage before sends what is no pass"))?;
        let num_tokens = message.ids.len();
        let tensor = |width: usize| {
            comm.start_receive(self.ctx.empty(&[num_tokens, width], DType::F32), before, TAG_STREAM)?.finish()
        };
        let x = tensor(self.stage.config().width)?;
        let router_logits = (header.logits_width > 0).then(|| tensor(header.logits_width)).transpose()?;
        Ok(Some((message, ResidualStream { x, router_logits })))
    }

    /// Returns the stream after this rank's layers. `numbers` get what their routers decide, if the root wants to
    /// know.
    fn forward(&mut self, message: &PassMessage, stream: ResidualStream, numbers: &mut Vec<f64>) -> ResidualStream {
        message.forgotten.iter().for_each(|number| drop(self.caches.remove(number)));
        let Self { ctx, stage, weights, caches, .. } = self;
        let sequences = message.sequences;
        let rules = RouterRules::plain(&message.ids, &sequences);
        let mut pass = stage.pass(ctx, weights, Mode::Infer, sequences, rules, None);
        if !message.segments.is_empty() {
            let segments = match message.cache {
                CacheUse::Paged { block_len, .. } => Segments::in_blocks(message.segments.clone(), block_len),
                _ => Segments::documents(&message.segments.iter().map(|segment| segment.len).collect::<Vec<_>>()),
            };
            stage.set_segments(&mut pass, segments);
        }
        let layers = cache_of(ctx, stage, caches, &message.cache);
        let mut tell = |layer: usize, saved: &MoeSaved| report::write(numbers, layer, saved);
        let hook = message.is_watched.then_some(&mut tell as RoutingHook<'_>);
        stage.forward_layers(&pass, weights, stream, layers, hook)
    }

    /// Starts to send the stream onward, or back from the last stage, and the decisions to the root.
    fn send(&mut self, message: &PassMessage, stream: ResidualStream, numbers: Vec<f64>) -> Result<(), CommError> {
        std::mem::take(&mut self.sent).finish()?;
        if message.is_watched {
            self.sent.report_len = Some(self.comm.start_send(vec![numbers.len() as u64], ROOT, TAG_REPORT)?);
            let numbers = Some(numbers).filter(|numbers| !numbers.is_empty());
            self.sent.report = numbers.map(|numbers| self.comm.start_send(numbers, ROOT, TAG_REPORT)).transpose()?;
        }
        match self.next() {
            Some(next) => self.sent.onward = Some(send(self.comm, next, message.to_words(), stream)?),
            None => self.sent.back = send_stream(self.comm, ROOT, [Some(stream.x), None])?,
        }
        Ok(())
    }
}

/// Returns the keys and values of all layers in the cache of a pass, which is made if it is not there yet.
fn cache_of<'c>(
    ctx: &Context,
    stage: &Stage,
    caches: &'c mut HashMap<u32, StageCache>,
    cache: &CacheUse,
) -> Option<Vec<LayerKv<'c>>> {
    let config = stage.config();
    match *cache {
        CacheUse::None => None,
        CacheUse::Growing { number, num_sequences, len } => {
            let new = || StageCache::Growing(KvCache::with_sequences(config, num_sequences));
            let StageCache::Growing(cache) = caches.entry(number).or_insert_with(new) else { return None };
            cache.truncate_layers(stage.part().layers.clone(), len);
            Some(cache.layers_mut())
        }
        CacheUse::Paged { number, num_blocks, block_len, kv_type, ref copies } => {
            let new = || StageCache::Paged(PagedKvCache::new(config, num_blocks, block_len).with_type(kv_type));
            let StageCache::Paged(cache) = caches.entry(number).or_insert_with(new) else { return None };
            for copy in copies {
                cache.copy_block(ctx, copy.from, copy.to);
            }
            cache.take_copies();
            Some(cache.layers_mut())
        }
    }
}
