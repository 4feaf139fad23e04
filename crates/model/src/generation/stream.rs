//! Text from ids as they come.

use crate::tokenizer::{Tokenizer, TokenizerError};

/// Ids that may wait for the rest of a character. A character has at most four bytes and an id at least one.
const MAX_PENDING: usize = 8;

/// Turns ids into text one by one. A piece that ends inside a character is held back until the character is complete.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Ids whose text is out, kept as context for decoders that look at the id before.
    shown: Vec<u32>,
    /// Ids whose text is not out yet.
    pending: Vec<u32>,
}

impl<'a> TextStream<'a> {
    /// A stream at the start of a text.
    #[must_use]
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, shown: Vec::new(), pending: Vec::new() }
    }

    /// The text that `id` completes, which may be empty. Special tokens have no text.
    pub fn push(&mut self, id: u32) -> Result<String, TokenizerError> {
        self.pending.push(id);
        let text = self.pending_text()?;
        let is_complete = !text.ends_with(char::REPLACEMENT_CHARACTER) || self.pending.len() >= MAX_PENDING;
        Ok(if is_complete { self.take(text) } else { String::new() })
    }

    /// The text that is still held back; bytes that are no character come as U+FFFD.
    pub fn finish(&mut self) -> Result<String, TokenizerError> {
        let text = self.pending_text()?;
        Ok(self.take(text))
    }

    fn pending_text(&self) -> Result<String, TokenizerError> {
        let before = self.tokenizer.decode(&self.shown)?;
        let all: Vec<u32> = self.shown.iter().chain(&self.pending).copied().collect();
        let mut text = self.tokenizer.decode(&all)?;
        Ok(text.split_off(before.len().min(text.len())))
    }

    fn take(&mut self, text: String) -> String {
        if !text.is_empty() {
            self.shown = std::mem::take(&mut self.pending);
        }
        text
    }
}
