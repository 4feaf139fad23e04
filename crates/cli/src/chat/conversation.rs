//! A conversation: its messages, what of them fits in the model's context, and its answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use moeworks_model::chat::{ChatTemplate, Message, final_message};
use moeworks_model::generation::{CachedSequence, GenerateRequest, Sampler};

use super::render::render;
use crate::args::TokenLimit;
use crate::failure::Failure;
use crate::generate::{End, Printed, print_answer};
use crate::model::Model;

/// Tokens for an answer, at most, for which older turns are left out.
const MAX_ANSWER_ROOM: usize = 1024;
/// Tokens for the next turn, at most, that an answer leaves.
const MAX_NEXT_ROOM: usize = 2048;

/// Why a turn brought no answer.
pub(super) enum TurnError {
    /// The turn is taken back, and the chat goes on.
    Refused(Failure),
    /// The model cannot answer at all.
    Fatal(Failure),
}

/// A conversation with a model.
pub(super) struct Conversation<'a> {
    pub(super) model: &'a Model,
    pub(super) template: ChatTemplate,
    pub(super) sampler: Sampler,
    /// Tokens of an answer at most, if the user says so.
    pub(super) limit: Option<TokenLimit>,
    /// Tokens of an answer at most, if the model's files say so.
    pub(super) limit_of_model: Option<usize>,
    /// Texts that end an answer.
    pub(super) stops: Vec<String>,
    /// Becomes true at Ctrl-C.
    pub(super) is_asked: Arc<AtomicBool>,
    /// The system message as it was given.
    system: Option<String>,
    messages: Vec<Message>,
    sequence: CachedSequence,
}

impl<'a> Conversation<'a> {
    pub(super) fn new(model: &'a Model, template: ChatTemplate, sampler: Sampler) -> Self {
        Self {
            model,
            template,
            sampler,
            limit: None,
            limit_of_model: None,
            stops: Vec::new(),
            is_asked: Arc::default(),
            system: None,
            messages: Vec::new(),
            sequence: CachedSequence::new(model.decoder.config()),
        }
    }

    /// The system message, if there is one.
    pub(super) fn system(&self) -> Option<&str> {
        self.system.as_deref()
    }

    /// Sets the system message, or takes it away.
    pub(super) fn set_system(&mut self, text: Option<&str>) {
        let start = self.num_system();
        let message = text.map(|text| Message::new("system", self.model.tokenizer.guard(text)));
        self.messages.splice(..start, message);
        self.system = text.map(str::to_owned);
    }

    /// Messages before the conversation.
    fn num_system(&self) -> usize {
        usize::from(self.system.is_some())
    }

    /// Forgets all messages but the system message.
    pub(super) fn clear(&mut self) {
        let start = self.num_system();
        self.messages.truncate(start);
    }

    /// Takes back the last message of the user and all behind it; returns whether there was one.
    pub(super) fn undo(&mut self) -> bool {
        let last = self.messages.iter().rposition(|message| message.role == "user");
        if let Some(last) = last {
            self.messages.truncate(last);
        }
        last.is_some()
    }

    /// Says `text` to the model and prints what it answers.
    pub(super) fn say(&mut self, text: &str) -> Result<Printed, TurnError> {
        let before = self.messages.clone();
        self.messages.push(Message::new("user", self.model.tokenizer.guard(text)));
        self.answer_or(before)
    }

    /// Whether the user has said something.
    pub(super) fn has_turn(&self) -> bool {
        self.messages.iter().any(|message| message.role == "user")
    }

    /// Answers the last message of the user again.
    pub(super) fn regenerate(&mut self) -> Result<Printed, TurnError> {
        let before = self.messages.clone();
        let last = self.messages.iter().rposition(|message| message.role == "user");
        self.messages.truncate(last.map_or(0, |last| last + 1));
        self.answer_or(before)
    }

    /// Answers the messages. Where that is refused they become those `before`.
    fn answer_or(&mut self, before: Vec<Message>) -> Result<Printed, TurnError> {
        let prompt = match self.fitting_prompt() {
            Ok(prompt) => prompt,
            Err(failure) => {
                self.messages = before;
                return Err(TurnError::Refused(failure));
            }
        };
        self.answer(&prompt).map_err(TurnError::Fatal)
    }

    fn answer(&mut self, prompt: &[u32]) -> Result<Printed, Failure> {
        let tokenizer = &self.model.tokenizer;
        let max_new_tokens = self.max_new_tokens(prompt.len());
        let request = GenerateRequest { prompt, max_new_tokens, stop_ids: &self.model.stop_ids };
        let is_asked = || self.is_asked.load(Ordering::Relaxed);
        let answer = print_answer(self.model, &mut self.sequence, &request, &mut self.sampler, &self.stops, is_asked);
        // An error stands on a line of its own.
        println!();
        let answer = answer?;
        let kept = if tokenizer.has_channels() { final_message(&answer.text) } else { &answer.text };
        self.messages.push(Message::new("assistant", tokenizer.guard(kept)));
        if answer.end == End::Limit && self.limit.is_none() {
            let why = match self.limit_of_model {
                Some(limit) if limit == max_new_tokens => "as the model's files recommend",
                _ => "to leave room for the next turn",
            };
            let count = answer.count;
            notice!("(The answer was cut after {count} tokens, {why}; --max-tokens N sets another limit.)");
        }
        Ok(answer)
    }

    /// The tokens of the context; none where it has no limit.
    fn context(&self) -> usize {
        self.model.decoder.config().max_seq_len
    }

    /// Tokens behind a prompt.
    fn room(&self, prompt_len: usize) -> usize {
        self.model.decoder.room(prompt_len).min(self.context())
    }

    /// Tokens for an answer, for which older turns are left out.
    fn wanted(&self) -> usize {
        let usual = (self.context() / 4).clamp(1, MAX_ANSWER_ROOM);
        match self.limit {
            Some(TokenLimit::Tokens(limit)) => usual.min(limit.max(1)),
            _ => usual,
        }
    }

    /// Tokens of an answer at most: those that were asked for, or as many as leave room for the next turn.
    fn max_new_tokens(&self, prompt_len: usize) -> usize {
        let room = self.room(prompt_len);
        match self.limit {
            Some(TokenLimit::Tokens(limit)) => limit.min(room),
            Some(TokenLimit::Room) => room,
            None => {
                let leaving_room = room.saturating_sub((self.context() / 2).min(MAX_NEXT_ROOM));
                leaving_room.max(self.wanted().min(room)).min(self.limit_of_model.unwrap_or(usize::MAX))
            }
        }
    }

    /// The tokens of the messages. The oldest turns are forgotten until there is room for an answer.
    fn fitting_prompt(&mut self) -> Result<Vec<u32>, Failure> {
        let mut num_dropped = 0;
        loop {
            let text = render(&self.template, &self.messages)?;
            let prompt = self.model.tokenizer.encode_rendered(&text)?;
            if self.room(prompt.len()) < self.wanted() && self.drop_oldest_turn() {
                num_dropped += 1;
                continue;
            }
            if self.room(prompt.len()) == 0 {
                let (len, context) = (prompt.len(), self.context());
                return Err(Failure::input(format!(
                    "this message has {len} tokens with what the template puts around it, but the model's context is \
                     {context}: shorten it"
                )));
            }
            if num_dropped > 0 {
                let turns = match num_dropped {
                    1 => "oldest turn was".to_owned(),
                    count => format!("{count} oldest turns were"),
                };
                notice!("(The context of {} tokens is full: the {turns} forgotten.)", self.context());
            }
            return Ok(prompt);
        }
    }

    /// Forgets the oldest message of the user with its answer, but never the last one; returns whether there was one.
    fn drop_oldest_turn(&mut self) -> bool {
        let start = self.num_system();
        let later = self.messages.iter().skip(start + 1).position(|message| message.role == "user");
        let Some(count) = later.map(|position| position + 1) else { return false };
        self.messages.drain(start..start + count);
        true
    }
}
