//! Batches as a pure function of (tokens, seed, position).

use std::ops::Range;
use std::sync::Arc;

use moeworks_infer::data::{Batch, DataError, Encode, Notes, ReadSummary, SpanLengths, SpanRule, TokenStore};
use moeworks_tensor::{Purpose, Random};

use super::windows::Split;
use super::{Blend, DatasetError, Mix, Permutation, Windows};
use crate::config::RunConfig;

/// The stream of random numbers that orders the held-out windows; epochs never get this far.
const VALIDATION_STREAM: u64 = (1 << 56) - 2;

/// Tokens that are counted of several sources together.
const COUNTED: f64 = 1e9;

/// What decides the batches, besides the tokens.
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
    /// Decides what is held out, and the order in which it is looked at.
    pub validation_seed: u64,
    /// Decides the order of training.
    pub seed: u64,
}

impl DatasetOptions {
    /// The options of a configuration.
    #[must_use]
    pub fn of(config: &RunConfig) -> Self {
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

/// A source of a data set: its tokens, and which of them are trained on and held out.
#[derive(Clone, Debug)]
pub struct Part {
    name: String,
    tokens: Arc<TokenStore>,
    split: Split,
}

impl Part {
    /// The source's paths, as given.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its tokens.
    #[must_use]
    pub fn tokens(&self) -> &TokenStore {
        &self.tokens
    }

    /// The training windows; one epoch passes each once.
    #[must_use]
    pub fn train(&self) -> &Windows {
        &self.split.train
    }

    /// The held-out windows.
    #[must_use]
    pub fn validation(&self) -> &Windows {
        &self.split.validation
    }
}

/// Training and validation batches over the same tokens.
#[derive(Clone, Debug)]
pub struct Dataset {
    parts: Vec<Part>,
    /// Which source a sequence is from.
    blend: Blend,
    options: DatasetOptions,
    spans: Option<SpanRule>,
    /// The token that ends a document, where the documents of a sequence are separate.
    separator: Option<u32>,
    num_files: usize,
}

impl Dataset {
    /// Reads the sources of `mix` through the token cache and splits each as `config` says. Warns in one line of rows that are
    /// passed over.
    pub fn open(config: &RunConfig, mix: &Mix, tokenizer: &dyn Encode) -> Result<Self, DatasetError> {
        let separator = separator(config, tokenizer)?;
        let options = DatasetOptions::of(config);
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

    /// Batches of `tokens`. `place` names the data where it is too short for one sequence.
    pub fn new(tokens: Arc<TokenStore>, options: DatasetOptions, place: &str) -> Result<Self, DatasetError> {
        Self::blended(vec![(tokens, place.into())], &[1.0], options)
    }

    /// Batches of sources, tokens with a name, each of which has a weight.
    pub fn blended(
        sources: Vec<(Arc<TokenStore>, String)>,
        weights: &[f64],
        options: DatasetOptions,
    ) -> Result<Self, DatasetError> {
        let num_files = sources.len();
        let parts = sources.into_iter().map(|(tokens, name)| part(tokens, options, name)).collect::<Result<_, _>>()?;
        Ok(Self { parts, blend: Blend::new(weights), options, spans: None, separator: None, num_files })
    }

    /// The sources.
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The share of the training sequences that are from source `part`.
    #[must_use]
    pub fn share(&self, part: usize) -> f64 {
        self.blend.share(part)
    }

    /// How many of the first `num_sequences` training sequences are from each source.
    #[must_use]
    pub fn sequences_of_parts(&self, num_sequences: u64) -> Vec<u64> {
        self.blend.at(num_sequences).counts().to_vec()
    }

    /// Training sequences of the first `num_steps` steps.
    #[must_use]
    pub fn num_sequences(&self, num_steps: u64) -> u64 {
        num_steps * (self.options.grad_accumulation * self.options.batch_size) as u64
    }

    /// Training windows of all sources.
    #[must_use]
    pub fn num_train(&self) -> u64 {
        self.parts.iter().map(|part| part.split.train.len()).sum()
    }

    /// Held-out windows of all sources.
    #[must_use]
    pub fn num_validation(&self) -> u64 {
        self.parts.iter().map(|part| part.split.validation.len()).sum()
    }

    /// Figures of what was read.
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

    /// The same texts with spans left out by `rule`, for models with an encoder: of a sequence in other places each time.
    #[must_use]
    pub fn with_spans(self, rule: Option<SpanRule>) -> Self {
        Self { spans: rule, ..self }
    }

    /// Makes a batch of the same texts with documents that do not see each other, each ended by `separator`.
    #[must_use]
    pub fn with_separate_documents(self, separator: u32) -> Self {
        Self { separator: Some(separator), ..self }
    }

    /// What a sequence becomes where spans are left out.
    #[must_use]
    pub fn span_lengths(&self) -> Option<SpanLengths> {
        self.spans.as_ref().map(|rule| rule.lengths(self.options.seq_len))
    }

    /// Tokens of a sequence that have a loss.
    #[must_use]
    pub fn targets_per_sequence(&self) -> usize {
        self.span_lengths().map_or(self.options.seq_len, |lengths| lengths.answer)
    }

    /// Tokens of step `step`, on all ranks, that have a loss.
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

    /// Makes the documents of a filled batch separate where they are to be.
    fn separate(&self, batch: &mut Batch) {
        if let Some(separator) = self.separator {
            batch.separate_documents(separator);
        }
    }

    /// Adds the window of `tokens` that begins at token `start`; `random` says what is left out.
    fn push(&self, tokens: &TokenStore, start: u64, random: &Random, batch: &mut Batch) {
        let Some(rule) = &self.spans else { return batch.push(tokens, start) };
        let mut window = Vec::new();
        tokens.read(start..start + self.options.seq_len as u64, &mut window);
        batch.push_spans(&window, rule, random);
    }

    /// How often each id below `vocab_size` stands in the training windows, or in 65,536 of them spread evenly; of several sources
    /// in proportion to their shares.
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

    /// Microbatch `micro` of optimizer step `step`, both from 0.
    #[must_use]
    pub fn train_batch(&self, step: u64, micro: usize) -> Batch {
        let mut batch = Batch::default();
        self.fill_train_batch(step, micro, &mut batch);
        batch
    }

    /// As [`Self::train_batch`], into a batch whose memory is used again.
    pub fn fill_train_batch(&self, step: u64, micro: usize, batch: &mut Batch) {
        let num_sequences = self.options.batch_size;
        let first = (step * self.options.grad_accumulation as u64 + micro as u64) * num_sequences as u64;
        self.fill_sequences(first, num_sequences, batch);
    }

    /// Training sequences `first..first + num_sequences` of the endless sequence of epochs. Their order depends on nothing
    /// but the seed, the tokens and the weights, so a run may go on with batches of another size.
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

    /// The first `max_batches` batches of the held-out windows, all of them for 0. They come in a fixed mixed order, so
    /// that a few are like the whole, sources in turn by their weights until they are through; the last may have fewer sequences;
    /// none come if nothing is held out.
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

/// The seed by which a source is mixed. The first one has that of a run of one source.
fn seed_of(seed: u64, source: usize) -> u64 {
    seed.wrapping_add((source as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// The token that ends a document, where `config` asks for separate ones.
fn separator(config: &RunConfig, tokenizer: &dyn Encode) -> Result<Option<u32>, DatasetError> {
    if !config.data.separate_documents {
        return Ok(None);
    }
    tokenizer.eos().map(Some).ok_or(DatasetError::NoSeparator)
}

/// A source of `tokens`, split as the options say.
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
    /// How often each id below `vocab_size` stands in the training windows, or in 65,536 of them spread evenly.
    fn token_counts(&self, vocab_size: usize) -> Vec<u64> {
        const MAX_WINDOWS: u64 = 1 << 16;
        let train = &self.split.train;
        let stride = train.len().div_ceil(MAX_WINDOWS).max(1);
        let (mut counts, mut ids) = (vec![0_u64; vocab_size], Vec::new());
        for window in (0..train.len()).step_by(stride as usize) {
            ids.clear();
            let Range { start, end } = train.tokens(window);
            // The last token is a target alone, and the first of the next window.
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
