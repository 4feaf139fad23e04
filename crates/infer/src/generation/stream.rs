//! Text from ids as they come.

use moeworks_model::{Tokenizer, TokenizerError};

/// Ids that a character's beginning may be spread over: one of four bytes lacks its last, and an id has at least one
/// byte.
const MAX_PENDING: usize = 3;

/// Ids that wait at most, where each ends one character and begins another.
const MAX_STRADDLING: usize = 64;

/// Ids of a prompt that are enough context for the text behind it.
const MAX_CONTEXT: usize = 16;

/// Turns ids into text one by one. A piece that ends inside a character is held back until the character is complete.
///
/// A decoder may take blanks from the beginning of a text, so that the text of an id depends on whether it is the
/// first. Behind a prompt ([`after`](Self::after)) it is not.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Ids whose text is out, kept as context for decoders that look at the ids before.
    context: Vec<u32>,
    /// Ids whose text is not out yet, or not all of it.
    pending: Vec<u32>,
    /// Bytes of the pending ids' text that are out.
    num_shown: usize,
    shows_special: bool,
}

impl<'a> TextStream<'a> {
    /// A stream at the start of a text.
    #[must_use]
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, context: Vec::new(), pending: Vec::new(), num_shown: 0, shows_special: false }
    }

    /// A stream that shows special tokens as they are spelled: those of an answer in T5's way say which span follows.
    #[must_use]
    pub fn with_special(tokenizer: &'a Tokenizer) -> Self {
        Self { shows_special: true, ..Self::new(tokenizer) }
    }

    /// Puts the stream behind the ids of a prompt: all its pieces together are the text of prompt and ids without
    /// that of the prompt.
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
        if self.begins_with_byte() {
            let text = self.text_of(count)?;
            return Ok(self.take(count, text));
        }
        let end = text.len() - char::REPLACEMENT_CHARACTER.len_utf8();
        let shown = text[self.num_shown.min(end)..end].to_owned();
        self.num_shown = self.num_shown.max(end);
        self.let_go(count)?;
        Ok(shown)
    }

    /// Counts as shown what is before the last few ids, if no character goes on behind it.
    fn let_go(&mut self, count: usize) -> Result<(), TokenizerError> {
        let text = self.text_of(count)?;
        if text.is_empty() || text.ends_with(char::REPLACEMENT_CHARACTER) && count < MAX_STRADDLING {
            return Ok(());
        }
        let num_shown = self.num_shown.saturating_sub(text.len());
        self.take(count, text);
        self.num_shown = num_shown;
        Ok(())
    }

    /// The text that is still held back; bytes that are no character come as U+FFFD.
    pub fn finish(&mut self) -> Result<String, TokenizerError> {
        let text = self.text_of(self.pending.len())?;
        Ok(self.take(self.pending.len(), text))
    }

    fn begins_with_byte(&self) -> bool {
        self.pending.first().is_some_and(|&id| self.tokenizer.is_byte_token(id))
    }

    /// The context of the first pending id. A byte that begins a character has nothing to do with the bytes of the
    /// one before, but decoders take bytes that follow each other for valid or invalid together.
    fn context(&self) -> &[u32] {
        if !self.begins_with_byte() {
            return &self.context;
        }
        let is_end = |&id: &u32| !self.tokenizer.is_byte_token(id) && self.tokenizer.is_shown(id, self.shows_special);
        let end = self.context.iter().rposition(is_end).map_or(0, |last| last + 1);
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

    /// Counts the first `count` pending ids, of this text, as shown. Returns what was not out of it.
    fn take(&mut self, count: usize, text: String) -> String {
        // A blank that begins a text has none, but the next one has; ids without text stand for nothing by
        // themselves.
        let mut context = match (text.is_empty(), self.begins_with_byte()) {
            (true, _) => std::mem::take(&mut self.context),
            (false, true) => self.context().to_vec(),
            (false, false) => Vec::new(),
        };
        let rest = self.pending.split_off(count);
        context.extend(std::mem::replace(&mut self.pending, rest));
        context.drain(..context.len().saturating_sub(MAX_CONTEXT));
        self.context = context;
        let num_shown = std::mem::take(&mut self.num_shown);
        text.get(num_shown..).unwrap_or_default().to_owned()
    }
}

/// The text behind what it has in common with the text `before`, which a decoder changed when more followed.
fn differing(before: &str, text: &str) -> String {
    let common: usize = before.chars().zip(text.chars()).take_while(|(a, b)| a == b).map(|(c, _)| c.len_utf8()).sum();
    text[common..].to_owned()
}
