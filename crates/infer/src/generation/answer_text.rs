//! The text of an answer as its tokens are drawn, up to a stop text.

use super::{StopTexts, TextStream};
use crate::InferError;
use crate::open::Model;

/// The text of an answer as its tokens are drawn, up to a stop text.
pub struct AnswerText<'a> {
    stream: TextStream<'a>,
    stops: StopTexts,
    /// The text so far.
    text: String,
}

impl<'a> AnswerText<'a> {
    /// Makes an empty answer of `model` to `prompt`, which ends before the first of the texts in `stops`.
    #[must_use]
    pub fn new(model: &'a Model, prompt: &[u32], stops: &[String]) -> Self {
        let tokenizer = &model.tokenizer;
        // Special tokens name the span or the channel that follows.
        let shows_special = model.has_encoder() || tokenizer.has_channels();
        let stream = if shows_special { TextStream::with_special(tokenizer) } else { TextStream::new(tokenizer) };
        // An encoder's answer is a text of its own, not the continuation of the prompt.
        let stream = if model.has_encoder() { stream } else { stream.after(prompt) };
        Self { stream, stops: StopTexts::new(stops), text: String::new() }
    }

    /// Adds a token and returns the text that is now certain; it may be empty.
    ///
    /// # Errors
    /// Fails if the tokenizer does not know the token.
    pub fn push(&mut self, id: u32) -> Result<String, InferError> {
        let piece = self.stream.push(id)?;
        let piece = self.stops.push(&piece);
        self.text += &piece;
        Ok(piece)
    }

    /// Ends the answer and returns the text that was held back.
    ///
    /// # Errors
    /// Fails if the tokenizer does not know a token.
    pub fn finish(&mut self) -> Result<String, InferError> {
        let rest = self.stream.finish()?;
        let rest = self.stops.push(&rest) + &self.stops.finish();
        self.text += &rest;
        Ok(rest)
    }

    /// Returns whether a stop text came.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.stops.is_found()
    }

    /// Returns the whole text.
    #[must_use]
    pub fn into_text(self) -> String {
        self.text
    }
}
