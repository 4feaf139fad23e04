//! A conversation: its messages, the part of them that fits in the model's context, and answers.

use std::ops::ControlFlow;

use super::{ChatTemplate, Message, RenderOptions, Sandbox, final_message};
use crate::InferError;
use crate::generation::{Answer, CachedSequence, End, GenerateRequest, Sampler, TokenLimit, TokenLimits, answer};
use crate::open::Model;

/// The most tokens for an answer for which older turns are dropped.
const MAX_ANSWER_ROOM: usize = 1024;
/// The most tokens that an answer leaves for the next turn.
const MAX_NEXT_ROOM: usize = 2048;

/// An error of a turn that has no answer.
#[derive(Debug)]
pub enum TurnError {
    /// The turn is undone, and the conversation can continue.
    Refused(InferError),
    /// The model cannot answer at all.
    Fatal(InferError),
}

/// An event of a turn, as it happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TurnEvent<'a> {
    /// The oldest turns were dropped, because the context is full.
    Forgot {
        /// The number of turns.
        num_turns: usize,
        /// The tokens of the context.
        context: usize,
    },
    /// A token was drawn, and added this text, which may be empty.
    Text(&'a str),
}

/// The reason why an answer ended at a limit that the user did not set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// The model's files recommend the limit.
    ModelLimit,
    /// The next turn needs space.
    NextTurn,
}

/// A turn that was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The answer.
    pub answer: Answer,
    /// Set if the answer ended at a limit that the user did not set.
    pub cut: Option<Cut>,
}

/// Options of a conversation.
#[derive(Clone, Debug, Default)]
pub struct ConversationOptions {
    /// Limits on the tokens of an answer.
    pub limits: TokenLimits,
    /// Texts that end an answer.
    pub stops: Vec<String>,
}

/// A conversation with a model.
pub struct Conversation<'a> {
    model: &'a Model,
    template: ChatTemplate,
    sandbox: Sandbox,
    sampler: Sampler,
    options: ConversationOptions,
    /// The system message as given.
    system: Option<String>,
    messages: Vec<Message>,
    sequence: CachedSequence,
}

impl<'a> Conversation<'a> {
    /// Makes an empty conversation, which is rendered by `template` in `sandbox`.
    #[must_use]
    pub fn new(
        model: &'a Model,
        template: ChatTemplate,
        sandbox: Sandbox,
        sampler: Sampler,
        options: ConversationOptions,
    ) -> Self {
        let sequence = CachedSequence::new(model.decoder.config());
        Self { model, template, sandbox, sampler, options, system: None, messages: Vec::new(), sequence }
    }

    /// Returns the system message, if there is one.
    #[must_use]
    pub fn system(&self) -> Option<&str> {
        self.system.as_deref()
    }

    /// Sets or removes the system message.
    pub fn set_system(&mut self, text: Option<&str>) {
        let start = self.num_system();
        let message = text.map(|text| Message::new("system", self.model.tokenizer.guard(text)));
        self.messages.splice(..start, message);
        self.system = text.map(str::to_owned);
    }

    /// Returns the number of messages before the conversation.
    fn num_system(&self) -> usize {
        usize::from(self.system.is_some())
    }

    /// Returns the messages as the template sees them, the system message first.
    #[must_use]
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// Removes all messages except the system message.
    pub fn clear(&mut self) {
        let start = self.num_system();
        self.messages.truncate(start);
    }

    /// Removes the user's last message and all after it. Returns whether there was one.
    pub fn undo(&mut self) -> bool {
        let last = self.messages.iter().rposition(|message| message.role == "user");
        if let Some(last) = last {
            self.messages.truncate(last);
        }
        last.is_some()
    }

    /// Returns whether there is a message of the user.
    #[must_use]
    pub fn has_turn(&self) -> bool {
        self.messages.iter().any(|message| message.role == "user")
    }

    /// Adds the user's message `text` and generates the answer. `on_event` is called during the answer, and may end
    /// it.
    pub fn say(
        &mut self,
        text: &str,
        on_event: impl FnMut(TurnEvent<'_>) -> ControlFlow<()>,
    ) -> Result<Turn, TurnError> {
        let before = self.messages.clone();
        self.messages.push(Message::new("user", self.model.tokenizer.guard(text)));
        self.answer_or(before, on_event)
    }

    /// Generates another answer to the user's last message.
    pub fn regenerate(&mut self, on_event: impl FnMut(TurnEvent<'_>) -> ControlFlow<()>) -> Result<Turn, TurnError> {
        let before = self.messages.clone();
        let last = self.messages.iter().rposition(|message| message.role == "user");
        self.messages.truncate(last.map_or(0, |last| last + 1));
        self.answer_or(before, on_event)
    }

    /// Generates an answer. If it is refused, the messages are reset to `before`.
    fn answer_or(
        &mut self,
        before: Vec<Message>,
        mut on_event: impl FnMut(TurnEvent<'_>) -> ControlFlow<()>,
    ) -> Result<Turn, TurnError> {
        match self.fitting_prompt(&mut on_event) {
            Ok(prompt) => self.answer(&prompt, on_event).map_err(TurnError::Fatal),
            Err(error) => {
                self.messages = before;
                Err(TurnError::Refused(error))
            }
        }
    }

    fn answer(
        &mut self,
        prompt: &[u32],
        mut on_event: impl FnMut(TurnEvent<'_>) -> ControlFlow<()>,
    ) -> Result<Turn, InferError> {
        let tokenizer = &self.model.tokenizer;
        let max_new_tokens = self.max_new_tokens(prompt.len());
        let request = GenerateRequest { prompt, max_new_tokens, stop_ids: &self.model.stop_ids };
        let on_text = |piece: &str| on_event(TurnEvent::Text(piece));
        let stops = &self.options.stops;
        let answer = answer(self.model, &mut self.sequence, &request, &mut self.sampler, stops, on_text)?;
        let kept = if tokenizer.has_channels() { final_message(&answer.text) } else { &answer.text };
        self.messages.push(Message::new("assistant", tokenizer.guard(kept)));
        let TokenLimits { asked, of_model } = self.options.limits;
        let is_cut = answer.end == End::Limit && asked.is_none();
        let why = if of_model == Some(max_new_tokens) { Cut::ModelLimit } else { Cut::NextTurn };
        Ok(Turn { answer, cut: is_cut.then_some(why) })
    }

    /// Returns the tokens of the context; `None` if it has no limit.
    fn context(&self) -> usize {
        self.model.decoder.config().max_seq_len
    }

    /// Returns the tokens that fit after a prompt.
    fn room(&self, prompt_len: usize) -> usize {
        self.model.decoder.room(prompt_len).min(self.context())
    }

    /// Returns the tokens for an answer for which older turns are dropped.
    fn wanted(&self) -> usize {
        let usual = (self.context() / 4).clamp(1, MAX_ANSWER_ROOM);
        match self.options.limits.asked {
            Some(TokenLimit::Tokens(limit)) => usual.min(limit.max(1)),
            _ => usual,
        }
    }

    /// Returns the most tokens of an answer: the limit that was asked for, or as many as leave space for the next
    /// turn.
    fn max_new_tokens(&self, prompt_len: usize) -> usize {
        let room = self.room(prompt_len);
        match self.options.limits.asked {
            Some(TokenLimit::Tokens(limit)) => limit.min(room),
            Some(TokenLimit::Room) => room,
            None => {
                let leaving_room = room.saturating_sub((self.context() / 2).min(MAX_NEXT_ROOM));
                leaving_room.max(self.wanted().min(room)).min(self.options.limits.of_model.unwrap_or(usize::MAX))
            }
        }
    }

    /// Returns the tokens of the messages, after dropping the oldest turns until an answer fits.
    fn fitting_prompt(
        &mut self,
        on_event: &mut impl FnMut(TurnEvent<'_>) -> ControlFlow<()>,
    ) -> Result<Vec<u32>, InferError> {
        let mut num_turns = 0;
        loop {
            let text = self.sandbox.render(&self.template, &self.messages, &RenderOptions::default())?;
            let prompt = self.model.tokenizer.encode_rendered(&text)?;
            if self.room(prompt.len()) < self.wanted() && self.drop_oldest_turn() {
                num_turns += 1;
                continue;
            }
            let context = self.context();
            if self.room(prompt.len()) == 0 {
                return Err(InferError::LongMessage { len: prompt.len(), context });
            }
            if num_turns > 0 {
                let _ = on_event(TurnEvent::Forgot { num_turns, context });
            }
            return Ok(prompt);
        }
    }

    /// Drops the user's oldest message with its answer, but never the last one. Returns whether there was one.
    fn drop_oldest_turn(&mut self) -> bool {
        let start = self.num_system();
        let later = self.messages.iter().skip(start + 1).position(|message| message.role == "user");
        let Some(count) = later.map(|position| position + 1) else { return false };
        self.messages.drain(start..start + count);
        true
    }
}
