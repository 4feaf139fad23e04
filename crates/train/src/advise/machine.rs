//! Findings on the memory of the machine.

use moeworks_model::model_cost::{Kept, shape};
use moeworks_plan::{RankMemory, Tokens, Workload, rank_memory};

use super::figures::RunFigures;
use super::finding::{Figure, Finding, Over, Remedy, Topic};
use super::settings::Remedies;
use crate::config::{GradientType, RunConfig};

/// Above this share of the machine's memory a peak is near its end.
const NEARLY_FULL: f64 = 0.8;
/// A peak that has grown by this factor since the first steps follows the load of experts.
const GROWTH: f64 = 1.25;
/// Steps after which every buffer has been used once.
const SETTLED: usize = 3;

/// Finds a peak of memory near what the machine has.
pub(super) fn memory(run: &RunFigures) -> Option<Finding> {
    let machine = run.machine_bytes? as f64;
    let peak = run.course.points.iter().map(|point| point.memory_peak_bytes).max().filter(|&peak| peak > 0)? as f64;
    // The figure is that of rank 0; ranks are threads of one machine unless bytes went to other nodes.
    let is_one_machine = run.window.ranks.as_ref().is_none_or(|ranks| ranks.cluster_mb == 0.0);
    let num_ranks = if is_one_machine { run.settings.parallel.num_ranks() as f64 } else { 1.0 };
    let share = peak * num_ranks / machine;
    if share < NEARLY_FULL {
        return None;
    }
    let settled = run.course.points.get(SETTLED).map_or(peak, |point| point.memory_peak_bytes as f64);
    let growth = if settled > 0.0 { peak / settled } else { 1.0 };
    Some(Finding {
        topic: Topic::Memory,
        summary: format!(
            "the peak of memory is {:.0}% of the machine's {:.2} GB{}",
            100.0 * share,
            machine / 1e9,
            if growth > GROWTH { ", and it grew with the load of experts" } else { "" }
        ),
        at_stake: ((share - NEARLY_FULL) / (1.0 - NEARLY_FULL)).clamp(0.05, 1.0),
        figures: vec![
            Figure::new("perf/memory_peak_bytes", peak, Over::RunMost),
            Figure::new("ranks on the machine", num_ranks, Over::Computed),
            Figure::new("memory of the machine, bytes", machine, Over::Computed),
        ],
        remedies: smaller(run, growth),
    })
}

/// Returns remedies that need less memory, with the bytes that each saves by the model of memory.
fn smaller(run: &RunFigures, growth: f64) -> Vec<Remedy> {
    let (make, train, parallel) = (Remedies::new(&run.settings), &run.settings.train, &run.settings.parallel);
    let saving = |remedy: Remedy| with_saving(&run.settings, remedy);
    let half = [
        ("train.batch_size", (train.batch_size / 2).to_string()),
        ("train.grad_accumulation", (2 * train.grad_accumulation).to_string()),
    ];
    let follows_load = growth > GROWTH && run.settings.model.capacity_factor == 0.0 && run.choices().is_some();
    let copies = parallel.dp.max(if run.choices().is_none() { parallel.ep } else { 1 });
    let next_zero = parallel.zero + 1;
    let remedies = [
        follows_load
            .then(|| make.set("model.capacity_factor", "2.0", "experts with at most twice their even share of rows"))
            .flatten(),
        (!train.checkpoint_layers).then(|| make.set("train.checkpoint_layers", true, "").map(saving)).flatten(),
        (train.batch_size >= 2).then(|| make.set_all(&half, "").map(saving)).flatten(),
        (copies * parallel.ep > 1 && next_zero <= 3)
            .then(|| make.set("parallel.zero", next_zero, "").map(saving))
            .flatten(),
        (parallel.num_ranks() == 1 && train.expert_gradients == GradientType::F32 && run.choices().is_some())
            .then(|| make.set("train.expert_gradients", "bf16", "").map(saving))
            .flatten(),
    ];
    remedies.into_iter().flatten().collect()
}

/// Says how many bytes a rank needs before and after a remedy.
fn with_saving(settings: &RunConfig, remedy: Remedy) -> Remedy {
    let overrides = remedy.changes.iter().map(|change| format!("{}={}", change.setting, change.value));
    let overrides = overrides.map(|text| crate::config::Override::parse(&text)).collect::<Result<Vec<_>, _>>();
    let layers = overrides.map(|overrides| crate::config::ConfigLayers { overrides, ..Default::default() });
    let after = layers.and_then(|layers| layers.resolve_over(settings.clone()));
    let expected = match (needed(settings), after.ok().and_then(|after| needed(&after))) {
        (Some(before), Some(after)) => format!(
            "about {:.1} MB a rank in place of {:.1} MB, by the model of memory",
            after.total() / 1e6,
            before.total() / 1e6
        ),
        _ => "less memory".to_owned(),
    };
    Remedy { expected, ..remedy }
}

/// Returns the memory of the fullest rank by the model of memory.
fn needed(settings: &RunConfig) -> Option<RankMemory> {
    let train = &settings.train;
    let kept = Kept { precision: train.precision, checkpoint_layers: train.checkpoint_layers };
    let shape = shape(&settings.model, &settings.weight_table().ok()?, train.seq_len, kept);
    let workload = Workload {
        tokens: Tokens::Sequences { num: train.batch_size, len: train.seq_len },
        precision: train.precision,
        zero: settings.parallel.zero,
        expert_gradient_bytes: train.expert_gradients.bytes(),
    };
    Some(rank_memory(&shape, &workload, &settings.parallel.layout()))
}
