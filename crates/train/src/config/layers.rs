//! Resolves layers of settings to one configuration.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use serde::Deserialize;
use toml::de::{DeTable, DeValue, ValueDeserializer};
use toml::{Spanned, Table, Value};

use moeworks_model::ModelConfig;
use moeworks_model::hf::ModelFolder;

use super::table::{SettingRow, setting_rows};
use super::{ConfigError, RunConfig, TokenizerChoice, presets, schemes};

/// The setting that sets others along with it.
const SCHEME: &str = "model.router.kind";

/// The layers of settings that a user gives, from the weakest to the strongest: preset, model folder, file, single
/// settings. Defaults are below all of them.
#[derive(Clone, Debug, Default)]
pub struct ConfigLayers {
    /// One of [`super::PRESETS`].
    pub preset: Option<String>,
    /// A model folder, whose configuration and tokenizer replace the preset's.
    pub from: Option<PathBuf>,
    /// A TOML file with any of the settings.
    pub file: Option<PathBuf>,
    /// Single settings; later ones win.
    pub overrides: Vec<Override>,
}

/// A single setting from the command line or a program.
#[derive(Clone, Debug, PartialEq)]
pub struct Override {
    setting: String,
    value: Value,
    /// The value as it was typed, for settings that are text.
    text: Option<String>,
}

impl Override {
    /// Creates the override of `setting`, such as `data.paths`, by a value that a program made.
    pub fn new(setting: &str, value: impl Into<Value>) -> Self {
        Self { setting: setting.into(), value: value.into(), text: None }
    }

    /// Returns the setting's dotted name.
    #[must_use]
    pub fn setting(&self) -> &str {
        &self.setting
    }

    /// Parses `SETTING=VALUE`. The value is TOML, or a bare word for text.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let malformed = || ConfigError::Override { text: text.into() };
        let (setting, typed) = text.split_once('=').ok_or_else(malformed)?;
        let (setting, typed) = (setting.trim(), typed.trim());
        if setting.is_empty() {
            return Err(malformed());
        }
        let value = typed.parse::<Value>().unwrap_or_else(|_| Value::String(typed.into()));
        Ok(Self { setting: setting.into(), value, text: Some(typed.into()) })
    }
}

/// The setting that is a number or a text with a number for each level.
const DOMAIN: &str = "parallel.domain";

/// The model section of a file.
#[derive(Deserialize)]
struct FileModel {
    model: Option<ModelConfig>,
}

/// A setting to apply, and its origin.
struct Given<'a> {
    setting: &'a str,
    value: Value,
    /// The value's text on the command line.
    text: Option<&'a str>,
    /// `file:line: `, or nothing.
    origin: String,
}

impl ConfigLayers {
    /// Applies the layers in order and checks every setting of the result.
    pub fn resolve(&self) -> Result<RunConfig, ConfigError> {
        let mut base = presets::preset(self.preset.as_deref())?;
        if let Some(dir) = &self.from {
            base.model = ModelFolder::open(dir)?.config().clone();
            base.data.tokenizer = TokenizerChoice::File(dir.join("tokenizer.json").display().to_string());
            base.train.seq_len = base.train.seq_len.min(base.model.max_seq_len);
        }
        self.resolve_over(base)
    }

    /// Applies the file and the single settings to `base`, such as the configuration of a resumed run.
    pub fn resolve_over(&self, base: RunConfig) -> Result<RunConfig, ConfigError> {
        let text = |path: &PathBuf| {
            fs::read_to_string(path).map_err(|source| ConfigError::Unreadable { path: path.clone(), source })
        };
        let file = self.file.as_ref().map(|path| Ok::<_, ConfigError>((path, text(path)?))).transpose()?;
        let model = file.as_ref().and_then(|(_, text)| toml::from_str::<FileModel>(text).ok()?.model);
        let mut settings = Settings::new(match model {
            // A model with a published family's variant replaces the base; its variant cannot be merged as settings.
            Some(model) if !model.variant.is_plain() => RunConfig { model, ..base },
            _ => base,
        });
        if let Some((path, text)) = file {
            settings.set_file(path, &text)?;
        }
        // The scheme goes first, so that given settings override those that it sets.
        let is_scheme = |given: &&Override| given.setting == SCHEME;
        let (schemes, others): (Vec<_>, Vec<_>) = self.overrides.iter().partition(is_scheme);
        for given in schemes.into_iter().chain(others) {
            settings.set(Given {
                setting: &given.setting,
                value: given.value.clone(),
                text: given.text.as_deref(),
                origin: String::new(),
            })?;
        }
        settings.finish()
    }
}

/// The settings applied so far. Each is applied only if the result is still a valid configuration, so that an error
/// names the setting that caused it.
struct Settings {
    config: RunConfig,
    table: Table,
    /// The origin of each setting, for messages about values that conflict with others.
    origins: BTreeMap<String, String>,
    /// The table of settings.
    rows: Rc<[SettingRow]>,
}

impl Settings {
    fn new(config: RunConfig) -> Self {
        let table = super::print::to_table(&config);
        Self { config, table, origins: BTreeMap::new(), rows: setting_rows().into() }
    }

    fn set_file(&mut self, path: &Path, text: &str) -> Result<(), ConfigError> {
        let line_of = |offset: usize| text.as_bytes()[..offset.min(text.len())].split(|&byte| byte == b'\n').count();
        let parsed = DeTable::parse(text).map_err(|error| ConfigError::Syntax {
            path: path.into(),
            line: line_of(error.span().map_or(0, |span| span.start)),
            message: one_line(error.message()),
        })?;
        let mut leaves = leaves(parsed.get_ref(), &self.table);
        leaves.sort_by_key(|leaf| leaf.setting != SCHEME);
        for Leaf { setting, value, offset } in leaves {
            let origin = format!("{}:{}: ", path.display(), line_of(offset));
            let value =
                Value::deserialize(ValueDeserializer::from(value.clone())).map_err(|error| ConfigError::Value {
                    origin: origin.clone(),
                    setting: setting.clone(),
                    value: text[value.span()].trim().into(),
                    expected: one_line(error.message()),
                })?;
            self.set(Given { setting: &setting, value, text: None, origin })?;
        }
        Ok(())
    }

    fn set(&mut self, given: Given<'_>) -> Result<(), ConfigError> {
        let Given { setting, value, text, origin } = given;
        let rows = Rc::clone(&self.rows);
        let row = rows.iter().find(|row| row.name == setting || row.old_name.as_deref() == Some(setting));
        let (setting, is_ramp) = row.map_or((setting, false), |row| (row.name.as_str(), row.is_ramp));
        let is_old = setting != given.setting;
        let Some(current) = find(&mut self.table, setting) else {
            return Err(ConfigError::Unknown { origin, setting: setting.into(), hint: self.hint(setting) });
        };
        let shown = value.to_string();
        let wrong = |expected: String| ConfigError::Value {
            origin: origin.clone(),
            setting: setting.into(),
            value: shown.clone(),
            expected,
        };
        *current = match value {
            // A renamed setting may have been a boolean before.
            Value::Boolean(_) if is_old => value,
            // A number, or a text with several, whatever it was before; it is checked when it is read.
            value @ (Value::Integer(_) | Value::String(_)) if setting == DOMAIN => value,
            value => fit(value, current, text, is_ramp).map_err(|expected| wrong(expected.into()))?,
        };
        let kind = self.config.model.router.kind;
        self.config = RunConfig::deserialize_table(&self.table).map_err(wrong)?;
        self.origins.insert(setting.into(), origin.clone());
        if kind != self.config.model.router.kind {
            for (setting, value) in schemes::companions(self.config.model.router.kind) {
                self.set(Given { setting, value, text: None, origin: origin.clone() })?;
            }
        }
        Ok(())
    }

    fn hint(&self, setting: &str) -> String {
        let near = near_names(&self.table, setting);
        if near.is_empty() {
            "`moeworks train --print-config` shows all settings".into()
        } else {
            format!("near names: {}", near.join(", "))
        }
    }

    fn finish(self) -> Result<RunConfig, ConfigError> {
        match self.config.validate() {
            Ok(()) => Ok(self.config),
            Err(ConfigError::Value { setting, value, expected, .. }) => {
                let origin = self.origins.get(&setting).cloned().unwrap_or_default();
                Err(ConfigError::Value { origin, setting, value, expected })
            }
            Err(other) => Err(other),
        }
    }
}

impl RunConfig {
    fn deserialize_table(table: &Table) -> Result<Self, String> {
        table.clone().try_into().map_err(|error: toml::de::Error| one_line(error.message()))
    }
}

/// A setting of a file: its dotted name, its value and its position.
struct Leaf<'t, 'i> {
    setting: String,
    value: &'t Spanned<DeValue<'i>>,
    offset: usize,
}

/// Returns the settings of a parsed file, in the file's order. Whatever is not a known section counts as a setting,
/// so that a misspelt section is found even when it is empty.
fn leaves<'t, 'i>(file: &'t DeTable<'i>, known: &Table) -> Vec<Leaf<'t, 'i>> {
    let mut leaves = Vec::new();
    add_leaves(file, known, "", &mut leaves);
    leaves.sort_by_key(|leaf| leaf.offset);
    leaves
}

fn add_leaves<'t, 'i>(section: &'t DeTable<'i>, known: &Table, prefix: &str, leaves: &mut Vec<Leaf<'t, 'i>>) {
    for (key, value) in section {
        let setting = format!("{prefix}{}", key.get_ref());
        match (value.get_ref(), known.get(key.get_ref().as_ref())) {
            (DeValue::Table(section), Some(Value::Table(known))) => {
                add_leaves(section, known, &format!("{setting}."), leaves);
            }
            _ => leaves.push(Leaf { setting, value, offset: key.span().start }),
        }
    }
}

/// Converts `value` to the type of the setting that it replaces, or returns what would be valid. `typed` is the text
/// on the command line: text settings take it unchanged, even if it reads as a number.
fn fit(value: Value, current: &Value, typed: Option<&str>, is_ramp: bool) -> Result<Value, &'static str> {
    match (current, value) {
        (current, value) if *current == value => Ok(value),
        (_, Value::Integer(whole)) if is_ramp => Ok(Value::Float(whole as f64)),
        (_, value @ (Value::Float(_) | Value::String(_))) if is_ramp => Ok(value),
        (Value::Float(_), Value::Integer(whole)) => Ok(Value::Float(whole as f64)),
        (Value::Float(_), Value::Float(number)) if !number.is_finite() => Err("must be a finite number"),
        (Value::Float(_), value @ Value::Float(_)) => Ok(value),
        (Value::Float(_), _) => Err("must be a number"),
        // TOML's whole numbers are signed, but all settings are unsigned.
        (Value::Integer(_), value @ Value::Integer(0..)) => Ok(value),
        (Value::Integer(_), _) => Err("must be a whole number of at least 0"),
        (Value::Boolean(_), value @ Value::Boolean(_)) => Ok(value),
        (Value::Boolean(_), _) => Err("must be true or false"),
        (Value::String(_), value @ Value::String(_)) => Ok(value),
        (Value::String(_), _) if typed.is_some() => Ok(Value::String(typed.unwrap_or_default().into())),
        (Value::String(_), _) => Err("must be text in quotation marks"),
        (Value::Array(_), Value::String(one)) => Ok(Value::Array(vec![Value::String(one)])),
        (Value::Array(_), Value::Array(items)) if items.iter().all(Value::is_str) => Ok(Value::Array(items)),
        (Value::Array(_), _) => Err("must be a list of texts, such as [\"a.txt\", \"b.txt\"]"),
        (_, value) => Ok(value),
    }
}

/// Finds the setting of a dotted name; none for a section.
fn find<'t>(table: &'t mut Table, setting: &str) -> Option<&'t mut Value> {
    match setting.split_once('.') {
        Some((section, rest)) => find(table.get_mut(section)?.as_table_mut()?, rest),
        None => table.get_mut(setting).filter(|value| !value.is_table()),
    }
}

/// Returns up to three settings and sections with the most similar names.
fn near_names(table: &Table, setting: &str) -> Vec<String> {
    let last = setting.rsplit('.').next().unwrap_or(setting);
    let mut near = Vec::new();
    for full in super::print::names(table) {
        let name = full.rsplit('.').next().unwrap_or(&full);
        near.push((edit_distance(last, name).min(edit_distance(setting, &full)), full));
    }
    near.sort();
    let limit = 1 + last.len() / 5;
    near.into_iter().take_while(|(distance, _)| *distance <= limit).take(3).map(|(_, name)| name).collect()
}

/// Computes Levenshtein's distance in bytes.
fn edit_distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

fn one_line(message: &str) -> String {
    message.trim().replace('\n', ", ")
}
