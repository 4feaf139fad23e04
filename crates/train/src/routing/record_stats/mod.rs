//! Statistics of recorded routing: how concentrated each layer's load is, how stable over time, and how well choices
//! and loads can be foretold.

mod concentration;
mod foretell;
mod gather;
mod json;
mod page;
mod rank_load;
mod windows;

use moeworks_infer::routing_record::{Damage, RecordHeader};
use moeworks_plan::ForecastError;

pub use concentration::Concentration;
pub use foretell::NextLayer;
pub use gather::record_stats;
pub use json::stats_json;
pub use page::stats_page;
pub use rank_load::RankLoad;
pub use windows::{Window, stats_of_windows};

/// The settings of statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatsOptions {
    /// Steps of a window where loads are recorded, tokens of a window where only choices are; none for one step, or a
    /// twentieth of the tokens.
    pub window: Option<u64>,
    /// Windows whose loads together are foretold; none for one.
    pub ahead: Option<usize>,
}

/// The statistics of a record.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordStats {
    /// The model, and how its experts were placed.
    pub header: RecordHeader,
    /// Tokens whose choices are recorded.
    pub num_tokens: u64,
    /// Steps whose loads are recorded.
    pub num_steps: u64,
    /// Windows by which changes over time are measured.
    pub num_windows: usize,
    /// Windows whose loads together are foretold.
    pub num_ahead: usize,
    /// The MoE layers, first to last.
    pub layers: Vec<RecordedLayer>,
    /// The parts of the record that could not be read.
    pub damage: Damage,
    /// Statistics that are left out, with the reason.
    pub notes: Vec<String>,
}

/// The statistics of one MoE layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecordedLayer {
    /// Index of the layer in the model.
    pub layer: usize,
    /// `[E]`: choices of each expert before capacity, of all tokens where loads are recorded.
    pub chosen: Vec<u64>,
    /// `[E]`: choices after capacity; none where that is not known.
    pub kept: Option<Vec<u64>>,
    /// `[E]`: the sum of the weights of each expert's choices; none where they are not recorded.
    pub importance: Option<Vec<f64>>,
    /// The load of ranks and nodes; none without a placement.
    pub on_ranks: Option<RankLoad>,
    /// The concentration of the choices.
    pub concentration: Concentration,
    /// The change over time; none with fewer than two windows.
    pub stability: Option<Stability>,
    /// The errors of foretelling the loads of the coming windows; empty with too few windows.
    pub forecasts: Vec<ForecastError>,
    /// The mean error that the true shares would have, because these windows are samples; none with too few windows.
    pub forecast_sampling: Option<f64>,
    /// The accuracy of foretelling the choices in the next MoE layer.
    pub next_layer: Option<NextLayer>,
    /// The share of a token's experts that the token before it has, too.
    pub repeats: Option<Repeats>,
    /// The pairs of experts that most tokens choose together, most first.
    pub pairs: Vec<ExpertPair>,
    /// `[windows, E]`: the shares of the experts over time, of at most 100 windows.
    pub course: Vec<Vec<f64>>,
}

/// The change of a layer's shares over time, each as `sum_e |share_e - other share_e|`, from 0 to 2.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stability {
    /// The mean change from window to window.
    pub change: f64,
    /// The mean change that a constant routing would show, because windows are samples.
    pub sampling: f64,
    /// The change from the first window to the last.
    pub drift: f64,
    /// The share of the busiest tenth of the experts of a window that are also in that of the next one.
    pub top_kept: f64,
}

/// Choices that are those of the token before, too.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Repeats {
    /// The share of choices that the token before has made, too.
    pub share: f64,
    /// The share if tokens chose independently of each other.
    pub base: f64,
}

/// Two experts that tokens choose together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertPair {
    /// The expert with the lower index.
    pub first: usize,
    /// The other one.
    pub second: usize,
    /// The share of tokens that choose both.
    pub share: f64,
    /// This share over the one of independent choices.
    pub lift: f64,
}

#[cfg(test)]
mod tests;
