//! The decoder language model: embedding, layers of attention and feed-forward, norm, output projection.
//!
//! There is no tape. Forward keeps what each block's backward needs (or only the layer's input, with checkpointing);
//! the balance losses, which look at all layers, are known before backward starts; backward goes through the layers from
//! the last to the first and runs each block's weight-gradient task as soon as the block's input gradient is known.

mod checks;
mod ends;

use std::sync::Arc;

use moeworks_moe::{
    ConfigError, ExpertRanks, LayerStats, MoeConfig, MoeLayer, MoeSaved, NamedTensor, RouterInput, WeightShape,
};
use moeworks_ops::linear::Write;
use moeworks_ops::sampling::DrawnTokens;
use moeworks_ops::{Context, elementwise};
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use self::ends::Ids;
use crate::config::ModelConfig;
use crate::encoder::Encoder;
use crate::gather::{Gather, after};
use crate::kv_cache::{KvCache, LayerCache};
use crate::layers::attention::AttentionBlock;
use crate::layers::cross::CrossBlock;
use crate::layers::feed_forward::FeedForwardBlock;
use crate::layers::norm::Norm;
use crate::layers::relative::Relative;
use crate::layers::stack::Stack;
use crate::layers::training::{Flow, LayerRecord, Training};
use crate::layers::{Memory, Pass};
use crate::losses::router_losses;
use crate::pass::{BatchError, PassOptions, PassStats, Rules, TokenBatch};
use crate::rope_tables::RopeTables;
use crate::tensor_ranks::TensorRanks;
use crate::weights::{DecoderWeights, WeightGroup, WeightRole, WeightSpec, WeightTable};

/// A decoder language model: its configuration and the blocks that carry it out. Weights are apart.
///
/// Capacity and jitter are rules of training: outside [`Decoder::forward_backward`] no token is dropped and no noise is
/// added, so that a token's logits do not depend on what else is in the batch. (A model with an `expert_capacity` of its own
/// drops tokens of a sequence always.)
///
/// It may have an encoder, which reads a source first: [`Decoder::encode`] and what takes its result.
#[derive(Debug)]
pub struct Decoder {
    config: ModelConfig,
    attention: Vec<AttentionBlock>,
    pub(crate) training: Vec<FeedForwardBlock>,
    pub(crate) inference: Vec<FeedForwardBlock>,
    cross: Option<CrossBlock>,
    encoder: Option<Encoder>,
    rope: RopeTables,
    /// Where the experts are, if not all here.
    pub(crate) ranks: Option<ExpertRanks>,
    /// The ranks that hold the matrices between them, if not all here.
    pub(crate) tensor: Option<TensorRanks>,
    /// The weights of the model.
    pub(crate) table: Arc<WeightTable>,
    /// Whether ranks of `tensor` have parts of the embedding, and of the output projection.
    cut_ends: CutEnds,
    /// What makes weights whole, if ranks keep parts of them.
    pub(crate) gather: Option<Arc<dyn Gather>>,
}

/// Which ends of a decoder are cut over tensor-parallel ranks.
#[derive(Clone, Copy, Debug)]
struct CutEnds {
    embedding: bool,
    head: bool,
}

impl CutEnds {
    fn new(table: &WeightTable) -> Self {
        let head = if table.is_tied() { WeightRole::Embedding } else { WeightRole::Head };
        Self { embedding: table.is_cut_outside(WeightRole::Embedding), head: table.is_cut_outside(head) }
    }
}

/// Who is told that the gradients of a layer are whole.
pub type LayerDone<'a> = &'a mut dyn FnMut(usize, &mut DecoderWeights);

impl Decoder {
    /// A decoder of `config`, whose `vocab_size` must be set. Fails if a setting is out of range.
    pub fn new(config: ModelConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        let table = WeightTable::new(&config);
        Self::with_table(config, table)
    }

    /// Makes one as [`new`](Self::new) does, with the table of the model's weights, of which some may be frozen.
    pub fn with_table(config: ModelConfig, table: WeightTable) -> Result<Self, ConfigError> {
        Self::build(config, table, None, None)
    }

    pub(crate) fn build(
        config: ModelConfig,
        table: WeightTable,
        ranks: Option<ExpertRanks>,
        tensor: Option<TensorRanks>,
    ) -> Result<Self, ConfigError> {
        config.validate()?;
        if config.vocab_size == 0 {
            return Err(ConfigError::new("vocab_size", 0, "must be at least 1"));
        }
        let is_cut = |i| table.is_cut_in_layer(i, WeightGroup::Dense);
        let training = feed_forwards(&config, &config.moe(), ranks.as_ref(), is_cut)?;
        let inference = feed_forwards(&config, &config.inference_moe(), ranks.as_ref(), is_cut)?;
        let encoder = config.of_encoder().map(|of_encoder| Encoder::new(of_encoder, config.num_layers)).transpose()?;
        let cross = encoder.is_some().then(|| CrossBlock::new(&config));
        let split = tensor.as_ref().map(TensorRanks::split);
        let split_of = |i| split.filter(|_| table.is_cut_in_layer(i, WeightGroup::Attention));
        let attention = (0..config.num_layers).map(|i| AttentionBlock::new(&config, i, split_of(i))).collect();
        let (rope, cut_ends, table) = (RopeTables::default(), CutEnds::new(&table), Arc::new(table));
        let gather = None;
        Ok(Self {
            config,
            attention,
            training,
            inference,
            cross,
            encoder,
            rope,
            ranks,
            tensor,
            table,
            cut_ends,
            gather,
        })
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    pub(crate) fn encoder(&self) -> Option<&Encoder> {
        self.encoder.as_ref()
    }

    /// f32 weights drawn from `seed`: normal with `init_std`, truncated at three deviations; the projections that write to
    /// the residual stream are smaller by sqrt(2 L), norm weights are 1.
    #[must_use]
    pub fn init(&self, ctx: &Context, seed: u64) -> DecoderWeights {
        self.init_kept(ctx, seed, |_, tensor| tensor)
    }

    /// Initialises as [`init`](Self::init) does and keeps of each tensor the result of `keep`, such as a part of it. The tensors are
    /// never all there whole at a time.
    #[must_use]
    pub fn init_kept(
        &self,
        ctx: &Context,
        seed: u64,
        mut keep: impl FnMut(&WeightSpec, Tensor) -> Tensor,
    ) -> DecoderWeights {
        self.build_weights(ctx, |spec| keep(spec, spec.first_values(ctx, seed)))
    }

    /// Puts weights together of tensors that `make` makes, one for each entry of the table in its order. Routers have the states of the
    /// first step.
    #[must_use]
    pub fn build_weights(&self, ctx: &Context, make: impl FnMut(&WeightSpec) -> Tensor) -> DecoderWeights {
        DecoderWeights::build(&self.config, &self.table, make, |state| first_state(ctx, state))
    }

    /// The table of the model's weights.
    #[must_use]
    pub fn weight_table(&self) -> &Arc<WeightTable> {
        &self.table
    }

    /// The name and shape of every tensor, in the order of [`DecoderWeights::tensors`].
    #[must_use]
    pub fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        self.table.specs().iter().map(|spec| (spec.name.clone(), spec.shape.clone())).collect()
    }

    /// f32 weights of zeros.
    #[must_use]
    pub fn zero_weights(&self, ctx: &Context) -> DecoderWeights {
        let zeros = |shape: &[usize]| ctx.zeros(shape, DType::F32);
        DecoderWeights::build(&self.config, &self.table, |spec| zeros(&spec.shape), |state| zeros(&state.shape))
    }

    /// One training pass: the losses of `batch` and the gradient of every weight, written to `grads` or added as `write`
    /// says. `weights` are f32 or a compute copy; `grads` are f32.
    pub fn forward_backward(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        batch: &TokenBatch<'_>,
        options: &PassOptions,
        write: Write,
        grads: &mut DecoderWeights,
    ) -> Result<PassStats, BatchError> {
        self.forward_backward_watched(ctx, weights, batch, options, (write, &mut |_, _| ()), grads)
    }

    /// As [`forward_backward`](Self::forward_backward), telling `done` when the gradients of a layer (its index) are whole, last
    /// layer first: what it does with them goes before the backward pass of the layers below.
    pub fn forward_backward_watched(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        batch: &TokenBatch<'_>,
        options: &PassOptions,
        (write, done): (Write, LayerDone<'_>),
        grads: &mut DecoderWeights,
    ) -> Result<PassStats, BatchError> {
        self.check_trainable()?;
        self.check_batch(batch)?;
        if batch.inputs.is_empty() {
            return Ok(self.serve_training(ctx, weights, options, (write, done), grads));
        }
        let gathered = self.gathered(ctx, weights);
        let weights = gathered.as_ref().unwrap_or(weights);
        Ok(self.training_pass(ctx, weights, batch, options, (write, done), grads))
    }

    /// The training pass of a checked batch that is not empty, by whole weights outside the layers.
    fn training_pass(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        batch: &TokenBatch<'_>,
        options: &PassOptions,
        (write, done): (Write, LayerDone<'_>),
        grads: &mut DecoderWeights,
    ) -> PassStats {
        let encoded = self.encoder.as_ref().map(|encoder| encoder.training_forward(ctx, weights, batch, options));
        let memory = encoded.as_ref().map(|encoded| encoded.memory(weights));
        let pass = self.pass(ctx, weights, (batch.num_sequences, batch.seq_len, 0), memory.as_ref());
        let training = self.training(&pass, batch.inputs, options);
        let mut layer_stats = encoded.as_ref().map_or_else(Vec::new, |encoded| encoded.stats.clone());
        let (x, records) = self.training_forward(&training, weights, &mut layer_stats);
        self.merge_stats(&mut layer_stats);
        let (router, mut loss_grads) = router_losses(&layer_stats, (&self.config.router, self.config.top_k), options);
        self.take_share(self.routed_tokens(batch, options.sequence_coef != 0.0).len(), &layer_stats, &mut loss_grads);
        let (loss, dx) = self.head_backward(ctx, weights, &x, batch.targets, (options.grad_scale, write), grads);
        drop(x);
        let mut flow = Flow::new(ctx, dx, encoded.as_ref().map(|encoded| &encoded.result));
        for (i, record) in records.into_iter().enumerate().rev() {
            let w = self.layer(ctx, weights, (i, i.checked_sub(1)));
            training.backward((i, &w), record, (&mut flow, &mut loss_grads), write, &mut grads.layers[i]);
            done(i, grads);
        }
        pass.relative_backward(&flow, write, grads.relative.as_mut());
        let Flow { dx, encoded: of_encoded, .. } = flow;
        self.embed_backward(&pass, weights.head.is_none(), (batch.inputs, dx), write, grads);
        if let (Some(encoder), Some(encoded), Some((_, d_encoded))) = (&self.encoder, encoded, of_encoded) {
            encoder.backward(weights, (encoded, &d_encoded), loss_grads, write, grads);
        }
        self.pass_stats(loss, router, layer_stats)
    }

    /// The loss of `batch`, no gradient. No token is dropped. The router losses are the pooled ones. In a model with an encoder
    /// its MoE layers come first, as in [`ModelConfig::moe_layers`].
    pub fn evaluate(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        batch: &TokenBatch<'_>,
    ) -> Result<PassStats, BatchError> {
        self.evaluate_watched(ctx, weights, batch, |_, _| ())
    }

    /// As [`evaluate`](Self::evaluate), showing `watch` what each MoE layer decided, with the layer's index; the layers of an
    /// encoder come before the decoder's.
    pub fn evaluate_watched(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        batch: &TokenBatch<'_>,
        mut watch: impl FnMut(usize, &MoeSaved),
    ) -> Result<PassStats, BatchError> {
        self.check_batch(batch)?;
        if batch.inputs.is_empty() {
            return Ok(self.serve_evaluation(ctx, weights));
        }
        let gathered = self.gathered(ctx, weights);
        let weights = gathered.as_ref().unwrap_or(weights);
        let mut layers = Vec::new();
        let mut watch = |i: usize, saved: &MoeSaved| {
            watch(i, saved);
            layers.push(saved.stats());
        };
        let sources = batch.source_batch();
        let memory =
            self.encoder.as_ref().map(|_| self.encode_watched(ctx, weights, &sources, &mut watch)).transpose()?;
        let pass = self.pass(ctx, weights, (batch.num_sequences, batch.seq_len, 0), memory.as_ref());
        let before = self.config.num_encoder_layers();
        let x = self.hidden(&pass, weights, Ids::Known(batch.inputs), Rules::Inference, None, |i, saved| {
            watch(before + i, saved);
        });
        let loss = self.head_loss(ctx, weights, &x, batch.targets);
        self.merge_stats(&mut layers);
        let (router, _) = router_losses(&layers, (&self.config.router, self.config.top_k), &PassOptions::default());
        Ok(self.pass_stats(loss, router, layers))
    }

    /// Shows `watch` what each MoE layer decides for `num_sequences` sequences of `inputs`, by the rules of training (the
    /// capacity over all these tokens, without noise) or of inference. Nothing is predicted. Over ranks as [`extend`](Self::extend).
    pub fn route(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        (inputs, num_sequences): (&[u32], usize),
        rules: Rules,
        watch: impl FnMut(usize, &MoeSaved),
    ) -> Result<(), BatchError> {
        let seq_len = inputs.len() / num_sequences.max(1);
        self.check_batch(&TokenBatch { inputs, targets: inputs, num_sequences, seq_len, ..TokenBatch::default() })?;
        let gathered = self.gathered(ctx, weights);
        let weights = gathered.as_ref().unwrap_or(weights);
        let pass = self.pass(ctx, weights, (num_sequences, seq_len, 0), None);
        self.hidden(&pass, weights, Ids::Known(inputs), rules, None, watch);
        Ok(())
    }

    /// The logits `[T, V]` f32 of every position of `num_sequences` sequences of `seq_len` tokens. For training and
    /// evaluation there are [`Decoder::forward_backward`] and [`Decoder::evaluate`], which never hold all logits.
    pub fn logits(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        inputs: &[u32],
        num_sequences: usize,
    ) -> Result<Tensor, BatchError> {
        let seq_len = inputs.len() / num_sequences.max(1);
        self.check_batch(&TokenBatch { inputs, targets: inputs, num_sequences, seq_len, ..TokenBatch::default() })?;
        Ok(self.all_logits(ctx, weights, None, inputs, num_sequences))
    }

    /// The logits of checked `inputs`.
    pub(crate) fn all_logits(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        memory: Option<&Memory>,
        inputs: &[u32],
        num_sequences: usize,
    ) -> Tensor {
        let pass = self.pass(ctx, weights, (num_sequences, inputs.len() / num_sequences, 0), memory);
        let x = self.hidden(&pass, weights, Ids::Known(inputs), Rules::Inference, None, |_, _| ());
        self.head_logits(ctx, weights, &x)
    }

    /// Appends `ids` to the sequence in `cache` and returns the logits `[V]` f32 after the last of them (of several sequences those of
    /// one behind the other). Many ids at once
    /// are a prefill, a single one is a step of decoding.
    ///
    /// Where experts live on several ranks, the others [serve](Self::serve_inference); ranks that hold the matrices of other layers
    /// between them pass the same ids.
    pub fn extend(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        cache: &mut KvCache,
        ids: &[u32],
    ) -> Result<Tensor, BatchError> {
        let logits = self.extend_watched(ctx, weights, cache, ids, |_, _| ())?;
        Ok(logits.reshaped(&[cache.num_sequences() * self.config.vocab_size]))
    }

    /// As [`extend`](Self::extend) for all sequences of the cache together: `ids` are those of the first, then those of the second and
    /// so on, as many of each. The logits `[sequences, V]` f32 are those after the last of each. Shows `watch` what each MoE layer
    /// decided, with the layer's index.
    pub fn extend_watched(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        cache: &mut KvCache,
        ids: &[u32],
        watch: impl FnMut(usize, &MoeSaved),
    ) -> Result<Tensor, BatchError> {
        let num_sequences = cache.num_sequences();
        let seq_len = ids.len() / num_sequences;
        self.check_ids("prompt", ids)?;
        if seq_len * num_sequences != ids.len() {
            let seq_len = seq_len + 1;
            return Err(BatchError::Length { what: "prompt", len: ids.len(), num_sequences, seq_len });
        }
        if ids.is_empty() {
            return Err(BatchError::Empty);
        }
        self.extend_by(ctx, weights, cache, (Ids::Known(ids), seq_len), watch)
    }

    /// As [`extend`](Self::extend) by one token of each sequence, which was drawn: a GPU begins before the host knows it, if nothing
    /// else has to.
    pub fn extend_drawn(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        cache: &mut KvCache,
        drawn: &DrawnTokens,
    ) -> Result<Tensor, BatchError> {
        let num_sequences = cache.num_sequences();
        let (len, fits) = (drawn.ids().len(), drawn.vocabulary() <= weights.embedding.rows());
        if !fits || len != num_sequences || !self.goes_on_unknowing(ctx) {
            return self.extend(ctx, weights, cache, &Ids::Drawn(drawn).in_host());
        }
        let logits = self.extend_by(ctx, weights, cache, (Ids::Drawn(drawn), 1), |_, _| ())?;
        Ok(logits.reshaped(&[num_sequences * self.config.vocab_size]))
    }

    /// Whether a step can begin before the host knows its tokens: on a GPU, where routers do not look at ids and no other rank waits for
    /// them.
    #[must_use]
    pub fn goes_on_unknowing(&self, ctx: &Context) -> bool {
        let is_by_ids = self.config.router.looks_at_ids();
        let is_alone = self.tensor.is_none() && self.ranks.is_none() && self.gather.is_none();
        ctx.gpu().is_some() && is_alone && !is_by_ids
    }

    fn extend_by(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        cache: &mut KvCache,
        (ids, seq_len): (Ids<'_>, usize),
        watch: impl FnMut(usize, &MoeSaved),
    ) -> Result<Tensor, BatchError> {
        let (start, num_sequences) = (cache.len(), cache.num_sequences());
        self.check_len(start + seq_len)?;
        let (caches, memory) = cache.parts();
        if self.encoder.is_some() && memory.is_none() {
            return Err(BatchError::NoSource);
        }
        let gathered = self.gathered(ctx, weights);
        let weights = gathered.as_ref().unwrap_or(weights);
        let pass = self.pass(ctx, weights, (num_sequences, seq_len, start), memory);
        if seq_len == 1 {
            return Ok(ctx.capture_replay(|| {
                let x = self.hidden(&pass, weights, ids, Rules::Inference, Some(caches), watch);
                self.head_logits(ctx, weights, &x)
            }));
        }
        let x = self.hidden(&pass, weights, ids, Rules::Inference, Some(caches), watch);
        let mut last = ctx.empty(&[num_sequences, self.config.width], DType::F32);
        for sequence in 0..num_sequences {
            elementwise::copy_rows(ctx, (&x, (sequence + 1) * seq_len - 1), (&mut last, sequence), 1);
        }
        Ok(self.head_logits(ctx, weights, &last))
    }

    /// The residual stream after the last layer, `[T, D]` f32, without noise.
    fn hidden(
        &self,
        pass: &Pass<'_>,
        weights: &DecoderWeights,
        ids: Ids<'_>,
        rules: Rules,
        caches: Option<&mut [LayerCache]>,
        watch: impl FnMut(usize, &MoeSaved),
    ) -> Tensor {
        let x = self.embed(pass, weights, ids);
        let is_inference = rules == Rules::Inference;
        let stack = self.stack(if is_inference { &self.inference } else { &self.training });
        let (token_ids, first_token) = (ids.known(), pass.start * pass.num_sequences);
        let input =
            RouterInput { token_ids, first_token, is_inference, is_forward_only: true, ..RouterInput::default() };
        let num_layers = weights.layers.len();
        let layer = |i| self.layer(pass.ctx, weights, (i, after(i, num_layers)));
        stack.forward(pass, layer, x, &input, caches, watch)
    }

    fn stack<'a>(&'a self, feed_forward: &'a [FeedForwardBlock]) -> Stack<'a> {
        let expert_capacity = self.config.variant.expert_capacity;
        Stack { attention: &self.attention, cross: self.cross.as_ref(), feed_forward, expert_capacity }
    }

    fn training<'a>(&'a self, pass: &'a Pass<'a>, token_ids: &'a [u32], options: &'a PassOptions) -> Training<'a> {
        let layers_before = self.config.num_encoder_layers();
        let num_layers = layers_before + self.config.num_layers;
        Training { stack: self.stack(&self.training), pass, token_ids, options, layers_before, num_layers }
    }

    /// The residual stream after the last layer and what each layer leaves for backward; statistics of MoE layers go to `stats`.
    fn training_forward(
        &self,
        training: &Training<'_>,
        weights: &DecoderWeights,
        stats: &mut Vec<LayerStats>,
    ) -> (Tensor, Vec<LayerRecord>) {
        let mut x = self.embed(training.pass, weights, Ids::Known(training.token_ids));
        let num_layers = weights.layers.len();
        let mut previous = None;
        let layer = |i| {
            let w = self.layer(training.pass.ctx, weights, (i, after(i, num_layers)));
            let (y, record) = training.forward((i, &w), x.clone(), &mut previous, stats);
            x = y;
            record
        };
        let records: Vec<LayerRecord> = (0..num_layers).map(layer).collect();
        stats.extend(records.iter().filter_map(LayerRecord::stats));
        (x, records)
    }

    /// A pass over `num_sequences` sequences of `seq_len` tokens, the first of which is at position `start`.
    fn pass<'a>(
        &'a self,
        ctx: &'a Context,
        weights: &DecoderWeights,
        (num_sequences, seq_len, start): (usize, usize, usize),
        memory: Option<&'a Memory>,
    ) -> Pass<'a> {
        let len = start + seq_len;
        let relative = Relative::of(&self.config, weights.relative.as_ref(), true, [seq_len, len]);
        let pass = Pass::new(ctx, self.rope.get(&self.config, len), num_sequences, seq_len, start);
        Pass { relative, memory, tensor: self.tensor.as_ref(), ..pass }
    }
}

/// The state of a router before the first step.
fn first_state(ctx: &Context, state: &WeightShape) -> Tensor {
    let random = Random::new(0, Purpose::Init, 0);
    NamedTensor::first(ctx, state, &random, 0.0).tensor
}

/// The feed-forward blocks of the layers of `config`, whose MoE layers are of `moe_config`; `is_cut` says which dense ones tensor-parallel
/// ranks have parts of.
pub(crate) fn feed_forwards(
    config: &ModelConfig,
    moe_config: &MoeConfig,
    ranks: Option<&ExpertRanks>,
    is_cut: impl Fn(usize) -> bool,
) -> Result<Vec<FeedForwardBlock>, ConfigError> {
    let layer = |i| {
        let moe_layer = || match ranks {
            None => MoeLayer::new(moe_config.clone()),
            Some(ranks) => MoeLayer::over_ranks(moe_config.clone(), ranks.layer(i)),
        };
        let moe = config.is_moe_layer(i).then(moe_layer).transpose()?;
        Ok(FeedForwardBlock {
            moe,
            activation: config.activation.into(),
            norm: Norm { eps: config.norm_eps },
            residual_multiplier: config.variant.residual_multiplier,
            is_cut: is_cut(i),
        })
    };
    (0..config.num_layers).map(layer).collect()
}
