//! Checkpoint folders of a run, written so that a kill at any moment leaves older checkpoints intact.
//!
//! A checkpoint is written into a folder with a temporary name, every file and folder is synced, and one rename makes
//! it `checkpoints/step-00000123`. Its manifest, `checkpoint.json`, is written last and lists every file with its
//! size and XXH3 checksum, so that an incomplete or damaged checkpoint is detected. Only files in the manifest are
//! ever deleted. Leftovers of killed saves have names of their own and are removed when a trainer next opens the run.

mod disk;
mod holding;
mod manifest;
mod resolve;

use std::cmp::Reverse;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use disk::Disk;
use moeworks_model::files::Unfinished;

pub use holding::Holding;
pub use manifest::{Checkpoint, Metadata};
pub use resolve::{Pick, Resolved, newest_run, resolve_run};

/// The folder of the checkpoints in a run folder.
pub const CHECKPOINTS_DIR: &str = "checkpoints";
/// The effective configuration in a run folder.
pub const CONFIG_FILE: &str = "config.toml";
/// The manifest in a checkpoint folder.
pub const MANIFEST_FILE: &str = "checkpoint.json";
/// The file of the records in a run folder: one JSON object per line.
pub const METRICS_JSONL: &str = "metrics.jsonl";
/// The record of routing of a run that keeps one.
pub const ROUTING_RECORD: &str = "routing.records";
/// The lock file, which the trainer of a run holds while it works.
const LOCK_FILE: &str = ".lock";
/// The prefix of folders being written, replaced or deleted. No other name begins like this, so leftovers can be
/// removed.
const SAVING_PREFIX: &str = ".tmp-save-";
const DELETING_PREFIX: &str = ".tmp-delete-";
const REPLACED_PREFIX: &str = ".tmp-replaced-";

/// The reason why a checkpoint cannot be written, found or read.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Writing failed: the disk is full, or rights are missing. Older checkpoints are intact.
    #[error("cannot save the checkpoint of step {step}: {}: {source}; {}", path.display(), advice(source))]
    Save {
        /// The step that was being saved.
        step: u64,
        /// The file or folder that could not be written.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The caller's own files could not be written. Older checkpoints are intact.
    #[error("cannot save the checkpoint of step {step}: {source}; older checkpoints are unharmed")]
    Content {
        /// The step that was being saved.
        step: u64,
        /// The caller's reason.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A folder or file cannot be read or made.
    #[error("{}: {source}", path.display())]
    Access {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The checkpoint is incomplete or was changed.
    #[error("{}: {problem}", path.display())]
    Damaged {
        /// The checkpoint folder, or the file in it.
        path: PathBuf,
        /// The problem, with what would be right.
        problem: String,
    },
    /// Another process trains in this run folder.
    #[error("{}: another process is training here; wait for it, or choose another run folder", path.display())]
    Locked {
        /// The run folder.
        path: PathBuf,
    },
    /// The path is neither a run nor a checkpoint nor a model, or the run has no checkpoint.
    #[error("{}: {problem}", path.display())]
    NotFound {
        /// The path that was given.
        path: PathBuf,
        /// The missing thing, with what would be right.
        problem: String,
    },
}

/// Returns advice on an error of the system, which also says that nothing is lost.
fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free some space and resume: older checkpoints are unharmed"
        }
        _ => "older checkpoints are unharmed",
    }
}

impl StoreError {
    fn access(path: &Path) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Access { path, source }
    }
}

/// The checkpoints to keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// The number of newest checkpoints, at least 1.
    pub last: usize,
    /// True to keep the one with the lowest validation loss as well.
    pub best: bool,
}

impl Default for Keep {
    fn default() -> Self {
        Self { last: 2, best: true }
    }
}

/// The checkpoints of one run.
#[derive(Debug)]
pub struct Store {
    dir: PathBuf,
    /// The lock on the run folder, which keeps another trainer out; held if the store can write.
    lock: Option<File>,
    disk: Disk,
}

impl Store {
    /// Opens the checkpoints of a run for reading. Changes nothing on disk, and works while a trainer runs.
    #[must_use]
    pub fn open(run_dir: &Path) -> Self {
        Self { dir: run_dir.join(CHECKPOINTS_DIR), lock: None, disk: Disk::default() }
    }

    /// Opens the checkpoints of a run for writing. Makes missing folders, locks the run folder against other
    /// trainers, and removes leftovers of killed saves.
    pub fn open_to_write(run_dir: &Path) -> Result<Self, StoreError> {
        Self::open_with(run_dir, Disk::default())
    }

    fn open_with(run_dir: &Path, disk: Disk) -> Result<Self, StoreError> {
        let dir = run_dir.join(CHECKPOINTS_DIR);
        fs::create_dir_all(&dir).map_err(StoreError::access(&dir))?;
        let lock_path = run_dir.join(LOCK_FILE);
        let lock = File::create(&lock_path).map_err(StoreError::access(&lock_path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Err(StoreError::Locked { path: run_dir.to_owned() }),
            // Some network file systems have no locks; there the user has to keep other trainers out.
            Err(fs::TryLockError::Error(error)) => tracing::warn!("{}: cannot lock: {error}", lock_path.display()),
        }
        let store = Self { dir, lock: Some(lock), disk };
        store.clean().map_err(StoreError::access(&store.dir))?;
        Ok(store)
    }

    /// Saves a checkpoint. `write` writes the files into a given folder; then they are synced, and the folder gets
    /// its name in one step. Afterwards older checkpoints that `keep` does not ask for are deleted. A checkpoint of
    /// the same step is replaced.
    ///
    /// # Errors
    /// Fails if anything cannot be written. The new files are removed again, and every older checkpoint is intact.
    pub fn save<E>(
        &self,
        metadata: &Metadata,
        keep: Keep,
        write: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<Checkpoint, StoreError>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let step = metadata.step;
        let name = folder_name(step);
        let tmp = Unfinished::note(self.dir.join(format!("{SAVING_PREFIX}{name}")));
        let tmp = tmp.path();
        let final_path = self.dir.join(&name);
        let written = self.write_folder(tmp, metadata, write).and_then(|mut checkpoint| {
            self.put_in_place(tmp, &final_path).map_err(|(path, source)| StoreError::Save { step, path, source })?;
            checkpoint.path.clone_from(&final_path);
            Ok(checkpoint)
        });
        if written.is_err() {
            // The first error is reported. Files that cannot be removed now are removed at the next start.
            let _ = self.disk.remove_tree(tmp);
        } else {
            self.prune(keep);
        }
        written
    }

    fn write_folder<E>(
        &self,
        tmp: &Path,
        metadata: &Metadata,
        write: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<Checkpoint, StoreError>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let step = metadata.step;
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| StoreError::Save { step, path, source }
        };
        self.disk.remove_tree(tmp).map_err(failed(tmp))?;
        self.disk.create_dir(tmp).map_err(failed(tmp))?;
        write(tmp).map_err(|error| StoreError::Content { step, source: error.into() })?;
        let (files, dirs) = manifest::list_tree(tmp).map_err(failed(tmp))?;
        for file in &files {
            self.disk.sync(&tmp.join(file)).map_err(failed(&tmp.join(file)))?;
        }
        let checkpoint = Checkpoint::describe(tmp, metadata, &files).map_err(failed(tmp))?;
        let manifest_path = tmp.join(MANIFEST_FILE);
        self.disk.write(&manifest_path, &checkpoint.to_json()).map_err(failed(&manifest_path))?;
        self.disk.sync(&manifest_path).map_err(failed(&manifest_path))?;
        for dir in dirs.iter().rev() {
            self.disk.sync_dir(&tmp.join(dir)).map_err(failed(&tmp.join(dir)))?;
        }
        self.disk.sync_dir(tmp).map_err(failed(tmp))?;
        Ok(checkpoint)
    }

    /// Renames a finished folder to its name. An existing folder of that name is set aside first, under a name by
    /// which it is still found if the process is killed between the two renames.
    fn put_in_place(&self, tmp: &Path, final_path: &Path) -> Result<(), (PathBuf, io::Error)> {
        let at = |path: &Path| {
            let path = path.to_owned();
            move |source| (path, source)
        };
        let name = final_path.file_name().unwrap_or_default().to_string_lossy();
        let mut set_aside = None;
        if fs::symlink_metadata(final_path).is_ok() {
            let is_ours = Checkpoint::read(final_path).is_ok_and(|old| old.holds_nothing_else());
            let aside = if is_ours {
                self.dir.join(format!("{REPLACED_PREFIX}{name}"))
            } else {
                let aside = free_name(final_path, "old");
                let (name, aside_name) = (final_path.display(), aside.display());
                tracing::warn!(
                    "{name} is damaged or holds files of others: it is not deleted but renamed to {aside_name}"
                );
                aside
            };
            self.disk.remove_tree(&aside).map_err(at(&aside))?;
            self.disk.rename(final_path, &aside).map_err(at(final_path))?;
            set_aside = Some((aside, is_ours));
        }
        if let Err(error) = self.disk.rename(tmp, final_path) {
            if let Some((aside, _)) = &set_aside {
                let _ = self.disk.rename(aside, final_path);
            }
            return Err(at(final_path)(error));
        }
        self.disk.sync_dir(&self.dir).map_err(at(&self.dir))?;
        if let Some((aside, true)) = set_aside
            && let Err(error) = self.disk.remove_tree(&aside)
        {
            tracing::warn!("{}: cannot remove: {error}", aside.display());
        }
        Ok(())
    }

    /// Returns every checkpoint with a valid manifest and file sizes, oldest first. Others are skipped with a
    /// warning.
    pub fn list(&self) -> Result<Vec<Checkpoint>, StoreError> {
        let mut checkpoints = Vec::new();
        for (_, path) in self.folders()? {
            match Checkpoint::read(&path) {
                Ok(checkpoint) => checkpoints.push(checkpoint),
                Err(error) => tracing::warn!("{error}; it is skipped"),
            }
        }
        Ok(checkpoints)
    }

    /// Returns the folders with the name of a checkpoint, or of one that a killed save set aside, by step.
    fn folders(&self) -> Result<Vec<(u64, PathBuf)>, StoreError> {
        let entries = match fs::read_dir(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(StoreError::access(&self.dir))?,
        };
        let mut folders = Vec::new();
        for entry in entries {
            let entry = entry.map_err(StoreError::access(&self.dir))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_aside = name.starts_with(REPLACED_PREFIX);
            let Some(step) = step_of_folder(name.strip_prefix(REPLACED_PREFIX).unwrap_or(&name)) else { continue };
            if !(is_aside && self.dir.join(folder_name(step)).exists()) {
                folders.push((step, entry.path()));
            }
        }
        folders.sort();
        Ok(folders)
    }

    /// Returns whether the run has no checkpoint folder yet, intact or damaged.
    pub fn is_empty(&self) -> Result<bool, StoreError> {
        Ok(self.folders()?.is_empty())
    }

    /// Removes every checkpoint, intact or damaged.
    pub fn remove_all(&self) -> Result<(), StoreError> {
        for (_, path) in self.folders()? {
            self.disk.remove_tree(&path).map_err(StoreError::access(&path))?;
        }
        Ok(())
    }

    /// Returns the newest intact checkpoint: every file has the checksum of its manifest. Damaged ones are skipped
    /// with a warning that names them.
    pub fn latest(&self) -> Result<Option<Checkpoint>, StoreError> {
        Ok(self.list()?.into_iter().rev().find(Self::is_whole))
    }

    /// Returns the intact checkpoint with the lowest validation loss; the newest if none was evaluated.
    pub fn best(&self) -> Result<Option<Checkpoint>, StoreError> {
        let mut evaluated: Vec<Checkpoint> =
            self.list()?.into_iter().filter(|checkpoint| checkpoint.finite_val_loss().is_some()).collect();
        evaluated
            .sort_by(|a, b| a.finite_val_loss().partial_cmp(&b.finite_val_loss()).unwrap_or(std::cmp::Ordering::Equal));
        match evaluated.into_iter().find(Self::is_whole) {
            None => self.latest(),
            best => Ok(best),
        }
    }

    /// Returns the checkpoint of a step; `None` if it has no folder.
    ///
    /// # Errors
    /// Fails if it is damaged.
    pub fn find(&self, step: u64) -> Result<Option<Checkpoint>, StoreError> {
        let Some((_, path)) = self.folders()?.into_iter().find(|(of, _)| *of == step) else { return Ok(None) };
        let checkpoint = Checkpoint::read(&path)?;
        checkpoint.verify()?;
        Ok(Some(checkpoint))
    }

    /// Deletes the checkpoints after `step`, for a run that is resumed from an older checkpoint.
    pub fn discard_after(&self, step: u64) -> Result<(), StoreError> {
        for checkpoint in self.list()?.iter().rev().filter(|checkpoint| checkpoint.metadata.step > step) {
            self.delete(checkpoint).map_err(StoreError::access(&checkpoint.path))?;
        }
        Ok(())
    }

    fn is_whole(checkpoint: &Checkpoint) -> bool {
        checkpoint.verify().inspect_err(|error| tracing::warn!("{error}; it is skipped")).is_ok()
    }

    /// Deletes the checkpoints that `keep` does not ask for. If one cannot be deleted, a warning is logged.
    fn prune(&self, keep: Keep) {
        let mut checkpoints = match self.list() {
            Ok(checkpoints) => checkpoints,
            Err(error) => return tracing::warn!("cannot delete old checkpoints: {error}"),
        };
        checkpoints.sort_by_key(|checkpoint| Reverse(checkpoint.metadata.step));
        let best = checkpoints
            .iter()
            .filter(|_| keep.best)
            .filter_map(|checkpoint| checkpoint.finite_val_loss().map(|loss| (loss, checkpoint.metadata.step)));
        // The earliest at ties.
        let best = best.min_by(|a, b| a.partial_cmp(b).unwrap_or(std::cmp::Ordering::Equal)).map(|(_, step)| step);
        for checkpoint in checkpoints.iter().skip(keep.last.max(1)) {
            if best != Some(checkpoint.metadata.step)
                && let Err(error) = self.delete(checkpoint)
            {
                tracing::warn!("cannot delete the old checkpoint {}: {error}", checkpoint.path.display());
            }
        }
    }

    /// Deletes a checkpoint. One with files that are not in its manifest stays, with a warning.
    fn delete(&self, checkpoint: &Checkpoint) -> io::Result<()> {
        if !checkpoint.holds_nothing_else() {
            tracing::warn!("{} holds files that were put there by others: it is kept", checkpoint.path.display());
            return Ok(());
        }
        let name = checkpoint.path.file_name().unwrap_or_default().to_string_lossy();
        let doomed = self.dir.join(format!("{DELETING_PREFIX}{name}"));
        self.disk.remove_tree(&doomed)?;
        self.disk.rename(&checkpoint.path, &doomed)?;
        self.disk.sync_dir(&self.dir)?;
        self.disk.remove_tree(&doomed)
    }

    /// Removes leftovers of killed saves and deletions, and restores a checkpoint that was being replaced.
    fn clean(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let rest =
                [SAVING_PREFIX, DELETING_PREFIX, REPLACED_PREFIX].iter().find_map(|prefix| name.strip_prefix(prefix));
            // Only names made by this file count.
            let Some(step) = rest.and_then(|rest| step_of_folder(rest.strip_prefix(REPLACED_PREFIX).unwrap_or(rest)))
            else {
                continue;
            };
            let final_path = self.dir.join(folder_name(step));
            if name.starts_with(REPLACED_PREFIX) && !final_path.exists() {
                self.disk.rename(&path, &final_path)?;
            } else {
                self.disk.remove_tree(&path)?;
            }
        }
        Ok(())
    }
}

impl Drop for Store {
    /// Unlocks at once. Closing the file alone would not, while a process that was just started still holds a copy of
    /// it.
    fn drop(&mut self) {
        if let Some(lock) = &self.lock {
            let _ = lock.unlock();
        }
    }
}

fn folder_name(step: u64) -> String {
    format!("step-{step:08}")
}

fn step_of_folder(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    // Only the exact name from `folder_name` counts: not "step-1", not "step-+0000001".
    (folder_name(step) == name).then_some(step)
}

/// Returns `path.word`, or `path.word-2` and so on, the first that does not exist.
fn free_name(path: &Path, word: &str) -> PathBuf {
    let candidate = |number: u64| {
        let mut name = path.as_os_str().to_owned();
        name.push(if number == 1 { format!(".{word}") } else { format!(".{word}-{number}") });
        PathBuf::from(name)
    };
    (1..).map(candidate).find(|path| fs::symlink_metadata(path).is_err()).unwrap_or_else(|| candidate(u64::MAX))
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
