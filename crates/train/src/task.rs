//! The interface between the trainer and a model: its batches, its loss and its metrics.
//!
//! A [`Trainer`](crate::Trainer) knows a model only by its table of weights and its [`Task`]. The trainer does steps,
//! learning rates, clipping, microbatches, sums over ranks, evaluations, checkpoints and records.
//! `docs/train-your-own-model.md` has an example of a model that is not a decoder;
//! [`LanguageModel`](crate::language_model::LanguageModel) is the task of `moeworks train`.

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
use crate::parallel::{Ranks, SumsUnderWay};
pub use figures::{Evaluation, Metric, PassFigures};

/// A function that reduces a whole tensor to the part that this rank holds, given its entry in the table.
pub type KeepPart<'a> = dyn FnMut(&WeightSpec, &Tensor) -> Tensor + 'a;

/// The error of a model that cannot be saved.
pub type SaveError = Box<dyn Error + Send + Sync>;

/// A model with its data, trained by a [`Trainer`](crate::Trainer).
///
/// On several ranks all of them make the same calls in the same order, each with its share of every batch. Figures
/// that a task returns are those of all ranks. Gradients are those of this rank's share; the trainer sums them.
pub trait Task {
    /// The struct that holds the weights, or their gradients.
    type Params: ParamSet;

    /// Returns the table of the weights, in the order in which [`Params`](Self::Params) lists them.
    fn table(&self) -> &Arc<WeightTable>;

    /// Builds a set of the tensors that `make` returns for each entry of the table, in its order. State other than
    /// weights gets its initial values.
    fn build_params(&self, ctx: &Context, make: &mut dyn FnMut(&WeightSpec) -> Tensor) -> Self::Params;

    /// Computes the loss of a microbatch and its gradient.
    ///
    /// The gradient is that of the mean over the whole step: with N targets in the step on all ranks, of the sum of
    /// this rank's losses times 1/N. `gradients.layer_done` must be called for each layer of the table, last layer
    /// first, as soon as the gradients of its tensors are complete. With ZeRO 2 the gradients of a layer have memory
    /// only until that call, and those of the layer below only from then on.
    ///
    /// # Errors
    /// [`TrainError::Task`] for the task's own errors, or an error of the ranks.
    fn train_pass(
        &mut self,
        model: &ModelView<'_, Self::Params>,
        batch: Microbatch,
        gradients: PassGradients<'_, Self::Params>,
    ) -> Result<PassFigures, TrainError>;

    /// Loss and gradient of all microbatches of a step at once, of which `first` is the first, where the task does
    /// not take one after the other; none where it does, and the trainer asks for a
    /// [`train_pass`](Self::train_pass) over each. The gradients become those of this rank's share, and the
    /// figures are the sums of those of all microbatches.
    ///
    /// # Errors
    /// The errors of [`train_pass`](Self::train_pass).
    fn train_step(
        &mut self,
        model: &ModelView<'_, Self::Params>,
        first: Microbatch,
        gradients: StepGradients<'_, Self::Params>,
    ) -> Result<Option<PassFigures>, TrainError> {
        let _ = (model, first, gradients);
        Ok(None)
    }

    /// Computes the loss and metrics on held-out data; none without such data. `layers` are the records of the step's
    /// MoE layers, to which it may add.
    ///
    /// # Errors
    /// See [`train_pass`](Self::train_pass).
    fn evaluate(
        &mut self,
        model: &ModelView<'_, Self::Params>,
        layers: &mut [LayerRecord],
    ) -> Result<Option<Evaluation>, TrainError>;

    /// Returns the settings of the run as the text of its `config.toml`. Ranks must have equal texts.
    fn config_text(&self) -> String;

    /// Returns the kinds of parallelism that the task supports.
    fn parallelism(&self) -> Parallelism {
        Parallelism::default()
    }

    /// Creates the initial weights, each reduced by `keep`. By default they are the table's initial values, drawn
    /// from `seed`.
    ///
    /// # Errors
    /// If the weights are read from files that are invalid.
    fn first_params(&mut self, ctx: &Context, seed: u64, keep: &mut KeepPart<'_>) -> Result<Self::Params, TrainError> {
        Ok(self.build_params(ctx, &mut |spec| keep(spec, &spec.first_values(ctx, seed))))
    }

    /// Updates state without gradients, such as the biases of routers, after a step with these figures. `progress`, 0
    /// to 1, is that of the run after the step. `copy` is the copy that GEMMs read, if there is one.
    fn next_states(
        &mut self,
        ctx: &Context,
        params: ParamsAndCopy<'_, Self::Params>,
        figures: &PassFigures,
        progress: f64,
    ) {
        let _ = (ctx, params, figures, progress);
    }

    /// Writes the model into a checkpoint's folder. By default this is a `model.safetensors` with the names of the
    /// table.
    ///
    /// # Errors
    /// If a file cannot be written.
    fn save_model(&self, dir: &Path, model: &ModelToSave<'_, Self::Params>) -> Result<(), SaveError> {
        model_file::save(dir, self.table(), model)
    }

    /// Reads the files of [`save_model`](Self::save_model), each tensor reduced by `keep`, as f32 in memory of its
    /// own.
    ///
    /// # Errors
    /// If the files are damaged or of another model.
    fn load_model(&mut self, ctx: &Context, dir: &Path, keep: &mut KeepPart<'_>) -> Result<Self::Params, TrainError> {
        model_file::load(self, ctx, dir, keep)
    }

    /// Writes additional files into the folder of a new run.
    ///
    /// # Errors
    /// If a file cannot be written.
    fn begin_run(&self, run_dir: &Path) -> Result<(), TrainError> {
        let _ = run_dir;
        Ok(())
    }

    /// Returns a hash of the data, by which a resumed run detects changed data.
    fn data_hash(&self) -> String {
        String::new()
    }

    /// Returns the indices of the MoE layers, one for each of [`PassFigures::layers`].
    fn moe_layers(&self) -> Vec<usize> {
        Vec::new()
    }

    /// Returns the names of the metrics of passes and evaluations, without the loss.
    fn metric_names(&self) -> Vec<&'static str> {
        Vec::new()
    }

    /// Returns the operations of a step per target, for computing the utilisation; none if they are not counted.
    fn flops_per_target(&self) -> Option<f64> {
        None
    }

    /// Returns the share of a flat router's operations that the routers save.
    fn routing_flops_saved(&self) -> f64 {
        0.0
    }

    /// Inspects the model before a planned checkpoint is written; may add to the record of the step.
    ///
    /// # Errors
    /// See [`train_pass`](Self::train_pass).
    fn at_planned_checkpoint(
        &mut self,
        model: &ModelView<'_, Self::Params>,
        record: &mut Record,
    ) -> Result<(), TrainError> {
        let _ = (model, record);
        Ok(())
    }

    /// Records the routing of some tokens of a step, before its passes; called on all ranks.
    ///
    /// # Errors
    /// See [`train_pass`](Self::train_pass).
    fn record_choices(
        &mut self,
        model: &ModelView<'_, Self::Params>,
        step: RecordedStep<'_>,
    ) -> Result<(), TrainError> {
        let _ = (model, step);
        Ok(())
    }

    /// Records the loads of the experts in a step, whose passes gave `figures`.
    ///
    /// # Errors
    /// If the record cannot be written.
    fn record_loads(&mut self, step: RecordedStep<'_>, figures: &PassFigures) -> Result<(), TrainError> {
        let _ = (step, figures);
        Ok(())
    }

    /// Generates a text after `step` steps, on the rank that records; none for models that generate none.
    ///
    /// # Errors
    /// See [`train_pass`](Self::train_pass).
    fn sample(&mut self, model: &ModelView<'_, Self::Params>, step: u64) -> Result<Option<Sample>, TrainError> {
        let _ = (model, step);
        Ok(None)
    }
}

/// A step whose routing may be recorded.
#[derive(Clone, Copy, Debug)]
pub struct RecordedStep<'a> {
    /// The run's folder.
    pub run_dir: &'a Path,
    /// The number of the step, from 1.
    pub step: u64,
    /// True on the rank that writes files.
    pub writes: bool,
}

/// The kinds of parallelism that a task supports besides expert parallelism.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parallelism {
    /// True if tensor-parallel ranks may hold shards of the tensors that the table marks.
    pub tensor: bool,
    /// True if weights may be sharded (ZeRO 3), so that passes gather them.
    pub sharded_weights: bool,
    /// True if stage groups may hold stages of the model, which a whole step goes through.
    pub pipeline: bool,
}

/// The model as a pass sees it.
pub struct ModelView<'a, P> {
    /// The device and the threads that compute.
    pub ctx: &'a Context,
    /// This rank's handle; none for a single rank.
    pub ranks: Option<&'a Ranks>,
    /// The weights in the precision that GEMMs read.
    pub params: &'a P,
}

impl<P> ModelView<'_, P> {
    /// Returns this rank's share of `num` items of a batch; all of them on a single rank.
    #[must_use]
    pub fn share(&self, num: usize) -> Range<usize> {
        self.ranks.map_or(0..num, |ranks| ranks.share(num))
    }

    /// Merges the statistics of all ranks' tokens into `layers`. Auxiliary losses are computed from the result.
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

/// The position of a microbatch in a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Microbatch {
    /// The step, from 0.
    pub step: u64,
    /// The index of the microbatch in the step, from 0.
    pub index: usize,
    /// The number of microbatches of a step.
    pub num: usize,
    /// The finished share of the run, 0 to 1.
    pub progress: f64,
}

impl Microbatch {
    /// Returns the index of the microbatch in the run.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.step * self.num as u64 + self.index as u64
    }
}

/// The destination of a pass's gradients.
pub struct PassGradients<'a, P> {
    /// The choice of replacing the gradients or adding to them.
    pub write: Write,
    /// The gradients.
    pub grads: &'a mut P,
    /// A callback for each layer whose gradients are complete.
    pub layer_done: &'a mut dyn FnMut(usize, &mut dyn ParamSet),
}

/// The destination of the gradients of a whole step.
pub struct StepGradients<'a, P> {
    /// The gradients.
    pub grads: &'a mut P,
    /// The slices that sharded gradients are reduced into.
    pub(crate) sums: &'a mut SumsUnderWay,
}

/// Weights, and in mixed precision the copy that GEMMs read.
pub struct ParamsAndCopy<'a, P> {
    /// The weights.
    pub params: &'a mut P,
    /// The copy.
    pub copy: Option<&'a mut P>,
}

/// The weights to save in a checkpoint.
pub enum ModelToSave<'a, P> {
    /// All of them, in memory.
    Whole(&'a P),
    /// The weights of several ranks, gathered one after another.
    Streamed {
        /// This rank's part of the weights, and the state.
        part: &'a P,
        /// Returns the next tensor, in f32, in the order of the table.
        next: &'a dyn Fn() -> io::Result<Tensor>,
    },
}
