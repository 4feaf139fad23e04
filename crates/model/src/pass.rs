//! What goes into a pass over a batch of tokens and what comes out of it.

use moeworks_moe::{EntropyRule, ExpertIds, LayerStats, RoutingError};
use serde::{Deserialize, Serialize};

use crate::pass_order::PassOrder;

/// Sequences of tokens with the token to be predicted at each position.
#[derive(Clone, Copy, Debug, Default)]
pub struct TokenBatch<'a> {
    /// `[num_sequences, source_len]`: what the encoder reads, to which the sequences are answers; each of these begins with the
    /// encoder's `start_id`. Empty in a model without one.
    pub sources: &'a [u32],
    /// `[num_sequences, seq_len]`: token ids.
    pub inputs: &'a [u32],
    /// `[num_sequences, seq_len]`: the id to be predicted at each position, `moeworks_ops::head_loss::IGNORE` where there
    /// is none.
    pub targets: &'a [u32],
    /// Sequences.
    pub num_sequences: usize,
    /// Tokens of each sequence.
    pub seq_len: usize,
    /// Lengths of the consecutive pieces of the batch's tokens that do not see each other, such as the documents packed into a
    /// sequence; positions begin at 0 in each. None crosses the end of a sequence. Empty: each sequence is one piece.
    pub segments: &'a [usize],
    /// The experts that the tokens go to in place of the routers' choice: one entry for each MoE layer of the decoder, first to last, whatever
    /// stage the batch is for. Made by [`Decoder::expert_ids`](crate::Decoder::expert_ids), or by a hook from
    /// [`MoeSaved::expert_ids`](moeworks_moe::MoeSaved::expert_ids). Empty: the routers choose.
    pub expert_ids: &'a [ExpertIds],
}

impl<'a> TokenBatch<'a> {
    /// Sequences of equal length, `[num_sequences, seq_len]` ids, of which nothing is predicted. The targets are the ids themselves.
    #[must_use]
    pub fn without_targets(inputs: &'a [u32], num_sequences: usize) -> Self {
        let seq_len = inputs.len() / num_sequences.max(1);
        Self { inputs, targets: inputs, num_sequences, seq_len, ..Self::default() }
    }

    /// Returns whether a sequence has more than one piece.
    #[must_use]
    pub fn has_pieces(&self) -> bool {
        self.segments.iter().any(|&len| len != self.seq_len)
    }

    /// Checks that the pieces are not empty, end where sequences end, and add up to the batch.
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
    /// The position of the first of them: tokens of the sequence before it, whose keys and values are in the blocks.
    pub start: usize,
    /// The blocks of the sequence in the cache, in the order of its tokens. Blocks before that of the first token may be those of other
    /// sequences, too.
    pub blocks: &'a [u32],
    /// The adapter to compute with. There is none yet.
    pub adapter: Option<u32>,
    /// The tokens whose logits are wanted.
    pub logits: WantedLogits,
    /// The experts that the tokens go to, as in [`TokenBatch::expert_ids`].
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

/// The stream of the noise on router inputs. Each layer draws from a stream of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterNoise {
    /// The run's seed.
    pub seed: u64,
    /// A number that no other microbatch of the run has, such as step * accumulation + microbatch. In a pass over several it is that of the
    /// first, and the others have the numbers behind it.
    pub step: u64,
}

/// The settings of a training pass.
#[derive(Clone, Copy, Debug)]
pub struct PassOptions {
    /// Multiplies the gradient of the balance loss. With gradient accumulation over M batches: the coefficient over M.
    pub balance_coef: f32,
    /// Which balance loss.
    pub balance: BalanceKind,
    /// Multiplies the gradient of the router z-loss; as `balance_coef`.
    pub z_coef: f32,
    /// Multiplies the gradient of the device-level balance loss (DeepSeek-V2) over the router's groups of experts, the sum of the
    /// layers'; as `balance_coef`. Without groups there is none.
    pub device_coef: f32,
    /// The same of the communication balance loss (DeepSeek-V2).
    pub communication_coef: f32,
    /// Multiplies the gradient of the sequence-wise balance loss (DeepSeek-V3), the sum of the layers'; as `balance_coef`.
    /// 0: that loss is not computed.
    pub sequence_coef: f32,
    /// Multiplies the gradient of the squared coefficient of variation of the experts' importance (Shazeer), the sum of
    /// the layers'; as `balance_coef`.
    pub importance_coef: f32,
    /// The same of the experts' smooth load, where there is noise on the logits.
    pub load_coef: f32,
    /// The entropy losses; their weights as `balance_coef`.
    pub entropy: EntropyRule,
    /// Multiplies the gradient of the L1 loss of ReLU routing, whose weight is in the router's state; as `balance_coef`.
    pub l1_scale: f32,
    /// The share of the run that is done, 0 to 1, for what changes over a run.
    pub progress: f64,
    /// The position of the first token of the batch among those of all ranks, by which noise is addressed.
    pub first_token: usize,
    /// Noise on router inputs, if the configuration's `jitter` is not 0; none gives none.
    pub noise: Option<RouterNoise>,
    /// Keep only each layer's input and compute the layer again in backward.
    pub checkpoint_layers: bool,
    /// The order of layers and microbatches, where there are several of these.
    pub order: PassOrder,
    /// Multiplies the gradient of the SUM of the tokens' losses: one over the number of targets of the whole step gives the
    /// gradient of the mean.
    pub grad_scale: f32,
}

impl PassOptions {
    /// The settings of a microbatch of a pass.
    pub(crate) fn of_microbatch(&self, index: usize) -> Self {
        let noise = self.noise.map(|noise| RouterNoise { step: noise.step.wrapping_add(index as u64), ..noise });
        Self { noise, ..*self }
    }

    /// Whether GShard's balance loss counts.
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

/// The losses on routers besides balance and z-loss, each the sum of the MoE layers' unless it says otherwise, not multiplied by
/// its coefficient; none where a loss is not computed or has no meaning.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RouterLosses {
    /// The device-level balance loss (DeepSeek-V2), with groups of experts: 1 a layer when balanced.
    pub device: Option<f64>,
    /// The communication balance loss (DeepSeek-V2), with groups of experts: 1 a layer when balanced and each token goes to as
    /// many groups as it may.
    pub communication: Option<f64>,
    /// The sequence-wise balance loss (DeepSeek-V3), where it has a coefficient: 1 a layer when balanced.
    pub sequence: Option<f64>,
    /// The squared coefficient of variation of the experts' importance (Shazeer).
    pub importance: Option<f64>,
    /// The same of their smooth load, with noise on the logits.
    pub load: Option<f64>,
    /// The mean entropy of a token's distribution, the sum of the modalities' (LIMoE's local loss).
    pub local_entropy: Option<f64>,
    /// What the entropy of the mean distribution lacks, the sum of the modalities' (LIMoE's global loss).
    pub global_entropy: Option<f64>,
    /// The mean over tokens and layers of the sum of a token's gates, each as often as [`l1_loads`](moeworks_moe::l1_loads) says,
    /// with ReLU routing (ReMoE, 2412.14711, equation 10).
    pub l1: Option<f64>,
}

impl RouterLosses {
    /// The losses with their names.
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

    /// The losses that `value` gives for their names.
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

    /// Adds `share` times the losses of `other`; what only one has stays none.
    pub fn add(&mut self, other: &Self, share: f64) {
        let sums = self.named().into_iter().zip(other.named());
        let sums: Vec<_> = sums.map(|((name, a), (_, b))| (name, a.zip(b).map(|(a, b)| a + share * b))).collect();
        *self = Self::from_names(|name| sums.iter().find(|sum| sum.0 == name).and_then(|sum| sum.1));
    }
}

/// What a pass says about a batch.
#[derive(Clone, Debug, Default)]
pub struct PassStats {
    /// Sum over counted tokens of the cross-entropy, in nats.
    pub loss_sum: f64,
    /// Tokens that count.
    pub num_targets: usize,
    /// Of these, tokens whose largest logit is the target's.
    pub num_correct: usize,
    /// The balance loss, not multiplied by its coefficient; 0 without MoE layers.
    pub balance_loss: f64,
    /// The router z-loss, the sum of the MoE layers', not multiplied by its coefficient; 0 without MoE layers.
    pub z_loss: f64,
    /// The other losses on routers.
    pub router_losses: RouterLosses,
    /// What each MoE layer's router did, first to last.
    pub layers: Vec<LayerStats>,
}

impl PassStats {
    /// Mean cross-entropy of a counted token, in nats; 0 if none counts.
    #[must_use]
    pub fn mean_loss(&self) -> f64 {
        if self.num_targets == 0 { 0.0 } else { self.loss_sum / self.num_targets as f64 }
    }
}

/// The tokens and the experts that a list of expert ids is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertIdShape {
    /// T.
    pub num_tokens: usize,
    /// Experts that the layer chooses among.
    pub num_experts: usize,
}

/// A batch that a model cannot take.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum BatchError {
    /// The numbers of ids and of sequences do not fit.
    #[error("{what} has {len} ids, but {num_sequences} sequences of {seq_len} tokens need {}", num_sequences * seq_len)]
    Length {
        /// `inputs` or `targets`.
        what: &'static str,
        /// Its ids.
        len: usize,
        /// Sequences.
        num_sequences: usize,
        /// Tokens of each.
        seq_len: usize,
    },
    /// A token id that the vocabulary does not have.
    #[error("{what}[{index}] = {id}: token ids must be below the vocabulary's size, {vocab_size}")]
    Id {
        /// `inputs`, `targets` or `prompt`.
        what: &'static str,
        /// The position.
        index: usize,
        /// The id.
        id: u32,
        /// V.
        vocab_size: usize,
    },
    /// A sequence longer than the model is made for.
    #[error("a sequence of {len} tokens: the model is made for at most {max_seq_len} (max_seq_len)")]
    TooLong {
        /// Tokens.
        len: usize,
        /// The longest possible.
        max_seq_len: usize,
    },
    /// A model that can be used but not trained.
    #[error("this model cannot be trained: {0}")]
    NotTrainable(&'static str),
    /// A stage is given no residual stream of its neighbour, or its gradient, though it has no end there, or one though it has.
    #[error("{}", if *is_missing { "the stage takes the residual stream of its neighbour: none was given" } else { "the stage has an end of the model there and takes no residual stream" })]
    Stream {
        /// Whether it is missing.
        is_missing: bool,
    },
    /// A model with an encoder is given no source.
    #[error("this model has an encoder, which reads a source text first; here there is none for it to read")]
    NoSource,
    /// A source is given to a model without an encoder.
    #[error("this model has no encoder to read a source with")]
    NoEncoder,
    /// No token at all.
    #[error("no token: at least one is needed")]
    Empty,
    /// A piece without tokens.
    #[error("segments[{index}] = 0: each piece of a sequence needs at least one token")]
    EmptySegment {
        /// The piece.
        index: usize,
    },
    /// A piece that goes on past the end of its sequence.
    #[error(
        "segments[{index}] = {len}: its sequence has only {room} more tokens; a piece ends with its sequence at the latest"
    )]
    SegmentCrosses {
        /// The piece.
        index: usize,
        /// Its tokens.
        len: usize,
        /// Tokens of the sequence from the piece's first on.
        room: usize,
    },
    /// Pieces that are fewer or more tokens than the batch.
    #[error("the segments have {sum} tokens together, but the batch has {num_tokens}")]
    SegmentSum {
        /// Tokens of the pieces.
        sum: usize,
        /// Tokens of the batch.
        num_tokens: usize,
    },
    /// A sequence without blocks for all its tokens.
    #[error(
        "sequence {sequence} has {num_blocks} blocks of {block_len} tokens, but {num_tokens} tokens with those of this pass"
    )]
    FewBlocks {
        /// The sequence in the pass.
        sequence: usize,
        /// Its blocks.
        num_blocks: usize,
        /// Tokens of a block.
        block_len: usize,
        /// Its tokens.
        num_tokens: usize,
    },
    /// A block that the cache does not have.
    #[error("sequence {sequence}: block {block} is not one of the cache's {num_blocks}")]
    NoBlock {
        /// The sequence in the pass.
        sequence: usize,
        /// The block.
        block: u32,
        /// Blocks of the cache.
        num_blocks: usize,
    },
    /// Two sequences of a pass with the same block, of which one writes into it.
    #[error("sequence {sequence} writes into block {block}, which sequence {other} writes into or reads")]
    SharedBlock {
        /// The sequence that writes.
        sequence: usize,
        /// The block.
        block: u32,
        /// The other sequence.
        other: usize,
    },
    /// An adapter that was not loaded.
    #[error("sequence {sequence}: there is no adapter {adapter}")]
    NoAdapter {
        /// The sequence in the pass.
        sequence: usize,
        /// The adapter.
        adapter: u32,
    },
    /// A model whose passes hold sequences of one length alone.
    #[error("sequences of different lengths in one pass: {0}")]
    NotRagged(&'static str),
    /// A model that cannot keep the pieces of a sequence separate.
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
    /// A result that is not a number, as weights that are damaged or too large give.
    #[error("the model's result is not a number")]
    NotANumber,
}

#[cfg(test)]
#[path = "pass_tests.rs"]
mod tests;
