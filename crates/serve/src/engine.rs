//! The engine: carries out the scheduler's turns with a model.

mod outputs;
mod prompt_logprobs;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use moeworks_infer::InferError;
use moeworks_infer::generation::{AnswerText, End, Sampler, TokenLogprobs};
use moeworks_infer::open::Model;
use moeworks_infer::routing_record::{RoutingRecorder, Run};
use moeworks_model::{Decoder, KvType, PagedKvCache, SequencePart, WantedLogits};
use moeworks_moe::MoeSaved;
use moeworks_ops::elementwise::copy_rows;
use moeworks_tensor::{DType, Tensor};

pub use self::outputs::{Output, PromptOutput, WantedLogprobs};
use self::prompt_logprobs::PromptLogprobs;
use crate::experts::{ExpertLoad, Experts, RoutedExperts, Slots};
use crate::rebalance::{RebalanceOptions, Rebalancer};
use crate::scheduler::{Counts, Limits, LimitsError, NewSequence, Refused, Scheduler, SequenceId, Turn, TurnPart};

/// A request for an answer.
#[derive(Debug)]
pub struct Request {
    /// The tokens to go on from.
    pub prompt: Vec<u32>,
    /// Tokens to generate at most.
    pub max_new_tokens: usize,
    /// Draws the tokens, with settings and a seed of this request.
    pub sampler: Sampler,
    /// Texts that end the answer and are not part of it.
    pub stops: Vec<String>,
    /// Tokens that end the answer and have no text in it: usually those of the model.
    pub stop_ids: Vec<u32>,
    /// Lower ones are served first.
    pub priority: i32,
    /// Says whether special tokens are part of the text, as those that say where a call of a tool begins.
    pub shows_special: bool,
    /// Requests of different salts share no keys and values.
    pub salt: Vec<u8>,
    /// The position from which on the experts of its tokens are wanted; none where they are not.
    pub experts_from: Option<usize>,
    /// The log-probabilities that come with the tokens, if any.
    pub logprobs: Option<WantedLogprobs>,
}

/// A failure of the engine.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The limits leave nothing.
    #[error(transparent)]
    Limits(#[from] LimitsError),
    /// The request is not taken.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The model fails.
    #[error(transparent)]
    Model(#[from] InferError),
    /// Experts that are stored in another form than in rows cannot move.
    #[error(
        "the model's experts cannot move between ranks: its file stores them transposed, or with scales apart; leave \
         out --rebalance"
    )]
    CannotMove,
    /// A single answer cannot go on.
    #[error("{why}")]
    Answer {
        /// The reason.
        why: String,
    },
}

/// An answer under way.
struct Answering<'a> {
    sampler: Sampler,
    text: AnswerText<'a>,
    stop_ids: Vec<u32>,
    /// Tokens that it may still get.
    num_left: usize,
    /// The position from which on experts are to be told.
    experts_from: Option<usize>,
    logprobs: Option<WantedLogprobs>,
    /// The log-probabilities of the prompt's tokens as far as they are known, where they are wanted.
    of_prompt: Option<PromptLogprobs>,
    /// Says whether it has no token yet.
    is_new: bool,
}

/// A model that answers many requests at once.
pub struct Engine<'a> {
    model: &'a Model,
    scheduler: Scheduler,
    cache: PagedKvCache,
    answers: HashMap<SequenceId, Answering<'a>>,
    /// The choices of routers; none for a model without MoE layers.
    experts: Option<Experts>,
    /// The part that moves experts between ranks; none where they stay.
    rebalancer: Option<Rebalancer<'a>>,
}

impl<'a> Engine<'a> {
    /// An engine without requests.
    ///
    /// # Errors
    /// If the limits leave nothing, or the model cannot pass sequences of different lengths together.
    pub fn new(model: &'a Model, limits: Limits) -> Result<Self, EngineError> {
        Self::with_kv_type(model, limits, KvType::Activations)
    }

    /// An engine without requests that keeps keys and values in this type. On a GPU it must be that of activations.
    ///
    /// # Errors
    /// As [`Self::new`], and if the rows of the model cannot be kept in this type.
    pub fn with_kv_type(model: &'a Model, limits: Limits, kv_type: KvType) -> Result<Self, EngineError> {
        let config = model.decoder.config();
        model.decoder.check_ragged().map_err(InferError::from)?;
        kv_type.check(config).map_err(InferError::from)?;
        let scheduler = Scheduler::new(limits)?;
        let cache = PagedKvCache::new(config, limits.num_blocks, limits.block_len).with_type(kv_type);
        let experts = Experts::new(model.decoder.config(), limits.num_blocks, limits.block_len);
        let mut engine = Self { model, scheduler, cache, answers: HashMap::new(), experts, rebalancer: None };
        engine.rebalance(RebalanceOptions::default())?;
        Ok(engine)
    }

    /// Lets experts move between ranks from now on. Nothing moves where all are on one rank.
    ///
    /// # Errors
    /// [`EngineError::CannotMove`] if the model's experts cannot move.
    pub fn rebalance(&mut self, options: RebalanceOptions) -> Result<(), EngineError> {
        if let Some(experts) = &self.experts {
            self.rebalancer = Rebalancer::new(self.model, options, experts.load())?;
        }
        Ok(())
    }

    /// Returns the tokens that each expert computes, which are counted as the engine goes on; none for a model
    /// without MoE layers.
    #[must_use]
    pub fn expert_load(&self) -> Option<Arc<ExpertLoad>> {
        self.experts.as_ref().map(|experts| Arc::clone(experts.load()))
    }

    /// Writes the experts of every token that is passed from now on to `recorder`; nothing for a model without MoE
    /// layers. If the file cannot be written, a warning is logged and the recording ends.
    pub fn record_routing(&mut self, recorder: RoutingRecorder) {
        if let Some(experts) = &mut self.experts {
            experts.record_to(recorder);
        }
    }

    /// The bounds of what is done at a time.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        self.scheduler.limits()
    }

    /// Counts of what is waiting and running, for metrics.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.scheduler.counts()
    }

    /// Returns why no more turns can be made, if none can: a rank that holds experts of the model was lost.
    #[must_use]
    pub fn lost(&self) -> Option<String> {
        self.model.lost_rank().map(|error| error.to_string())
    }

    /// Bytes that keys and values take; 0 before the first turn.
    #[must_use]
    pub fn num_cache_bytes(&self) -> usize {
        self.cache.num_bytes()
    }

    /// Returns whether a request is waiting or running.
    #[must_use]
    pub fn has_requests(&self) -> bool {
        self.scheduler.has_sequences()
    }

    /// Takes a request, which waits for its first turn.
    ///
    /// # Errors
    /// If it does not fit, or too many wait.
    pub fn add(&mut self, request: Request) -> Result<SequenceId, EngineError> {
        let Request { prompt, max_new_tokens, mut sampler, stops, stop_ids, priority, .. } = request;
        let Request { shows_special, salt, experts_from, logprobs, .. } = request;
        let len = prompt.len().saturating_add(max_new_tokens);
        self.model.decoder.check_len(len).map_err(InferError::from)?;
        self.model.decoder.check_prompt(&prompt).map_err(InferError::from)?;
        sampler.begin(&prompt);
        let new_text = if shows_special { AnswerText::with_special } else { AnswerText::new };
        let text = new_text(self.model, &prompt, &stops);
        let wanted = logprobs.filter(|wanted| wanted.of_prompt);
        let of_prompt = wanted.map(|wanted| PromptLogprobs::new(&prompt, wanted.num_top));
        // Keys and values of others bring no logits.
        let uses_prefix_cache = of_prompt.is_none();
        let new = NewSequence { prompt, max_new_tokens, priority, salt, adapter: None, uses_prefix_cache };
        let id = self.scheduler.add(new)?;
        let num_left = max_new_tokens;
        let answering =
            Answering { sampler, text, stop_ids, num_left, experts_from, logprobs, of_prompt, is_new: true };
        self.answers.insert(id, answering);
        Ok(id)
    }

    /// Drops a request; its blocks are free at once. Returns whether it was here.
    pub fn cancel(&mut self, id: SequenceId) -> bool {
        self.answers.remove(&id);
        self.scheduler.remove(id)
    }

    /// Makes a turn: passes what the scheduler decides, and draws a token for each sequence that is ready for one.
    ///
    /// # Errors
    /// If the model fails. Its requests are still there, and the turn is lost.
    pub fn turn(&mut self) -> Result<Vec<Output>, EngineError> {
        if let (Some(rebalancer), Some(experts)) = (&mut self.rebalancer, &self.experts) {
            rebalancer.before_turn(experts.load())?;
        }
        let turn = self.scheduler.next_turn();
        if turn.is_empty() {
            return Ok(Vec::new());
        }
        let wanted: Vec<WantedLogits> = turn.parts.iter().map(|part| self.wanted_logits(part)).collect();
        let logits = self.pass(&turn, &wanted)?;
        let (mut outputs, mut row) = (Vec::new(), 0);
        for (part, wanted) in turn.parts.iter().zip(wanted) {
            let num_rows = match wanted {
                WantedLogits::None => 0,
                WantedLogits::Last => 1,
                WantedLogits::All => part.tokens.len(),
            };
            outputs.extend(self.take_rows(&logits, row..row + num_rows, part)?);
            row += num_rows;
        }
        let is_drawn = |output: &&Output| output.failure.is_none();
        let drawn: Vec<_> = outputs.iter().filter(is_drawn).map(|output| (output.sequence, output.token)).collect();
        self.scheduler.complete(&turn, &drawn);
        for output in outputs.iter().filter(|output| output.is_last()) {
            self.cancel(output.sequence);
        }
        Ok(outputs)
    }

    /// The tokens of a part whose logits are needed.
    fn wanted_logits(&self, part: &TurnPart) -> WantedLogits {
        let of_prompt = self.answers.get(&part.sequence).and_then(|answer| answer.of_prompt.as_ref());
        match of_prompt {
            Some(of_prompt) if of_prompt.needs(part) => WantedLogits::All,
            _ if part.draws => WantedLogits::Last,
            _ => WantedLogits::None,
        }
    }

    /// Computes the logits of each part that are wanted, a row each.
    fn pass(&mut self, turn: &Turn, wanted: &[WantedLogits]) -> Result<Tensor, EngineError> {
        let Model { ctx, decoder, weights, .. } = self.model;
        let block_len = self.cache.block_len();
        for copy in &turn.copies {
            self.cache.copy_block(ctx, copy.from, copy.to);
            if let Some(experts) = &mut self.experts {
                experts.record().copy_block(copy.from, copy.to, block_len);
            }
        }
        let parts = turn.parts.iter().zip(wanted).map(|(part, &logits)| sequence_part(part, logits));
        let parts: Vec<SequencePart<'_>> = parts.collect();
        let is_late = ctx.gpu().is_some();
        let mut pass = self.experts.as_mut().map(|experts| experts.begin(slots(decoder, &parts, block_len), is_late));
        let mut tell = |layer: usize, saved: &MoeSaved| {
            if let Some(pass) = &mut pass {
                pass.tell(layer, saved);
            }
        };
        let logits = decoder.forward_ragged(ctx, weights, &mut self.cache, &parts, Some(&mut tell));
        let logits = logits.map_err(InferError::from)?;
        if let Some(pass) = pass {
            pass.finish();
        }
        if let Some(experts) = self.experts.as_mut().filter(|experts| experts.is_recorded()) {
            let (runs, ids) = rows(decoder, &parts, turn);
            experts.write_record(&runs, &ids);
        }
        Ok(logits)
    }

    /// Takes in the logits of a part: the log-probabilities of its prompt, and the next token if it draws one. A
    /// result that is no number fails this request alone.
    fn take_rows(
        &mut self,
        logits: &Tensor,
        rows: Range<usize>,
        part: &TurnPart,
    ) -> Result<Option<Output>, EngineError> {
        let experts = part.draws.then(|| self.experts_of(part)).flatten();
        let num_cached = self.scheduler.num_cached(part.sequence);
        let Some(answer) = self.answers.get_mut(&part.sequence) else { return Ok(None) };
        if let Some(of_prompt) = answer.of_prompt.as_mut().filter(|of_prompt| of_prompt.needs(part)) {
            let width = logits.cols();
            let of_part = &logits.f32s()[rows.start * width..rows.end * width];
            if !of_prompt.add(part, of_part.chunks_exact(width)) {
                return Ok(Some(Output::not_a_number(part.sequence)));
            }
        }
        if !part.draws {
            return Ok(None);
        }
        let mut output = answer.draw(self.model, logits, rows.end - 1, part.sequence)?;
        output.experts = experts;
        if std::mem::take(&mut answer.is_new) {
            let logprobs = answer.of_prompt.take().map(PromptLogprobs::into_found).unwrap_or_default();
            output.prompt = Some(Box::new(PromptOutput { num_cached, logprobs }));
        }
        Ok(Some(output))
    }

    /// The experts of a sequence's tokens up to the end of a part that were not told yet, if they are wanted.
    fn experts_of(&mut self, part: &TurnPart) -> Option<RoutedExperts> {
        let from = self.answers.get_mut(&part.sequence)?.experts_from.as_mut()?;
        let end = part.start + part.tokens.len();
        let positions = *from..end.max(*from);
        *from = positions.end;
        Some(self.experts.as_mut()?.record().read(&part.blocks, positions, self.cache.block_len()))
    }
}

impl Answering<'_> {
    /// Draws the next token from a row of logits.
    fn draw(
        &mut self,
        model: &Model,
        logits: &Tensor,
        row: usize,
        sequence: SequenceId,
    ) -> Result<Output, EngineError> {
        let ctx = &model.ctx;
        let mut own = ctx.empty_on_device(&[1, logits.cols()], DType::F32);
        copy_rows(ctx, logits, row, &mut own, 0, 1);
        let drawn = self.sampler.sample(ctx, &own);
        if drawn.has_nan {
            return Ok(Output::not_a_number(sequence));
        }
        if let Some(failure) = self.sampler.failure() {
            return Ok(Output::failed(sequence, failure));
        }
        let logprobs = self.logprobs.map(|wanted| TokenLogprobs::from_logits(own.f32s(), drawn.id, wanted.num_top));
        self.num_left -= 1;
        let is_stop = self.stop_ids.contains(&drawn.id);
        let mut text = if is_stop { String::new() } else { self.text.push(drawn.id)? };
        let end = match (is_stop, self.text.is_stopped(), self.num_left) {
            (true, ..) => Some(End::StopToken),
            (false, true, _) => Some(End::StopText),
            // A form that is complete ends the answer as a token does.
            (false, false, _) if self.sampler.is_complete() => Some(End::StopToken),
            (false, false, 0) => Some(End::Limit),
            _ => None,
        };
        if end.is_some() {
            text += &self.text.finish()?;
        }
        Ok(Output { token: drawn.id, text, end, logprobs, ..Output::empty(sequence) })
    }
}

/// The places of the tokens of parts, in the order in which a pass goes through them.
fn slots(decoder: &Decoder, parts: &[SequencePart<'_>], block_len: usize) -> Slots {
    let mut slots = Slots::default();
    for part in decoder.ragged_groups(parts).into_iter().flatten().map(|index| &parts[index]) {
        slots.add(part.blocks, part.start..part.start + part.ids.len(), block_len);
    }
    slots
}

/// The runs and the ids of the tokens of a turn's parts, in the order in which a pass goes through them.
fn rows(decoder: &Decoder, parts: &[SequencePart<'_>], turn: &Turn) -> (Vec<Run>, Vec<u32>) {
    let order: Vec<&TurnPart> =
        decoder.ragged_groups(parts).into_iter().flatten().map(|index| &turn.parts[index]).collect();
    let run =
        |part: &&TurnPart| Run { id: part.sequence.0, position: part.start as u32, len: part.tokens.len() as u32 };
    (order.iter().map(run).collect(), order.iter().flat_map(|part| &part.tokens).copied().collect())
}

/// A part of a turn as the model takes it.
fn sequence_part(part: &TurnPart, logits: WantedLogits) -> SequencePart<'_> {
    SequencePart {
        ids: &part.tokens,
        start: part.start,
        blocks: &part.blocks,
        adapter: part.adapter,
        logits,
        expert_ids: &[],
    }
}
