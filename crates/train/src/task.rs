//! A task of the trainer: a model with its batches, its loss and its metrics.
//!
//! A [`Trainer`](crate::Trainer) knows a model by its table of weights and by a [`Task`] alone. Steps, learning rates, clipping,
//! microbatches, sums over ranks, evaluations, checkpoints and records are the trainer's. `docs/train-your-own-model.md` has an
//! example of a model that is no decoder; [`LanguageModel`](crate::language_model::LanguageModel) is the task of `moeworks train`.

mod figures;
mod model_file;

use std::error::Error;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use moeworks_model::{ParamSet, WeightSpec, WeightTable};
use moeworks_moe::LayerStats;
use moeworks_ops::Context;
use moeworks_ops::linear::Write;
use moeworks_tensor::Tensor;

use crate::error::TrainError;
use crate::metrics::{LayerRecord, Record, Sample};
use crate::parallel::Ranks;
pub use figures::{Evaluation, Metric, PassFigures};

/// Gives the part that a rank keeps of a whole tensor, from its entry in the table and it.
pub type KeepPart<'a> = dyn FnMut(&WeightSpec, &Tensor) -> Tensor + 'a;

/// The cause of a model that cannot be saved.
pub type SaveError = Box<dyn Error + Send + Sync>;

/// A model that a [`Trainer`](crate::Trainer) trains, with its data.
///
/// On several ranks all of them make the same calls in the same order, each with its share of every batch. Figures that a task
/// returns are those of all ranks; gradients are those of this rank's share, which the trainer sums.
pub trait Task {
    /// The struct that holds the weights, and their gradients.
    type Params: ParamSet;

    /// The table of the weights, in the order in which [`Params`](Self::Params) lists them.
    fn table(&self) -> &Arc<WeightTable>;

    /// Puts a set together of tensors that `make` makes, one for each entry of the table in its order. Its state is that before the
    /// first step.
    fn build_params(&self, ctx: &Context, make: &mut dyn FnMut(&WeightSpec) -> Tensor) -> Self::Params;

    /// The loss of a microbatch, and its gradient.
    ///
    /// The gradient is that of the mean over the whole step: with N targets in the step on all ranks, the sum of the losses of this
    /// rank's share times 1/N. `gradients.layer_done` is called for each layer of the table, last layer first, as soon as the
    /// gradients of its tensors are whole; with ZeRO 2 the gradients of a layer have memory only until then, and those of the layer
    /// below from then on.
    ///
    /// # Errors
    /// [`TrainError::Task`] for what can fail here, or an error of the ranks.
    fn train_pass(
        &mut self,
        model: &ModelView<'_, Self::Params>,
        batch: Microbatch,
        gradients: PassGradients<'_, Self::Params>,
    ) -> Result<PassFigures, TrainError>;

    /// The loss on data that is held out, and metrics; none without such data. `layers` are the records of the MoE layers of the step, to
    /// which it may add.
    ///
    /// # Errors
    /// Those of [`train_pass`](Self::train_pass).
    fn evaluate(
        &mut self,
        model: &ModelView<'_, Self::Params>,
        layers: &mut [LayerRecord],
    ) -> Result<Option<Evaluation>, TrainError>;

    /// The settings of the run as the text of its `config.toml`. Ranks with another text are refused.
    fn config_text(&self) -> String;

    /// Whether ranks may hold parts of tensors.
    fn parallelism(&self) -> Parallelism {
        Parallelism::default()
    }

    /// Makes the weights before the first step: the result of `keep` for each tensor. Normally these are the table's first values, drawn
    /// from `seed`.
    ///
    /// # Errors
    /// Where the weights are read from files and these cannot be used.
    fn first_params(&mut self, ctx: &Context, seed: u64, keep: &mut KeepPart<'_>) -> Result<Self::Params, TrainError> {
        Ok(self.build_params(ctx, &mut |spec| keep(spec, &spec.first_values(ctx, seed))))
    }

    /// Moves the state that has no gradient, such as the biases of routers, after a step with these figures, which ends when
    /// `progress`, 0 to 1, of the run is done. `copy` is the copy that products read, if there is one.
    fn next_states(
        &mut self,
        ctx: &Context,
        params: ParamsAndCopy<'_, Self::Params>,
        figures: &PassFigures,
        progress: f64,
    ) {
        let _ = (ctx, params, figures, progress);
    }

    /// Writes the model into a checkpoint's folder. Normally a `model.safetensors` with the names of the table.
    ///
    /// # Errors
    /// Where a file cannot be written.
    fn save_model(&self, dir: &Path, model: &ModelToSave<'_, Self::Params>) -> Result<(), SaveError> {
        model_file::save(dir, self.table(), model)
    }

    /// Reads the files of [`save_model`](Self::save_model): the result of `keep` for each tensor, f32 and in memory of its own.
    ///
    /// # Errors
    /// Where the files are damaged or of another model.
    fn load_model(&mut self, ctx: &Context, dir: &Path, keep: &mut KeepPart<'_>) -> Result<Self::Params, TrainError> {
        model_file::load(self, ctx, dir, keep)
    }

    /// Writes files beside the configuration into the folder of a run that begins.
    ///
    /// # Errors
    /// Where a file cannot be written.
    fn begin_run(&self, run_dir: &Path) -> Result<(), TrainError> {
        let _ = run_dir;
        Ok(())
    }

    /// A hash of the data, by which a resumed run sees that it has changed.
    fn data_hash(&self) -> String {
        String::new()
    }

    /// The numbers of the MoE layers, one for each of [`PassFigures::layers`].
    fn moe_layers(&self) -> Vec<usize> {
        Vec::new()
    }

    /// The names of the metrics that passes and evaluations give besides the loss.
    fn metric_names(&self) -> Vec<&'static str> {
        Vec::new()
    }

    /// Operations of a step for each target, of which the utilisation follows; none where they are not counted.
    fn flops_per_target(&self) -> Option<f64> {
        None
    }

    /// The share of a flat router's operations that the routers save.
    fn routing_flops_saved(&self) -> f64 {
        0.0
    }

    /// Looks at the model before a planned checkpoint is written, and may add to the record of the step.
    ///
    /// # Errors
    /// Those of [`train_pass`](Self::train_pass).
    fn at_planned_checkpoint(
        &mut self,
        model: &ModelView<'_, Self::Params>,
        record: &mut Record,
    ) -> Result<(), TrainError> {
        let _ = (model, record);
        Ok(())
    }

    /// A text that the model writes after `step` steps, on the rank that records; none for models that write none.
    ///
    /// # Errors
    /// Those of [`train_pass`](Self::train_pass).
    fn sample(&mut self, model: &ModelView<'_, Self::Params>, step: u64) -> Result<Option<Sample>, TrainError> {
        let _ = (model, step);
        Ok(None)
    }
}

/// The parts of tensors that ranks may hold, besides the experts of MoE layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parallelism {
    /// Whether tensor-parallel ranks may hold parts of the tensors that the table says are cut.
    pub tensor: bool,
    /// Whether weights may be sharded (ZeRO 3), so that a pass gathers them.
    pub sharded_weights: bool,
}

/// A model as a pass sees it.
pub struct ModelView<'a, P> {
    /// The device and the threads that compute.
    pub ctx: &'a Context,
    /// This rank's place, if there are several ranks.
    pub ranks: Option<&'a Ranks>,
    /// The weights as products read them.
    pub params: &'a P,
}

impl<P> ModelView<'_, P> {
    /// This rank's share of `num` items of a batch: all of them on one rank.
    #[must_use]
    pub fn share(&self, num: usize) -> Range<usize> {
        self.ranks.map_or(0..num, |ranks| ranks.share(num))
    }

    /// Makes of the statistics of this rank's tokens those of all ranks' tokens. Losses on routers are computed from these.
    pub fn merge_stats(&self, layers: &mut [LayerStats]) {
        if let Some(ranks) = self.ranks {
            ranks.experts().merge_stats(layers);
        }
    }

    /// Sums the loss, the targets and the metrics of a pass over ranks.
    pub fn sum(&self, figures: &mut PassFigures) {
        if let Some(ranks) = self.ranks {
            let mut numbers = figures.sums();
            ranks.experts().sum(&mut numbers);
            figures.set_sums(&numbers);
        }
    }
}

/// The place of a microbatch in a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Microbatch {
    /// The step, from 0.
    pub step: u64,
    /// The microbatch of the step, from 0.
    pub index: usize,
    /// Microbatches of a step.
    pub num: usize,
    /// The share of the run that is done, 0 to 1.
    pub progress: f64,
}

impl Microbatch {
    /// The number of the microbatch among all of the run.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.step * self.num as u64 + self.index as u64
    }
}

/// The place of a pass's gradients.
pub struct PassGradients<'a, P> {
    /// Whether they replace what is there or are added to it.
    pub write: Write,
    /// The gradients.
    pub grads: &'a mut P,
    /// Is told the layers whose gradients are whole.
    pub layer_done: &'a mut dyn FnMut(usize, &mut dyn ParamSet),
}

/// Weights, and in mixed precision the copy that products read.
pub struct ParamsAndCopy<'a, P> {
    /// The weights.
    pub params: &'a mut P,
    /// The copy.
    pub copy: Option<&'a mut P>,
}

/// The weights of a checkpoint.
pub enum ModelToSave<'a, P> {
    /// All of them, in memory.
    Whole(&'a P),
    /// The weights of several ranks, put together one after another.
    Streamed {
        /// This rank's part of them, and the state.
        part: &'a P,
        /// Gives the next tensor, in f32, in the order of the table.
        next: &'a dyn Fn() -> io::Result<Tensor>,
    },
}
