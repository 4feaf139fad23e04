//! AdamW over all tensors of a model, the global gradient norm, and clipping.

use std::sync::Arc;

use moeworks_model::{ParamSet, WeightSpec, WeightTable};
use moeworks_ops::Context;
use moeworks_ops::adamw::{AdamWStep, AdamWTensors, adamw};
use moeworks_ops::elementwise::{cast_into, sums_of_squares};
use moeworks_tensor::{DType, Tensor};

/// The constants of AdamW (Loshchilov & Hutter, 1711.05101).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWConfig {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// A small number added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay, applied to matrices and not to norms or biases.
    pub weight_decay: f64,
}

/// The optimizer's state: two f32 moments for each trainable weight, and the number of updates made.
pub struct Optimizer {
    config: AdamWConfig,
    table: Arc<WeightTable>,
    /// First moments; those of frozen weights have no elements.
    pub first: Vec<Tensor>,
    /// Second moments; those of frozen weights have no elements.
    pub second: Vec<Tensor>,
    /// Updates made so far; a skipped step makes none.
    pub updates: u64,
}

/// The learning rate of an update and the factor on its gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateScale {
    /// The learning rate.
    pub lr: f64,
    /// The factor on the gradients; see [`clip_scale`].
    pub grad_scale: f32,
}

/// The tensors of an update.
pub(crate) struct Weights<'a> {
    /// f32 weights, or this rank's slices of them.
    pub(crate) params: &'a mut dyn ParamSet,
    /// Their gradients.
    pub(crate) grads: &'a dyn ParamSet,
    /// The copy that GEMMs read, if the update writes it.
    pub(crate) compute: Option<&'a mut dyn ParamSet>,
}

/// A weight with the tensors that its update reads and writes.
struct Updated<'a> {
    param: &'a mut Tensor,
    grad: &'a Tensor,
    m: &'a mut Tensor,
    v: &'a mut Tensor,
    /// The copy of the weight that GEMMs read, if there is one.
    copy: Option<&'a mut Tensor>,
}

impl Optimizer {
    /// Creates the state before the first update of `params`, which are the weights of `table` or shards of them.
    #[must_use]
    pub fn new(ctx: &Context, config: AdamWConfig, table: &Arc<WeightTable>, params: &dyn ParamSet) -> Self {
        let moment = |(spec, tensor): (&WeightSpec, &Tensor)| {
            ctx.zeros_on_device(if spec.is_trainable { tensor.shape() } else { &[0] }, DType::F32)
        };
        let moments = || table.specs().iter().zip(params.params()).map(moment).collect();
        Self { config, table: Arc::clone(table), first: moments(), second: moments(), updates: 0 }
    }

    /// Restores the state after `updates` updates from its moments, first and second.
    #[must_use]
    pub fn from_moments(
        config: AdamWConfig,
        table: &Arc<WeightTable>,
        [first, second]: [Vec<Tensor>; 2],
        updates: u64,
    ) -> Self {
        Self { config, table: Arc::clone(table), first, second, updates }
    }

    /// Returns the table of the weights.
    #[must_use]
    pub fn table(&self) -> &WeightTable {
        &self.table
    }

    /// Updates `params` by gradients `grads`, and then `compute`, the copy that GEMMs read. With a context without a
    /// GPU, moments and weights are kept in (or moved to) host memory, and the GPU gets its copy when it next reads
    /// it.
    pub fn update(
        &mut self,
        ctx: &Context,
        scale: UpdateScale,
        params: &mut dyn ParamSet,
        grads: &dyn ParamSet,
        compute: Option<&mut dyn ParamSet>,
    ) {
        self.updates += 1;
        let compute = compute.map(|compute| compute as &mut dyn ParamSet);
        self.update_some(ctx, scale, Weights { params, grads, compute }, &|_| true);
    }

    /// Updates the weights whose index is chosen, as part of the update that `updates` counts last.
    pub(crate) fn update_some(
        &mut self,
        ctx: &Context,
        scale: UpdateScale,
        weights: Weights<'_>,
        is_chosen: &dyn Fn(usize) -> bool,
    ) {
        let Weights { params, grads, compute } = weights;
        let mut copies = compute.map(|copy| copy.params_mut().into_iter());
        let moments = self.first.iter_mut().zip(&mut self.second);
        let tensors = params.params_mut().into_iter().zip(grads.params()).zip(moments);
        for (spec, ((param, grad), (m, v))) in self.table.specs().iter().zip(tensors) {
            let copy = copies.as_mut().and_then(Iterator::next);
            if !spec.is_trainable || !is_chosen(spec.index) {
                continue;
            }
            let step = AdamWStep {
                lr: scale.lr,
                beta1: self.config.beta1,
                beta2: self.config.beta2,
                eps: self.config.eps,
                weight_decay: if spec.is_decayed { self.config.weight_decay } else { 0.0 },
                step: self.updates,
                grad_scale: scale.grad_scale,
            };
            update_one(ctx, &step, Updated { param, grad, m, v, copy });
        }
    }
}

fn update_one(ctx: &Context, step: &AdamWStep, updated: Updated<'_>) {
    let Updated { param, grad, m, v, mut copy } = updated;
    if let Some(copy) = copy.as_mut().filter(|copy| ctx.gpu().is_none() && !copy.is_in_host()) {
        // The copy is overwritten completely, so its content on the GPU need not be fetched.
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

/// Computes the norm of the gradients of all trainable weights of `table`, taken as one vector. It is not finite if a
/// gradient is not.
#[must_use]
pub fn global_norm(ctx: &Context, table: &WeightTable, grads: &dyn ParamSet) -> f64 {
    let trainable = table.specs().iter().zip(grads.params()).filter(|(spec, _)| spec.is_trainable);
    let tensors: Vec<_> = trainable.map(|(_, tensor)| tensor).collect();
    sums_of_squares(ctx, &tensors).iter().sum::<f64>().sqrt()
}

/// Returns the factor that reduces gradients of norm `norm` to a norm of at most `clip_norm` (0: no clipping).
#[must_use]
pub fn clip_scale(norm: f64, clip_norm: f64) -> f32 {
    if clip_norm > 0.0 && norm > clip_norm { (clip_norm / norm) as f32 } else { 1.0 }
}
