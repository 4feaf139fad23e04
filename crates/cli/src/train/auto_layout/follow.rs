//! The watch over a run in a chosen layout: it records the decision, and asks for a stop when steps leave what was
//! measured.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use moeworks_train::auto_layout::{LAYOUTS_JSONL, Monitor};
use moeworks_train::metrics::Record;
use moeworks_train::{Requests, TrainError};

/// Steps left below which another layout is not worth its trial.
const LEAST_LEFT: u64 = 20;

/// The root's part of a run in a chosen layout: it records the decision, and follows the times of steps.
pub(in crate::train) struct Follow {
    /// The lines for the file of decisions.
    lines: String,
    /// The watch over the times of steps; none for the last layout of a call.
    monitor: Option<Mutex<Monitor>>,
    /// The reason to try layouts again, once there is one.
    reason: Mutex<Option<String>>,
}

impl Follow {
    /// Creates the watch of a decision with these lines; without `monitor` the layout stays.
    pub(super) fn new(lines: String, monitor: Option<Monitor>) -> Self {
        Self { lines, monitor: monitor.map(Mutex::new), reason: Mutex::default() }
    }

    /// Appends the decision to the file in the run's folder.
    pub(in crate::train) fn record(&self, run_dir: &Path) -> Result<(), TrainError> {
        let path = run_dir.join(LAYOUTS_JSONL);
        let written = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .and_then(|mut file| file.write_all(self.lines.as_bytes()));
        written.map_err(|source| TrainError::Io { path, source })
    }

    /// Takes the record of a step, and asks for a stop if steps have left what was measured.
    pub(in crate::train) fn step(&self, record: &Record, total_steps: u64, requests: &Requests) {
        let Some(monitor) = &self.monitor else { return };
        let mut monitor = monitor.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(median) = monitor.add(record.step_ms) else { return };
        let is_worth_it = total_steps.saturating_sub(record.step) >= LEAST_LEFT;
        if is_worth_it && !requests.stop.swap(true, Ordering::SeqCst) {
            let reason = format!(
                "the median of ten steps is {median:.1} ms up to step {}, in place of {:.1} ms",
                record.step,
                monitor.expected_ms()
            );
            *self.reason.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason);
        }
    }

    /// Returns the reason to try layouts again, if there is one.
    pub(super) fn reason(&self) -> Option<String> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
