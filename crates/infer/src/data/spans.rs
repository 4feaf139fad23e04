//! Span corruption, the first training task of T5 and Switch Transformers (Raffel et al., 1910.10683, section 3.1.4):
//! spans of a text are replaced by sentinels, and the model predicts them from the rest.
//!
//! The number of removed tokens and spans depends only on the length of the text, so that texts of equal length make
//! pairs of equal lengths. Their positions are random.

use moeworks_model::{ModelConfig, Tokenizer};
use moeworks_tensor::{Purpose, Random};

use super::{Batch, TokenStore};

/// The share of tokens that is removed.
const DENSITY: f64 = 0.15;
/// The mean length of a span.
const MEAN_SPAN: f64 = 3.0;

/// The error of a tokenizer without the tokens of span corruption, which a model with an encoder is trained by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the tokenizer has no {missing}: it must be T5's")]
pub struct SpanTokensError {
    /// The tokens that it lacks.
    pub missing: &'static str,
}

/// The token ids of span corruption.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpanRule {
    /// The ids that replace the spans, in order; at least one.
    pub sentinels: Vec<u32>,
    /// The id that ends sources and answers.
    pub eos: u32,
    /// The id that the decoder reads first.
    pub start: u32,
}

/// The lengths of the source and the answer made from a text.
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
    /// Returns the rule for a model of `config`; `None` without an encoder. Fails if `tokenizer` lacks the tokens.
    pub fn from_config(config: &ModelConfig, tokenizer: &Tokenizer) -> Result<Option<Self>, SpanTokensError> {
        let Some(encoder) = &config.variant.encoder else { return Ok(None) };
        let sentinels = tokenizer.sentinels().to_vec();
        if sentinels.is_empty() {
            let missing = "<extra_id_0>, <extra_id_1>, ..., which replace removed spans";
            return Err(SpanTokensError { missing });
        }
        let missing = "token that ends a text, such as </s>";
        let eos = tokenizer.eos_id().ok_or(SpanTokensError { missing })?;
        Ok(Some(Self { sentinels, eos, start: encoder.start_id }))
    }

    /// Returns the lengths of source and answer for a text of `len` tokens, at least 2.
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
    /// Adds the pair made from the text `window`, which must be as long as the others.
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

/// Iterates over the windows of `seq_len` (at least 2) of `tokens` with spans removed, in batches of at most
/// `batch_size`. The result is the same every time. The last window may be shorter and is then a batch of its own; a
/// last single token is left out.
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
    /// The text with a sentinel for each removed span, and the end of text.
    pub source: Vec<u32>,
    /// Each sentinel with its span, and the end of text.
    pub answer: Vec<u32>,
}

/// Removes 15% of `tokens`, in spans of 3 tokens on average and at least one each. The text begins with a token that
/// stays and ends with one that is removed, as in T5. There must be at least two tokens; with few sentinels spans are
/// longer.
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

/// Returns `count` lengths of at least 1 with the sum `total`, each division equally likely. Draws from `position`
/// on.
fn random_lengths(total: usize, count: usize, random: &Random, position: u64) -> Vec<usize> {
    // The borders between lengths are random positions between neighbours.
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
