//! Batches as a pure function of (tokens, seed, position).

use std::ops::Range;
use std::sync::Arc;

use moeworks_infer::data::{Batch, DataError, Encode, Notes, ReadSummary, SpanLengths, SpanRule, TokenStore};
use moeworks_tensor::{Purpose, Random};

use super::windows::Split;
use super::{Blend, DatasetError, Mix, Permutation, Windows};
use crate::config::RunConfig;

/// The random stream of the order of held-out windows, beyond the streams of epochs.
const VALIDATION_STREAM: u64 = (1 << 56) - 2;

/// The total to which counts of several sources are scaled.
const COUNTED: f64 = 1e9;

/// The options that determine the batches, besides the tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DatasetOptions {
    /// S: tokens of a sequence, at least 1.
    pub seq_len: usize,
    /// Sequences of a microbatch, at least 1.
    pub batch_size: usize,
    /// Microbatches of a step, at least 1.
    pub grad_accumulation: usize,
    /// Share of the tokens held out, 0 to 0.5.
    pub validation_fraction: f64,
    /// The seed of the split into training and validation, and of the order of validation.
    pub validation_seed: u64,
    /// The seed of the order of training.
    pub seed: u64,
}

impl DatasetOptions {
    /// Reads the options from a configuration.
    #[must_use]
    pub fn from_config(config: &RunConfig) -> Self {
        Self {
            seq_len: config.train.seq_len,
            batch_size: config.train.batch_size,
            grad_accumulation: config.train.grad_accumulation,
            validation_fraction: config.data.validation_fraction,
            validation_seed: config.data.validation_seed,
            seed: config.train.seed,
        }
    }
}

/// A source to create a data set from.
#[derive(Clone, Debug)]
pub struct NamedTokens {
    /// The name of the source in errors and figures.
    pub name: String,
    /// The tokens of the source.
    pub tokens: Arc<TokenStore>,
}

/// A source of a data set: its tokens, and their split into training and validation.
#[derive(Clone, Debug)]
pub struct Part {
    name: String,
    tokens: Arc<TokenStore>,
    split: Split,
}

impl Part {
    /// Returns the source's paths, as given.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the source's tokens.
    #[must_use]
    pub fn tokens(&self) -> &TokenStore {
        &self.tokens
    }

    /// Returns the training windows; an epoch has each once.
    #[must_use]
    pub fn train(&self) -> &Windows {
        &self.split.train
    }

    /// Returns the held-out windows.
    #[must_use]
    pub fn validation(&self) -> &Windows {
        &self.split.validation
    }
}

/// Training and validation batches over the same tokens.
#[derive(Clone, Debug)]
pub struct Dataset {
    parts: Vec<Part>,
    /// The interleaving of the sources.
    blend: Blend,
    options: DatasetOptions,
    spans: Option<SpanRule>,
    /// The token that ends a document, if the documents of a sequence are separate.
    separator: Option<u32>,
    num_files: usize,
}

impl Dataset {
    /// Reads the sources of `mix` through the token cache and splits each according to `config`. Warns in one line of
    /// skipped rows.
    pub fn open(config: &RunConfig, mix: &Mix, tokenizer: &dyn Encode) -> Result<Self, DatasetError> {
        let separator = separator(config, tokenizer)?;
        let options = DatasetOptions::from_config(config);
        let (mut parts, mut notes, mut num_files) = (Vec::new(), Notes::default(), 0);
        for source in mix.sources() {
            let place = config.cache_place(source.watch().user_cache());
            let tokens = TokenStore::open(source, tokenizer, &place)?;
            notes.merge(tokens.notes());
            num_files += source.num_files();
            parts.push((Arc::new(tokens), source.describe()));
        }
        mix.warn(&notes);
        let parts = parts.into_iter().map(|(tokens, name)| part(tokens, options, name)).collect::<Result<_, _>>()?;
        Ok(Self { parts, blend: Blend::new(mix.weights()), options, spans: None, separator, num_files })
    }

    /// Creates a data set of `tokens`. `place` names the data in errors.
    pub fn new(tokens: Arc<TokenStore>, options: DatasetOptions, place: &str) -> Result<Self, DatasetError> {
        Self::blended(vec![NamedTokens { tokens, name: place.into() }], &[1.0], options)
    }

    /// Creates a data set of several named sources, each with a weight.
    pub fn blended(sources: Vec<NamedTokens>, weights: &[f64], options: DatasetOptions) -> Result<Self, DatasetError> {
        let num_files = sources.len();
        let parts =
            sources.into_iter().map(|source| part(source.tokens, options, source.name)).collect::<Result<_, _>>()?;
        Ok(Self { parts, blend: Blend::new(weights), options, spans: None, separator: None, num_files })
    }

    /// Returns the sources.
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Returns the share of the training sequences that are from source `part`.
    #[must_use]
    pub fn share(&self, part: usize) -> f64 {
        self.blend.share(part)
    }

    /// Returns how many of the first `num_sequences` training sequences are from each source.
    #[must_use]
    pub fn sequences_of_parts(&self, num_sequences: u64) -> Vec<u64> {
        self.blend.at(num_sequences).counts().to_vec()
    }

    /// Returns the number of training sequences in the first `num_steps` steps.
    #[must_use]
    pub fn num_sequences(&self, num_steps: u64) -> u64 {
        num_steps * (self.options.grad_accumulation * self.options.batch_size) as u64
    }

    /// Returns the number of training windows of all sources.
    #[must_use]
    pub fn num_train(&self) -> u64 {
        self.parts.iter().map(|part| part.split.train.len()).sum()
    }

    /// Returns the number of held-out windows of all sources.
    #[must_use]
    pub fn num_validation(&self) -> u64 {
        self.parts.iter().map(|part| part.split.validation.len()).sum()
    }

    /// Returns figures of the data that was read.
    #[must_use]
    pub fn summary(&self) -> ReadSummary {
        let mut summary = ReadSummary { num_files: self.num_files, ..ReadSummary::default() };
        for Part { tokens, .. } in &self.parts {
            let part = tokens.summary(0);
            summary.num_documents += part.num_documents;
            summary.num_text_bytes += part.num_text_bytes;
            summary.num_tokens += part.num_tokens;
        }
        summary
    }

    /// Sets the rule that masks spans of a text, for models with an encoder. A sequence gets other spans each time.
    #[must_use]
    pub fn with_spans(self, rule: Option<SpanRule>) -> Self {
        Self { spans: rule, ..self }
    }

    /// Separates the documents of a sequence, each ended by `separator`.
    #[must_use]
    pub fn with_separate_documents(self, separator: u32) -> Self {
        Self { separator: Some(separator), ..self }
    }

    /// Returns the lengths of a sequence with masked spans; none without a rule for spans.
    #[must_use]
    pub fn span_lengths(&self) -> Option<SpanLengths> {
        self.spans.as_ref().map(|rule| rule.lengths(self.options.seq_len))
    }

    /// Returns the number of a sequence's tokens that have a loss.
    #[must_use]
    pub fn targets_per_sequence(&self) -> usize {
        self.span_lengths().map_or(self.options.seq_len, |lengths| lengths.answer)
    }

    /// Returns the number of tokens in step `step`, on all ranks, that have a loss.
    #[must_use]
    pub fn targets_of_step(&self, step: u64) -> usize {
        let num_micro = self.options.grad_accumulation;
        if self.separator.is_none() {
            return self.options.batch_size * self.targets_per_sequence() * num_micro;
        }
        let mut batch = Batch::default();
        let count = |micro| {
            self.fill_train_batch(step, micro, &mut batch);
            batch.num_targets()
        };
        (0..num_micro).map(count).sum::<usize>().max(1)
    }

    /// Separates the documents of a filled batch if the options say so.
    fn separate(&self, batch: &mut Batch) {
        if let Some(separator) = self.separator {
            batch.separate_documents(separator);
        }
    }

    /// Appends the window of `tokens` that begins at token `start`; `random` selects masked spans.
    fn push(&self, tokens: &TokenStore, start: u64, random: &Random, batch: &mut Batch) {
        let Some(rule) = &self.spans else { return batch.push(tokens, start) };
        let mut window = Vec::new();
        tokens.read(start..start + self.options.seq_len as u64, &mut window);
        batch.push_spans(&window, rule, random);
    }

    /// Counts each id below `vocab_size` in the training windows, or in 65,536 evenly spaced ones; several sources
    /// count in proportion to their shares.
    #[must_use]
    pub fn token_counts(&self, vocab_size: usize) -> Vec<u64> {
        if let [part] = &self.parts[..] {
            return part.token_counts(vocab_size);
        }
        let mut sum = vec![0_u64; vocab_size];
        for (i, part) in self.parts.iter().enumerate() {
            let counts = part.token_counts(vocab_size);
            let total = counts.iter().sum::<u64>().max(1) as f64;
            let scale = self.share(i) * COUNTED / total;
            sum.iter_mut().zip(counts).for_each(|(sum, count)| *sum += (count as f64 * scale).round() as u64);
        }
        sum
    }

    /// Returns microbatch `micro` of optimizer step `step`, both from 0.
    #[must_use]
    pub fn train_batch(&self, step: u64, micro: usize) -> Batch {
        let mut batch = Batch::default();
        self.fill_train_batch(step, micro, &mut batch);
        batch
    }

    /// Fills `batch`, whose memory is reused, with microbatch `micro` of step `step`; see [`Self::train_batch`].
    pub fn fill_train_batch(&self, step: u64, micro: usize, batch: &mut Batch) {
        let num_sequences = self.options.batch_size;
        let first = (step * self.options.grad_accumulation as u64 + micro as u64) * num_sequences as u64;
        self.fill_sequences(first, num_sequences, batch);
    }

    /// Fills `batch` with the training sequences `first..first + num_sequences` of the endless sequence of epochs.
    /// Their order depends only on the seed, the tokens and the weights, so that a run may continue with another
    /// batch size.
    pub fn fill_sequences(&self, first: u64, num_sequences: usize, batch: &mut Batch) {
        batch.clear(self.options.seq_len);
        let mut cursor = self.blend.at(first);
        let mut orders: Vec<Option<(u64, Permutation)>> = vec![None; self.parts.len()];
        for position in first..first + num_sequences as u64 {
            let (source, item) = cursor.advance();
            let Part { tokens, split, .. } = &self.parts[source];
            let (epoch, item) = (item / split.train.len(), item % split.train.len());
            let permutation = match orders[source] {
                Some((known, permutation)) if known == epoch => permutation,
                _ => Permutation::new(split.train.len(), seed_of(self.options.seed, source), epoch),
            };
            orders[source] = Some((epoch, permutation));
            let random = Random::new(self.options.seed, Purpose::Spans, position);
            self.push(tokens, split.train.tokens(permutation.at(item)).start, &random, batch);
        }
        self.separate(batch);
    }

    /// Returns the first `max_batches` batches of held-out windows; all of them for 0, none if nothing is held out.
    /// They come in a fixed random order, so that a few are representative, interleaved by the sources' weights until
    /// these are exhausted. The last batch may have fewer sequences.
    pub fn validation_batches(&self, max_batches: usize) -> impl Iterator<Item = Batch> + '_ {
        let lens: Vec<u64> = self.parts.iter().map(|part| part.split.validation.len()).collect();
        let seed = self.options.validation_seed;
        let order = |(source, len): (usize, &u64)| Permutation::new(*len, seed_of(seed, source), VALIDATION_STREAM);
        let orders: Vec<Permutation> = lens.iter().enumerate().map(order).collect();
        let (size, num_windows) = (self.options.batch_size as u64, self.num_validation());
        let num_batches = num_windows.div_ceil(size);
        let num_batches = if max_batches == 0 { num_batches } else { num_batches.min(max_batches as u64) };
        let mut cursor = self.blend.at(0);
        (0..num_batches).map(move |i| {
            let mut batch = Batch::default();
            batch.clear(self.options.seq_len);
            for position in i * size..((i + 1) * size).min(num_windows) {
                let Some((source, item)) = cursor.advance_within(&lens) else { break };
                let Part { tokens, split, .. } = &self.parts[source];
                let random = Random::new(seed, Purpose::Spans, VALIDATION_STREAM - position);
                self.push(tokens, split.validation.tokens(orders[source].at(item)).start, &random, &mut batch);
            }
            self.separate(&mut batch);
            batch
        })
    }
}

/// Returns the seed of a source's order. The first source has the seed of a run with a single one.
fn seed_of(seed: u64, source: usize) -> u64 {
    seed.wrapping_add((source as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// Returns the token that ends a document, if `config` asks for separate documents.
fn separator(config: &RunConfig, tokenizer: &dyn Encode) -> Result<Option<u32>, DatasetError> {
    if !config.data.separate_documents {
        return Ok(None);
    }
    tokenizer.eos().map(Some).ok_or(DatasetError::NoSeparator)
}

/// Creates a source of `tokens`, split according to the options.
fn part(tokens: Arc<TokenStore>, options: DatasetOptions, name: String) -> Result<Part, DatasetError> {
    let DatasetOptions { seq_len, validation_fraction, validation_seed, .. } = options;
    if tokens.is_empty() {
        return Err(DataError::NoText { place: name, skipped: String::new() }.into());
    }
    let split = Split::new(tokens.len(), seq_len as u64, validation_fraction, validation_seed);
    if split.train.is_empty() {
        return Err(DatasetError::TooShort { place: name, tokens: tokens.len(), needed: seq_len as u64 + 1 });
    }
    if split.validation.is_empty() && validation_fraction > 0.0 {
        tracing::warn!("{name}: too short to hold anything out for validation");
    }
    Ok(Part { name, tokens, split })
}

impl Part {
    /// Counts each id below `vocab_size` in the training windows, or in 65,536 evenly spaced ones.
    fn token_counts(&self, vocab_size: usize) -> Vec<u64> {
        const MAX_WINDOWS: u64 = 1 << 16;
        let train = &self.split.train;
        let stride = train.len().div_ceil(MAX_WINDOWS).max(1);
        let (mut counts, mut ids) = (vec![0_u64; vocab_size], Vec::new());
        for window in (0..train.len()).step_by(stride as usize) {
            ids.clear();
            let Range { start, end } = train.tokens(window);
            // The last token of a window is only a target; it is also the first of the next window.
            self.tokens.read(start..end - 1, &mut ids);
            for &id in &ids {
                if let Some(count) = counts.get_mut(id as usize) {
                    *count += 1;
                }
            }
        }
        counts
    }
}

#[cfg(test)]
#[path = "dataset_tests.rs"]
mod tests;
