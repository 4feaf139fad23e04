//! The gradients of a step, whole or reduced layer by layer into slices (ZeRO 2).

use moeworks_model::{DecoderWeights, GradTarget, ParamSet, Stage, WeightGradTasks, WeightGrads};
use moeworks_ops::elementwise::fill;
use moeworks_ops::linear::Write;

use super::StageView;
use crate::parallel::GradSlices;

/// The gradients of a step.
pub(super) struct StepGrads<'a> {
    /// The gradients of this rank's sequences. With slices those of layers' matrices have memory only while they are
    /// computed.
    pub(super) grads: &'a mut DecoderWeights,
    /// The slices into which the gradients of matrices are reduced, if ranks keep these alone.
    pub(super) slices: Option<&'a mut GradSlices>,
}

impl StepGrads<'_> {
    /// Sets gradients to zero.
    pub(super) fn clear(&mut self, view: StageView<'_>) {
        for tensor in self.grads.params_mut().into_iter().filter(|tensor| !tensor.is_empty()) {
            fill(view.ctx, tensor, 0.0);
        }
    }

    /// Runs the backward of a stage, which adds to the gradients that it is given.
    pub(super) fn backward<R>(
        &mut self,
        view: StageView<'_>,
        stage: &Stage,
        when: WeightGrads,
        run: impl FnOnce(GradTarget<'_>) -> R,
    ) -> R {
        let StageView { ctx, ranks, .. } = view;
        let Some(slices) = self.slices.as_deref_mut().filter(|_| when == WeightGrads::AtOnce) else {
            return run(GradTarget::new(Write::Add, self.grads));
        };
        let layers = stage.part().layers.clone();
        if let Some(last) = layers.clone().last() {
            slices.begin_layer(ranks, ctx, last, self.grads);
        }
        let mut done = |layer: usize, grads: &mut DecoderWeights| {
            slices.end_layer(ranks, ctx, layer, grads);
            if layer > layers.start {
                slices.begin_layer(ranks, ctx, layer - 1, grads);
            }
        };
        run(GradTarget { done: Some(&mut done), ..GradTarget::new(Write::Add, self.grads) })
    }

    /// Computes the gradients that a backward has left.
    pub(super) fn run_tasks(&mut self, view: StageView<'_>, tasks: WeightGradTasks) {
        let StageView { ctx, ranks, .. } = view;
        let Some(slices) = self.slices.as_deref_mut() else { return tasks.run(ctx, self.grads) };
        // The tasks of a layer follow each other.
        let mut current = None;
        for task in tasks {
            if current != Some(task.layer()) {
                if let Some(layer) = current {
                    slices.end_layer(ranks, ctx, layer, self.grads);
                }
                slices.begin_layer(ranks, ctx, task.layer(), self.grads);
                current = Some(task.layer());
            }
            task.run(ctx, self.grads);
        }
        if let Some(layer) = current {
            slices.end_layer(ranks, ctx, layer, self.grads);
        }
    }

    /// Ends the step: what was kept whole is reduced, too.
    pub(super) fn end_step(&mut self, view: StageView<'_>) {
        if let Some(slices) = self.slices.as_deref_mut() {
            slices.end_step(view.ranks, view.ctx, self.grads);
        }
    }
}
