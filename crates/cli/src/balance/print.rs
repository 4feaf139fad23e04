//! The outcome of `moeworks balance` as a table and as JSON.

use std::path::Path;

use moeworks_train::metrics::LoadWindow;
use serde_json::{Value, json};

use super::loads::Loads;
use super::{Change, LayerOutcome};
use crate::tables;

fn mean(outcomes: &[LayerOutcome], value: impl Fn(&LayerOutcome) -> f64) -> f64 {
    outcomes.iter().map(value).sum::<f64>() / outcomes.len() as f64
}

/// Prints a row for each layer, with the columns that are known.
pub(super) fn table(loads: &Loads, outcomes: &[LayerOutcome], out: &Path) {
    let LoadWindow { last_step, num_steps, .. } = &loads.window;
    let steps = if loads.has_steps {
        format!("{num_steps} steps up to step {last_step}")
    } else {
        format!("{num_steps} passes")
    };
    println!("Load of the last {steps}; imbalance is the largest rank's load over the mean, less 1");
    let has = |known: &dyn Fn(&LayerOutcome) -> bool| outcomes.iter().any(known);
    let (has_steps, has_split) =
        (has(&|outcome| outcome.of_steps.is_some()), has(&|outcome| outcome.with_split.is_some()));
    let has_nodes = has(&|outcome| outcome.in_node.is_some());
    let mut heads = vec!["layer", "before", "after"];
    heads.extend(has_steps.then_some(["each step", "after"]).into_iter().flatten());
    heads.extend(has_split.then_some("rows split"));
    heads.extend(has_nodes.then_some(["pairs in node", "after"]).into_iter().flatten());
    heads.push("experts to copy");
    let figure = |value: f64| format!("{value:.3}");
    let both = |change: Option<Change>| {
        change.map_or_else(|| ["-".to_owned(), "-".to_owned()], |change| [figure(change.before), figure(change.after)])
    };
    let row = |outcome: &LayerOutcome| {
        let mut row = vec![outcome.layer.to_string()];
        row.extend(both(Some(outcome.imbalance)));
        row.extend(has_steps.then(|| both(outcome.of_steps)).into_iter().flatten());
        row.extend(has_split.then(|| outcome.with_split.map_or_else(|| "-".to_owned(), figure)));
        row.extend(has_nodes.then(|| both(outcome.in_node)).into_iter().flatten());
        row.push(outcome.num_moved.to_string());
        row
    };
    tables::print(&heads, &outcomes.iter().map(row).collect::<Vec<_>>());
    let before = mean(outcomes, |outcome| outcome.imbalance.before);
    let after = mean(outcomes, |outcome| outcome.imbalance.after);
    println!("Mean imbalance {before:.3} before, {after:.3} after: {}", out.display());
}

/// Prints an object; figures that are not known are absent.
pub(super) fn json(loads: &Loads, outcomes: &[LayerOutcome], out: &Path) {
    let layer = |outcome: &LayerOutcome| {
        let mut value = json!({
            "layer": outcome.layer,
            "imbalance_before": outcome.imbalance.before,
            "imbalance_after": outcome.imbalance.after,
            "experts_to_copy": outcome.num_moved,
        });
        add(&mut value, "step_imbalance", outcome.of_steps);
        add(&mut value, "pairs_in_node", outcome.in_node);
        if let Some(imbalance) = outcome.with_split {
            value["step_imbalance_with_rows_split"] = imbalance.into();
        }
        value
    };
    let layers: Vec<Value> = outcomes.iter().map(layer).collect();
    let value = json!({
        "last_step": loads.window.last_step,
        "steps": loads.window.num_steps,
        "layers": layers,
        "imbalance_before": mean(outcomes, |outcome| outcome.imbalance.before),
        "imbalance_after": mean(outcomes, |outcome| outcome.imbalance.after),
        "placement": out.display().to_string(),
    });
    println!("{value:#}");
}

fn add(value: &mut Value, name: &str, change: Option<Change>) {
    if let Some(Change { before, after }) = change {
        value[format!("{name}_before")] = before.into();
        value[format!("{name}_after")] = after.into();
    }
}
