//! Requests to a running trainer, and its events.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::metrics::{Record, Sample};

/// Requests to a running trainer, set from signal handlers or other threads.
#[derive(Clone, Debug, Default)]
pub struct Requests {
    /// Finish the step, write a checkpoint and return.
    pub stop: Arc<AtomicBool>,
    /// Write a checkpoint after this step and continue.
    pub save: Arc<AtomicBool>,
    /// The number of trainers that are making steps and check these requests between them.
    num_listening: Arc<AtomicUsize>,
}

impl Requests {
    /// Requests a stop if a trainer is making steps. Otherwise, before the first step and after the last, returns
    /// false; the caller may then end the program.
    #[must_use]
    pub fn ask_to_stop(&self) -> bool {
        let is_heard = self.num_listening.load(Ordering::SeqCst) > 0;
        if is_heard {
            self.stop.store(true, Ordering::SeqCst);
        }
        is_heard
    }

    pub(super) fn listen(&self) -> Listening {
        self.num_listening.fetch_add(1, Ordering::SeqCst);
        Listening { count: Arc::clone(&self.num_listening) }
    }
}

/// A guard for a trainer that is making steps.
pub(super) struct Listening {
    count: Arc<AtomicUsize>,
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::SeqCst);
    }
}

/// An event during training, for display.
pub enum Event<'a> {
    /// A step is done.
    Step {
        /// Its record.
        record: &'a Record,
        /// Steps of the whole run.
        total_steps: u64,
        /// The newest validation loss.
        val_loss: Option<f64>,
    },
    /// A text was sampled.
    Sample(&'a Sample),
    /// A step's update was skipped: the loss or a gradient was not finite.
    Skipped {
        /// The step, counted from 1.
        step: u64,
        /// Consecutive skipped steps, this one included.
        in_a_row: u64,
        /// The number of consecutive skipped steps that ends the run.
        max_in_a_row: u64,
    },
    /// A checkpoint was written.
    Saved(&'a Path),
}

/// The end of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All steps are done.
    Finished,
    /// A stop was requested and a checkpoint written.
    Stopped,
}
