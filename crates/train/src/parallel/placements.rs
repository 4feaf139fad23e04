//! The placements of experts for a run.

use std::fs;
use std::path::Path;

use moeworks_plan::{Placement, PlacementError, Placements};

use crate::config::{PlacementChoice, RunConfig};
use crate::error::TrainError;

/// Returns the placement of each layer's experts according to `config`.
///
/// # Errors
/// [`TrainError::State`] if the file is not a placement, or does not match the run's experts, ranks or layers;
/// [`TrainError::Io`] if it cannot be read.
pub fn placements(config: &RunConfig) -> Result<Placements, TrainError> {
    let (num_experts, num_ranks) = (config.model.num_experts, config.parallel.layout().num_expert_ranks());
    let path = match &config.parallel.placement {
        PlacementChoice::Sharded => return Ok(Placement::sharded(num_experts, num_ranks).into()),
        PlacementChoice::Everywhere => return Ok(Placement::everywhere(num_experts, num_ranks).into()),
        PlacementChoice::File(path) => Path::new(path),
    };
    let text = fs::read_to_string(path).map_err(TrainError::io(path))?;
    let wrong = |problem: String| TrainError::State { path: path.to_owned(), problem };
    let placements: Placements = text.parse().map_err(|error: PlacementError| wrong(error.to_string()))?;
    check(&placements, config).map_err(wrong)?;
    Ok(placements)
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
    if config.parallel.zero > 0 && placements.has_replicas() {
        return Err("puts an expert on several ranks: parallel.zero must then be 0".to_owned());
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
