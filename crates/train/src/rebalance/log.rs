//! The record of decisions and moves in a run's folder: one JSON object a line.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use moeworks_plan::{ExpertTransfer, LayerChange, RebalancePolicy, RebalanceRates};
use serde_json::{Map, Value, json};

use crate::error::TrainError;

/// The file of decisions and moves in a run folder.
pub const REBALANCE_JSONL: &str = "rebalance.jsonl";

/// The open file.
pub(super) struct RebalanceLog {
    path: PathBuf,
    file: File,
}

impl RebalanceLog {
    /// Opens the file in `run_dir`, of which lines after step `step` are removed.
    pub(super) fn open(run_dir: &Path, step: u64) -> Result<Self, TrainError> {
        let path = run_dir.join(REBALANCE_JSONL);
        let old = match fs::read_to_string(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            old => old.map_err(TrainError::io(&path))?,
        };
        let is_before = |line: &&str| {
            let value: Option<Value> = serde_json::from_str(line).ok();
            value.and_then(|value| value.get("step")?.as_u64()).is_some_and(|of| of <= step)
        };
        let kept: String = old.lines().filter(is_before).map(|line| format!("{line}\n")).collect();
        if kept != old || old.is_empty() {
            fs::write(&path, kept).map_err(TrainError::io(&path))?;
        }
        let file = OpenOptions::new().append(true).open(&path).map_err(TrainError::io(&path))?;
        Ok(Self { path, file })
    }

    /// Appends a line.
    pub(super) fn write(&mut self, value: &Value) -> Result<(), TrainError> {
        self.file.write_all(format!("{value}\n").as_bytes()).map_err(TrainError::io(&self.path))
    }
}

/// A layer that changes.
pub(super) struct ChangedLayer {
    pub(super) layer: usize,
    pub(super) change: LayerChange,
}

/// A decision by load.
pub(super) struct Decision<'a> {
    pub(super) step: u64,
    pub(super) policy: RebalancePolicy,
    /// Mean seconds of a step since the decision before.
    pub(super) step_s: f64,
    pub(super) rates: RebalanceRates,
    /// The mean seconds of a step after decisions by each policy.
    pub(super) means: Vec<(&'static str, Option<f64>)>,
    /// The layers that change.
    pub(super) changes: &'a [ChangedLayer],
}

impl Decision<'_> {
    pub(super) fn json(&self) -> Value {
        let means = self.means.iter().map(|(name, seconds)| ((*name).to_owned(), json!(seconds.map(|s| s * 1e3))));
        let layer = |ChangedLayer { layer, change }: &ChangedLayer| {
            json!({
                "layer": layer,
                "imbalance_before": change.imbalance[0],
                "imbalance_after": change.imbalance[1],
                "copies": change.num_copies,
                "saved_ms_a_step": change.saved_s * 1e3,
                "cost_ms": change.cost_s * 1e3,
            })
        };
        json!({
            "step": self.step,
            "event": "decision",
            "policy": self.policy.name(),
            "step_ms": self.step_s * 1e3,
            "token_us": self.rates.row_s * 1e6,
            "bytes_per_s": self.rates.bytes_per_s,
            "sum_bytes_per_s": self.rates.sum_bytes_per_s,
            "step_ms_by_policy": means.collect::<Map<String, Value>>(),
            "layers": self.changes.iter().map(layer).collect::<Vec<_>>(),
        })
    }
}

/// The experts of a layer that moved between two steps.
pub(super) struct MoveLine<'a> {
    pub(super) step: u64,
    pub(super) layer: usize,
    pub(super) transfers: &'a [ExpertTransfer],
    /// True if the layer has reached its placement.
    pub(super) is_complete: bool,
    /// The seconds of the pause, of all layers that moved in it.
    pub(super) moves_pause_s: f64,
}

impl MoveLine<'_> {
    pub(super) fn json(&self) -> Value {
        let copy =
            |transfer: &ExpertTransfer| json!({ "expert": transfer.expert, "from": transfer.from, "to": transfer.to });
        json!({
            "step": self.step,
            "event": "move",
            "layer": self.layer,
            "copies": self.transfers.iter().map(copy).collect::<Vec<_>>(),
            "complete": self.is_complete,
            "pause_ms": self.moves_pause_s * 1e3,
        })
    }
}
