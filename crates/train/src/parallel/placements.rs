//! The placements of experts for a run.

use std::fs;
use std::path::Path;

use moeworks_plan::{Layout, Placement, PlacementError, Placements};

use crate::config::{PlacementChoice, RebalanceMode, RunConfig};
use crate::error::TrainError;
use crate::rebalance::PLACEMENT_FILE;

/// Returns the placement of each layer's experts according to `config`.
///
/// # Errors
/// [`TrainError::State`] if the file is not a placement, or does not match the run's experts, ranks or layers;
/// [`TrainError::Io`] if it cannot be read.
pub fn placements(config: &RunConfig) -> Result<Placements, TrainError> {
    placements_of(config, &config.parallel.layout())
}

/// Returns the placement of each layer's experts in a stage group of `layout`.
pub(super) fn placements_of(config: &RunConfig, layout: &Layout) -> Result<Placements, TrainError> {
    let (num_experts, num_ranks) = (config.model.num_experts, layout.num_expert_ranks());
    let path = match &config.parallel.placement {
        PlacementChoice::Sharded => return Ok(Placement::sharded(num_experts, num_ranks).into()),
        PlacementChoice::Everywhere => return Ok(Placement::everywhere(num_experts, num_ranks).into()),
        PlacementChoice::File(path) => Path::new(path),
    };
    read(path, config)
}

/// Returns the placements to which experts move while the run goes on, if `config` names a file of them.
///
/// # Errors
/// The errors of [`placements`].
pub(crate) fn rebalance_target(config: &RunConfig) -> Result<Option<Placements>, TrainError> {
    match &config.rebalance.mode {
        RebalanceMode::File(path) => read(Path::new(path), config).map(Some),
        _ => Ok(None),
    }
}

/// Returns the placements that were in force when the checkpoint in `dir` was written, if experts move in the run and
/// they are for its ranks.
///
/// # Errors
/// [`TrainError::State`] if the file is damaged; [`TrainError::Io`] if it cannot be read.
pub(crate) fn placements_in_checkpoint(config: &RunConfig, dir: &Path) -> Result<Option<Placements>, TrainError> {
    let path = dir.join(PLACEMENT_FILE);
    if config.rebalance.mode == RebalanceMode::Off || !path.is_file() {
        return Ok(None);
    }
    let placements = parse(&path)?;
    Ok(check(&placements, config).is_ok().then_some(placements))
}

fn read(path: &Path, config: &RunConfig) -> Result<Placements, TrainError> {
    let placements = parse(path)?;
    let wrong = |problem: String| TrainError::State { path: path.to_owned(), problem };
    check(&placements, config).map_err(wrong)?;
    Ok(placements)
}

fn parse(path: &Path) -> Result<Placements, TrainError> {
    let text = fs::read_to_string(path).map_err(TrainError::io(path))?;
    let wrong = |error: PlacementError| TrainError::State { path: path.to_owned(), problem: error.to_string() };
    text.parse().map_err(wrong)
}

/// Checks that `placements` match the experts, ranks and layers of the run.
fn check(placements: &Placements, config: &RunConfig) -> Result<(), String> {
    let (num_experts, num_ranks) = (config.model.num_experts, config.parallel.layout().num_expert_ranks());
    let sizes = (placements.num_experts(), placements.num_ranks());
    if sizes != (num_experts, num_ranks) {
        return Err(format!(
            "places {} experts on {} ranks, but model.num_experts is {num_experts} and parallel.ep times parallel.tp {num_ranks}",
            sizes.0, sizes.1
        ));
    }
    let named = placements.layers();
    if named.is_empty() {
        return Ok(());
    }
    let has_experts = |layer: usize| layer < config.model.num_layers && config.model.is_moe_layer(layer);
    if let Some(layer) = named.iter().find(|layer| !has_experts(**layer)) {
        return Err(format!(
            "places experts of layer {layer}, which has none (model.num_layers is {})",
            config.model.num_layers
        ));
    }
    match (0..config.model.num_layers).find(|layer| has_experts(*layer) && !named.contains(layer)) {
        Some(layer) => Err(format!("has no section \"layer {layer}:\": each layer with experts must have one")),
        None => Ok(()),
    }
}
