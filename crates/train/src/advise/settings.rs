//! Settings in advice: their values now, and the way in which a changed one takes effect.

use std::fs;
use std::path::Path;

use toml::{Table, Value};

use super::finding::{Change, Reach, Remedy};
use crate::config::{ConfigError, ConfigLayers, Override, RunConfig};
use crate::error::TrainError;
use crate::language_model::read_config;
use moeworks_infer::store::CONFIG_FILE;

/// The most settings of another version that are left out.
const MAX_LEFT_OUT: usize = 100;

/// Settings of `train` that a resumed run keeps.
const KEPT: [&str; 3] = ["train.seed", "train.seq_len", "train.freeze"];

/// Settings of the model that leave what trained weights compute as it is.
const OF_TRAINING: [&str; 5] = [
    "model.capacity_factor",
    "model.jitter",
    "model.router.overflow",
    "model.router.local_group",
    "model.router.bias_update_rate",
];

/// Returns the way in which a changed value of `setting` takes effect.
#[must_use]
pub fn reach(setting: &str) -> Reach {
    let is_kept = KEPT.contains(&setting) || setting.starts_with("data.") || setting.starts_with("run.");
    match setting {
        _ if OF_TRAINING.contains(&setting) => Reach::FromWeights,
        _ if is_kept || setting.starts_with("model.") => Reach::NewRun,
        _ => Reach::Resume,
    }
}

/// Makes remedies for a run with some settings.
pub(super) struct Remedies<'a> {
    settings: &'a RunConfig,
}

impl<'a> Remedies<'a> {
    pub(super) fn new(settings: &'a RunConfig) -> Self {
        Self { settings }
    }

    /// Returns the remedy that sets `setting` to `value`; none if it has that value already.
    pub(super) fn set(
        &self,
        setting: &'static str,
        value: impl ToString,
        expected: impl Into<String>,
    ) -> Option<Remedy> {
        self.set_all(&[(setting, value.to_string())], expected)
    }

    /// Returns the remedy that changes these settings together; none if nothing changes, or if the result is not a
    /// valid configuration.
    pub(super) fn set_all(&self, wanted: &[(&'static str, String)], expected: impl Into<String>) -> Option<Remedy> {
        let before = crate::config::table_of(self.settings);
        let overrides = wanted.iter().map(|(setting, value)| Override::parse(&format!("{setting}={value}")));
        let overrides = overrides.collect::<Result<Vec<_>, _>>().ok()?;
        let layers = ConfigLayers { overrides, ..ConfigLayers::default() };
        let after = crate::config::table_of(&layers.resolve_over(self.settings.clone()).ok()?);
        let change = |(setting, value): &(&'static str, String)| {
            let now = value_of(&before, setting)?;
            (Some(now) != value_of(&after, setting)).then(|| Change { setting, now: shown(now), value: value.clone() })
        };
        let changes: Vec<Change> = wanted.iter().filter_map(change).collect();
        let reach = changes.iter().map(|change| reach(change.setting)).max_by_key(|reach| *reach as u8)?;
        Some(Remedy { changes, command: None, placement: None, expected: expected.into(), reach })
    }
}

/// Returns the value of a dotted name.
fn value_of<'t>(table: &'t Table, name: &str) -> Option<&'t Value> {
    match name.split_once('.') {
        Some((section, rest)) => value_of(table.get(section)?.as_table()?, rest),
        None => table.get(name),
    }
}

fn shown(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// The settings of a run, and the names of those that this version does not take.
pub(super) struct ReadSettings {
    pub(super) config: RunConfig,
    pub(super) left_out: Vec<String>,
}

/// Reads the settings of a run, which another version may have written: settings that this one does not know, or
/// whose values it refuses, are left out.
pub(super) fn read_settings(run_dir: &Path) -> Result<ReadSettings, TrainError> {
    let refused = match read_config(run_dir) {
        Ok(config) => return Ok(ReadSettings { config, left_out: Vec::new() }),
        Err(TrainError::Config(error @ (ConfigError::Unknown { .. } | ConfigError::Value { .. }))) => error,
        Err(error) => return Err(error),
    };
    let path = run_dir.join(CONFIG_FILE);
    let text = fs::read_to_string(&path).map_err(TrainError::io(&path))?;
    let Ok(table) = text.parse::<Table>() else { return Err(refused.into()) };
    let mut overrides = Vec::new();
    flatten("", &table, &mut overrides);
    let mut left_out = Vec::new();
    loop {
        let layers = ConfigLayers { overrides: overrides.clone(), ..ConfigLayers::default() };
        let setting = match layers.resolve() {
            Ok(config) => return Ok(ReadSettings { config, left_out }),
            Err(ConfigError::Unknown { setting, .. } | ConfigError::Value { setting, .. }) => setting,
            Err(error) => return Err(error.into()),
        };
        let count = overrides.len();
        overrides.retain(|given| given.setting() != setting);
        if overrides.len() == count || left_out.len() == MAX_LEFT_OUT {
            return Err(refused.into());
        }
        left_out.push(setting);
    }
}

/// Collects every value of `table` under its dotted name.
fn flatten(prefix: &str, table: &Table, overrides: &mut Vec<Override>) {
    for (key, value) in table {
        let name = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        match value {
            Value::Table(inner) => flatten(&name, inner, overrides),
            value => overrides.push(Override::new(&name, value.clone())),
        }
    }
}
