//! The account of a step's microbatches, of which each is known where its loss was found, on all ranks.

use moeworks_model::{PassStats, router_losses};
use moeworks_moe::LayerStats;

use super::{Pipeline, StageView, StepBatch};
use crate::error::TrainError;
use crate::parallel::all_values;

/// Numbers of a microbatch before those of its layers.
const HEAD: usize = 5;

/// The account of a microbatch, where its loss was found.
pub(super) struct MicrobatchStats {
    pub(super) microbatch: u32,
    pub(super) stats: PassStats,
}

/// The account of each microbatch from those that this rank and the ranks at its place in other stage groups have.
pub(super) fn of_all_ranks(
    pipeline: &Pipeline,
    view: StageView<'_>,
    microbatches: &[StepBatch],
    own: &[MicrobatchStats],
) -> Result<Vec<PassStats>, TrainError> {
    let numbers: Vec<f64> = own.iter().flat_map(to_numbers).collect();
    let pipeline_group = view.ranks.pipeline_group().unwrap_or(view.ranks.stage_group());
    let all = all_values(pipeline_group, &numbers)?;
    let mut stats: Vec<PassStats> = microbatches.iter().map(|_| PassStats::default()).collect();
    let mut numbers = all.into_iter().peekable();
    while numbers.peek().is_some() {
        let head: Vec<f64> = numbers.by_ref().take(HEAD).collect();
        let [microbatch, loss_sum, num_targets, num_correct, num_layers] = head[..] else { break };
        let layers: Vec<LayerStats> =
            (0..num_layers as usize).map(|_| LayerStats::from_numbers(&mut numbers)).collect();
        let index = microbatch as usize;
        // They follow from the statistics, and are the same on every rank.
        let router = router_losses(pipeline.config(), &layers, &microbatches[index].options).values;
        stats[index] = PassStats {
            loss_sum,
            num_targets: num_targets as usize,
            num_correct: num_correct as usize,
            balance_loss: router.balance,
            z_loss: router.z,
            router_losses: router.others,
            layers,
        };
    }
    Ok(stats)
}

fn to_numbers(MicrobatchStats { microbatch, stats }: &MicrobatchStats) -> Vec<f64> {
    let counts = [f64::from(*microbatch), stats.loss_sum, stats.num_targets as f64, stats.num_correct as f64];
    let layers = stats.layers.iter().flat_map(LayerStats::to_numbers);
    counts.into_iter().chain([stats.layers.len() as f64]).chain(layers).collect()
}
