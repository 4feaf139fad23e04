//! The inputs, options and statistics of a pass over a batch of tokens.

use moeworks_comm::CommError;
use moeworks_moe::{EntropyRule, ExpertIds, LayerStats, RoutingError};
use serde::{Deserialize, Serialize};

use crate::pass_order::PassOrder;

/// Sequences of tokens, with the target of each position.
#[derive(Clone, Copy, Debug, Default)]
pub struct TokenBatch<'a> {
    /// `[num_sequences, source_len]`: the sources for the encoder. The sequences are answers to them, and each begins
    /// with the encoder's `start_id`. Empty in a model without an encoder.
    pub sources: &'a [u32],
    /// `[num_sequences, seq_len]`: token ids.
    pub inputs: &'a [u32],
    /// `[num_sequences, seq_len]`: the id to predict at each position, or `moeworks_ops::head_loss::IGNORE`.
    pub targets: &'a [u32],
    /// The number of sequences.
    pub num_sequences: usize,
    /// The number of tokens of each sequence.
    pub seq_len: usize,
    /// The lengths of consecutive segments of tokens that do not attend to each other, such as documents packed into
    /// a sequence; positions begin at 0 in each. No segment crosses the end of a sequence. Empty: each sequence is
    /// one segment.
    pub segments: &'a [usize],
    /// The experts to use instead of the routers' choice: one entry per MoE layer of the decoder, in order, whatever
    /// stage the batch is for. [`Decoder::expert_ids`](crate::Decoder::expert_ids) makes them, or a hook from
    /// [`MoeSaved::expert_ids`](moeworks_moe::MoeSaved::expert_ids). Empty: the routers choose.
    pub expert_ids: &'a [ExpertIds],
}

impl<'a> TokenBatch<'a> {
    /// Returns a batch of sequences of equal length, `[num_sequences, seq_len]` ids, without predictions. The targets
    /// are the ids themselves.
    #[must_use]
    pub fn without_targets(inputs: &'a [u32], num_sequences: usize) -> Self {
        let seq_len = inputs.len() / num_sequences.max(1);
        Self { inputs, targets: inputs, num_sequences, seq_len, ..Self::default() }
    }

    /// Returns true if a sequence has more than one segment.
    #[must_use]
    pub fn has_pieces(&self) -> bool {
        self.segments.iter().any(|&len| len != self.seq_len)
    }

    /// Checks that segments are not empty, end where sequences end, and cover the batch.
    ///
    /// # Errors
    /// If they do not.
    pub fn check_segments(&self) -> Result<(), BatchError> {
        let Self { segments, num_sequences, seq_len, .. } = *self;
        if segments.is_empty() {
            return Ok(());
        }
        let num_tokens = num_sequences.saturating_mul(seq_len);
        let mut end = 0_usize;
        for (index, &len) in segments.iter().enumerate() {
            let room = if seq_len == 0 { 0 } else { seq_len - end % seq_len };
            match len {
                0 => return Err(BatchError::EmptySegment { index }),
                _ if len > room => return Err(BatchError::SegmentCrosses { index, len, room }),
                _ => end += len,
            }
        }
        if end == num_tokens { Ok(()) } else { Err(BatchError::SegmentSum { sum: end, num_tokens }) }
    }
}

/// The next tokens of a sequence in a pass over sequences of different lengths.
#[derive(Clone, Copy, Debug, Default)]
pub struct SequencePart<'a> {
    /// The tokens, at least one.
    pub ids: &'a [u32],
    /// The position of the first token: the number of tokens of the sequence before it, whose keys and values are in
    /// the blocks.
    pub start: usize,
    /// The sequence's blocks in the cache, in the order of its tokens. Blocks before that of the first token may be
    /// shared with other sequences.
    pub blocks: &'a [u32],
    /// The adapter to apply. Not supported yet: must be none.
    pub adapter: Option<u32>,
    /// The tokens whose logits are wanted.
    pub logits: WantedLogits,
    /// The experts to use instead of the routers' choice; see [`TokenBatch::expert_ids`].
    pub expert_ids: &'a [ExpertIds],
}

/// The tokens of a sequence whose logits are wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WantedLogits {
    /// None, as in the middle of a prompt.
    None,
    /// The last one.
    #[default]
    Last,
    /// All of them.
    All,
}

/// The auxiliary loss that balances the experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BalanceKind {
    /// None.
    None,
    /// Each layer by itself, added up (Switch): 1 a layer when balanced.
    Layer,
    /// All layers together, as `transformers` does: K when balanced.
    #[default]
    Pooled,
    /// Each layer by itself by the tokens' first choices, added up (GShard): `1/E^2` a layer when balanced.
    Gshard,
}

/// The random stream of noise on router inputs. Each layer draws from its own stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterNoise {
    /// The run's seed.
    pub seed: u64,
    /// A number that is unique to the microbatch in the run, such as step * accumulation + microbatch. In a pass over
    /// several microbatches it is that of the first, and the others have the numbers after it.
    pub step: u64,
}

/// The options of a training pass.
#[derive(Clone, Copy, Debug)]
pub struct PassOptions {
    /// The factor of the balance loss's gradient: its coefficient, over M with gradient accumulation over M batches.
    /// The factors of the other losses are defined alike.
    pub balance_coef: f32,
    /// The kind of balance loss.
    pub balance: BalanceKind,
    /// The factor of the router z-loss's gradient.
    pub z_coef: f32,
    /// The factor of the gradient of the device-level balance loss (DeepSeek-V2) over the router's groups of experts,
    /// summed over layers. Without groups there is no such loss.
    pub device_coef: f32,
    /// The factor of the gradient of the communication balance loss (DeepSeek-V2), summed over layers.
    pub communication_coef: f32,
    /// The factor of the gradient of the sequence-wise balance loss (DeepSeek-V3), summed over layers. 0: the loss is
    /// not computed.
    pub sequence_coef: f32,
    /// The factor of the gradient of the squared coefficient of variation of the experts' importance (Shazeer),
    /// summed over layers.
    pub importance_coef: f32,
    /// The factor of the gradient of the squared coefficient of variation of the experts' smooth load (Shazeer), if
    /// logits have noise.
    pub load_coef: f32,
    /// The entropy losses, with the factors of their gradients.
    pub entropy: EntropyRule,
    /// The factor of the gradient of ReLU routing's L1 loss, whose weight is in the router's state.
    pub l1_scale: f32,
    /// The share of the run that is done, 0 to 1, for settings that change over a run.
    pub progress: f64,
    /// The position of the batch's first token among those of all ranks, which addresses the random numbers of noise.
    pub first_token: usize,
    /// The noise on router inputs, if `jitter` is not 0 in the configuration; none: no noise.
    pub noise: Option<RouterNoise>,
    /// Keeps only the input of each layer and recomputes the layer in backward.
    pub checkpoint_layers: bool,
    /// The order of layers and microbatches in a pass over several microbatches.
    pub order: PassOrder,
    /// The factor of the gradient of the SUM of the tokens' losses. One over the number of targets of the whole step
    /// gives the gradient of the mean.
    pub grad_scale: f32,
}

impl PassOptions {
    /// Returns the options of one microbatch of a pass.
    pub(crate) fn of_microbatch(&self, index: usize) -> Self {
        let noise = self.noise.map(|noise| RouterNoise { step: noise.step.wrapping_add(index as u64), ..noise });
        Self { noise, ..*self }
    }

    /// Returns true if GShard's balance loss has a gradient.
    pub(crate) fn has_gshard_loss(&self) -> bool {
        self.balance == BalanceKind::Gshard && self.balance_coef != 0.0
    }
}

impl Default for PassOptions {
    fn default() -> Self {
        Self {
            balance_coef: 0.0,
            balance: BalanceKind::Pooled,
            z_coef: 0.0,
            device_coef: 0.0,
            communication_coef: 0.0,
            sequence_coef: 0.0,
            importance_coef: 0.0,
            load_coef: 0.0,
            entropy: EntropyRule::default(),
            l1_scale: 0.0,
            progress: 1.0,
            first_token: 0,
            noise: None,
            checkpoint_layers: false,
            order: PassOrder::default(),
            grad_scale: 1.0,
        }
    }
}

/// The losses on routers other than balance and z-loss, without their coefficients. Each is the sum over MoE layers
/// unless it says otherwise; none if it is not computed or has no meaning.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RouterLosses {
    /// The device-level balance loss (DeepSeek-V2), with groups of experts: 1 per layer if balanced.
    pub device: Option<f64>,
    /// The communication balance loss (DeepSeek-V2), with groups of experts: 1 per layer if balanced and each token
    /// goes to as many groups as it may.
    pub communication: Option<f64>,
    /// The sequence-wise balance loss (DeepSeek-V3), if it has a coefficient: 1 per layer if balanced.
    pub sequence: Option<f64>,
    /// The squared coefficient of variation of the experts' importance (Shazeer).
    pub importance: Option<f64>,
    /// The squared coefficient of variation of the experts' smooth load (Shazeer), with noise on the logits.
    pub load: Option<f64>,
    /// The mean entropy of a token's distribution, summed over modalities (LIMoE's local loss).
    pub local_entropy: Option<f64>,
    /// The amount by which the entropy of the mean distribution falls below its threshold, summed over modalities
    /// (LIMoE's global loss).
    pub global_entropy: Option<f64>,
    /// The mean over tokens and layers of the sum of a token's gates, each weighted by
    /// [`l1_loads`](moeworks_moe::l1_loads), with ReLU routing (ReMoE, 2412.14711, equation 10).
    pub l1: Option<f64>,
}

impl RouterLosses {
    /// Returns the losses with their names.
    #[must_use]
    pub fn named(&self) -> [(&'static str, Option<f64>); 8] {
        [
            ("device", self.device),
            ("communication", self.communication),
            ("sequence", self.sequence),
            ("importance", self.importance),
            ("load", self.load),
            ("local_entropy", self.local_entropy),
            ("global_entropy", self.global_entropy),
            ("l1", self.l1),
        ]
    }

    /// Makes the losses from a function of their names.
    #[must_use]
    pub fn from_names(mut value: impl FnMut(&str) -> Option<f64>) -> Self {
        Self {
            device: value("device"),
            communication: value("communication"),
            sequence: value("sequence"),
            importance: value("importance"),
            load: value("load"),
            local_entropy: value("local_entropy"),
            global_entropy: value("global_entropy"),
            l1: value("l1"),
        }
    }

    /// Adds `share` times the losses of `other`; a loss that is none in either becomes none.
    pub fn add(&mut self, other: &Self, share: f64) {
        let sums = self.named().into_iter().zip(other.named());
        let sums: Vec<_> = sums.map(|((name, a), (_, b))| (name, a.zip(b).map(|(a, b)| a + share * b))).collect();
        *self = Self::from_names(|name| sums.iter().find(|sum| sum.0 == name).and_then(|sum| sum.1));
    }
}

/// The statistics of a pass over a batch.
#[derive(Clone, Debug, Default)]
pub struct PassStats {
    /// The cross-entropy in nats, summed over targets.
    pub loss_sum: f64,
    /// The number of targets.
    pub num_targets: usize,
    /// The number of targets that have the largest logit.
    pub num_correct: usize,
    /// The balance loss without its coefficient; 0 without MoE layers.
    pub balance_loss: f64,
    /// The router z-loss without its coefficient, summed over MoE layers; 0 without any.
    pub z_loss: f64,
    /// The other losses on routers.
    pub router_losses: RouterLosses,
    /// The statistics of each MoE layer's router, in order.
    pub layers: Vec<LayerStats>,
}

impl PassStats {
    /// Returns the mean cross-entropy of a target in nats; 0 without targets.
    #[must_use]
    pub fn mean_loss(&self) -> f64 {
        if self.num_targets == 0 { 0.0 } else { self.loss_sum / self.num_targets as f64 }
    }
}

/// The tokens and the experts that a list of expert ids is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertIdShape {
    /// The number of tokens, T.
    pub num_tokens: usize,
    /// The number of experts that the layer chooses among.
    pub num_experts: usize,
}

/// A batch that a model cannot process.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum BatchError {
    /// A rank that holds experts or layers of the model was lost.
    #[error(transparent)]
    Ranks(#[from] CommError),
    /// The number of ids does not match the number and length of sequences.
    #[error("{what} has {len} ids, but {num_sequences} sequences of {seq_len} tokens need {}", num_sequences * seq_len)]
    Length {
        /// `inputs` or `targets`.
        what: &'static str,
        /// The number of its ids.
        len: usize,
        /// The number of sequences.
        num_sequences: usize,
        /// The number of tokens of each.
        seq_len: usize,
    },
    /// A token id is beyond the vocabulary.
    #[error("{what}[{index}] = {id}: token ids must be below the vocabulary's size, {vocab_size}")]
    Id {
        /// `inputs`, `targets` or `prompt`.
        what: &'static str,
        /// The position.
        index: usize,
        /// The id.
        id: u32,
        /// The size of the vocabulary.
        vocab_size: usize,
    },
    /// A sequence is longer than the model allows.
    #[error("a sequence of {len} tokens: the model is made for at most {max_seq_len} (max_seq_len)")]
    TooLong {
        /// The number of tokens.
        len: usize,
        /// The longest sequence of the model.
        max_seq_len: usize,
    },
    /// The model cannot be trained.
    #[error("this model cannot be trained: {0}")]
    NotTrainable(&'static str),
    /// A stage lacks the residual stream of its neighbour or its gradient, or is given one on the side where it has
    /// an end of the model.
    #[error("{}", if *is_missing { "the stage needs the residual stream of its neighbour" } else { "the stage has an end of the model on that side and takes no residual stream" })]
    Stream {
        /// True if it is missing.
        is_missing: bool,
    },
    /// A model with an encoder lacks a source.
    #[error("this model has an encoder and needs a source text")]
    NoSource,
    /// A source is given to a model without an encoder.
    #[error("this model has no encoder, so there must be no source text")]
    NoEncoder,
    /// The batch has no tokens.
    #[error("no tokens: at least one is needed")]
    Empty,
    /// A segment has no tokens.
    #[error("segments[{index}] = 0: a segment needs at least one token")]
    EmptySegment {
        /// The index of the segment.
        index: usize,
    },
    /// A segment goes on past the end of its sequence.
    #[error(
        "segments[{index}] = {len}: its sequence has only {room} more tokens, and a segment must not cross its end"
    )]
    SegmentCrosses {
        /// The index of the segment.
        index: usize,
        /// The number of its tokens.
        len: usize,
        /// The number of tokens from its first one to the end of the sequence.
        room: usize,
    },
    /// The segments have fewer or more tokens than the batch.
    #[error("the segments have {sum} tokens in all, but the batch has {num_tokens}")]
    SegmentSum {
        /// The number of tokens of the segments.
        sum: usize,
        /// The number of tokens of the batch.
        num_tokens: usize,
    },
    /// A sequence has too few blocks for its tokens.
    #[error(
        "sequence {sequence} has {num_blocks} blocks of {block_len} tokens, but {num_tokens} tokens with those of this pass"
    )]
    FewBlocks {
        /// The index of the sequence in the pass.
        sequence: usize,
        /// The number of its blocks.
        num_blocks: usize,
        /// The number of tokens of a block.
        block_len: usize,
        /// The number of its tokens.
        num_tokens: usize,
    },
    /// A block is not in the cache.
    #[error("sequence {sequence}: block {block} is not one of the cache's {num_blocks}")]
    NoBlock {
        /// The index of the sequence in the pass.
        sequence: usize,
        /// The block.
        block: u32,
        /// The number of blocks of the cache.
        num_blocks: usize,
    },
    /// Two sequences of a pass share a block, and one of them writes to it.
    #[error("sequence {sequence} writes into block {block}, which sequence {other} writes into or reads")]
    SharedBlock {
        /// The sequence that writes.
        sequence: usize,
        /// The block.
        block: u32,
        /// The other sequence.
        other: usize,
    },
    /// The adapter was not loaded.
    #[error("sequence {sequence}: unknown adapter {adapter}")]
    NoAdapter {
        /// The index of the sequence in the pass.
        sequence: usize,
        /// The adapter.
        adapter: u32,
    },
    /// The ranks that have the model's layers do not make such a pass.
    #[error("a model whose layers are on several ranks is for use alone: {0}")]
    OnStages(&'static str),
    /// The model supports only sequences of equal length in a pass.
    #[error("sequences of different lengths in one pass: {0}")]
    NotRagged(&'static str),
    /// The model cannot keep the segments of a sequence apart.
    #[error("sequences of several documents that do not see each other: {0}")]
    NoSegments(&'static str),
    /// Expert ids for another number of MoE layers.
    #[error("expert ids for {found} MoE layers: the model has {expected}")]
    ExpertIdLayers {
        /// Lists given.
        found: usize,
        /// MoE layers of the decoder.
        expected: usize,
    },
    /// Expert ids of another layer or of other tokens.
    #[error(
        "layer {layer} has expert ids of {} tokens among {} experts: must be of {} tokens among {}",
        found.num_tokens, found.num_experts, expected.num_tokens, expected.num_experts
    )]
    ExpertIdShape {
        /// The layer.
        layer: usize,
        /// The ids that were given.
        found: ExpertIdShape,
        /// The ids that the pass needs.
        expected: ExpertIdShape,
    },
    /// A list of expert ids that a layer cannot take.
    #[error("layer {layer}: {error}")]
    ExpertIds {
        /// The layer.
        layer: usize,
        /// The reason.
        error: RoutingError,
    },
    /// A result is NaN, as with weights that are damaged or too large.
    #[error("the model's result is not a number")]
    NotANumber,
}

#[cfg(test)]
#[path = "pass_tests.rs"]
mod tests;
