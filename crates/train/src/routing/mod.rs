//! Measurements of a model's routing beyond the figures of one step: how far a token's id decides its expert, how
//! many choices changed since the previous checkpoint, a page that shows a text coloured by expert, and
//! statistics of recorded routing.

mod agreement;
mod page;
mod palette;
mod record_stats;
mod routed;
mod specialization;
mod text;

pub use agreement::RoutingSample;
pub use page::routing_page;
pub use record_stats::{
    Concentration, ExpertPair, NextLayer, RankLoad, RecordStats, RecordedLayer, Repeats, Stability, StatsOptions,
    Window, record_stats, stats_json, stats_of_windows, stats_page,
};
pub use routed::{Choice, RoutedLayer, RoutedText, TokenCount, first_tokens};
pub use specialization::{Specialization, specialization};
