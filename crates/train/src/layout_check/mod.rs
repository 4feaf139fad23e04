//! The check that a configuration trains alike in any layout: loss and gradients of a step on one rank, and on
//! several ranks in each layout that a machine can hold.
//!
//! Steps are those of training, with random weights and tokens, in f32 on the CPU: other formats round differently
//! in each layout. Ranks are threads of this process with one thread each.

mod compare;
mod layouts;
mod step;

use crate::config::{ConfigError, Precision, RunConfig, WireChoice, wrong};
use crate::error::TrainError;
pub use compare::Difference;
pub use layouts::{CheckedLayout, SkippedLayout, layouts};
pub use step::Fault;
use step::StepResult;

/// The most tokens of a sequence and sequences of a microbatch: enough to reach every expert of most models.
const MAX_SEQ_LEN: usize = 32;
const MAX_SEQUENCES: usize = 8;

/// The result of a layout.
#[derive(Clone, Debug, PartialEq)]
pub struct LayoutOutcome {
    /// The mean loss of the step.
    pub loss: f64,
    /// The largest difference of any gradient from that on one rank, as a share of the tensor's largest value.
    pub largest: f64,
    /// The first value that differs by more than the tolerance, if there is one.
    pub difference: Option<Difference>,
}

/// A check of a configuration. Steps on one rank are kept, because many layouts are compared with the same.
pub struct LayoutCheck {
    config: RunConfig,
    tolerance: f64,
    fault: Option<Fault>,
    /// Steps on one rank, each with its number of microbatches.
    on_one_rank: Vec<(usize, StepResult)>,
}

impl LayoutCheck {
    /// Makes a check of `config` that lets values differ by `tolerance`, a share of the largest value of a tensor.
    /// The vocabulary must be set.
    ///
    /// # Errors
    /// If the configuration is wrong, or has a model that is not checked.
    pub fn new(config: &RunConfig, tolerance: f64) -> Result<Self, ConfigError> {
        config.validate()?;
        if config.model.variant.encoder.is_some() {
            return Err(wrong("model.family", "a model with an encoder", "must be a decoder to be checked"));
        }
        Ok(Self { config: small(config), tolerance, fault: None, on_one_rank: Vec::new() })
    }

    /// Puts a fault in, to see that it is found.
    ///
    /// # Errors
    /// If the model has no such tensor.
    pub fn with_fault(mut self, fault: Fault) -> Result<Self, ConfigError> {
        let table = self.config.weight_table()?;
        if table.specs().iter().all(|spec| spec.name != fault.tensor) {
            return Err(wrong("--fault", &fault.tensor, "must be the name of a tensor of the model"));
        }
        self.fault = Some(fault);
        Ok(self)
    }

    /// Returns the configuration that is checked: that of the user with short sequences, in f32.
    #[must_use]
    pub fn config(&self) -> &RunConfig {
        &self.config
    }

    /// Takes a step in a layout, and compares it with that of one rank.
    ///
    /// # Errors
    /// If the layout's ranks fail.
    pub fn check(&mut self, layout: &CheckedLayout) -> Result<LayoutOutcome, TrainError> {
        let config = layout.apply(&self.config);
        let num_microbatches = config.train.grad_accumulation;
        let tolerance = self.tolerance;
        let many = step::on_ranks(&config, self.fault.as_ref())?;
        let one = self.step_on_one_rank(num_microbatches)?;
        Ok(LayoutOutcome {
            loss: many.loss(),
            largest: compare::largest(one, &many),
            difference: compare::first(one, &many, tolerance),
        })
    }

    /// The step on one rank with so many microbatches.
    fn step_on_one_rank(&mut self, num_microbatches: usize) -> Result<&StepResult, TrainError> {
        let place = match self.on_one_rank.iter().position(|(num, _)| *num == num_microbatches) {
            Some(place) => place,
            None => {
                let mut config = CheckedLayout::one_rank().apply(&self.config);
                config.train.grad_accumulation = num_microbatches;
                self.on_one_rank.push((num_microbatches, step::on_one(&config)?));
                self.on_one_rank.len() - 1
            }
        };
        Ok(&self.on_one_rank[place].1)
    }
}

/// Returns the configuration with what its check changes: short sequences, f32 everywhere, and cores for all.
fn small(config: &RunConfig) -> RunConfig {
    let mut config = config.clone();
    config.train.seq_len = config.train.seq_len.min(MAX_SEQ_LEN);
    config.train.batch_size = config.train.batch_size.min(MAX_SEQUENCES);
    config.train.precision = Precision::F32;
    config.train.expert_gradients = crate::config::GradientType::F32;
    config.parallel.wire = WireChoice::F32;
    config.parallel.pin = false;
    config
}

#[cfg(test)]
mod tests;
