//! Text from ids as they come.

use crate::tokenizer::{Tokenizer, TokenizerError};

/// Ids that may wait for the rest of a character: one of four bytes lacks its last, and an id has at least one byte.
const MAX_PENDING: usize = 3;

/// Ids of a prompt that are enough context for the text behind it.
const MAX_CONTEXT: usize = 16;

/// Turns ids into text one by one. A piece that ends inside a character is held back until the character is complete.
///
/// A decoder may take blanks from the beginning of a text, so that the text of an id depends on whether it is the first.
/// Behind a prompt ([`after`](Self::after)) it is not.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Ids whose text is out, kept as context for decoders that look at the ids before.
    context: Vec<u32>,
    /// Ids whose text is not out yet.
    pending: Vec<u32>,
    shows_special: bool,
}

impl<'a> TextStream<'a> {
    /// A stream at the start of a text.
    #[must_use]
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, context: Vec::new(), pending: Vec::new(), shows_special: false }
    }

    /// A stream that shows special tokens as they are spelled: those of an answer in T5's way say which span follows.
    #[must_use]
    pub fn with_special(tokenizer: &'a Tokenizer) -> Self {
        Self { shows_special: true, ..Self::new(tokenizer) }
    }

    /// The same stream behind the ids of a prompt: all its pieces together are the text of prompt and ids without that of the
    /// prompt.
    #[must_use]
    pub fn after(self, prompt: &[u32]) -> Self {
        Self { context: prompt[prompt.len().saturating_sub(MAX_CONTEXT)..].to_vec(), ..self }
    }

    /// Ids whose text is held back.
    #[must_use]
    pub fn num_pending(&self) -> usize {
        self.pending.len()
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

    /// The context of the first pending id. A byte that begins a character has nothing to do with the bytes of the one before,
    /// but decoders take bytes that follow each other for valid or invalid together.
    fn context(&self) -> &[u32] {
        let is_byte = |id: &u32| self.tokenizer.is_byte_token(*id);
        if !self.pending.first().is_some_and(is_byte) {
            return &self.context;
        }
        let end = self.context.iter().rposition(|id| !is_byte(id)).map_or(0, |last| last + 1);
        &self.context[..end]
    }

    /// The text of the first `count` pending ids.
    fn text_of(&self, count: usize) -> Result<String, TokenizerError> {
        let before = self.decode(self.context())?;
        let ids: Vec<u32> = self.context().iter().chain(&self.pending[..count]).copied().collect();
        let text = self.decode(&ids)?;
        Ok(text.strip_prefix(&before[..]).map_or_else(|| differing(&before, &text), str::to_owned))
    }

    fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        if self.shows_special { self.tokenizer.decode_with_special(ids) } else { self.tokenizer.decode(ids) }
    }

    /// Counts the first `count` pending ids as shown.
    fn take(&mut self, count: usize, text: String) -> String {
        let is_byte = self.pending.first().is_some_and(|&id| self.tokenizer.is_byte_token(id));
        let mut context = if is_byte { self.context().to_vec() } else { Vec::new() };
        let rest = self.pending.split_off(count);
        context.extend(std::mem::replace(&mut self.pending, rest));
        // Ids without text are no context.
        if !text.is_empty() {
            self.context = context;
        }
        text
    }
}

/// The text behind what it has in common with the text `before`, which a decoder changed when more followed.
fn differing(before: &str, text: &str) -> String {
    let common: usize = before.chars().zip(text.chars()).take_while(|(a, b)| a == b).map(|(c, _)| c.len_utf8()).sum();
    text[common..].to_owned()
}
