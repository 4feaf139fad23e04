//! The engine: carries out the scheduler's turns with a model.

use std::collections::HashMap;
use std::sync::Arc;

use moeworks_infer::InferError;
use moeworks_infer::generation::{AnswerText, End, Sampler};
use moeworks_infer::open::Model;
use moeworks_model::{Decoder, PagedKvCache, SequencePart, WantedLogits};
use moeworks_moe::MoeSaved;
use moeworks_ops::elementwise::copy_rows;
use moeworks_tensor::{DType, Tensor};

use crate::experts::{ExpertLoad, Experts, RoutedExperts, Slots};
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
    /// Requests of different salts share no keys and values.
    pub salt: Vec<u8>,
    /// The position from which on the experts of its tokens are wanted; none where they are not.
    pub experts_from: Option<usize>,
}

/// A token that a turn adds to an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// The request's sequence.
    pub sequence: SequenceId,
    /// The token.
    pub token: u32,
    /// The text that is certain with it; a character of several tokens comes with its last one.
    pub text: String,
    /// Says why the answer is complete, if it is.
    pub end: Option<End>,
    /// The experts, where they are wanted, of tokens that were passed since the last output: with the first token those of the prompt, then
    /// those of the token before. The last token of an answer is not passed.
    pub experts: Option<RoutedExperts>,
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
}

/// A model that answers many requests at once.
pub struct Engine<'a> {
    model: &'a Model,
    scheduler: Scheduler,
    cache: PagedKvCache,
    answers: HashMap<SequenceId, Answering<'a>>,
    /// What routers chose; none for a model without MoE layers.
    experts: Option<Experts>,
}

impl<'a> Engine<'a> {
    /// An engine without requests.
    ///
    /// # Errors
    /// If the limits leave nothing, or the model cannot pass sequences of different lengths together.
    pub fn new(model: &'a Model, limits: Limits) -> Result<Self, EngineError> {
        model.decoder.check_ragged().map_err(InferError::from)?;
        let scheduler = Scheduler::new(limits)?;
        let cache = PagedKvCache::new(model.decoder.config(), limits.num_blocks, limits.block_len);
        let experts = Experts::new(model.decoder.config(), limits.num_blocks, limits.block_len);
        Ok(Self { model, scheduler, cache, answers: HashMap::new(), experts })
    }

    /// Returns the tokens that each expert computes, which are counted as the engine goes on; none for a model without MoE layers.
    #[must_use]
    pub fn expert_load(&self) -> Option<Arc<ExpertLoad>> {
        self.experts.as_ref().map(|experts| Arc::clone(experts.load()))
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

    /// Whether a request is waiting or running.
    #[must_use]
    pub fn has_requests(&self) -> bool {
        self.scheduler.has_sequences()
    }

    /// Takes a request, which waits for its first turn.
    ///
    /// # Errors
    /// If it does not fit, or too many wait.
    pub fn add(&mut self, request: Request) -> Result<SequenceId, EngineError> {
        let Request { prompt, max_new_tokens, mut sampler, stops, stop_ids, priority, salt, experts_from } = request;
        let len = prompt.len().saturating_add(max_new_tokens);
        self.model.decoder.check_len(len).map_err(InferError::from)?;
        self.model.decoder.check_prompt(&prompt).map_err(InferError::from)?;
        sampler.begin(&prompt);
        let text = AnswerText::new(self.model, &prompt, &stops);
        let new = NewSequence { prompt, max_new_tokens, priority, salt, adapter: None, uses_prefix_cache: true };
        let id = self.scheduler.add(new)?;
        self.answers.insert(id, Answering { sampler, text, stop_ids, num_left: max_new_tokens, experts_from });
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
        let turn = self.scheduler.next_turn();
        if turn.is_empty() {
            return Ok(Vec::new());
        }
        let logits = self.pass(&turn)?;
        let mut outputs = Vec::new();
        for (row, part) in turn.parts.iter().filter(|part| part.draws).enumerate() {
            outputs.extend(self.draw(&logits, row, part)?);
        }
        let drawn: Vec<_> = outputs.iter().map(|output| (output.sequence, output.token)).collect();
        self.scheduler.complete(&turn, &drawn);
        for output in outputs.iter().filter(|output| output.end.is_some()) {
            self.cancel(output.sequence);
        }
        Ok(outputs)
    }

    /// The logits behind each part that draws, a row each.
    fn pass(&mut self, turn: &Turn) -> Result<Tensor, EngineError> {
        let Model { ctx, decoder, weights, .. } = self.model;
        let block_len = self.cache.block_len();
        for copy in &turn.copies {
            self.cache.copy_block(ctx, copy.from, copy.to);
            if let Some(experts) = &mut self.experts {
                experts.record().copy_block(copy.from, copy.to, block_len);
            }
        }
        let parts: Vec<SequencePart<'_>> = turn.parts.iter().map(sequence_part).collect();
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
        Ok(logits)
    }

    /// Draws the next token of a sequence from a row of logits; none if its request is gone.
    fn draw(&mut self, logits: &Tensor, row: usize, part: &TurnPart) -> Result<Option<Output>, EngineError> {
        let (ctx, id) = (&self.model.ctx, part.sequence);
        let experts = self.experts_of(part);
        let Some(answer) = self.answers.get_mut(&id) else { return Ok(None) };
        let mut own = ctx.empty_there(&[1, logits.cols()], DType::F32);
        copy_rows(ctx, logits, row, &mut own, 0, 1);
        let drawn = answer.sampler.sample(ctx, &own);
        if drawn.has_nan {
            return Err(self.model.not_a_number().into());
        }
        answer.num_left -= 1;
        let is_stop = answer.stop_ids.contains(&drawn.id);
        let mut text = if is_stop { String::new() } else { answer.text.push(drawn.id)? };
        let end = match (is_stop, answer.text.is_stopped(), answer.num_left) {
            (true, ..) => Some(End::StopToken),
            (false, true, _) => Some(End::StopText),
            (false, false, 0) => Some(End::Limit),
            _ => None,
        };
        if end.is_some() {
            text += &answer.text.finish()?;
        }
        Ok(Some(Output { sequence: id, token: drawn.id, text, end, experts }))
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

/// The places of the tokens of parts, in the order in which a pass goes through them.
fn slots(decoder: &Decoder, parts: &[SequencePart<'_>], block_len: usize) -> Slots {
    let mut slots = Slots::default();
    for part in decoder.ragged_groups(parts).into_iter().flatten().map(|index| &parts[index]) {
        slots.add(part.blocks, part.start..part.start + part.ids.len(), block_len);
    }
    slots
}

/// A part of a turn as the model takes it.
fn sequence_part(part: &TurnPart) -> SequencePart<'_> {
    let logits = if part.draws { WantedLogits::Last } else { WantedLogits::None };
    SequencePart {
        ids: &part.tokens,
        start: part.start,
        blocks: &part.blocks,
        adapter: part.adapter,
        logits,
        expert_ids: &[],
    }
}
