//! Batches of token sequences.

use std::ops::Range;

use moeworks_model::TokenBatch;

use super::TokenStore;

/// A target that has no loss.
pub const IGNORE: u32 = u32::MAX;

/// Sequences of equal length and, for each token, the one that follows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Token ids for an encoder `[num_sequences * source_len]`, to which the sequences are answers; empty where there
    /// is none.
    pub sources: Vec<u32>,
    /// Token ids `[num_sequences * seq_len]`.
    pub inputs: Vec<u32>,
    /// The following token of each, or [`IGNORE`].
    pub targets: Vec<u32>,
    /// Sequences.
    pub num_sequences: usize,
    /// Tokens of each.
    pub seq_len: usize,
    /// Lengths of the consecutive pieces of the sequences that do not see each other, as in
    /// [`TokenBatch::segments`](moeworks_model::TokenBatch::segments).
    pub segments: Vec<usize>,
}

impl Batch {
    /// The batch as a model takes it.
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

    /// Empties it, for sequences of `seq_len` tokens; its memory is used again.
    pub fn clear(&mut self, seq_len: usize) {
        self.sources.clear();
        self.inputs.clear();
        self.targets.clear();
        self.segments.clear();
        self.num_sequences = 0;
        self.seq_len = seq_len;
    }

    /// Keeps only these of its sequences.
    pub fn keep(&mut self, sequences: Range<usize>) {
        self.keep_segments(&sequences);
        for ids in [&mut self.sources, &mut self.inputs, &mut self.targets] {
            let len = ids.len() / self.num_sequences.max(1);
            ids.truncate(sequences.end * len);
            ids.drain(..sequences.start * len);
        }
        self.num_sequences = sequences.len();
    }

    /// Keeps only the pieces of these sequences.
    fn keep_segments(&mut self, sequences: &Range<usize>) {
        let tokens = sequences.start * self.seq_len..sequences.end * self.seq_len;
        let mut end = 0;
        self.segments.retain(|&len| {
            end += len;
            tokens.start < end && end <= tokens.end
        });
    }

    /// Adds a sequence of `seq_len + 1` tokens that begins at token `start`, or of what the store has from there on.
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
    /// Makes each document of the sequences a piece of its own: [`segments`](Self::segments) become the lengths of
    /// the documents, or of the parts of them that are in a sequence. `separator` ends a document and belongs to it.
    ///
    /// A document's last word still predicts the separator. The separator predicts nothing: the token behind it
    /// begins another document, of which nothing can be known, so that its target becomes [`IGNORE`]. A sequence that
    /// begins within a document begins a piece there. This is what Megatron-LM does with `--reset-position-ids
    /// --reset-attention-mask --eod-mask-loss` (its `get_ltor_masks_and_position_ids` masks the loss where the input
    /// is the separator), and what TRL's packing does (position ids from 0 in each example, and the first token of
    /// each is no label). torchtitan's document mask blocks attention alike, but keeps that target.
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

    /// Returns how many tokens have a loss.
    #[must_use]
    pub fn num_targets(&self) -> usize {
        self.targets.iter().filter(|&&target| target != IGNORE).count()
    }

    /// Takes the loss from the tokens `text_start`, which begin every document: nobody asks a model for them. Returns
    /// how many there were. `eos` ends the document before.
    pub fn ignore_text_starts(&mut self, text_start: &[u32], eos: Option<u32>) -> usize {
        let mut num_ignored = 0;
        let sequences = self.inputs.chunks(self.seq_len.max(1)).zip(self.targets.chunks_mut(self.seq_len.max(1)));
        for (inputs, targets) in sequences {
            for at in 0..targets.len() {
                // Where in the beginning of a document the target stands, by the tokens before it.
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

/// All of `tokens` in order, each but the first the target of exactly one position, in batches of at most
/// `batch_size` sequences. The end of the last sequence is padded with targets of [`IGNORE`].
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
