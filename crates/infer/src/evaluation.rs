//! Evaluation: the loss of a model on a text, and the experts that its tokens go to.
//!
//! The text is divided into consecutive windows. The last one is padded, and padding is not counted. Each document
//! begins with the tokens that the tokenizer puts before a text; they are read but not counted. A window that begins
//! inside a document sees nothing before it, as in training. A model with an encoder predicts spans removed from each
//! window, as T5 is trained.

use std::f64::consts::LN_2;
use std::ops::ControlFlow;

use moeworks_model::PassStats;
use moeworks_moe::MoeSaved;

use crate::InferError;
use crate::data::{Batch, SpanRule, TokenStore, evaluation_batches, span_batches};
use crate::open::Model;
use crate::routing_record::{PassTokens, RecordError, RoutingRecorder, Run};

/// The number of tokens of a batch, whatever the sequence length.
const BATCH_TOKENS: usize = 4096;
/// The longest default sequence length.
const DEFAULT_SEQ_LEN: usize = 1024;
/// The longest window for an encoder, which itself has no limit.
const MAX_SOURCE_LEN: usize = 1 << 20;

/// Options of an evaluation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EvaluationOptions {
    /// The tokens of a window; `None` for the model's maximum, up to 1,024.
    pub seq_len: Option<usize>,
    /// The most windows; 0 for the whole text.
    pub max_sequences: usize,
}

impl EvaluationOptions {
    /// Returns the tokens of a window.
    ///
    /// # Errors
    /// Fails if the model cannot read windows of that length.
    pub fn seq_len(&self, model: &Model) -> Result<usize, InferError> {
        let longest = model.decoder.config().max_seq_len;
        let seq_len = self.seq_len.unwrap_or(DEFAULT_SEQ_LEN.min(longest));
        // An encoder needs at least one token besides the removed span.
        let (least, longest) = if model.has_encoder() { (2, MAX_SOURCE_LEN) } else { (1, longest) };
        let is_possible = (least..=longest).contains(&seq_len);
        if is_possible { Ok(seq_len) } else { Err(InferError::SeqLen { seq_len, least, longest }) }
    }
}

/// The progress of an evaluation after a batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EvaluationProgress {
    /// Tokens evaluated so far.
    pub num_tokens_done: u64,
    /// Tokens of the text.
    pub num_tokens: u64,
    /// The mean loss so far, in nats a token.
    pub mean_loss: f64,
}

/// The results of an evaluation.
#[derive(Clone, Debug)]
pub struct Evaluation {
    /// Losses, and the routing of tokens in each MoE layer.
    pub stats: PassStats,
    /// Bytes of the text that the targets cover; `None` for span corruption.
    pub num_bytes: Option<f64>,
}

impl Evaluation {
    /// Returns the mean loss in nats per token.
    #[must_use]
    pub fn loss(&self) -> f64 {
        self.stats.mean_loss()
    }

    /// Returns the perplexity per token.
    #[must_use]
    pub fn perplexity(&self) -> f64 {
        self.loss().exp()
    }

    /// Returns the loss in bits per byte of the text; `None` for span corruption.
    #[must_use]
    pub fn bits_per_byte(&self) -> Option<f64> {
        self.num_bytes.map(|bytes| self.stats.loss_sum / LN_2 / bytes)
    }

    /// Returns the share of targets that are the model's most likely token.
    #[must_use]
    pub fn accuracy(&self) -> f64 {
        self.stats.num_correct as f64 / self.stats.num_targets.max(1) as f64
    }
}

/// Evaluates `model` on `tokens`. `on_batch` is called after each batch, and may end the evaluation.
///
/// # Errors
/// Fails if there are fewer than two tokens, the tokenizer lacks tokens for span corruption, or the loss is not a
/// number.
pub fn evaluate(
    model: &Model,
    tokens: &TokenStore,
    options: EvaluationOptions,
    on_batch: impl FnMut(EvaluationProgress) -> ControlFlow<()>,
) -> Result<Evaluation, InferError> {
    evaluate_recorded(model, tokens, options, None, on_batch)
}

/// Evaluates as [`evaluate`] does, and records the experts of each token, if a recorder is given.
///
/// # Errors
/// Fails as [`evaluate`] does, or if the record cannot be written.
pub fn evaluate_recorded(
    model: &Model,
    tokens: &TokenStore,
    options: EvaluationOptions,
    mut recorder: Option<&mut RoutingRecorder>,
    mut on_batch: impl FnMut(EvaluationProgress) -> ControlFlow<()>,
) -> Result<Evaluation, InferError> {
    let seq_len = options.seq_len(model)?;
    if tokens.len() < 2 {
        return Err(InferError::FewTokens { num_tokens: tokens.len() });
    }
    let spans = SpanRule::from_config(model.decoder.config(), &model.tokenizer)?;
    let sizes = BatchSizes::new(seq_len, options.max_sequences);
    let batches: Box<dyn Iterator<Item = Batch>> = match &spans {
        None => Box::new(evaluation_batches(tokens, seq_len, sizes.batch_size)),
        Some(rule) => Box::new(span_batches(tokens, seq_len, sizes.batch_size, rule)),
    };
    let (mut stats, mut num_ignored, mut num_sequences) = (PassStats::default(), 0, 0);
    for mut batch in batches.take(sizes.max_batches) {
        if spans.is_none() {
            num_ignored += batch.ignore_text_starts(model.tokenizer.text_start(), model.tokenizer.eos_id());
        }
        let mut tell = |layer: usize, saved: &MoeSaved| {
            if let Some(recorder) = &mut recorder {
                recorder.tell(layer, saved);
            }
        };
        add(&mut stats, model.decoder.evaluate(&model.ctx, &model.weights, &batch.tokens(), Some(&mut tell))?);
        if let Some(recorder) = &mut recorder {
            let num_left = tokens.len().saturating_sub(1).saturating_sub(num_sequences * seq_len as u64);
            let num_real = if spans.is_some() { u64::MAX } else { num_left };
            record(recorder, &batch, num_sequences, num_real)?;
        }
        num_sequences += batch.num_sequences as u64;
        let num_tokens = tokens.len();
        let num_tokens_done = (num_sequences * seq_len as u64).min(num_tokens);
        let progress = EvaluationProgress { num_tokens_done, num_tokens, mean_loss: stats.mean_loss() };
        if on_batch(progress).is_break() {
            break;
        }
    }
    if !stats.mean_loss().is_finite() {
        return Err(model.not_a_number());
    }
    // Every target except an end of text covers some bytes. The bytes of the whole text are scaled by the share of
    // tokens evaluated.
    let share = (stats.num_targets + num_ignored) as f64 / (tokens.len() - 1) as f64;
    let num_bytes = (!model.has_encoder()).then(|| tokens.num_text_bytes() as f64 * share);
    Ok(Evaluation { stats, num_bytes })
}

/// Records the choices of a batch, whose first window is number `first`. Only the first `num_real` tokens are those
/// of the text; the others fill the last window up.
fn record(recorder: &mut RoutingRecorder, batch: &Batch, first: u64, num_real: u64) -> Result<(), RecordError> {
    let len = |sequence: usize| num_real.saturating_sub((sequence * batch.seq_len) as u64).min(batch.seq_len as u64);
    let run = |sequence| Run { id: first + sequence as u64, position: 0, len: len(sequence) as u32 };
    let runs: Vec<Run> = (0..batch.num_sequences).map(run).filter(|run| run.len > 0).collect();
    recorder.finish_pass(PassTokens { runs: &runs, token_ids: &batch.inputs })
}

/// The sizes of batches. With a limit on sequences, batches have one sequence, so that they end exactly at the limit.
struct BatchSizes {
    batch_size: usize,
    max_batches: usize,
}

impl BatchSizes {
    fn new(seq_len: usize, max_sequences: usize) -> Self {
        match max_sequences {
            0 => Self { batch_size: (BATCH_TOKENS / seq_len).max(1), max_batches: usize::MAX },
            limit => Self { batch_size: 1, max_batches: limit },
        }
    }
}

/// Adds the results of a batch.
fn add(sum: &mut PassStats, stats: PassStats) {
    sum.loss_sum += stats.loss_sum;
    sum.num_targets += stats.num_targets;
    sum.num_correct += stats.num_correct;
    if sum.layers.is_empty() {
        sum.layers = stats.layers;
    } else {
        sum.layers.iter_mut().zip(&stats.layers).for_each(|(sum, layer)| sum.merge(layer));
    }
}
