//! The table of all settings, assembled from the sections that define them.

use std::fmt::Write as _;

use moeworks_model::ModelConfig;
use moeworks_moe::{Range, RouterConfig, RouterKind, Section, Setting};
use toml::{Table, Value};

use super::{DataConfig, OutputConfig, ParallelConfig, RebalanceConfig, RunConfig, TrainConfig, print};

/// The setting whose comment names all routing schemes.
const SCHEME: &str = "model.router.kind";

/// Width, in letters, at which an assembled comment is wrapped.
const COMMENT_WIDTH: usize = 110;

/// A setting, or a section of settings.
#[derive(Clone, Debug, PartialEq)]
pub struct SettingRow {
    /// The dotted name.
    pub name: String,
    /// The comment in a configuration file.
    pub comment: String,
    /// The valid values of a number.
    pub range: Range,
    /// The valid values in words, if the range does not describe them fully.
    pub values: String,
    /// True if the setting may also be the text of a ramp.
    pub is_ramp: bool,
    /// The former dotted name, which is still read.
    pub old_name: Option<String>,
    /// True for a section.
    pub is_section: bool,
}

/// Returns the rows of all sections and settings, in the order in which a configuration is printed.
#[must_use]
pub fn setting_rows() -> Vec<SettingRow> {
    let mut rows = section::<ModelConfig>("model", "model.");
    rows.extend(section::<RouterConfig>("model.router", "model."));
    for setting in RouterKind::ALL.iter().flat_map(|kind| kind.doc().settings) {
        rows.push(SettingRow {
            name: format!("model.router.{}", setting.name),
            comment: setting.comment.into(),
            range: setting.range,
            values: setting.values.into(),
            is_ramp: false,
            old_name: None,
            is_section: false,
        });
    }
    rows.extend(section::<DataConfig>("data", ""));
    rows.extend(section::<TrainConfig>("train", ""));
    rows.extend(section::<ParallelConfig>("parallel", ""));
    rows.extend(section::<RebalanceConfig>("rebalance", ""));
    rows.extend(section::<OutputConfig>("run", ""));
    rows
}

/// Returns the rows of a section; `prefix` completes the names of its settings.
fn section<S: Section>(name: &str, prefix: &str) -> Vec<SettingRow> {
    let header = SettingRow {
        name: name.into(),
        comment: S::comment(),
        range: Range::Any,
        values: String::new(),
        is_ramp: false,
        old_name: None,
        is_section: true,
    };
    let row = |setting: &Setting| {
        let name = format!("{prefix}{}", setting.name);
        SettingRow {
            comment: if name == SCHEME { scheme_comment() } else { setting.comment() },
            name,
            range: setting.range,
            values: String::new(),
            is_ramp: setting.is_ramp,
            old_name: setting.old_name.map(|old| format!("{prefix}{old}")),
            is_section: false,
        }
    };
    std::iter::once(header).chain(S::SETTINGS.iter().map(row)).collect()
}

/// Returns the comment of the setting of the scheme: all names, wrapped to a readable width.
fn scheme_comment() -> String {
    let names: Vec<&str> = RouterKind::ALL.iter().map(|kind| kind.name()).collect();
    let mut comment = "The routing scheme:".to_owned();
    let mut width = comment.len();
    for (i, name) in names.iter().enumerate() {
        let word = match names.len() - i {
            1 => format!("or {name}."),
            2 => (*name).to_owned(),
            _ => format!("{name},"),
        };
        let is_full = width + word.len() > COMMENT_WIDTH;
        width = if is_full { word.len() } else { width + 1 + word.len() };
        comment.push(if is_full { '\n' } else { ' ' });
        comment.push_str(&word);
    }
    comment + "\nChoosing one also sets the settings it was published with, unless they are given."
}

/// Returns the generated part of `docs/settings.md`.
#[must_use]
pub fn settings_page() -> String {
    let defaults = print::to_table(&RunConfig::default());
    let mut page = String::new();
    for SettingRow { name, comment, range, values, is_section, .. } in setting_rows() {
        let comment = comment.replace('\n', " ").replace('|', "\\|");
        if is_section {
            let gap = if page.is_empty() { "" } else { "\n" };
            let _ = writeln!(
                page,
                "{gap}## `{name}`\n\n{comment}\n\n| setting | default | values | |\n| --- | --- | --- | --- |"
            );
            continue;
        }
        let default = default_of(&defaults, &name).map(|value| format!("`{value}`")).unwrap_or_default();
        let values = match (range, values.is_empty()) {
            (_, false) => values,
            (Range::Any, true) => String::new(),
            (range, true) => range.to_string(),
        };
        let _ = writeln!(page, "| `{name}` | {default} | {values} | {comment} |");
    }
    page
}

/// Finds the default of a setting by its dotted name.
fn default_of<'t>(table: &'t Table, name: &str) -> Option<&'t Value> {
    match name.split_once('.') {
        Some((section, rest)) => default_of(table.get(section)?.as_table()?, rest),
        None => table.get(name),
    }
}
