//! The outputs of a run during training: checkpoints and samples. On several ranks the root writes both. For a
//! checkpoint it gathers the model tensor by tensor, since the whole may exceed one rank's memory.

use std::cell::RefCell;
use std::io;
use std::path::{Path, PathBuf};

use moeworks_infer::store::Keep;
use moeworks_model::files::{FileError, write_whole};
use moeworks_model::safetensors::TensorBytes;

use super::{Event, Output, Trainer};
use crate::checkpoint;
use crate::error::TrainError;
use crate::rebalance::{PLACEMENT_FILE, Rebalancer};
use crate::task::{ModelToSave, SaveError, Task};

impl<T: Task> Trainer<T> {
    /// Writes a checkpoint.
    pub(super) fn save(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<(), TrainError> {
        self.progress.updates = self.optimizer.updates;
        self.with_rebalancer(Rebalancer::finish_moments)?;
        self.ranks.as_ref().map_or(Ok(()), |ranks| ranks.check_copies(&self.params))?;
        if let Some(ranks) = &self.ranks {
            // A run that goes on from the checkpoint has none of it.
            ranks.experts().forget_gathered();
        }
        let Some(mut output) = self.output.take() else { return self.help_to_save() };
        let result = self.save_to(&mut output);
        self.output = Some(output);
        self.give_back();
        on_event(Event::Saved(&result?));
        Ok(())
    }

    /// Frees memory that only a checkpoint needs.
    fn give_back(&self) {
        if self.ranks.as_ref().is_some_and(|ranks| ranks.shards_optimizer()) {
            self.ctx.pool().trim();
        }
    }

    /// Sends this rank's part of the model, and then of the moments, to the root.
    fn help_to_save(&self) -> Result<(), TrainError> {
        let Some(ranks) = &self.ranks else { return Ok(()) };
        ranks.patiently(|| {
            ranks.give_tensors(&self.ctx, ranks.held_weights(&self.params))?;
            checkpoint::moments(&self.optimizer)
                .into_iter()
                .try_for_each(|(_, moments)| ranks.give_tensors(&self.ctx, ranks.held_moments(moments)))
        })
    }

    fn save_to(&self, output: &mut Output) -> Result<PathBuf, TrainError> {
        let Some(ranks) = &self.ranks else {
            let moments = checkpoint::lent_moments(&self.optimizer);
            let write = |dir: &Path| self.task.save_model(dir, &ModelToSave::Whole(&self.params));
            return self.write_checkpoint(output, &moments, write);
        };
        let whole = |held, prefix| ranks.whole_tensors(&self.ctx, held, prefix);
        let moments = checkpoint::moments(&self.optimizer).into_iter();
        let moments: Vec<_> =
            moments.flat_map(|(prefix, moments)| whole(ranks.held_moments(moments), prefix)).collect();
        ranks.patiently(|| {
            self.write_checkpoint(output, &moments, |dir| {
                let weights = ranks.whole_one_by_one(&self.ctx, ranks.held_weights(&self.params));
                let weights = RefCell::new(weights);
                let next = || weights.borrow_mut().next().unwrap_or_else(|| Err(io::Error::other("no more tensors")));
                self.task.save_model(dir, &ModelToSave::Streamed { part: &self.params, next: &next })
            })
        })
    }

    /// Writes a checkpoint: the folder that `write_model` fills, and `moments` in it.
    fn write_checkpoint(
        &self,
        output: &mut Output,
        moments: &[TensorBytes<'_>],
        write_model: impl FnOnce(&Path) -> Result<(), SaveError>,
    ) -> Result<PathBuf, TrainError> {
        output.metrics.sync()?;
        let keep = Keep { last: self.settings.keep_last, best: true };
        let checkpoint = output.store.save(&checkpoint::metadata(&self.progress), keep, |dir| {
            write_model(dir)?;
            self.save_placements(dir)?;
            checkpoint::save_moments(dir, moments).map_err(SaveError::from)
        })?;
        output.last_checkpoint = Some(checkpoint.path.clone());
        Ok(checkpoint.path)
    }

    /// Writes the placements in force, if experts move.
    fn save_placements(&self, dir: &Path) -> Result<(), FileError> {
        let Some(ranks) = self.ranks.as_ref().filter(|_| self.rebalancer.is_some()) else { return Ok(()) };
        let (path, text) = (dir.join(PLACEMENT_FILE), ranks.experts().placements().to_string());
        write_whole(&path, text.as_bytes()).map_err(FileError::at(&path))
    }

    /// Samples a text from the model and records it.
    pub(super) fn write_sample(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<(), TrainError> {
        let step = self.progress.step;
        let (task, model) = self.task_and_model();
        let sample = task.sample(&model, step)?;
        if let (Some(output), Some(sample)) = (&mut self.output, sample) {
            output.metrics.write_sample(&sample)?;
            on_event(Event::Sample(&sample));
        }
        Ok(())
    }
}
