//! Training steps of a small bf16 model on one batch, for tests of devices and precisions.

use moeworks_model::{Decoder, DecoderWeights, GradTarget, ModelConfig, ParamSet, PassOptions, TokenBatch};
use moeworks_ops::Context;
use moeworks_ops::linear::Write;
use moeworks_tensor::{DType, Purpose, Random};
use moeworks_train::optimizer::{AdamWConfig, Optimizer, UpdateScale};

const SEQ_LEN: usize = 24;

/// A model that memorizes two sequences.
pub(crate) struct Steps {
    ctx: Context,
    /// The context in which weights are updated.
    at: Context,
    decoder: Decoder,
    weights: DecoderWeights,
    compute: DecoderWeights,
    grads: DecoderWeights,
    optimizer: Optimizer,
    ids: Vec<u32>,
}

impl Steps {
    pub(crate) fn new(ctx: &Context, at: &Context) -> Self {
        Self::with_expert_gradients(ctx, at, DType::F32)
    }

    /// Creates steps with gradients of experts of the given type.
    pub(crate) fn with_expert_gradients(ctx: &Context, at: &Context, gradients: DType) -> Self {
        let config = ModelConfig {
            vocab_size: 300,
            width: 64,
            num_layers: 2,
            num_heads: 4,
            num_kv_heads: 2,
            head_dim: 16,
            num_experts: 3,
            top_k: 2,
            expert_width: 128,
            max_seq_len: SEQ_LEN,
            ..ModelConfig::default()
        };
        let decoder = Decoder::new(config).expect("a model");
        let weights = decoder.init(ctx, 7, None);
        let adamw = AdamWConfig { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
        let random = Random::new(1, Purpose::Test, 0);
        Self {
            compute: weights.compute_copy(at, DType::BF16),
            grads: weights.gradients(ctx, decoder.weight_table(), gradients),
            optimizer: Optimizer::new(ctx, adamw, decoder.weight_table(), &weights),
            ids: (0..2 * SEQ_LEN as u64).map(|i| random.below(i, 300) as u32).collect(),
            decoder,
            weights,
            ctx: ctx.clone(),
            at: at.clone(),
        }
    }

    /// Computes the gradients and returns the loss per token.
    pub(crate) fn pass(&mut self) -> f64 {
        self.pass_writing(Write::Replace)
    }

    /// Computes a [`pass`](Self::pass) whose gradients replace the existing ones or are added to them.
    pub(crate) fn pass_writing(&mut self, write: Write) -> f64 {
        let Self { ctx, decoder, compute, grads, ids, .. } = self;
        let batch =
            TokenBatch { inputs: ids, targets: ids, num_sequences: 2, seq_len: SEQ_LEN, ..TokenBatch::default() };
        let options = PassOptions { grad_scale: 1.0 / ids.len() as f32, ..PassOptions::default() };
        let stats = decoder
            .forward_backward(ctx, compute, &[batch], &options, GradTarget::new(write, grads))
            .expect("a step")
            .remove(0);
        stats.loss_sum / stats.num_targets as f64
    }

    pub(crate) fn update(&mut self, lr: f64) {
        let Self { at, optimizer, weights, grads, compute, .. } = self;
        optimizer.update(at, UpdateScale { lr, grad_scale: 1.0 }, weights, grads, Some(compute));
    }

    pub(crate) fn gradients(&self) -> &DecoderWeights {
        &self.grads
    }

    pub(crate) fn num_weights(&self) -> usize {
        self.weights.tensors().iter().map(|(_, tensor)| tensor.len()).sum()
    }
}
