//! The decoder language model: embedding, layers of attention and feed-forward, norm, output projection.
//!
//! There is no tape. The forward pass keeps the activations that each block's backward needs (or only the layer's
//! input, with checkpointing). The losses on routers, which depend on all layers, are known before the backward pass
//! starts. The backward pass goes from the last layer to the first, and runs each block's weight-gradient task as
//! soon as the gradient of its input is known.

mod checks;
mod ragged;
mod stages;
mod training;

use std::sync::Arc;

use moeworks_moe::{ConfigError, ExpertIds, MoeSaved, NamedTensor, WeightShape};
use moeworks_ops::sampling::DrawnTokens;
use moeworks_ops::{Context, elementwise};
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use self::stages::CacheMut;
use self::training::Executor;
use crate::config::ModelConfig;
use crate::encoder::Encoder;
use crate::kv_cache::KvCache;
use crate::layers::{EncoderOutput, Pass, RouterRules, Sequences};
use crate::losses::router_losses;
use crate::mode::Mode;
use crate::pass::{BatchError, PassOptions, PassStats, TokenBatch};
use crate::remote_stages::RemoteStages;
use crate::stage::{GradTarget, Ids, RoutingHook, Stage, StagePart, StageRanks};
use crate::weights::{DecoderWeights, WeightSpec, WeightTable};

/// A decoder language model: its configuration and blocks. Weights are arguments. It is the [`Stage`] of all layers
/// with embedding and head.
///
/// Capacity and jitter are rules of training: outside [`Decoder::forward_backward`] no token is dropped and no noise
/// is added, so that a token's logits do not depend on the rest of the batch. (A model with an `expert_capacity` of
/// its own always drops tokens of a sequence.)
///
/// It may have an encoder that reads a source first: see [`Decoder::encode`].
#[derive(Debug)]
pub struct Decoder {
    pub(crate) stage: Stage,
    pub(crate) encoder: Option<Encoder>,
    /// The ranks that have the layers after those of `stage`, if other ranks do.
    pub(crate) rest: Option<RemoteStages>,
}

/// A hook that is given each tensor of a model's initial weights, and returns the one to keep.
pub type InitHook<'a> = &'a mut dyn FnMut(&WeightSpec, Tensor) -> Tensor;

impl Decoder {
    /// Makes a decoder of `config`, whose `vocab_size` must be set. Fails if a setting is out of range.
    pub fn new(config: ModelConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        let table = WeightTable::new(&config);
        Self::with_table(config, table)
    }

    /// Makes a decoder with a table of weights, some of which may be frozen; see [`new`](Self::new).
    pub fn with_table(config: ModelConfig, table: WeightTable) -> Result<Self, ConfigError> {
        Self::build(config, table, StageRanks::default())
    }

    pub(crate) fn build(config: ModelConfig, table: WeightTable, ranks: StageRanks) -> Result<Self, ConfigError> {
        let (table, part) = (Arc::new(table), StagePart::whole(config.num_layers));
        let encoder = config.of_encoder();
        let num_layers = config.num_layers;
        let stage = Stage::on_ranks(config, Arc::clone(&table), part, ranks)?;
        let encoder = encoder.map(|config| Encoder::new(config, table, num_layers)).transpose()?;
        Ok(Self { stage, encoder, rest: None })
    }

    /// Returns the configuration.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.stage.config
    }

    pub(crate) fn encoder(&self) -> Option<&Encoder> {
        self.encoder.as_ref()
    }

    /// Returns f32 weights drawn from `seed`: normally distributed with `init_std`, truncated at three standard
    /// deviations; projections to the residual stream are divided by sqrt(2 L), and norm weights are 1. With `keep`
    /// each tensor is replaced by its result, such as a shard, as soon as it is made, so that the whole weights are
    /// never in memory.
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

    /// Builds weights with `make`, which makes one tensor for each entry of the table, in order. Routers have their
    /// initial states.
    #[must_use]
    pub fn build_weights(&self, ctx: &Context, make: impl FnMut(&WeightSpec) -> Tensor) -> DecoderWeights {
        DecoderWeights::build(self.config(), self.weight_table(), make, |state| first_state(ctx, state))
    }

    /// Returns the table of the model's weights.
    #[must_use]
    pub fn weight_table(&self) -> &Arc<WeightTable> {
        &self.stage.table
    }

    /// Lists the name and shape of every tensor, in the order of [`DecoderWeights::tensors`].
    #[must_use]
    pub fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        self.weight_table().specs().iter().map(|spec| (spec.name.clone(), spec.shape.clone())).collect()
    }

    /// Returns f32 weights of zeros.
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

    /// Checks lists of expert ids to use in [`TokenBatch::expert_ids`]: `[num_tokens, K]` for each MoE layer of the
    /// decoder, in order.
    ///
    /// # Errors
    /// If the number of lists is not that of the MoE layers, or if a layer does not accept its list.
    pub fn expert_ids(
        &self,
        ctx: &Context,
        num_tokens: usize,
        lists: &[Vec<u32>],
    ) -> Result<Vec<ExpertIds>, BatchError> {
        self.stage.expert_ids(ctx, num_tokens, lists)
    }

    /// Runs a training pass over microbatches, in the order given by `options`. Returns the losses of each, and
    /// computes the gradient of every weight, summed over microbatches in their order. `weights` are f32 or a compute
    /// copy. Losses on routers are per microbatch.
    ///
    /// With expert parallelism a microbatch may be empty: this rank's experts then serve the rows of others.
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

    /// Computes the loss of `batch` without gradients. No token is dropped, and the balance loss is the pooled one.
    /// In a model with an encoder its MoE layers come first, as in [`ModelConfig::moe_layers`], and `hook` gets their
    /// numbers before those of the decoder's.
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
        let x = self.hidden(&pass, weights, Ids::Known(batch.inputs), CacheMut::None, Some(&mut watch))?;
        let loss = self.stage.head_loss(ctx, weights, &x, batch.targets);
        self.check_ranks()?;
        self.merge_stats(&mut layers);
        let router = router_losses(self.config(), &layers, &PassOptions::default());
        Ok(self.pass_stats(loss, router.values, layers))
    }

    /// Shows `hook` the routing of each MoE layer for the inputs of `batch` by the rules of `mode` (those of
    /// training: the capacity is over all these tokens, without noise). Nothing is predicted. For ranks see
    /// [`forward_cached`](Self::forward_cached).
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
        self.hidden(&pass, weights, ids, CacheMut::None, Some(hook))?;
        self.check_ranks()
    }

    /// Returns the logits `[T, V]` f32 of every position of `num_sequences` sequences of equal length. In a model
    /// with an encoder, these answer the sources of `encoder_output` and begin with the encoder's `start_id`.
    /// Training and evaluation use [`Decoder::forward_backward`] and [`Decoder::evaluate`], which never hold all
    /// logits.
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
        let x = self.hidden(&pass, weights, ids, CacheMut::None, None)?;
        self.check_ranks()?;
        Ok(self.stage.head_logits(ctx, weights, &x))
    }

    /// Appends `ids` to the sequences in `cache`, equally many to each: those of the first, then those of the second
    /// and so on. Returns the logits `[sequences V]` f32 after the last id of each. Many ids are a prefill; one per
    /// sequence is a decoding step. `hook` sees the routing of each MoE layer.
    ///
    /// With expert parallelism the idle ranks [serve](Self::serve_inference); with tensor parallelism all ranks of a
    /// group pass the same ids.
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

    /// Appends one sampled token to each sequence like [`forward_cached`](Self::forward_cached). A GPU starts before
    /// the host knows the tokens, if nothing else needs them.
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

    /// Returns true if a step can start before the host knows its tokens: on a GPU, if routers do not look at ids and
    /// no other rank waits for them.
    #[must_use]
    pub fn can_run_ahead(&self, ctx: &Context) -> bool {
        let is_by_ids = self.config().router.looks_at_ids();
        let is_alone = self.stage.tensor.is_none() && self.stage.ranks.is_none() && self.stage.gather.is_none();
        let is_alone = is_alone && self.rest.is_none();
        ctx.gpu().is_some() && is_alone && !is_by_ids
    }

    /// Appends checked ids, at least one to each sequence in `cache`.
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
                let x = self.hidden(&pass, weights, ids, CacheMut::Growing(cache), hook)?;
                Ok::<_, BatchError>(self.stage.head_logits(ctx, weights, &x))
            })?
        } else {
            let x = self.hidden(&pass, weights, ids, CacheMut::Growing(cache), hook)?;
            let mut last = ctx.empty(&[count, self.config().width], DType::F32);
            for sequence in 0..count {
                elementwise::copy_rows(ctx, &x, (sequence + 1) * sequences.len - 1, &mut last, sequence, 1);
            }
            self.stage.head_logits(ctx, weights, &last)
        };
        self.check_ranks()?;
        Ok(logits.reshaped(&[count * self.config().vocab_size]))
    }

    /// Begins a pass without losses over the tokens `ids`.
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

    /// Returns the residual stream after the last layer, `[T, D]` f32, in a pass that keeps nothing.
    fn hidden(
        &self,
        pass: &Pass<'_>,
        weights: &DecoderWeights,
        ids: Ids<'_>,
        cache: CacheMut<'_>,
        mut hook: Option<RoutingHook<'_>>,
    ) -> Result<Tensor, BatchError> {
        let first = hook.as_mut().map(|hook| &mut **hook as RoutingHook<'_>);
        let layered = self.begin_layers(pass, weights, ids, cache, first)?;
        self.end_layers(pass.ctx, layered, hook)
    }
}

/// Returns the initial state of a router.
fn first_state(ctx: &Context, state: &WeightShape) -> Tensor {
    let random = Random::new(0, Purpose::Init, 0);
    NamedTensor::first(ctx, state, &random, 0.0).tensor
}
