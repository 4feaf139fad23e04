//! The decoder language model: embedding, layers of attention and feed-forward, norm, output projection.
//!
//! There is no tape. Forward keeps what each block's backward needs (or only the layer's input, with checkpointing);
//! the balance losses, which look at all layers, are known before backward starts; backward goes through the layers from
//! the last to the first and runs each block's weight-gradient task as soon as the block's input gradient is known.

use std::sync::{Arc, Mutex, PoisonError};

use moeworks_moe::{
    ConfigError, LayerStats, LossGrad, MoeConfig, MoeLayer, MoeSaved, MoeWeights, RouterInput, SharedWeights,
};
use moeworks_ops::embedding::{embedding, embedding_backward};
use moeworks_ops::head_loss::{HeadLoss, IGNORE, head_loss, head_loss_backward};
use moeworks_ops::linear::{Write, linear};
use moeworks_ops::rms_norm::{rms_norm, rms_norm_backward};
use moeworks_ops::rope::RopeTable;
use moeworks_ops::{Context, elementwise};
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use crate::blocks::Pass;
use crate::blocks::attention::{AttentionBlock, AttentionSaved};
use crate::blocks::feed_forward::{FeedForwardBlock, FeedForwardSaved};
use crate::config::{ModelConfig, QkNorm};
use crate::generation::{KvCache, LayerCache};
use crate::losses::router_losses;
use crate::pass::{BatchError, PassOptions, PassStats, RouterNoise, Rules, TokenBatch};
use crate::weights::{AttentionWeights, DecoderWeights, DenseWeights, FeedForwardWeights, LayerWeights};

/// A decoder language model: its configuration and the blocks that carry it out. Weights are apart.
///
/// Capacity and jitter are rules of training: outside [`Decoder::forward_backward`] no token is dropped and no noise is
/// added, so that a token's logits do not depend on what else is in the batch.
#[derive(Debug)]
pub struct Decoder {
    config: ModelConfig,
    attention: AttentionBlock,
    training: Vec<FeedForwardBlock>,
    inference: Vec<FeedForwardBlock>,
    rope: Mutex<Arc<RopeTable>>,
}

struct LayerSaved {
    attention: AttentionSaved,
    /// The residual stream between the two blocks.
    middle: Tensor,
    feed_forward: FeedForwardSaved,
}

/// What a layer leaves for backward: its input, and the rest unless it is to be computed again.
struct LayerRecord {
    input: Tensor,
    saved: Option<LayerSaved>,
}

impl Decoder {
    /// A decoder of `config`, whose `vocab_size` must be set. Fails if a setting is out of range.
    pub fn new(config: ModelConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        if config.vocab_size == 0 {
            return Err(ConfigError::new("vocab_size", 0, "must be at least 1"));
        }
        let blocks = |moe_config: MoeConfig| -> Result<Vec<FeedForwardBlock>, ConfigError> {
            let layer = |i| {
                let moe = config.is_moe_layer(i).then(|| MoeLayer::new(moe_config.clone())).transpose()?;
                Ok(FeedForwardBlock { moe, activation: config.activation.into(), eps: config.norm_eps })
            };
            (0..config.num_layers).map(layer).collect()
        };
        let training = blocks(config.moe())?;
        let inference = blocks(MoeConfig { capacity_factor: 0.0, jitter: 0.0, ..config.moe() })?;
        let rope = Mutex::new(Arc::new(RopeTable::new(config.head_dim, config.rope_theta, 0)));
        Ok(Self { attention: AttentionBlock::new(&config), training, inference, rope, config })
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// f32 weights drawn from `seed`: normal with `init_std`, truncated at three deviations; the projections that write to
    /// the residual stream are smaller by sqrt(2 L), norm weights are 1.
    #[must_use]
    pub fn init(&self, ctx: &Context, seed: u64) -> DecoderWeights {
        let mut weights = self.zero_weights(ctx);
        let std = self.config.init_std;
        let residual_std = std / (2.0 * self.config.num_layers as f32).sqrt();
        for ((name, tensor), stream) in weights.tensors_mut().into_iter().zip(0..) {
            let random = Random::new(seed, Purpose::Init, stream);
            if name.ends_with("norm.weight") {
                tensor.f32s_mut().fill(1.0);
            } else if name.ends_with("o_proj.weight") || name.ends_with("down_proj") {
                elementwise::fill_normal(ctx, &random, residual_std, tensor);
            } else {
                elementwise::fill_normal(ctx, &random, std, tensor);
            }
        }
        weights
    }

    /// f32 weights of zeros.
    #[must_use]
    pub fn zero_weights(&self, ctx: &Context) -> DecoderWeights {
        let c = &self.config;
        let zeros = |shape: &[usize]| ctx.zeros(shape, DType::F32);
        let (q_width, kv_width) = (c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim);
        let (q_norm, k_norm) = match c.qk_norm {
            QkNorm::None => (None, None),
            QkNorm::Head => (Some(c.head_dim), Some(c.head_dim)),
            QkNorm::Whole => (Some(q_width), Some(kv_width)),
        };
        let a = c.moe().activation.num_inputs();
        let layer = |i| LayerWeights {
            attention_norm: zeros(&[c.width]),
            attention: AttentionWeights {
                q: zeros(&[q_width, c.width]),
                k: zeros(&[kv_width, c.width]),
                v: zeros(&[kv_width, c.width]),
                o: zeros(&[c.width, q_width]),
                q_norm: q_norm.map(|width| zeros(&[width])),
                k_norm: k_norm.map(|width| zeros(&[width])),
            },
            feed_forward_norm: zeros(&[c.width]),
            feed_forward: if c.is_moe_layer(i) {
                FeedForwardWeights::Moe(MoeWeights {
                    router: zeros(&[c.num_experts, c.width]),
                    gate_up: zeros(&[c.num_experts, a * c.expert_width, c.width]),
                    down: zeros(&[c.num_experts, c.width, c.expert_width]),
                    shared: (c.shared_width > 0).then(|| SharedWeights {
                        gate_up: zeros(&[a * c.shared_width, c.width]),
                        down: zeros(&[c.width, c.shared_width]),
                    }),
                    state: c.router.first_state(ctx, c.num_experts),
                })
            } else {
                FeedForwardWeights::Dense(DenseWeights {
                    gate_up: zeros(&[1, a * c.dense_width, c.width]),
                    down: zeros(&[1, c.width, c.dense_width]),
                })
            },
        };
        DecoderWeights {
            embedding: zeros(&[c.vocab_size, c.width]),
            layers: (0..c.num_layers).map(layer).collect(),
            final_norm: zeros(&[c.width]),
            head: (!c.tie_embeddings).then(|| zeros(&[c.vocab_size, c.width])),
        }
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
        self.check_batch(batch)?;
        let rope = self.rope_table(batch.seq_len);
        let pass = Pass::new(ctx, &rope, batch.num_sequences, batch.seq_len, 0);
        let mut x = embedding(ctx, batch.inputs, &weights.embedding, DType::F32);
        let mut records = Vec::with_capacity(weights.layers.len());
        let mut layer_stats = Vec::new();
        for i in 0..weights.layers.len() {
            let (y, saved) = self.training_layer(&pass, weights, i, &x, (batch.inputs, options));
            layer_stats.extend(saved.feed_forward.stats());
            let input = std::mem::replace(&mut x, y);
            records.push(LayerRecord { input, saved: (!options.checkpoint_layers).then_some(saved) });
        }
        let (router, mut loss_grads) = router_losses(&layer_stats, options);
        let (loss, mut dx) = self.head_backward(ctx, weights, &x, batch.targets, (options.grad_scale, write), grads);
        drop(x);
        for (i, record) in records.into_iter().enumerate().rev() {
            let LayerRecord { input, saved } = record;
            let saved =
                saved.unwrap_or_else(|| self.training_layer(&pass, weights, i, &input, (batch.inputs, options)).1);
            let loss_grad = self.config.is_moe_layer(i).then(|| loss_grads.pop()).flatten();
            let (w, g) = (&weights.layers[i], &mut grads.layers[i]);
            dx = self.layer_backward(&pass, w, (&input, saved), (&dx, loss_grad.as_ref()), (write, i), g);
        }
        let d_embedding = &mut grads.embedding;
        if write == Write::Replace && weights.head.is_some() {
            d_embedding.f32s_mut().fill(0.0);
        }
        embedding_backward(ctx, batch.inputs, &dx, d_embedding);
        Ok(pass_stats(loss, router, layer_stats))
    }

    /// The loss of `batch`, no gradient. No token is dropped. The router losses are the pooled ones.
    pub fn evaluate(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        batch: &TokenBatch<'_>,
    ) -> Result<PassStats, BatchError> {
        self.evaluate_watched(ctx, weights, batch, |_, _| ())
    }

    /// As [`evaluate`](Self::evaluate), showing `watch` what each MoE layer decided, with the layer's index.
    pub fn evaluate_watched(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        batch: &TokenBatch<'_>,
        mut watch: impl FnMut(usize, &MoeSaved),
    ) -> Result<PassStats, BatchError> {
        self.check_batch(batch)?;
        let mut layers = Vec::new();
        let rope = self.rope_table(batch.seq_len);
        let pass = Pass::new(ctx, &rope, batch.num_sequences, batch.seq_len, 0);
        let x = self.hidden(&pass, weights, batch.inputs, Rules::Inference, None, |i, saved| {
            watch(i, saved);
            layers.push(saved.stats());
        });
        let head = weights.head.as_ref().unwrap_or(&weights.embedding);
        let (normed, _) = rms_norm(ctx, &x, &weights.final_norm, self.config.norm_eps, head.dtype());
        let loss = head_loss(ctx, &normed, head, batch.targets);
        let (router, _) = router_losses(&layers, &PassOptions::default());
        Ok(pass_stats(loss, router, layers))
    }

    /// Shows `watch` what each MoE layer decides for `num_sequences` sequences of `inputs`, by the rules of training (the
    /// capacity over all these tokens, without noise) or of inference. Nothing is predicted.
    pub fn route(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        (inputs, num_sequences): (&[u32], usize),
        rules: Rules,
        watch: impl FnMut(usize, &MoeSaved),
    ) -> Result<(), BatchError> {
        let seq_len = inputs.len() / num_sequences.max(1);
        self.check_batch(&TokenBatch { inputs, targets: inputs, num_sequences, seq_len })?;
        let rope = self.rope_table(seq_len);
        let pass = Pass::new(ctx, &rope, num_sequences, seq_len, 0);
        self.hidden(&pass, weights, inputs, rules, None, watch);
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
        self.check_batch(&TokenBatch { inputs, targets: inputs, num_sequences, seq_len })?;
        let rope = self.rope_table(seq_len);
        let pass = Pass::new(ctx, &rope, num_sequences, seq_len, 0);
        let x = self.hidden(&pass, weights, inputs, Rules::Inference, None, |_, _| ());
        Ok(self.head_logits(ctx, weights, &x))
    }

    /// Appends `ids` to the sequence in `cache` and returns the logits `[V]` f32 after the last of them. Many ids at once
    /// are a prefill, a single one is a step of decoding.
    pub fn extend(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        cache: &mut KvCache,
        ids: &[u32],
    ) -> Result<Tensor, BatchError> {
        let start = cache.len();
        self.check_ids("prompt", ids)?;
        self.check_len(start + ids.len())?;
        if ids.is_empty() {
            return Err(BatchError::Empty);
        }
        let rope = self.rope_table(start + ids.len());
        let pass = Pass::new(ctx, &rope, 1, ids.len(), start);
        let x = self.hidden(&pass, weights, ids, Rules::Inference, Some(cache), |_, _| ());
        let last = &x.f32s()[(ids.len() - 1) * self.config.width..];
        let last = Tensor::from_slice(ctx.pool(), &[1, self.config.width], last);
        Ok(self.head_logits(ctx, weights, &last).reshaped(&[self.config.vocab_size]))
    }

    /// The residual stream after the last layer, `[T, D]` f32, without noise.
    fn hidden(
        &self,
        pass: &Pass<'_>,
        weights: &DecoderWeights,
        ids: &[u32],
        rules: Rules,
        cache: Option<&mut KvCache>,
        mut watch: impl FnMut(usize, &MoeSaved),
    ) -> Tensor {
        let mut x = embedding(pass.ctx, ids, &weights.embedding, DType::F32);
        let is_inference = rules == Rules::Inference;
        let blocks = if is_inference { &self.inference } else { &self.training };
        let input = RouterInput { token_ids: ids, is_inference, ..RouterInput::default() };
        let mut caches = cache.map(|cache| cache.layers_mut().iter_mut());
        for (i, (block, w)) in blocks.iter().zip(&weights.layers).enumerate() {
            let layer_cache: Option<&mut LayerCache> = caches.as_mut().and_then(Iterator::next);
            let (middle, _) = self.attention.forward(pass, w, &x, layer_cache);
            let (y, saved) = block.forward(pass, w, &middle, &input);
            if let Some(saved) = saved.moe() {
                watch(i, saved);
            }
            x = y;
        }
        x
    }

    fn head_logits(&self, ctx: &Context, weights: &DecoderWeights, x: &Tensor) -> Tensor {
        let head = weights.head.as_ref().unwrap_or(&weights.embedding);
        let (normed, _) = rms_norm(ctx, x, &weights.final_norm, self.config.norm_eps, head.dtype());
        linear(ctx, &normed, head, DType::F32)
    }

    fn training_layer(
        &self,
        pass: &Pass<'_>,
        weights: &DecoderWeights,
        i: usize,
        x: &Tensor,
        (token_ids, options): (&[u32], &PassOptions),
    ) -> (Tensor, LayerSaved) {
        let w = &weights.layers[i];
        // Each pass has as many consecutive streams as there are layers.
        let noise = options.noise.map(|RouterNoise { seed, step }| {
            Random::new(seed, Purpose::Router, step.wrapping_mul(self.config.num_layers as u64).wrapping_add(i as u64))
        });
        let (middle, attention) = self.attention.forward(pass, w, x, None);
        let seq_len = if options.sequence_coef == 0.0 { 0 } else { pass.seq_len };
        let input = RouterInput { noise, token_ids, seq_len, progress: options.progress, is_inference: false };
        let (y, feed_forward) = self.training[i].forward(pass, w, &middle, &input);
        (y, LayerSaved { attention, middle, feed_forward })
    }

    fn layer_backward(
        &self,
        pass: &Pass<'_>,
        weights: &LayerWeights,
        (input, saved): (&Tensor, LayerSaved),
        (dy, loss_grad): (&Tensor, Option<&LossGrad>),
        (write, i): (Write, usize),
        grads: &mut LayerWeights,
    ) -> Tensor {
        let LayerSaved { attention, middle, feed_forward } = saved;
        let d_norm = &mut grads.feed_forward_norm;
        let saved = (&middle, feed_forward);
        let (d_middle, task) = self.training[i].backward(pass, weights, saved, (dy, loss_grad), write, d_norm);
        task.run(pass, write, &mut grads.feed_forward);
        let (dx, task) = self.attention.backward(pass, weights, (input, attention), &d_middle, write, grads);
        task.run(pass.ctx, write, &mut grads.attention);
        dx
    }

    /// The loss and the gradient of the residual stream after the last layer.
    fn head_backward(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        x: &Tensor,
        targets: &[u32],
        (grad_scale, write): (f32, Write),
        grads: &mut DecoderWeights,
    ) -> (HeadLoss, Tensor) {
        let (head, d_head) = match (&weights.head, &mut grads.head) {
            (Some(head), Some(d_head)) => (head, d_head),
            _ => (&weights.embedding, &mut grads.embedding),
        };
        let (normed, inv_rms) = rms_norm(ctx, x, &weights.final_norm, self.config.norm_eps, head.dtype());
        let (loss, d_normed) = head_loss_backward(ctx, &normed, head, targets, grad_scale, write, d_head);
        let dx = rms_norm_backward(ctx, &d_normed, x, &weights.final_norm, &inv_rms, write, &mut grads.final_norm);
        (loss, dx)
    }

    /// A rotary table for at least `len` positions. It grows as needed: a model made for a million positions does not cost
    /// them in every run.
    fn rope_table(&self, len: usize) -> Arc<RopeTable> {
        let mut table = self.rope.lock().unwrap_or_else(PoisonError::into_inner);
        if table.max_len() < len {
            let len = len.next_power_of_two().min(self.config.max_seq_len).max(len);
            *table = Arc::new(RopeTable::new(self.config.head_dim, self.config.rope_theta, len));
        }
        Arc::clone(&table)
    }

    fn check_batch(&self, batch: &TokenBatch<'_>) -> Result<(), BatchError> {
        let TokenBatch { inputs, targets, num_sequences, seq_len } = *batch;
        for (what, len) in [("inputs", inputs.len()), ("targets", targets.len())] {
            if num_sequences.checked_mul(seq_len) != Some(len) {
                return Err(BatchError::Length { what, len, num_sequences, seq_len });
            }
        }
        if inputs.is_empty() {
            return Err(BatchError::Empty);
        }
        self.check_len(seq_len)?;
        self.check_ids("inputs", inputs)?;
        let vocab_size = self.config.vocab_size;
        match targets.iter().position(|&id| id != IGNORE && id as usize >= vocab_size) {
            Some(index) => Err(BatchError::Id { what: "targets", index, id: targets[index], vocab_size }),
            None => Ok(()),
        }
    }

    fn check_len(&self, len: usize) -> Result<(), BatchError> {
        let max_seq_len = self.config.max_seq_len;
        if len > max_seq_len { Err(BatchError::TooLong { len, max_seq_len }) } else { Ok(()) }
    }

    fn check_ids(&self, what: &'static str, ids: &[u32]) -> Result<(), BatchError> {
        let vocab_size = self.config.vocab_size;
        match ids.iter().position(|&id| id as usize >= vocab_size) {
            Some(index) => Err(BatchError::Id { what, index, id: ids[index], vocab_size }),
            None => Ok(()),
        }
    }
}

fn pass_stats(loss: HeadLoss, (balance_loss, z_loss): (f64, f64), layers: Vec<LayerStats>) -> PassStats {
    let HeadLoss { loss_sum, num_targets, num_correct } = loss;
    PassStats { loss_sum, num_targets, num_correct, balance_loss, z_loss, layers }
}
