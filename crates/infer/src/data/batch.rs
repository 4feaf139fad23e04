//! Batches of token sequences.

use std::ops::Range;

use moeworks_model::TokenBatch;

use super::TokenStore;

/// The target of a position without loss.
pub const IGNORE: u32 = u32::MAX;

/// Sequences of equal length with the next token of each position.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Token ids for an encoder, `[num_sequences * source_len]`; the sequences are the answers. Empty without an
    /// encoder.
    pub sources: Vec<u32>,
    /// Token ids `[num_sequences * seq_len]`.
    pub inputs: Vec<u32>,
    /// The next token of each position, or [`IGNORE`].
    pub targets: Vec<u32>,
    /// The number of sequences.
    pub num_sequences: usize,
    /// The tokens of each sequence.
    pub seq_len: usize,
    /// The lengths of consecutive segments that do not attend to each other, as in
    /// [`TokenBatch::segments`](moeworks_model::TokenBatch::segments).
    pub segments: Vec<usize>,
}

impl Batch {
    /// Returns the batch as a model takes it.
    #[must_use]
    pub fn tokens(&self) -> TokenBatch<'_> {
        let Self { sources, inputs, targets, num_sequences, seq_len, segments } = self;
        TokenBatch {
            sources,
            inputs,
            targets,
            num_sequences: *num_sequences,
            seq_len: *seq_len,
            segments,
            expert_ids: &[],
        }
    }

    /// Empties the batch, for sequences of `seq_len` tokens. Its memory is reused.
    pub fn clear(&mut self, seq_len: usize) {
        self.sources.clear();
        self.inputs.clear();
        self.targets.clear();
        self.segments.clear();
        self.num_sequences = 0;
        self.seq_len = seq_len;
    }

    /// Keeps only these sequences.
    pub fn keep(&mut self, sequences: Range<usize>) {
        self.keep_segments(&sequences);
        for ids in [&mut self.sources, &mut self.inputs, &mut self.targets] {
            let len = ids.len() / self.num_sequences.max(1);
            ids.truncate(sequences.end * len);
            ids.drain(..sequences.start * len);
        }
        self.num_sequences = sequences.len();
    }

    /// Keeps only the segments of these sequences.
    fn keep_segments(&mut self, sequences: &Range<usize>) {
        let tokens = sequences.start * self.seq_len..sequences.end * self.seq_len;
        let mut end = 0;
        self.segments.retain(|&len| {
            end += len;
            tokens.start < end && end <= tokens.end
        });
    }

    /// Adds a sequence of `seq_len + 1` tokens that begins at token `start`, or as many as the store has from there.
    pub fn push(&mut self, tokens: &TokenStore, start: u64) {
        let end = (start + self.seq_len as u64 + 1).min(tokens.len());
        self.num_sequences += 1;
        tokens.read(start..end - 1, &mut self.inputs);
        tokens.read(start + 1..end, &mut self.targets);
        self.inputs.resize(self.num_sequences * self.seq_len, 0);
        self.targets.resize(self.num_sequences * self.seq_len, IGNORE);
    }
}

impl Batch {
    /// Makes each document a segment of its own: [`segments`](Self::segments) become the lengths of the documents, or
    /// of their parts in a sequence. `separator` ends a document and belongs to it.
    ///
    /// A document's last word still predicts the separator. The separator predicts nothing: the next token begins
    /// another document and cannot be predicted, so its target becomes [`IGNORE`]. A sequence that begins within a
    /// document begins a segment there. Megatron-LM does the same with `--reset-position-ids --reset-attention-mask
    /// --eod-mask-loss` (its `get_ltor_masks_and_position_ids` masks the loss where the input is the separator), and
    /// so does TRL's packing (position ids from 0 in each example, and the first token of each is no label).
    /// torchtitan's document mask blocks attention in the same way, but keeps that target.
    pub fn separate_documents(&mut self, separator: u32) {
        self.segments.clear();
        let seq_len = self.seq_len.max(1);
        for (inputs, targets) in self.inputs.chunks(seq_len).zip(self.targets.chunks_mut(seq_len)) {
            let mut start = 0;
            for at in (0..inputs.len()).filter(|&at| inputs[at] == separator) {
                targets[at] = IGNORE;
                self.segments.push(at + 1 - start);
                start = at + 1;
            }
            self.segments.extend((start < inputs.len()).then_some(inputs.len() - start));
        }
    }

    /// Returns the number of tokens with a loss.
    #[must_use]
    pub fn num_targets(&self) -> usize {
        self.targets.iter().filter(|&&target| target != IGNORE).count()
    }

    /// Removes the loss of the tokens `text_start`, which begin every document: nobody asks a model for them. Returns
    /// their number. `eos` ends the document before.
    pub fn ignore_text_starts(&mut self, text_start: &[u32], eos: Option<u32>) -> usize {
        let mut num_ignored = 0;
        let sequences = self.inputs.chunks(self.seq_len.max(1)).zip(self.targets.chunks_mut(self.seq_len.max(1)));
        for (inputs, targets) in sequences {
            for at in 0..targets.len() {
                // The k-th token of a document's beginning is recognised by the tokens before it.
                let is_at = |k: usize| {
                    let begun = at.checked_sub(k).map(|start| (inputs[start], &inputs[start + 1..=at]));
                    begun
                        .is_some_and(|(before, begun)| eos.is_none_or(|eos| eos == before) && begun == &text_start[..k])
                };
                if (0..text_start.len()).any(|k| targets[at] == text_start[k] && is_at(k)) {
                    targets[at] = IGNORE;
                    num_ignored += 1;
                }
            }
        }
        num_ignored
    }
}

/// Iterates over all of `tokens` in order, in batches of at most `batch_size` sequences. Each token but the first is
/// the target of exactly one position. The last sequence is padded with [`IGNORE`].
pub fn evaluation_batches(tokens: &TokenStore, seq_len: usize, batch_size: usize) -> impl Iterator<Item = Batch> + '_ {
    let num_sequences = tokens.len().saturating_sub(1).div_ceil(seq_len as u64);
    let size = batch_size as u64;
    (0..num_sequences.div_ceil(size)).map(move |i| {
        let mut batch = Batch::default();
        batch.clear(seq_len);
        for sequence in i * size..((i + 1) * size).min(num_sequences) {
            batch.push(tokens, sequence * seq_len as u64);
        }
        batch
    })
}

#[cfg(test)]
#[path = "batch_tests.rs"]
mod tests;
