//! Resolution of a path (a run, a checkpoint, a model folder) to the folder that holds the model.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use moeworks_model::model_path_advice;

use super::{CHECKPOINTS_DIR, CONFIG_FILE, Checkpoint, MANIFEST_FILE, METRICS_JSONL, Store, StoreError};

/// The choice among the checkpoints of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pick {
    /// The newest intact checkpoint.
    #[default]
    Latest,
    /// The checkpoint with the lowest validation loss.
    Best,
}

/// The folders that a path names.
#[derive(Clone, Debug, PartialEq)]
pub struct Resolved {
    /// The run folder; `None` for a separate model folder or a checkpoint outside a run.
    pub run_dir: Option<PathBuf>,
    /// The checkpoint; `None` for a separate model folder.
    pub checkpoint: Option<Checkpoint>,
    /// The folder with the model's `config.json`.
    pub model_dir: PathBuf,
}

/// Finds the model that a path names: a run folder (its checkpoint by `pick`), a checkpoint folder, or a model
/// folder.
pub fn resolve_run(path: &Path, pick: Pick) -> Result<Resolved, StoreError> {
    let not_found = |problem: String| StoreError::NotFound { path: path.to_owned(), problem };
    if !path.is_dir() {
        return Err(not_found(model_path_advice(path)));
    }
    if path.join(MANIFEST_FILE).exists() {
        let checkpoint = Checkpoint::read(path)?;
        checkpoint.verify()?;
        return Ok(Resolved { run_dir: run_of(path), model_dir: path.to_owned(), checkpoint: Some(checkpoint) });
    }
    if path.join(CHECKPOINTS_DIR).is_dir() {
        let store = Store::open(path);
        let checkpoint = match pick {
            Pick::Latest => store.latest()?,
            Pick::Best => store.best()?,
        };
        let checkpoint = checkpoint.ok_or_else(|| not_found("the run has no complete checkpoint yet".to_owned()))?;
        let model_dir = checkpoint.path.clone();
        return Ok(Resolved { run_dir: Some(path.to_owned()), checkpoint: Some(checkpoint), model_dir });
    }
    if path.join("config.json").is_file() {
        return Ok(Resolved { run_dir: None, checkpoint: None, model_dir: path.to_owned() });
    }
    Err(not_found(model_path_advice(path)))
}

/// Returns the run folder around a checkpoint folder: the parent of `checkpoints/`.
fn run_of(checkpoint: &Path) -> Option<PathBuf> {
    let checkpoint = fs::canonicalize(checkpoint).ok()?;
    let dir = checkpoint.parent()?;
    (dir.file_name()? == CHECKPOINTS_DIR).then(|| dir.parent().map(Path::to_owned))?
}

/// Returns the run in `out_dir` that was written last and can be resumed, or restarted because it was stopped before
/// its first checkpoint; `None` if there is none. This is `--resume auto`.
pub fn newest_run(out_dir: &Path) -> Result<Option<PathBuf>, StoreError> {
    let entries = match fs::read_dir(out_dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        entries => entries.map_err(StoreError::access(out_dir))?,
    };
    let mut runs = Vec::new();
    for entry in entries {
        let path = entry.map_err(StoreError::access(out_dir))?.path();
        if !path.is_dir() {
            continue;
        }
        let store = Store::open(&path);
        let can_begin_again = || Ok::<_, StoreError>(path.join(CONFIG_FILE).is_file() && store.is_empty()?);
        if !store.list()?.is_empty() || can_begin_again()? {
            runs.push((last_written(&path), path));
        }
    }
    Ok(runs.into_iter().max().map(|(_, path)| path))
}

/// Returns the time of the last write that a step or save makes.
fn last_written(run_dir: &Path) -> Option<SystemTime> {
    [METRICS_JSONL, CHECKPOINTS_DIR, CONFIG_FILE]
        .iter()
        .filter_map(|name| fs::metadata(run_dir.join(name)).ok()?.modified().ok())
        .max()
}
