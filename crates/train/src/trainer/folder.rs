//! The folder of a new run: checking that it may be used, and creating it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use moeworks_infer::store::{CONFIG_FILE, Checkpoint, Holding, Store};
use moeworks_model::files::{Unfinished, write_whole};

use super::Output;
use crate::auto_layout::LAYOUTS_JSONL;
use crate::error::TrainError;
use crate::events::EventFile;
use crate::language_model::ORIGIN_FILE;
use crate::metrics::{Columns, METRICS_CSV, METRICS_JSONL, MetricsWriter, SAMPLES_JSONL};
use crate::rebalance::REBALANCE_JSONL;
use crate::report::REPORT_HTML;
use crate::task::Task;

/// The action if the folder of a new run is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IfTaken {
    /// Refuses: the folder must be empty or missing.
    Refuse,
    /// Appends the first free number to the folder's name.
    Number,
    /// Removes the existing run. Files that do not belong to a run stay.
    Replace,
}

/// The folder of a new run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunFolder {
    path: PathBuf,
    if_taken: IfTaken,
}

impl From<PathBuf> for RunFolder {
    /// Creates a folder that must be empty or missing.
    fn from(path: PathBuf) -> Self {
        Self::new(path, IfTaken::Refuse)
    }
}

impl RunFolder {
    /// Creates the folder `path`.
    #[must_use]
    pub fn new(path: PathBuf, if_taken: IfTaken) -> Self {
        Self { path, if_taken }
    }

    /// Returns the requested path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Refuses a folder that is taken, before any work is done.
    ///
    /// # Errors
    /// If the folder holds something that must not be overwritten.
    pub fn check(&self) -> Result<(), TrainError> {
        let holding = Holding::new(&self.path).map_err(TrainError::io(&self.path))?;
        let Some(holds) = holding.describe() else { return Ok(()) };
        let advice = match (self.if_taken, holding) {
            (IfTaken::Number, _) => return Ok(()),
            (_, Holding::File) => "; give the name of a folder",
            (_, Holding::Checkpoint) => ", which no run is written over; choose another folder",
            (IfTaken::Replace, _) => return Ok(()),
            (_, Holding::Run) => "; go on with it by --resume, choose another folder, or --force to replace it",
            _ => "; choose another folder, or --force to write beside that",
        };
        Err(TrainError::State { path: self.path.clone(), problem: format!("{holds}{advice}") })
    }

    /// Creates the folder. If several programs ask for the same one at once, each gets its own or is refused.
    fn make(&self) -> Result<PathBuf, TrainError> {
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        parent.map_or(Ok(()), fs::create_dir_all).map_err(TrainError::io(parent.unwrap_or(&self.path)))?;
        let numbered = (2..).map(|number: u64| {
            let mut name = self.path.clone().into_os_string();
            name.push(format!("-{number}"));
            PathBuf::from(name)
        });
        for path in std::iter::once(self.path.clone()).chain(numbered) {
            match fs::create_dir(&path) {
                Ok(()) => return Ok(path),
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(TrainError::io(&path)(error)),
                Err(_) if self.if_taken == IfTaken::Number => {}
                Err(_) => return self.check().map(|()| path),
            }
        }
        self.check().map(|()| self.path.clone())
    }
}

/// A function that writes the files that only a new run has.
type BeginRun<'a> = dyn Fn(&Path) -> Result<(), TrainError> + 'a;

/// The files in the folder of a run besides its checkpoints.
pub(super) struct RunFiles<'a> {
    config_text: String,
    columns: Columns,
    /// Writes the files that only a new run has.
    begin: Box<BeginRun<'a>>,
}

impl<'a> RunFiles<'a> {
    /// Creates the files of a run of `task`.
    pub(super) fn new<T: Task>(task: &'a T) -> Self {
        Self {
            config_text: task.config_text(),
            columns: Columns::new(&task.moe_layers(), &task.metric_names()),
            begin: Box::new(|run_dir| task.begin_run(run_dir)),
        }
    }

    /// Writes the run's effective configuration, replacing an older one atomically.
    fn write_config(&self, run_dir: &Path) -> Result<(), TrainError> {
        let path = run_dir.join(CONFIG_FILE);
        fs::create_dir_all(run_dir).map_err(TrainError::io(run_dir))?;
        write_whole(&path, self.config_text.as_bytes()).map_err(TrainError::io(&path))
    }
}

/// Removes the run in a folder whose `store` is open: its checkpoints, records and pages.
fn remove_run(run_dir: &Path, store: &Store) -> Result<(), TrainError> {
    store.remove_all()?;
    for name in [
        CONFIG_FILE,
        ORIGIN_FILE,
        METRICS_JSONL,
        METRICS_CSV,
        SAMPLES_JSONL,
        REBALANCE_JSONL,
        REPORT_HTML,
        LAYOUTS_JSONL,
        "routing.html",
    ] {
        let path = run_dir.join(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(TrainError::io(path)(error)),
            _ => {}
        }
    }
    EventFile::remove_all(run_dir).map_err(TrainError::io(run_dir))
}

impl Output {
    /// Creates the files of a new run and its folder. A newly created folder is removed again if it cannot be filled.
    pub(super) fn create(folder: &RunFolder, files: &RunFiles<'_>) -> Result<(Self, PathBuf), TrainError> {
        let was_there = folder.if_taken != IfTaken::Number && folder.path.exists();
        let run_dir = folder.make()?;
        let new = (!was_there).then(|| Unfinished::note(&run_dir));
        let output = Self::fill(&run_dir, folder.if_taken, files);
        if output.is_err() && new.is_some() {
            // The reported error is that of filling the folder.
            let _ = fs::remove_dir_all(&run_dir);
        }
        Ok((output?, run_dir))
    }

    fn fill(run_dir: &Path, if_taken: IfTaken, files: &RunFiles<'_>) -> Result<Self, TrainError> {
        let store = Store::open_to_write(run_dir)?;
        if if_taken == IfTaken::Replace {
            remove_run(run_dir, &store)?;
        } else if run_dir.join(CONFIG_FILE).exists() {
            // Another program has used the folder since it was checked.
            RunFolder::new(run_dir.to_owned(), IfTaken::Refuse).check()?;
        }
        (files.begin)(run_dir)?;
        Self::begin(store, run_dir, files)
    }

    /// Creates the files of a run that starts, or restarts, in its own folder.
    pub(super) fn begin(store: Store, run_dir: &Path, files: &RunFiles<'_>) -> Result<Self, TrainError> {
        let metrics = MetricsWriter::create(run_dir, &files.columns)?;
        files.write_config(run_dir)?;
        Ok(Self { store, metrics, last_checkpoint: None })
    }

    /// Opens the files of a run that resumes from `checkpoint`; later records are removed.
    pub(super) fn go_on(
        store: Store,
        run_dir: &Path,
        files: &RunFiles<'_>,
        checkpoint: Checkpoint,
    ) -> Result<Self, TrainError> {
        store.discard_after(checkpoint.metadata.step)?;
        files.write_config(run_dir)?;
        let metrics = MetricsWriter::resume(run_dir, &files.columns, checkpoint.metadata.step)?;
        Ok(Self { store, metrics, last_checkpoint: Some(checkpoint.path) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(folder: &RunFolder) -> String {
        folder.check().unwrap_err().to_string()
    }

    #[test]
    fn a_folder_that_holds_something_is_refused_unless_it_is_to_be_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        let refusing = RunFolder::from(path.clone());
        refusing.check().unwrap();
        fs::create_dir(&path).unwrap();
        assert_eq!(refusing.make().unwrap(), path, "an empty folder is as good as none");
        fs::write(path.join("notes.txt"), "").unwrap();
        assert!(problem(&refusing).contains("notes.txt"), "{}", problem(&refusing));
        assert!(refusing.make().is_err());
        let replacing = RunFolder::new(path.clone(), IfTaken::Replace);
        assert_eq!(replacing.make().unwrap(), path);
        fs::write(path.join("config.toml"), "").unwrap();
        assert!(problem(&refusing).contains("--resume"), "{}", problem(&refusing));
        let file = RunFolder::new(path.join("notes.txt"), IfTaken::Replace);
        assert!(problem(&file).contains("is a file"), "{}", problem(&file));
    }

    #[test]
    fn runs_that_ask_for_one_folder_at_the_same_time_get_one_each() {
        let dir = tempfile::tempdir().unwrap();
        let folder = RunFolder::new(dir.path().join("runs/now"), IfTaken::Number);
        let mut made: Vec<PathBuf> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| folder.make().unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        made.sort();
        made.dedup();
        assert_eq!(made.len(), 8);
    }
}
