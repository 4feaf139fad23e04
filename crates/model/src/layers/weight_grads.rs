//! The gradients of matrices as tasks: run behind the backward of each block, or kept and run later.

use moeworks_ops::Context;
use moeworks_ops::linear::Write;

use super::attention::{AttentionGradTask, WRONG_KIND};
use super::cross::CrossGradTask;
use super::feed_forward::FeedForwardGradTask;
use crate::weights::{DecoderWeights, LayerWeights};

/// The time at which a backward pass computes the gradients of the layers' matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightGrads {
    /// Behind the backward of each block; those of experts with few rows beside the gradients of their inputs.
    #[default]
    AtOnce,
    /// When the caller runs the [`WeightGradTasks`] that come back: a pipeline schedule puts them where a rank would wait.
    Later,
}

/// The writing of gradients in a backward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GradWrite {
    /// Whether gradients replace what is there or are added to it.
    pub(crate) write: Write,
    /// Whether a block may write the gradients of its matrices in its backward, where that takes less time.
    pub(crate) matrices_at_once: bool,
}

/// The destination of the tasks that blocks leave.
pub(crate) enum TaskSink<'t> {
    /// They are run.
    Run(Write),
    /// They are kept.
    Keep(Write, &'t mut WeightGradTasks),
}

impl<'t> TaskSink<'t> {
    /// The sink of a backward pass that writes as `write` says; tasks that are to be run later go to `tasks`.
    pub(crate) fn new(when: WeightGrads, write: Write, tasks: &'t mut WeightGradTasks) -> Self {
        match when {
            WeightGrads::AtOnce => Self::Run(write),
            WeightGrads::Later => Self::Keep(write, tasks),
        }
    }

    pub(crate) fn how(&self) -> GradWrite {
        match *self {
            Self::Run(write) => GradWrite { write, matrices_at_once: true },
            Self::Keep(write, _) => GradWrite { write, matrices_at_once: false },
        }
    }

    /// Takes the task of a block of layer `layer`, whose gradients are `grads`.
    pub(crate) fn take(&mut self, ctx: &Context, layer: usize, block: BlockGradTask, grads: &mut LayerWeights) {
        match self {
            Self::Run(write) => block.run(ctx, *write, grads),
            Self::Keep(write, tasks) => tasks.tasks.push(WeightGradTask { layer, write: *write, block }),
        }
    }
}

/// The gradients of a block's matrices, still to be computed.
#[allow(clippy::large_enum_variant)] // one for each block of a pass
pub(crate) enum BlockGradTask {
    Attention(AttentionGradTask),
    Cross(CrossGradTask),
    FeedForward(FeedForwardGradTask),
}

impl BlockGradTask {
    fn run(self, ctx: &Context, write: Write, grads: &mut LayerWeights) {
        match self {
            Self::Attention(task) => task.run(ctx, write, &mut grads.attention),
            Self::Cross(task) => task.run(ctx, write, grads.cross.as_mut().expect(WRONG_KIND)),
            Self::FeedForward(task) => task.run(ctx, write, &mut grads.feed_forward),
        }
    }
}

/// The gradients of the matrices of one block of a decoder's layer, still to be computed (W in pipeline schedules; "Zero Bubble Pipeline
/// Parallelism", 2401.10241). It keeps the activations that it needs.
pub struct WeightGradTask {
    layer: usize,
    write: Write,
    block: BlockGradTask,
}

impl WeightGradTask {
    /// The number of the layer in the model.
    #[must_use]
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// Writes the gradients to those of its layer in `grads`, or adds them, as the backward pass was asked to.
    pub fn run(self, ctx: &Context, grads: &mut DecoderWeights) {
        self.block.run(ctx, self.write, &mut grads.layers[self.layer]);
    }
}

/// The tasks that a backward pass left, in the order in which it came to them.
///
/// Tasks of one pass write to different tensors, so they may run in any order. Of several passes each tensor's run in the order of the
/// passes: sums of gradients then have the same bits. Where experts live on several ranks, all ranks run the tasks in the same order.
#[derive(Default)]
pub struct WeightGradTasks {
    tasks: Vec<WeightGradTask>,
}

impl WeightGradTasks {
    /// Tasks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    /// Whether there is no task.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Runs all of them.
    pub fn run(self, ctx: &Context, grads: &mut DecoderWeights) {
        self.tasks.into_iter().for_each(|task| task.run(ctx, grads));
    }
}

impl IntoIterator for WeightGradTasks {
    type Item = WeightGradTask;
    type IntoIter = std::vec::IntoIter<WeightGradTask>;

    fn into_iter(self) -> Self::IntoIter {
        self.tasks.into_iter()
    }
}
