//! The decoder language model: embedding, layers of attention and feed-forward, norm, output projection.
//!
//! There is no tape. Forward keeps what each block's backward needs (or only the layer's input, with checkpointing);
//! the balance losses, which look at all layers, are known before backward starts; backward goes through the layers from
//! the last to the first and runs each block's weight-gradient task as soon as the block's input gradient is known.

mod checks;
mod ragged;
mod training;

use std::sync::Arc;

use moeworks_moe::{ConfigError, ExpertIds, MoeSaved, NamedTensor, WeightShape};
use moeworks_ops::sampling::DrawnTokens;
use moeworks_ops::{Context, elementwise};
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use self::training::Executor;
use crate::config::ModelConfig;
use crate::encoder::Encoder;
use crate::kv_cache::KvCache;
use crate::layers::layer::ResidualStream;
use crate::layers::{EncoderOutput, Pass, RouterRules, Sequences};
use crate::losses::router_losses;
use crate::mode::Mode;
use crate::pass::{BatchError, PassOptions, PassStats, TokenBatch};
use crate::stage::{GradTarget, Ids, RoutingHook, Stage, StagePart, StageRanks};
use crate::weights::{DecoderWeights, WeightSpec, WeightTable};

/// A decoder language model: its configuration and the blocks that carry it out. Weights are apart. It is the [`Stage`] of all layers
/// with both ends.
///
/// Capacity and jitter are rules of training: outside [`Decoder::forward_backward`] no token is dropped and no noise is
/// added, so that a token's logits do not depend on what else is in the batch. (A model with an `expert_capacity` of its own
/// drops tokens of a sequence always.)
///
/// It may have an encoder, which reads a source first: [`Decoder::encode`] and what takes its result.
#[derive(Debug)]
pub struct Decoder {
    pub(crate) stage: Stage,
    encoder: Option<Encoder>,
}

/// A hook that is given each tensor of a model's first weights, and whose result is kept.
pub type InitHook<'a> = &'a mut dyn FnMut(&WeightSpec, Tensor) -> Tensor;

impl Decoder {
    /// A decoder of `config`, whose `vocab_size` must be set. Fails if a setting is out of range.
    pub fn new(config: ModelConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        let table = WeightTable::new(&config);
        Self::with_table(config, table)
    }

    /// Makes one as [`new`](Self::new) does, with the table of the model's weights, of which some may be frozen.
    pub fn with_table(config: ModelConfig, table: WeightTable) -> Result<Self, ConfigError> {
        Self::build(config, table, StageRanks::default())
    }

    pub(crate) fn build(config: ModelConfig, table: WeightTable, ranks: StageRanks) -> Result<Self, ConfigError> {
        let (table, part) = (Arc::new(table), StagePart::whole(config.num_layers));
        let encoder = config.of_encoder();
        let num_layers = config.num_layers;
        let stage = Stage::on_ranks(config, Arc::clone(&table), part, ranks)?;
        let encoder = encoder.map(|config| Encoder::new(config, table, num_layers)).transpose()?;
        Ok(Self { stage, encoder })
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.stage.config
    }

    pub(crate) fn encoder(&self) -> Option<&Encoder> {
        self.encoder.as_ref()
    }

    /// f32 weights drawn from `seed`: normal with `init_std`, truncated at three deviations; the projections that write to
    /// the residual stream are smaller by sqrt(2 L), norm weights are 1. With `keep` its result for each tensor, such as a part of it, is in
    /// the tensor's place: the tensors are never all there whole at a time.
    #[must_use]
    pub fn init(&self, ctx: &Context, seed: u64, mut keep: Option<InitHook<'_>>) -> DecoderWeights {
        self.build_weights(ctx, |spec| {
            let tensor = spec.first_values(ctx, seed);
            match &mut keep {
                Some(keep) => keep(spec, tensor),
                None => tensor,
            }
        })
    }

    /// Puts weights together of tensors that `make` makes, one for each entry of the table in its order. Routers have the states of the
    /// first step.
    #[must_use]
    pub fn build_weights(&self, ctx: &Context, make: impl FnMut(&WeightSpec) -> Tensor) -> DecoderWeights {
        DecoderWeights::build(self.config(), self.weight_table(), make, |state| first_state(ctx, state))
    }

    /// The table of the model's weights.
    #[must_use]
    pub fn weight_table(&self) -> &Arc<WeightTable> {
        &self.stage.table
    }

    /// The name and shape of every tensor, in the order of [`DecoderWeights::tensors`].
    #[must_use]
    pub fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        self.weight_table().specs().iter().map(|spec| (spec.name.clone(), spec.shape.clone())).collect()
    }

    /// f32 weights of zeros.
    #[must_use]
    pub fn zero_weights(&self, ctx: &Context) -> DecoderWeights {
        let zeros = |shape: &[usize]| ctx.zeros(shape, DType::F32);
        DecoderWeights::build(
            self.config(),
            self.weight_table(),
            |spec| zeros(&spec.shape),
            |state| zeros(&state.shape),
        )
    }

    /// Checks lists of expert ids that are to be handed in for `num_tokens` tokens in [`TokenBatch::expert_ids`]: `[num_tokens, K]` for each
    /// MoE layer of the decoder, first to last.
    ///
    /// # Errors
    /// If there is not a list for each layer, or a layer cannot take its list.
    pub fn expert_ids(
        &self,
        ctx: &Context,
        num_tokens: usize,
        lists: &[Vec<u32>],
    ) -> Result<Vec<ExpertIds>, BatchError> {
        self.stage.expert_ids(ctx, num_tokens, lists)
    }

    /// One training pass over microbatches, in the order that `options` names: the losses of each, and the gradient of every weight, summed
    /// over them in their order. `weights` are f32 or a compute copy; losses on routers are of each microbatch by itself.
    ///
    /// A microbatch may be empty where experts live on several ranks: the experts here then serve the rows of others.
    pub fn forward_backward(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        batches: &[TokenBatch<'_>],
        options: &PassOptions,
        target: GradTarget<'_>,
    ) -> Result<Vec<PassStats>, BatchError> {
        self.check_trainable()?;
        batches.iter().try_for_each(|batch| self.check_batch(batch))?;
        let gathered = self.stage.gathered(ctx, weights);
        let weights = gathered.as_ref().unwrap_or(weights);
        Ok(Executor { decoder: self, ctx, weights, batches, options }.run(target))
    }

    /// The loss of `batch`, no gradient. No token is dropped. The router losses are the pooled ones. In a model with an encoder
    /// its MoE layers come first, as in [`ModelConfig::moe_layers`]; `hook` sees their numbers before those of the decoder's.
    pub fn evaluate(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        batch: &TokenBatch<'_>,
        mut hook: Option<RoutingHook<'_>>,
    ) -> Result<PassStats, BatchError> {
        self.check_batch(batch)?;
        if batch.inputs.is_empty() {
            return Ok(self.serve_evaluation(ctx, weights));
        }
        let gathered = self.stage.gathered(ctx, weights);
        let weights = gathered.as_ref().unwrap_or(weights);
        let mut layers = Vec::new();
        let mut watch = |number: usize, saved: &MoeSaved| {
            if let Some(hook) = &mut hook {
                hook(number, saved);
            }
            layers.push(saved.stats());
        };
        let sources = batch.source_batch();
        let encode = |_: &Encoder| self.encode(ctx, weights, &sources, Some(&mut watch));
        let encoder_output = self.encoder.as_ref().map(encode).transpose()?;
        let before = self.config().num_encoder_layers();
        let sequences = Sequences::whole(batch.num_sequences, batch.seq_len);
        let mut pass = self.pass(ctx, weights, Mode::Infer, sequences, Ids::Known(batch.inputs), encoder_output);
        self.stage.set_documents(&mut pass, batch);
        pass.expert_ids = batch.expert_ids;
        let mut watch = |index: usize, saved: &MoeSaved| watch(before + index, saved);
        let x = self.hidden(&pass, weights, Ids::Known(batch.inputs), None, Some(&mut watch));
        let loss = self.stage.head_loss(ctx, weights, &x, batch.targets);
        self.merge_stats(&mut layers);
        let router = router_losses(self.config(), &layers, &PassOptions::default());
        Ok(self.pass_stats(loss, router.values, layers))
    }

    /// Shows `hook` what each MoE layer decides for the inputs of `batch` by the rules of `mode` (those of training: the capacity over all
    /// these tokens, without noise). Nothing is predicted. Over ranks as [`forward_cached`](Self::forward_cached).
    pub fn route(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        batch: &TokenBatch<'_>,
        mode: Mode,
        hook: RoutingHook<'_>,
    ) -> Result<(), BatchError> {
        self.check_batch(&TokenBatch { targets: batch.inputs, ..*batch })?;
        let gathered = self.stage.gathered(ctx, weights);
        let weights = gathered.as_ref().unwrap_or(weights);
        let (ids, sequences) = (Ids::Known(batch.inputs), Sequences::whole(batch.num_sequences, batch.seq_len));
        let mut pass = self.pass(ctx, weights, mode.without_backward(), sequences, ids, None);
        self.stage.set_documents(&mut pass, batch);
        pass.expert_ids = batch.expert_ids;
        self.hidden(&pass, weights, ids, None, Some(hook));
        Ok(())
    }

    /// The logits `[T, V]` f32 of every position of `num_sequences` sequences of equal length, in a model with an encoder of texts that
    /// answer the sources of `encoder_output` and begin with the encoder's `start_id`. For training and evaluation there are
    /// [`Decoder::forward_backward`] and [`Decoder::evaluate`], which never hold all logits.
    pub fn logits(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        inputs: &[u32],
        num_sequences: usize,
        encoder_output: Option<&EncoderOutput>,
    ) -> Result<Tensor, BatchError> {
        match (&self.encoder, encoder_output) {
            (Some(_), None) => return Err(BatchError::NoSource),
            (None, Some(_)) => return Err(BatchError::NoEncoder),
            _ => {}
        }
        let batch = TokenBatch::without_targets(inputs, num_sequences);
        if let Some(output) = encoder_output.filter(|output| output.num_sequences() != num_sequences) {
            let (num_sequences, len, seq_len) = (output.num_sequences(), inputs.len(), batch.seq_len);
            return Err(BatchError::Length { what: "inputs", len, num_sequences, seq_len });
        }
        self.stage.check_shape(&batch)?;
        let (ids, sequences) = (Ids::Known(inputs), Sequences::whole(batch.num_sequences, batch.seq_len));
        let pass = self.pass(ctx, weights, Mode::Infer, sequences, ids, encoder_output.cloned());
        let x = self.hidden(&pass, weights, ids, None, None);
        Ok(self.stage.head_logits(ctx, weights, &x))
    }

    /// Appends `ids` to the sequences in `cache`: those of the first, then those of the second and so on, as many of each. Returns the
    /// logits `[sequences V]` f32 after the last of each, one behind the other. Many ids at once are a prefill, one of each sequence is a
    /// step of decoding. `hook` sees what each MoE layer decided.
    ///
    /// Where experts live on several ranks, the others [serve](Self::serve_inference); ranks that hold the matrices of other layers
    /// between them pass the same ids.
    pub fn forward_cached(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        cache: &mut KvCache,
        ids: &[u32],
        hook: Option<RoutingHook<'_>>,
    ) -> Result<Tensor, BatchError> {
        let num_sequences = cache.num_sequences();
        let seq_len = ids.len() / num_sequences;
        self.stage.check_ids("prompt", ids)?;
        if seq_len * num_sequences != ids.len() {
            let seq_len = seq_len + 1;
            return Err(BatchError::Length { what: "prompt", len: ids.len(), num_sequences, seq_len });
        }
        if ids.is_empty() {
            return Err(BatchError::Empty);
        }
        self.append(ctx, weights, cache, Ids::Known(ids), hook)
    }

    /// Appends one token of each sequence, which was drawn, as [`forward_cached`](Self::forward_cached) does: a GPU begins before the host
    /// knows it, if nothing else has to.
    pub fn step_async(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        cache: &mut KvCache,
        drawn: &DrawnTokens,
    ) -> Result<Tensor, BatchError> {
        let (len, fits) = (drawn.ids().len(), drawn.vocabulary() <= weights.embedding.rows());
        if !fits || len != cache.num_sequences() || !self.can_run_ahead(ctx) {
            return self.forward_cached(ctx, weights, cache, &Ids::Drawn(drawn).in_host(), None);
        }
        self.append(ctx, weights, cache, Ids::Drawn(drawn), None)
    }

    /// Whether a step can begin before the host knows its tokens: on a GPU, where routers do not look at ids and no other rank waits for
    /// them.
    #[must_use]
    pub fn can_run_ahead(&self, ctx: &Context) -> bool {
        let is_by_ids = self.config().router.looks_at_ids();
        let is_alone = self.stage.tensor.is_none() && self.stage.ranks.is_none() && self.stage.gather.is_none();
        ctx.gpu().is_some() && is_alone && !is_by_ids
    }

    /// Appends checked ids, at least one of each sequence in `cache`.
    fn append(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        cache: &mut KvCache,
        ids: Ids<'_>,
        hook: Option<RoutingHook<'_>>,
    ) -> Result<Tensor, BatchError> {
        let (start, count) = (cache.len(), cache.num_sequences());
        let sequences = Sequences { count, len: ids.len() / count, start };
        self.check_len(sequences.end())?;
        let encoder_output = cache.encoder_output().cloned();
        if self.encoder.is_some() && encoder_output.is_none() {
            return Err(BatchError::NoSource);
        }
        let gathered = self.stage.gathered(ctx, weights);
        let weights = gathered.as_ref().unwrap_or(weights);
        let pass = self.pass(ctx, weights, Mode::Infer, sequences, ids, encoder_output);
        let logits = if sequences.len == 1 {
            ctx.capture_replay(|| {
                let x = self.hidden(&pass, weights, ids, Some(cache), hook);
                self.stage.head_logits(ctx, weights, &x)
            })
        } else {
            let x = self.hidden(&pass, weights, ids, Some(cache), hook);
            let mut last = ctx.empty(&[count, self.config().width], DType::F32);
            for sequence in 0..count {
                elementwise::copy_rows(ctx, &x, (sequence + 1) * sequences.len - 1, &mut last, sequence, 1);
            }
            self.stage.head_logits(ctx, weights, &last)
        };
        Ok(logits.reshaped(&[count * self.config().vocab_size]))
    }

    /// A pass without losses over the tokens `ids`.
    fn pass<'a>(
        &'a self,
        ctx: &'a Context,
        weights: &DecoderWeights,
        mode: Mode,
        sequences: Sequences,
        ids: Ids<'a>,
        encoder_output: Option<EncoderOutput>,
    ) -> Pass<'a> {
        let rules = RouterRules::plain(ids.known(), &sequences);
        self.stage.pass(ctx, weights, mode, sequences, rules, encoder_output)
    }

    /// The residual stream after the last layer, `[T, D]` f32, of a pass that keeps nothing.
    fn hidden(
        &self,
        pass: &Pass<'_>,
        weights: &DecoderWeights,
        ids: Ids<'_>,
        cache: Option<&mut KvCache>,
        hook: Option<RoutingHook<'_>>,
    ) -> Tensor {
        let stream = ResidualStream { x: self.stage.embed(pass, weights, ids), router_logits: None };
        let caches = cache.map(KvCache::layers_mut);
        self.stage.forward_layers(pass, weights, stream, caches, hook).x
    }
}

/// The state of a router before the first step.
fn first_state(ctx: &Context, state: &WeightShape) -> Tensor {
    let random = Random::new(0, Purpose::Init, 0);
    NamedTensor::first(ctx, state, &random, 0.0).tensor
}
