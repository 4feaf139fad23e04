//! Conversion of ids to text as they are drawn.

use moeworks_model::{Tokenizer, TokenizerError};

/// The most ids over which an incomplete character can be spread: a character of four bytes lacks its last, and an id
/// has at least one byte.
const MAX_PENDING: usize = 3;

/// The most ids that wait, if each ends one character and begins another.
const MAX_STRADDLING: usize = 64;

/// The number of ids of a prompt that are enough context for the text after it.
const MAX_CONTEXT: usize = 16;

/// A converter of ids to text, one at a time. An incomplete character is held back until it is complete.
///
/// Decoders may remove a blank from the beginning of a text, so that an id's text depends on whether it is the first.
/// After a prompt ([`after`](Self::after)) it is not.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Ids whose text was returned, kept as context for decoders that look at earlier ids.
    context: Vec<u32>,
    /// Ids whose text was not returned, or only in part.
    pending: Vec<u32>,
    /// Bytes of the pending ids' text that were returned.
    num_shown: usize,
    shows_special: bool,
}

impl<'a> TextStream<'a> {
    /// Makes a stream at the start of a text.
    #[must_use]
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, context: Vec::new(), pending: Vec::new(), num_shown: 0, shows_special: false }
    }

    /// Makes a stream that shows special tokens as they are spelled. T5's answers need them, since they name the span
    /// that follows.
    #[must_use]
    pub fn with_special(tokenizer: &'a Tokenizer) -> Self {
        Self { shows_special: true, ..Self::new(tokenizer) }
    }

    /// Places the stream after the ids of a prompt. Its pieces together are the text of prompt and ids, without the
    /// text of the prompt.
    #[must_use]
    pub fn after(self, prompt: &[u32]) -> Self {
        Self { context: prompt[prompt.len().saturating_sub(MAX_CONTEXT)..].to_vec(), ..self }
    }

    /// Returns the number of ids whose text is held back.
    #[must_use]
    pub fn num_pending(&self) -> usize {
        self.pending.len()
    }

    /// Returns the text that `id` completes, which may be empty. Special tokens have no text unless they are shown.
    pub fn push(&mut self, id: u32) -> Result<String, TokenizerError> {
        self.pending.push(id);
        let text = self.text_of(self.pending.len())?;
        if !text.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(self.take(self.pending.len(), text));
        }
        // Only the last few ids can be the beginning of a character; earlier ones cannot become one.
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

    /// Counts all but the last few ids as shown, unless a character continues after them.
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

    /// Returns the text that is still held back. Bytes that are no character become U+FFFD.
    pub fn finish(&mut self) -> Result<String, TokenizerError> {
        let text = self.text_of(self.pending.len())?;
        Ok(self.take(self.pending.len(), text))
    }

    fn begins_with_byte(&self) -> bool {
        self.pending.first().is_some_and(|&id| self.tokenizer.is_byte_token(id))
    }

    /// Returns the context of the first pending id. A byte that begins a character does not depend on the bytes
    /// before, but decoders judge consecutive bytes together.
    fn context(&self) -> &[u32] {
        if !self.begins_with_byte() {
            return &self.context;
        }
        let is_end = |&id: &u32| !self.tokenizer.is_byte_token(id) && self.tokenizer.is_shown(id, self.shows_special);
        let end = self.context.iter().rposition(is_end).map_or(0, |last| last + 1);
        &self.context[..end]
    }

    /// Returns the text of the first `count` pending ids.
    fn text_of(&self, count: usize) -> Result<String, TokenizerError> {
        let before = self.decode(self.context())?;
        let ids: Vec<u32> = self.context().iter().chain(&self.pending[..count]).copied().collect();
        let text = self.decode(&ids)?;
        Ok(text.strip_prefix(&before[..]).map_or_else(|| differing(&before, &text), str::to_owned))
    }

    fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        if self.shows_special { self.tokenizer.decode_with_special(ids) } else { self.tokenizer.decode(ids) }
    }

    /// Counts the first `count` pending ids, of this text, as shown. Returns the part that was not returned before.
    fn take(&mut self, count: usize, text: String) -> String {
        // A blank at the beginning of a text has no text, but the next one has. Ids without text are no context by
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

/// Returns `text` without its common beginning with `before`, which a decoder changed when more followed.
fn differing(before: &str, text: &str) -> String {
    let common: usize = before.chars().zip(text.chars()).take_while(|(a, b)| a == b).map(|(c, _)| c.len_utf8()).sum();
    text[common..].to_owned()
}
