//! A conversation: its messages, what of them fits in the model's context, and its answers.

use std::ops::ControlFlow;

use super::{ChatTemplate, Message, RenderOptions, Sandbox, final_message};
use crate::InferError;
use crate::generation::{Answer, CachedSequence, End, GenerateRequest, Sampler, TokenLimit, TokenLimits, answer};
use crate::open::Model;

/// Tokens for an answer, at most, for which older turns are left out.
const MAX_ANSWER_ROOM: usize = 1024;
/// Tokens for the next turn, at most, that an answer leaves.
const MAX_NEXT_ROOM: usize = 2048;

/// An error of a turn that brought no answer.
#[derive(Debug)]
pub enum TurnError {
    /// The turn is taken back, and the conversation goes on.
    Refused(InferError),
    /// The model cannot answer at all.
    Fatal(InferError),
}

/// An event of a turn, as it happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TurnEvent<'a> {
    /// The oldest turns were forgotten, because the context is full.
    Forgot {
        /// The turns.
        num_turns: usize,
        /// Tokens of the context.
        context: usize,
    },
    /// A token came, and with it this text, which may be empty.
    Text(&'a str),
}

/// The reason why an answer ended at a limit that nobody asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// The model's files recommend the limit.
    ModelLimit,
    /// The next turn needs room.
    NextTurn,
}

/// A turn that was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The answer.
    pub answer: Answer,
    /// Set where the answer ended at a limit that nobody asked for.
    pub cut: Option<Cut>,
}

/// Options of a conversation.
#[derive(Clone, Debug, Default)]
pub struct ConversationOptions {
    /// Tokens of an answer at most.
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
    /// The system message as it was given.
    system: Option<String>,
    messages: Vec<Message>,
    sequence: CachedSequence,
}

impl<'a> Conversation<'a> {
    /// An empty conversation, whose text `template` makes in `sandbox`.
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

    /// The system message, if there is one.
    #[must_use]
    pub fn system(&self) -> Option<&str> {
        self.system.as_deref()
    }

    /// Sets the system message, or takes it away.
    pub fn set_system(&mut self, text: Option<&str>) {
        let start = self.num_system();
        let message = text.map(|text| Message::new("system", self.model.tokenizer.guard(text)));
        self.messages.splice(..start, message);
        self.system = text.map(str::to_owned);
    }

    /// Messages before the conversation.
    fn num_system(&self) -> usize {
        usize::from(self.system.is_some())
    }

    /// The messages as the template sees them, the system message first.
    #[must_use]
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// Forgets all messages but the system message.
    pub fn clear(&mut self) {
        let start = self.num_system();
        self.messages.truncate(start);
    }

    /// Takes back the last message of the user and all behind it; returns whether there was one.
    pub fn undo(&mut self) -> bool {
        let last = self.messages.iter().rposition(|message| message.role == "user");
        if let Some(last) = last {
            self.messages.truncate(last);
        }
        last.is_some()
    }

    /// Whether the user has said something.
    #[must_use]
    pub fn has_turn(&self) -> bool {
        self.messages.iter().any(|message| message.role == "user")
    }

    /// Says `text` to the model. `on_event` is called as the answer comes, and may end it.
    pub fn say(
        &mut self,
        text: &str,
        on_event: impl FnMut(TurnEvent<'_>) -> ControlFlow<()>,
    ) -> Result<Turn, TurnError> {
        let before = self.messages.clone();
        self.messages.push(Message::new("user", self.model.tokenizer.guard(text)));
        self.answer_or(before, on_event)
    }

    /// Answers the last message of the user again.
    pub fn regenerate(&mut self, on_event: impl FnMut(TurnEvent<'_>) -> ControlFlow<()>) -> Result<Turn, TurnError> {
        let before = self.messages.clone();
        let last = self.messages.iter().rposition(|message| message.role == "user");
        self.messages.truncate(last.map_or(0, |last| last + 1));
        self.answer_or(before, on_event)
    }

    /// Answers the messages. Where that is refused they become those `before`.
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
        match self.options.limits.asked {
            Some(TokenLimit::Tokens(limit)) => usual.min(limit.max(1)),
            _ => usual,
        }
    }

    /// Tokens of an answer at most: those that were asked for, or as many as leave room for the next turn.
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

    /// Returns the tokens of the messages. The oldest turns are forgotten until there is room for an answer.
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

    /// Forgets the oldest message of the user with its answer, but never the last one; returns whether there was one.
    fn drop_oldest_turn(&mut self) -> bool {
        let start = self.num_system();
        let later = self.messages.iter().skip(start + 1).position(|message| message.role == "user");
        let Some(count) = later.map(|position| position + 1) else { return false };
        self.messages.drain(start..start + count);
        true
    }
}
