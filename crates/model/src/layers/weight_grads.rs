//! The gradients of matrices as tasks, run after the backward of each block or later.

use moeworks_ops::Context;
use moeworks_ops::linear::Write;

use super::attention::{AttentionGradTask, WRONG_KIND};
use super::cross::CrossGradTask;
use super::feed_forward::FeedForwardGradTask;
use crate::weights::{DecoderWeights, LayerWeights};

/// The time at which a backward pass computes the gradients of matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightGrads {
    /// After the backward of each block. Experts with few rows compute them together with the gradients of their
    /// inputs.
    #[default]
    AtOnce,
    /// When the caller runs the returned [`WeightGradTasks`]: a pipeline schedule places them where a rank would be
    /// idle.
    Later,
}

/// The way in which a backward pass writes gradients.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GradWrite {
    /// Replaces gradients or adds to them.
    pub(crate) write: Write,
    /// Allows a block to write its matrices' gradients in its backward, if that is faster.
    pub(crate) matrices_at_once: bool,
}

/// The destination of the blocks' tasks.
pub(crate) enum TaskSink<'t> {
    /// Runs each task.
    Run(Write),
    /// Keeps each task.
    Keep(Write, &'t mut WeightGradTasks),
}

impl<'t> TaskSink<'t> {
    /// Makes the sink of a backward pass that writes as `write` says; tasks to run later go to `tasks`.
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

    /// Runs or keeps the task of a block of layer `layer`, whose gradients are `grads`.
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

/// The task of computing the gradients of one block's matrices (W in pipeline schedules; "Zero Bubble Pipeline
/// Parallelism", 2401.10241). It holds the activations that it needs.
pub struct WeightGradTask {
    layer: usize,
    write: Write,
    block: BlockGradTask,
}

impl WeightGradTask {
    /// Returns the index of the layer in the model.
    #[must_use]
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// Writes the gradients to those of its layer in `grads`, or adds them, as the backward pass was told.
    pub fn run(self, ctx: &Context, grads: &mut DecoderWeights) {
        self.block.run(ctx, self.write, &mut grads.layers[self.layer]);
    }
}

/// The tasks of a backward pass, in its order.
///
/// Tasks of one pass write to different tensors and may run in any order. The tasks of several passes for one tensor
/// must run in the order of the passes, so that sums of gradients have the same bits. With expert parallelism all
/// ranks must run the tasks in the same order.
#[derive(Default)]
pub struct WeightGradTasks {
    tasks: Vec<WeightGradTask>,
}

impl WeightGradTasks {
    /// Returns the number of tasks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    /// Returns true if there are no tasks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Runs all tasks.
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
