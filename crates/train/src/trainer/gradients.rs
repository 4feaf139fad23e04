//! The gradients of a step: passes over its microbatches, sums over ranks, and the update.

use std::sync::Arc;

use moeworks_model::ParamSet;
use moeworks_ops::linear::Write;
use moeworks_tensor::Tensor;

use super::Trainer;
use crate::error::TrainError;
use crate::optimizer::{UpdateScale, Weights, global_norm};
use crate::parallel::{Ranks, SumsUnderWay};
use crate::task::{Microbatch, ModelView, ParamsAndCopy, PassFigures, PassGradients, StepGradients, Task};

impl<T: Task> Trainer<T> {
    /// Computes the loss and the gradient of all microbatches of `step`. The gradient of the mean over all targets is
    /// summed into `self.grads`. On several ranks a layer's gradients are reduced in the last microbatch, as soon as
    /// the layer is done; with sharded gradients, in every microbatch.
    pub(super) fn accumulate(&mut self, step: u64) -> Result<(PassFigures, SumsUnderWay), TrainError> {
        let num = self.settings.grad_accumulation;
        let begin = |ranks: &Arc<Ranks>| ranks.begin_sums(&self.ctx);
        let mut sums = self.ranks.as_ref().map_or_else(SumsUnderWay::default, begin);
        let progress = step as f64 / self.settings.steps as f64;
        let model = ModelView {
            ctx: &self.ctx,
            ranks: self.ranks.as_deref(),
            params: self.copy.as_ref().unwrap_or(&self.params),
        };
        let first = Microbatch { step, index: 0, num, progress };
        let gradients = StepGradients { grads: &mut self.grads, sums: &mut sums };
        if let Some(figures) = self.task.train_step(&model, first, gradients)? {
            return Ok((figures.of_step(num), sums));
        }
        let mut total: Option<PassFigures> = None;
        for index in 0..num {
            let figures = self.pass(Microbatch { step, index, num, progress }, &mut sums)?;
            match &mut total {
                Some(total) => total.add(&figures),
                None => total = Some(figures),
            }
        }
        Ok((total.unwrap_or_default().of_step(num), sums))
    }

    /// Runs one microbatch.
    fn pass(&mut self, batch: Microbatch, sums: &mut SumsUnderWay) -> Result<PassFigures, TrainError> {
        let is_last = batch.index + 1 == batch.num;
        let ranks = self.ranks.as_deref();
        // Sharded gradients are accumulated in their slices.
        let write = if batch.index == 0 || sums.slices.is_some() { Write::Replace } else { Write::Add };
        if let (Some(ranks), Some(slices)) = (ranks, &sums.slices) {
            slices.begin_pass(ranks, &self.ctx, &mut self.grads);
        }
        let is_whole = |ranks: &&Ranks| ranks.shards_gradients() || (is_last && !ranks.shards_optimizer());
        let summing = ranks.filter(is_whole);
        let mut layer_done = |layer: usize, grads: &mut dyn ParamSet| {
            if let Some(ranks) = summing {
                ranks.start_sums(&self.ctx, layer, grads, sums);
            }
        };
        let model = ModelView { ctx: &self.ctx, ranks, params: self.copy.as_ref().unwrap_or(&self.params) };
        let gradients = PassGradients { write, grads: &mut self.grads, layer_done: &mut layer_done };
        let figures = self.task.train_pass(&model, batch, gradients)?;
        if let (Some(ranks), Some(slices)) = (ranks, &mut sums.slices) {
            slices.end_pass(ranks, &self.ctx, &self.grads);
        }
        Ok(figures)
    }

    /// Sums this rank's gradients over the ranks. Returns the global norm, and this rank's slices if these are all
    /// that it updates.
    pub(super) fn sum_gradients(&mut self, under_way: SumsUnderWay) -> Result<(f64, Option<Vec<Tensor>>), TrainError> {
        let Some(ranks) = &self.ranks else {
            return Ok((global_norm(&self.ctx, self.task.table(), &self.grads), None));
        };
        ranks.check()?;
        if ranks.shards_optimizer() {
            let slices = ranks.sum_to_slices(&self.ctx, &self.grads, under_way)?;
            return Ok((ranks.norm_of_slices(&self.ctx, &slices)?, Some(slices)));
        }
        ranks.sum_gradients(&mut self.grads, under_way)?;
        Ok((ranks.global_norm(&self.ctx, &self.grads)?, None))
    }

    /// Updates the weights by the gradients, or by this rank's `slices` of them. Experts that are to move are updated
    /// first, so that they travel while the others are.
    pub(super) fn update(&mut self, scale: UpdateScale, slices: Option<Vec<Tensor>>) -> Result<(), TrainError> {
        self.optimizer.updates += 1;
        let (rebalancer, ranks) = (self.rebalancer.as_ref(), self.ranks.as_deref());
        let first = rebalancer.zip(ranks).map_or_else(Vec::new, |(rebalancer, ranks)| rebalancer.planned_places(ranks));
        if !first.is_empty() {
            self.update_some(scale, slices.as_deref(), &|place| first.contains(&place))?;
        }
        self.with_rebalancer(|rebalancer, ranks, state| rebalancer.start(ranks, state))?;
        self.update_some(scale, slices.as_deref(), &|place| !first.contains(&place))?;
        let are_parts_whole = self.ranks.as_ref().is_none_or(|ranks| !ranks.shards_weights());
        if let Some(copy) = self.copy.as_mut().filter(|_| slices.is_some() && are_parts_whole) {
            self.params.update_copy(&self.settings.optimizer_context(&self.ctx), copy);
        }
        Ok(())
    }

    /// Updates the weights whose index is chosen. Where the update is of slices of whole weights, the copy that GEMMs
    /// read is left as it was.
    fn update_some(
        &mut self,
        scale: UpdateScale,
        slices: Option<&[Tensor]>,
        is_chosen: &dyn Fn(usize) -> bool,
    ) -> Result<(), TrainError> {
        let ctx = self.settings.optimizer_context(&self.ctx);
        let compute = self.copy.as_mut().map(|copy| copy as &mut dyn ParamSet);
        let (Some(ranks), Some(slices)) = (&self.ranks, slices) else {
            let weights = Weights { params: &mut self.params, grads: &self.grads, compute };
            self.optimizer.update_some(&ctx, scale, weights, is_chosen);
            return Ok(());
        };
        let grads = &slices.to_vec();
        if ranks.shards_weights() {
            let weights = Weights { params: &mut self.params, grads, compute };
            self.optimizer.update_some(&ctx, scale, weights, is_chosen);
            return Ok(());
        }
        let mut params = ranks.slices_of_some(&ctx, &self.params, is_chosen);
        self.optimizer.update_some(&ctx, scale, Weights { params: &mut params, grads, compute: None }, is_chosen);
        ranks.join_some(&ctx, &params, &mut self.params, is_chosen)
    }

    /// Updates state without gradients, after a step that is not skipped.
    pub(super) fn next_states(&mut self, figures: &PassFigures) {
        let progress = self.progress.step as f64 / self.settings.steps as f64;
        let params = ParamsAndCopy { params: &mut self.params, copy: self.copy.as_mut() };
        self.task.next_states(&self.ctx, params, figures, progress);
    }
}
