//! Experts that move between ranks while texts are served.
//!
//! Before each turn a few experts may travel, so that a turn waits little for them. Online, the load since the last
//! decision says which. Answers do not change by a bit, because an expert's rows are computed together wherever it
//! is.

use std::collections::BTreeMap;

use moeworks_infer::InferError;
use moeworks_infer::open::Model;
use moeworks_moe::{HeldLayer, RemoteExperts, bytes_of_expert, can_move};
use moeworks_plan::{
    LayerLoads, Placement, Placements, RebalancePolicy, RebalanceRates, RebalanceRules, ReplicaSharing,
    expert_transfers, most_copies, placement_step, rebalance_layer,
};

use crate::engine::EngineError;
use crate::experts::{ExpertLoad, RankLoad};

/// The source of the placements to which experts move.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum RebalanceSource {
    /// Experts stay where they are.
    #[default]
    Off,
    /// Placements that are known.
    Placements(Placements),
    /// Decisions by load.
    Online,
}

/// The options of experts that move.
#[derive(Clone, Debug, PartialEq)]
pub struct RebalanceOptions {
    /// The source of placements.
    pub source: RebalanceSource,
    /// Tokens between decisions by load.
    pub every_tokens: u64,
    /// Slots for experts on each rank beyond an even share, for copies of hot experts.
    pub spare_slots: usize,
    /// The most bytes that a rank sends or receives before a turn, but at least one expert.
    pub bytes_per_turn: usize,
}

impl Default for RebalanceOptions {
    fn default() -> Self {
        Self { source: RebalanceSource::Off, every_tokens: 2048, spare_slots: 0, bytes_per_turn: 32 << 20 }
    }
}

/// The least fall of imbalance (largest load of a rank over the mean, less 1) for which a layer changes.
const LEAST_GAIN: f64 = 0.05;

/// The largest number of moves and swaps of a layer in a decision without copies.
const MAX_MOVES: usize = 8;

/// The part of an engine that moves experts.
pub(crate) struct Rebalancer<'a> {
    model: &'a Model,
    remote: &'a RemoteExperts,
    options: RebalanceOptions,
    layers: Vec<HeldLayer<'a>>,
    /// The load when the last decision was made.
    seen: Vec<Vec<u64>>,
    seen_tokens: u64,
    /// The placements to which layers are moving.
    targets: BTreeMap<usize, Placement>,
}

impl<'a> Rebalancer<'a> {
    /// Creates the part for a model whose experts are on ranks, and lets `load` show where they are. Returns none
    /// where nothing moves.
    ///
    /// # Errors
    /// [`EngineError::CannotMove`] if the model's experts cannot move.
    pub(crate) fn new(
        model: &'a Model,
        options: RebalanceOptions,
        load: &ExpertLoad,
    ) -> Result<Option<Self>, EngineError> {
        let Some(remote) = model.decoder.remote_experts() else { return Ok(None) };
        let layers = model.weights.held_layers(model.decoder.config());
        let placement = |layer: &HeldLayer<'_>| (layer.number, (*remote.placement(layer.number)).clone());
        let placements = Placements::per_layer(layers.iter().map(placement));
        load.set_ranks(RankLoad::new(placements.clone(), remote.nodes()));
        let targets = match &options.source {
            RebalanceSource::Off => return Ok(None),
            RebalanceSource::Online => BTreeMap::new(),
            RebalanceSource::Placements(targets) => {
                let target = |layer: &HeldLayer<'_>| Some((layer.number, targets.layer(layer.number)?.clone()));
                layers.iter().filter_map(target).collect()
            }
        };
        if layers.iter().any(|layer| !can_move(layer.weights)) {
            return Err(EngineError::CannotMove);
        }
        Ok(Some(Self { model, remote, options, layers, seen: Vec::new(), seen_tokens: 0, targets }))
    }

    /// Moves some experts, if any are to move. Called before a turn.
    ///
    /// # Errors
    /// If a rank is lost.
    pub(crate) fn before_turn(&mut self, load: &ExpertLoad) -> Result<(), EngineError> {
        if self.targets.is_empty() && self.options.source == RebalanceSource::Online {
            self.decide(load)?;
        }
        let mut left = self.options.bytes_per_turn;
        let mut has_moved = false;
        while let Some((number, target)) = self.targets.pop_first() {
            let Some(layer) = self.layers.iter().find(|layer| layer.number == number) else { continue };
            let (current, bytes) = (self.remote.placement(number), bytes_of_expert(layer.weights).max(1));
            let max_copies = left / bytes;
            if max_copies == 0 && has_moved {
                self.targets.insert(number, target);
                break;
            }
            let next = placement_step(&current, &target, &self.remote.nodes(), max_copies);
            let transfers = expert_transfers(&current, &next, &self.remote.nodes());
            left = left.saturating_sub(most_copies(&transfers, current.num_ranks()) * bytes);
            if next != *current {
                let moved = self.remote.move_experts(&self.model.ctx, number, &next, layer.weights);
                moved.map_err(InferError::from)?;
                load.moved(number, &next, transfers.iter().map(|transfer| transfer.expert));
                has_moved = true;
            }
            if next != target {
                self.targets.insert(number, target);
                break;
            }
        }
        Ok(())
    }

    /// Decides by the load since the last decision, if that is due.
    fn decide(&mut self, load: &ExpertLoad) -> Result<(), EngineError> {
        let layers = load.layers();
        let num_tokens = layers.first().map_or(0, |layer| layer.num_tokens);
        if num_tokens - self.seen_tokens < self.options.every_tokens {
            return Ok(());
        }
        let mut window = Vec::new();
        for (place, layer) in layers.iter().enumerate() {
            let before = |expert: usize| self.seen.get(place).map_or(0, |seen| seen[expert]);
            let counts = layer.tokens_per_expert.iter().enumerate();
            let loads: Vec<u64> = counts.map(|(expert, count)| count - before(expert)).collect();
            if let Some(target) = self.target(layer.layer, &loads)? {
                self.targets.insert(layer.layer, target);
            }
            window.push(loads);
        }
        load.decided(window);
        self.seen = layers.into_iter().map(|layer| layer.tokens_per_expert).collect();
        self.seen_tokens = num_tokens;
        Ok(())
    }

    /// Returns the placement to which a layer with this load should change.
    fn target(&self, number: usize, loads: &[u64]) -> Result<Option<Placement>, EngineError> {
        let Some(layer) = self.layers.iter().find(|layer| layer.number == number) else { return Ok(None) };
        let placement = &*self.remote.placement(number);
        let (num_experts, num_ranks, spare) =
            (placement.num_experts(), placement.num_ranks(), self.options.spare_slots);
        let loads: Vec<f64> = loads.iter().take(num_experts).map(|&load| load as f64).collect();
        let expert_bytes = bytes_of_expert(layer.weights) as f64;
        let loads = LayerLoads { placement, loads: &loads, steps: &[], expert_bytes, gradient_bytes: 0.0 };
        let rules = RebalanceRules {
            slots_per_rank: num_experts.div_ceil(num_ranks).saturating_add(spare).min(num_experts),
            max_moves: MAX_MOVES,
            may_replicate: spare > 0,
            num_steps: 1,
            min_gain: 0.0,
            sharing: ReplicaSharing::Even,
        };
        let policy = if spare > 0 { RebalancePolicy::Anew } else { RebalancePolicy::Moves };
        let rates = RebalanceRates { row_s: 1.0, bytes_per_s: 1.0, sum_bytes_per_s: 1.0 };
        let change = rebalance_layer(loads, policy, &rules, &rates, &self.remote.nodes());
        let change = change.map_err(|error| EngineError::Answer { why: error.to_string() })?;
        let pays = change.filter(|change| change.imbalance[0] - change.imbalance[1] >= LEAST_GAIN);
        Ok(pays.map(|change| change.placement))
    }
}
