//! Text from ids as they come.

use crate::tokenizer::{Tokenizer, TokenizerError};

/// Ids that may wait for the rest of a character: one of four bytes lacks its last, and an id has at least one byte.
const MAX_PENDING: usize = 3;

/// Turns ids into text one by one. A piece that ends inside a character is held back until the character is complete.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Ids whose text is out, kept as context for decoders that look at the id before.
    shown: Vec<u32>,
    /// Ids whose text is not out yet.
    pending: Vec<u32>,
    shows_special: bool,
}

impl<'a> TextStream<'a> {
    /// A stream at the start of a text.
    #[must_use]
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, shown: Vec::new(), pending: Vec::new(), shows_special: false }
    }

    /// As [`new`](Self::new), with special tokens as they are spelled: those of an answer in T5's way say which span follows.
    #[must_use]
    pub fn with_special(tokenizer: &'a Tokenizer) -> Self {
        Self { shows_special: true, ..Self::new(tokenizer) }
    }

    /// The text that `id` completes, which may be empty. Special tokens have no text unless they are to be shown.
    pub fn push(&mut self, id: u32) -> Result<String, TokenizerError> {
        self.pending.push(id);
        let text = self.text_of(self.pending.len())?;
        if !text.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(self.take(self.pending.len(), text));
        }
        // Only the last few ids can be a character's beginning; what is before them will never be one.
        let count = self.pending.len().saturating_sub(MAX_PENDING);
        let text = self.text_of(count)?;
        Ok(self.take(count, text))
    }

    /// The text that is still held back; bytes that are no character come as U+FFFD.
    pub fn finish(&mut self) -> Result<String, TokenizerError> {
        let text = self.text_of(self.pending.len())?;
        Ok(self.take(self.pending.len(), text))
    }

    /// The text of the first `count` pending ids.
    fn text_of(&self, count: usize) -> Result<String, TokenizerError> {
        let before = self.decode(&self.shown)?;
        let ids: Vec<u32> = self.shown.iter().chain(&self.pending[..count]).copied().collect();
        let text = self.decode(&ids)?;
        Ok(text.get(before.len()..).unwrap_or_default().to_owned())
    }

    fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        if self.shows_special { self.tokenizer.decode_with_special(ids) } else { self.tokenizer.decode(ids) }
    }

    /// Counts the first `count` pending ids as shown.
    fn take(&mut self, count: usize, text: String) -> String {
        let rest = self.pending.split_off(count);
        let taken = std::mem::replace(&mut self.pending, rest);
        // Ids without text are no context.
        if !text.is_empty() {
            self.shown = taken;
        }
        text
    }
}
