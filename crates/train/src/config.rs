//! The settings of a training run, as one resolved value: [`RunConfig`].
//!
//! Settings are layered as TOML tables: defaults, then a preset, then a file, then single settings from the command
//! line ([`ConfigLayers`]). Only the result becomes a `RunConfig`. Code after this module therefore does not know
//! where a value came from, and no setting is optional: a run uses the values that [`print_config`] shows.
//!
//! A setting is one entry of a section's definition ([`settings!`](moeworks_moe::settings)): name, type, default,
//! range and comment. The commented file, the checks of ranges, suggestions for unknown names and `docs/settings.md`
//! are made from it. Checks of settings against each other are in `config/check.rs`.

mod check;
mod data;
mod domain;
mod error;
mod layers;
mod parallel;
mod pipeline;
mod presets;
mod print;
mod rebalance;
mod schemes;
mod table;
mod training;

use std::path::{Path, PathBuf};

use moeworks_model::ModelConfig;
use moeworks_moe::settings;
use serde::{Deserialize, Serialize};

pub(crate) use check::wrong;
pub use data::{DataConfig, TokenizerChoice};
pub use domain::{DomainBaseChoice, DomainChoice};
pub use error::ConfigError;
pub use layers::{ConfigLayers, Override};
pub use moeworks_model::BalanceKind;
pub use moeworks_plan::Precision;
pub use parallel::{BackwardWire, MovingChoice, ParallelConfig, PathChoice, PlacementChoice, WireChoice};
pub use presets::PRESETS;
pub use print::print_config;
pub(crate) use print::to_table as table_of;
pub use rebalance::{PolicyChoice, RebalanceConfig, RebalanceMode};
pub use table::{SettingRow, setting_rows, settings_page};
pub use training::{GradientType, ScheduleKind, TrainConfig};

/// Every setting of a training run.
///
/// ```
/// use moeworks_train::config::{ConfigLayers, Override, print_config};
///
/// let layers = ConfigLayers { overrides: vec![Override::parse("train.lr=3e-4").unwrap()], ..ConfigLayers::default() };
/// let config = layers.resolve().unwrap();
/// assert_eq!(config.train.lr, 3e-4);
/// assert!(print_config(&config).contains("lr = 0.0003"));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RunConfig {
    /// The model's shape and rules.
    pub model: ModelConfig,
    /// The training text and its tokenizer.
    pub data: DataConfig,
    /// The training.
    pub train: TrainConfig,
    /// The distribution over ranks.
    pub parallel: ParallelConfig,
    /// The movement of experts between ranks.
    pub rebalance: RebalanceConfig,
    /// The output folders.
    pub run: OutputConfig,
}

settings! {
    /// The output folders.
    #[serde(deny_unknown_fields, default)]
    pub struct OutputConfig in "run." {
        /// Folder of all runs.
        #[serde(serialize_with = "as_text")]
        out: PathBuf = "runs".into();
        /// Folder of this run within it; "": made from the date and the time.
        name: String = String::new();
    }
}

/// Serialises a path as text. Paths come from TOML, which is UTF-8, so nothing is lost.
fn as_text<S: serde::Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&path.to_string_lossy())
}

#[cfg(test)]
#[path = "config/tests.rs"]
mod tests;
