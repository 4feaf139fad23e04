//! The loads that a placement is made for: those of a run's records, or of a record of routing.

use std::path::{Path, PathBuf};

use moeworks_infer::routing_record::is_record;
use moeworks_infer::store::{METRICS_JSONL, ROUTING_RECORD};
use moeworks_plan::Coactivation;
use moeworks_train::metrics::{LoadWindow, RecordedLoads, read_loads, read_recorded_loads};

use crate::args::{BalanceArgs, Policy};
use crate::failure::Failure;

/// Loads, with what else is known of the choices.
pub(super) struct Loads {
    pub(super) window: LoadWindow,
    /// True if steps are training steps; false if they are passes of tokens.
    pub(super) has_steps: bool,
    /// `[steps][layers][E]`: the loads of each step, where a record has them.
    pub(super) steps: Vec<Vec<Vec<u64>>>,
    /// The experts that tokens choose together, for each layer; empty where that is not recorded.
    pub(super) pairs: Vec<Coactivation>,
}

impl Loads {
    pub(super) fn read(args: &BalanceArgs) -> Result<Self, Failure> {
        let loads = match record_of(args) {
            Some(record) => Self::from_record(&record, args)?,
            None => Self::from_run(args)?,
        };
        if args.policy == Policy::Coactivation && loads.pairs.is_empty() {
            let message = format!(
                "--policy coactivation: {} has no choices of single tokens; give a record (--record-routing, or \
                 train.record_routing)",
                args.run.display()
            );
            return Err(Failure::input(message));
        }
        Ok(loads)
    }

    fn from_record(record: &Path, args: &BalanceArgs) -> Result<Self, Failure> {
        let RecordedLoads { window, has_steps, steps, pairs, damage, .. } = read_recorded_loads(record, args.last)?;
        if !damage.is_none() {
            tracing::warn!("{}: {damage}", record.display());
        }
        if window.layers.is_empty() {
            return Err(Failure::input(format!("{}: the record has no whole block", record.display())));
        }
        Ok(Self { window, has_steps, steps, pairs })
    }

    fn from_run(args: &BalanceArgs) -> Result<Self, Failure> {
        if args.run.is_file() {
            let message = format!("{}: is neither a run nor a record of routing", args.run.display());
            return Err(Failure::input(message));
        }
        let file = args.run.join(METRICS_JSONL);
        let window = read_loads(&file, args.last).map_err(|error| Failure::input(error.to_string()))?;
        if window.layers.is_empty() {
            let message =
                format!("{}: has no record of an MoE layer; train a model with experts first", file.display());
            return Err(Failure::input(message));
        }
        Ok(Self { window, has_steps: true, steps: Vec::new(), pairs: Vec::new() })
    }
}

/// The record that is read: a file, or that of a run where the policy needs choices or rows are shared out.
fn record_of(args: &BalanceArgs) -> Option<PathBuf> {
    if args.run.is_file() {
        return is_record(&args.run).then(|| args.run.clone());
    }
    let record = args.run.join(ROUTING_RECORD);
    let needs_record = args.policy == Policy::Coactivation || args.split_rows;
    (needs_record && record.is_file()).then_some(record)
}
