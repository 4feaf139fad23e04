//! The settings of a trainer that moves experts.

use moeworks_plan::{Placements, RebalancePolicy};

/// The source of the placements to which experts move.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum RebalanceSource {
    /// Experts stay where they are.
    #[default]
    Off,
    /// Placements that are known.
    File {
        /// The placements of the layers.
        placements: Placements,
        /// The step after which experts begin to move.
        at_step: u64,
    },
    /// Decisions by the load of the last steps.
    Online,
}

/// The settings of a trainer that moves experts between steps.
#[derive(Clone, Debug, PartialEq)]
pub struct RebalanceSettings {
    /// The source of placements.
    pub source: RebalanceSource,
    /// Steps between decisions by load.
    pub every: u64,
    /// Slots for experts on each rank beyond an even share.
    pub spare: usize,
    /// The policies to choose among.
    pub policies: Vec<RebalancePolicy>,
    /// The most moves and swaps of a decision by [`RebalancePolicy::Moves`] in a layer.
    pub max_moves: usize,
    /// Seconds that a change must promise to save until the next decision for each second of moving.
    pub min_gain: f64,
    /// The most bytes of experts that a rank sends or receives in a step; 0: by `max_pause`.
    pub bytes_per_step: u64,
    /// The share of a step's time for which moving may pause training.
    pub max_pause: f64,
}

impl Default for RebalanceSettings {
    fn default() -> Self {
        Self {
            source: RebalanceSource::Off,
            every: 50,
            spare: 0,
            policies: RebalancePolicy::ALL.to_vec(),
            max_moves: 8,
            min_gain: 2.0,
            bytes_per_step: 0,
            max_pause: 0.02,
        }
    }
}
