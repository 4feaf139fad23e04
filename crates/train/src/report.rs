//! The HTML report of a run: one self-contained file.
//!
//! Charts are SVG without scripts, network access or fonts to load, so that the file can be archived and mailed. It
//! follows the reader's light or dark setting and fits a phone.

mod chart;
mod data;
mod heat;
mod numbers;
mod page;
mod ranks;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use moeworks_infer::store::CONFIG_FILE;
use moeworks_model::files::write_whole;

use crate::metrics::{METRICS_JSONL, MetricsError, read_samples};
use data::RunData;
pub(crate) use numbers::{Unit, grouped, short, tick_labels, ticks};
pub(crate) use page::escape;
use page::{Page, Settings};

/// The file of the report in a run folder.
pub const REPORT_HTML: &str = "report.html";
/// The maximum number of settings shown, and of letters of a value.
const MAX_SETTINGS: usize = 300;
const MAX_SETTING_CHARS: usize = 120;

/// An error that prevents a report.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The records cannot be read.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// The run has no record yet.
    #[error("{}: holds no record of a step; a report needs at least one", path.display())]
    Empty {
        /// The metrics file.
        path: PathBuf,
    },
    /// The report cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The report file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
}

/// Writes `report.html` into a run folder from its `metrics.jsonl`, `samples.jsonl` and `config.toml` (the last two
/// may be missing) and returns its path. An old report is replaced atomically. Damaged lines of the records are
/// skipped. The page stays below 2 MB for any length of the run and any number of layers and experts.
///
/// # Errors
/// If there is no record of a step, or a file cannot be read or written.
pub fn write_report(run_dir: &Path) -> Result<PathBuf, ReportError> {
    let metrics = run_dir.join(METRICS_JSONL);
    let data = RunData::read(&metrics)?.filter(|data| data.num_steps > 0);
    let data = data.ok_or(ReportError::Empty { path: metrics })?;
    let samples = read_samples(run_dir)?;
    // "." and ".." must be resolved to get a name.
    let named = fs::canonicalize(run_dir).unwrap_or_else(|_| run_dir.to_owned());
    let name = named.file_name().unwrap_or_default().to_string_lossy();
    let settings = settings_of(&run_dir.join(CONFIG_FILE));
    let html = Page { name: &name, data: &data, samples: &samples, settings: &settings }.html();
    let path = run_dir.join(REPORT_HTML);
    write_whole(&path, html.as_bytes()).map_err(|source| ReportError::Write { path: path.clone(), source })?;
    Ok(path)
}

/// Reads the configuration as sections of keys and values. A missing or invalid file gives none, because the report
/// does not depend on it.
fn settings_of(path: &Path) -> Settings {
    let Ok(text) = fs::read_to_string(path) else { return Settings::new() };
    let Ok(table) = text.parse::<toml::Table>() else { return Settings::new() };
    let mut settings = Settings::new();
    collect_settings(String::new(), &table, &mut settings, &mut { MAX_SETTINGS });
    settings
}

fn collect_settings(section: String, table: &toml::Table, settings: &mut Settings, room: &mut usize) {
    let mut entries = Vec::new();
    for (key, value) in table.iter().filter(|(_, value)| !value.is_table()) {
        if *room == 0 {
            break;
        }
        *room -= 1;
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let mut shown: String = text.chars().take(MAX_SETTING_CHARS).collect();
        if shown.len() < text.len() {
            shown.push('…');
        }
        entries.push((key.clone(), shown));
    }
    if !entries.is_empty() {
        settings.push((section.clone(), entries));
    }
    for (key, value) in table {
        if let Some(inner) = value.as_table() {
            let name = if section.is_empty() { key.clone() } else { format!("{section}.{key}") };
            collect_settings(name, inner, settings, room);
        }
    }
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
