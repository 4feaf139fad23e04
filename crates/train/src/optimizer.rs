//! AdamW over all tensors of a model, and the guards around it: the global norm and clipping.

use std::sync::Arc;

use moeworks_model::{DecoderWeights, WeightTable};
use moeworks_ops::Context;
use moeworks_ops::adamw::{AdamWStep, AdamWTensors, adamw};
use moeworks_ops::elementwise::{cast_into, sums_of_squares};
use moeworks_tensor::Tensor;

/// The constants of AdamW (Loshchilov & Hutter, 1711.05101).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWConfig {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled decay, applied to matrices and not to norms or biases.
    pub weight_decay: f64,
}

/// The optimizer's state: two moments for each trainable weight, in f32, and the number of updates made.
pub struct Optimizer {
    config: AdamWConfig,
    table: Arc<WeightTable>,
    /// First moments; those of frozen weights have no elements.
    pub first: DecoderWeights,
    /// Second moments; those of frozen weights have no elements.
    pub second: DecoderWeights,
    /// Updates made so far; a skipped step makes none.
    pub updates: u64,
}

impl Optimizer {
    /// The state before the first update of `weights`, which are those of `table` or parts of them.
    #[must_use]
    pub fn new(ctx: &Context, config: AdamWConfig, table: &Arc<WeightTable>, weights: &DecoderWeights) -> Self {
        let moments = || weights.moments(ctx, table);
        Self { config, table: Arc::clone(table), first: moments(), second: moments(), updates: 0 }
    }

    /// The state after `updates` updates that left these moments, first and second.
    #[must_use]
    pub fn from_moments(
        config: AdamWConfig,
        table: &Arc<WeightTable>,
        [first, second]: [DecoderWeights; 2],
        updates: u64,
    ) -> Self {
        Self { config, table: Arc::clone(table), first, second, updates }
    }

    /// The table of the weights.
    #[must_use]
    pub fn table(&self) -> &WeightTable {
        &self.table
    }

    /// Moves `weights` by one update with gradients `grads` times `grad_scale` at rate `lr`, and brings `compute`, the
    /// copy that products read, up to date. With a context without a GPU moments and weights stay in the host's memory, or come there,
    /// and what a GPU multiplies with goes there when it is next read.
    pub fn update(
        &mut self,
        ctx: &Context,
        (lr, grad_scale): (f64, f32),
        weights: &mut DecoderWeights,
        grads: &DecoderWeights,
        compute: Option<&mut DecoderWeights>,
    ) {
        self.updates += 1;
        let mut compute = compute.map(|copy| copy.tensors_mut().into_iter().map(|(_, t)| t).collect::<Vec<_>>());
        let params = weights.tensors_mut().into_iter().map(|(_, tensor)| tensor);
        let grads = grads.tensors().into_iter().map(|(_, tensor)| tensor);
        let firsts = self.first.tensors_mut().into_iter().map(|(_, tensor)| tensor);
        let seconds = self.second.tensors_mut().into_iter().map(|(_, tensor)| tensor);
        let tensors = self.table.specs().iter().zip(params).zip(grads).zip(firsts).zip(seconds);
        for ((((spec, param), grad), m), v) in tensors.filter(|((((spec, _), _), _), _)| spec.is_trainable) {
            let step = AdamWStep {
                lr,
                beta1: self.config.beta1,
                beta2: self.config.beta2,
                eps: self.config.eps,
                weight_decay: if spec.is_decayed() { self.config.weight_decay } else { 0.0 },
                step: self.updates,
                grad_scale,
            };
            let copy = compute.as_mut().map(|tensors| &mut *tensors[spec.index]);
            update_one(ctx, &step, (param, grad, m, v), copy);
        }
    }
}

fn update_one(
    ctx: &Context,
    step: &AdamWStep,
    (param, grad, m, v): (&mut Tensor, &Tensor, &mut Tensor, &mut Tensor),
    mut copy: Option<&mut Tensor>,
) {
    if let Some(copy) = copy.as_mut().filter(|copy| ctx.gpu().is_none() && !copy.is_in_host()) {
        // It is written from end to end: what the GPU has of it need not be fetched.
        **copy = ctx.empty(copy.shape(), copy.dtype());
    }
    match copy {
        Some(copy) if copy.dtype() != param.dtype() => {
            adamw(ctx, step, AdamWTensors { param, grad, m, v, compute: Some(copy) });
        }
        Some(copy) => {
            adamw(ctx, step, AdamWTensors { param: &mut *param, grad, m, v, compute: None });
            cast_into(ctx, param, copy);
        }
        None => adamw(ctx, step, AdamWTensors { param, grad, m, v, compute: None }),
    }
}

/// The norm of the gradients of all trainable weights of `table` as one vector. Not finite if any of these is not.
#[must_use]
pub fn global_norm(ctx: &Context, table: &WeightTable, grads: &DecoderWeights) -> f64 {
    let trainable = table.specs().iter().zip(grads.tensors()).filter(|(spec, _)| spec.is_trainable);
    let tensors: Vec<_> = trainable.map(|(_, (_, tensor))| tensor).collect();
    sums_of_squares(ctx, &tensors).iter().sum::<f64>().sqrt()
}

/// What gradients of norm `norm` are multiplied by so that their norm is at most `clip_norm` (0: never clipped).
#[must_use]
pub fn clip_scale(norm: f64, clip_norm: f64) -> f32 {
    if clip_norm > 0.0 && norm > clip_norm { (clip_norm / norm) as f32 } else { 1.0 }
}
