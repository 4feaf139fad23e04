//! Span corruption, the task that T5 and Switch Transformers are trained on first (Raffel et al., 1910.10683, section
//! 3.1.4): of a text some spans are left out, a sentinel in the place of each, and the spans are to be found from the
//! rest.
//!
//! The number of tokens and spans left out depends on the length of the text alone, so that texts of equal length
//! make pairs of equal lengths; which ones is random.

use moeworks_model::{ModelConfig, Tokenizer};
use moeworks_tensor::{Purpose, Random};

use super::{Batch, DataError, TokenStore};

/// The share of tokens that is left out.
const DENSITY: f64 = 0.15;
/// The mean length of a span.
const MEAN_SPAN: f64 = 3.0;

/// The ids that mark what was left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpanRule {
    /// Stand for the spans, in their order; at least one.
    pub sentinels: Vec<u32>,
    /// Ends sources and answers.
    pub eos: u32,
    /// The token that a model reads before it writes an answer.
    pub start: u32,
}

/// The lengths of a source and an answer made of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanLengths {
    num_left_out: usize,
    num_spans: usize,
    /// Tokens of the source.
    pub source: usize,
    /// Tokens of the answer.
    pub answer: usize,
}

impl SpanRule {
    /// The rule by which a model of `config` is trained and evaluated if it has an encoder; fails if `tokenizer`
    /// lacks the tokens for it.
    pub fn of(config: &ModelConfig, tokenizer: &Tokenizer) -> Result<Option<Self>, DataError> {
        let Some(encoder) = &config.variant.encoder else { return Ok(None) };
        let sentinels = tokenizer.sentinels().to_vec();
        if sentinels.is_empty() {
            let missing = "<extra_id_0>, <extra_id_1>, ..., which stand for what is left out of a text";
            return Err(DataError::NoSpans { missing });
        }
        let missing = "token that ends a text, such as </s>";
        let eos = tokenizer.eos_id().ok_or(DataError::NoSpans { missing })?;
        Ok(Some(Self { sentinels, eos, start: encoder.start_id }))
    }

    /// The lengths of what a text of `len` tokens becomes, at least 2.
    #[must_use]
    pub fn lengths(&self, len: usize) -> SpanLengths {
        let num_left_out = ((len as f64 * DENSITY).round() as usize).clamp(1, len - 1);
        let num_spans = (num_left_out as f64 / MEAN_SPAN).round() as usize;
        let num_spans = num_spans.clamp(1, self.sentinels.len()).min(len - num_left_out);
        let (source, answer) = (len - num_left_out + num_spans + 1, num_left_out + num_spans + 1);
        SpanLengths { num_left_out, num_spans, source, answer }
    }
}

impl Batch {
    /// Adds a pair made of the text `window`, which is as long as the others.
    pub fn push_spans(&mut self, window: &[u32], rule: &SpanRule, random: &Random) {
        let SpanPair { source, answer } = leave_out_spans(window, rule, random);
        self.sources.extend(source);
        self.inputs.push(rule.start);
        self.inputs.extend(&answer[..answer.len() - 1]);
        self.seq_len = answer.len();
        self.targets.extend(answer);
        self.num_sequences += 1;
    }
}

/// Spans left out of each window of `seq_len` of `tokens`, at least 2, in batches of at most `batch_size` windows.
/// They are the same every time. The last window may be shorter, and is then a batch of its own; a last token alone
/// makes none.
pub fn span_batches<'a>(
    tokens: &'a TokenStore,
    seq_len: usize,
    batch_size: usize,
    rule: &'a SpanRule,
) -> impl Iterator<Item = Batch> + 'a {
    let (len, size) = (seq_len as u64, batch_size as u64);
    let (num_whole, rest) = (tokens.len() / len, tokens.len() % len);
    let whole = (0..num_whole.div_ceil(size)).map(move |i| i * size..((i + 1) * size).min(num_whole));
    let last = (rest > 1).then_some(num_whole..num_whole + 1);
    whole.chain(last).map(move |windows| {
        let mut batch = Batch::default();
        for window in windows {
            let mut ids = Vec::new();
            tokens.read(window * len..((window + 1) * len).min(tokens.len()), &mut ids);
            batch.push_spans(&ids, rule, &Random::new(0, Purpose::Spans, window));
        }
        batch
    })
}

/// A source and its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpanPair {
    /// The text with a sentinel for each span left out, and the end of text.
    pub source: Vec<u32>,
    /// Each sentinel and its span, and the end of text.
    pub answer: Vec<u32>,
}

/// Leaves 15% of `tokens` out, in spans of 3 on average, and of at least one token each; the text begins with a token
/// that stays and ends with one that is left out, as in T5. There are at least two tokens; with few sentinels spans
/// are longer.
#[must_use]
pub fn leave_out_spans(tokens: &[u32], rule: &SpanRule, random: &Random) -> SpanPair {
    let SpanRule { sentinels, eos, .. } = rule;
    assert!(tokens.len() >= 2 && !sentinels.is_empty(), "a text of two tokens and a sentinel");
    let SpanLengths { num_left_out, num_spans, .. } = rule.lengths(tokens.len());
    let num_kept = tokens.len() - num_left_out;
    let mut pair = SpanPair { source: Vec::new(), answer: Vec::new() };
    let kept = random_lengths(num_kept, num_spans, random, 0);
    let left_out = random_lengths(num_left_out, num_spans, random, num_kept as u64);
    let mut rest = tokens;
    for ((kept, left_out), sentinel) in kept.into_iter().zip(left_out).zip(sentinels.iter().copied()) {
        let (text, after) = rest.split_at(kept);
        let (span, after) = after.split_at(left_out);
        pair.source.extend(text);
        pair.source.push(sentinel);
        pair.answer.push(sentinel);
        pair.answer.extend(span);
        rest = after;
    }
    pair.source.push(*eos);
    pair.answer.push(*eos);
    pair
}

/// `count` lengths of at least 1 that add up to `total`, each division equally likely. Draws from `position` on.
fn random_lengths(total: usize, count: usize, random: &Random, position: u64) -> Vec<usize> {
    // Where one ends and the next begins: some of the places between neighbours.
    let mut places: Vec<usize> = (1..total).collect();
    for i in 0..count - 1 {
        let other = i + random.below(position + i as u64, (places.len() - i) as u64) as usize;
        places.swap(i, other);
    }
    let mut ends = places[..count - 1].to_vec();
    ends.sort_unstable();
    ends.push(total);
    let starts = std::iter::once(0).chain(ends.iter().copied());
    starts.zip(&ends).map(|(start, end)| end - start).collect()
}

#[cfg(test)]
#[path = "spans_tests.rs"]
mod tests;
