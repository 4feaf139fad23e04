//! Atomic creation of a model folder: it appears whole or not at all.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::companions::COMPANIONS;
use crate::files::{FileError, Unfinished};

/// The file that makes a folder a model: it is moved last and removed first.
const CONFIG: &str = "config.json";
/// The age from which a temporary folder is abandoned.
const STALE: Duration = Duration::from_secs(24 * 60 * 60);

/// A model folder that is being written. Files go to a folder with a temporary name, beside the target or, if the
/// target exists, in it; [`finish`](Self::finish) moves them to their place. Dropping it before that leaves nothing.
#[derive(Debug)]
pub struct NewFolder {
    work: Unfinished,
    target: PathBuf,
    is_beside: bool,
}

impl NewFolder {
    /// Begins to write the folder `target`. Files of a model that is there already stay until
    /// [`finish`](Self::finish) replaces them.
    ///
    /// # Errors
    /// If the temporary folder cannot be made.
    pub fn begin(target: &Path) -> Result<Self, FileError> {
        let is_beside = !target.exists();
        let parent = target.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let place = if is_beside { parent } else { target };
        fs::create_dir_all(place).map_err(FileError::at(place))?;
        let mut prefix = std::ffi::OsString::from(".");
        prefix.push(target.file_name().unwrap_or_default());
        prefix.push(".tmp-");
        remove_stale(place, &prefix);
        let mut name = prefix;
        name.push(std::process::id().to_string());
        let work = Unfinished::note(place.join(name));
        // A killed process with the same id may have left a folder.
        let _ = fs::remove_dir_all(work.path());
        fs::create_dir(work.path()).map_err(FileError::at(work.path()))?;
        Ok(Self { work, target: target.to_owned(), is_beside })
    }

    /// The folder to write into.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.work.path()
    }

    /// Moves the written files to their place. Files of a model that was there are removed; other files stay.
    ///
    /// # Errors
    /// If a file cannot be moved or removed. The folder is then no model.
    pub fn finish(self) -> Result<(), FileError> {
        sync_dir(self.path()).map_err(FileError::at(self.path()))?;
        if self.is_beside && fs::rename(self.path(), &self.target).is_ok() {
            return Ok(());
        }
        // The folder exists, possibly only since a moment ago.
        let (work, target) = (self.path(), &*self.target);
        fs::create_dir_all(target).map_err(FileError::at(target))?;
        for name in in_order(names(target).map_err(FileError::at(target))?, Order::ConfigFirst) {
            if is_of_model(&name) {
                fs::remove_file(target.join(&name)).map_err(FileError::at(target.join(&name)))?;
            }
        }
        for name in in_order(names(work).map_err(FileError::at(work))?, Order::ConfigLast) {
            fs::rename(work.join(&name), target.join(&name)).map_err(FileError::at(target.join(&name)))?;
        }
        sync_dir(target).map_err(FileError::at(target))
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        // A finished folder has left nothing here.
        let _ = fs::remove_dir_all(self.work.path());
    }
}

/// The position of the configuration in a list of files.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    ConfigFirst,
    ConfigLast,
}

fn in_order(mut names: Vec<String>, order: Order) -> Vec<String> {
    names.sort_by_key(|name| (name == CONFIG) == (order == Order::ConfigLast));
    names
}

/// Returns the names of a folder's files that are valid UTF-8, as all of a model's are.
fn names(folder: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if !entry.file_type()?.is_dir() {
            names.extend(entry.file_name().into_string());
        }
    }
    Ok(names)
}

/// Returns true if a file of this name belongs to a model folder: left in place, it would contradict the new model.
fn is_of_model(name: &str) -> bool {
    name == CONFIG
        || COMPANIONS.contains(&name)
        || name.ends_with(".safetensors")
        || name == "model.safetensors.index.json"
}

/// Removes abandoned temporary folders of killed processes from `place`.
fn remove_stale(place: &Path, prefix: &std::ffi::OsStr) {
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        let is_ours = entry.file_name().as_encoded_bytes().starts_with(prefix.as_encoded_bytes());
        let age = || SystemTime::now().duration_since(entry.metadata().ok()?.modified().ok()?).ok();
        if is_ours && age().is_some_and(|age| age > STALE) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Flushes a folder's entries to disk. Windows has no such call and needs none.
fn sync_dir(path: &Path) -> io::Result<()> {
    if cfg!(unix) { fs::File::open(path)?.sync_all() } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_folder_appears_when_it_is_finished_and_leaves_nothing_otherwise() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("new/model");
        let folder = NewFolder::begin(&target).unwrap();
        fs::write(folder.path().join(CONFIG), "{}").unwrap();
        assert!(!target.exists());
        drop(folder);
        assert_eq!(listed(&dir.path().join("new")), [""; 0]);
        let folder = NewFolder::begin(&target).unwrap();
        fs::write(folder.path().join(CONFIG), "{}").unwrap();
        folder.finish().unwrap();
        assert_eq!(listed(&dir.path().join("new")), ["model"]);
        assert_eq!(listed(&target), [CONFIG]);
    }

    #[test]
    fn a_model_is_replaced_with_all_its_files_and_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path();
        for name in
            [CONFIG, "model-00001-of-00002.safetensors", "model.safetensors.index.json", "vocab.json", "README.md"]
        {
            fs::write(target.join(name), "old").unwrap();
        }
        let folder = NewFolder::begin(target).unwrap();
        fs::write(folder.path().join(CONFIG), "new").unwrap();
        fs::write(folder.path().join("model.safetensors"), "new").unwrap();
        drop(folder);
        assert_eq!(listed(target).len(), 5, "nothing was replaced yet");
        let folder = NewFolder::begin(target).unwrap();
        fs::write(folder.path().join(CONFIG), "new").unwrap();
        fs::write(folder.path().join("model.safetensors"), "new").unwrap();
        folder.finish().unwrap();
        assert_eq!(listed(target), ["README.md", CONFIG, "model.safetensors"]);
        assert_eq!(fs::read(target.join(CONFIG)).unwrap(), b"new");
    }

    #[test]
    fn what_a_killed_program_left_long_ago_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let (old, young) = (dir.path().join(".model.tmp-1"), dir.path().join(".model.tmp-2"));
        fs::create_dir(&old).unwrap();
        fs::create_dir(&young).unwrap();
        let long_ago = SystemTime::now() - 2 * STALE;
        fs::File::open(&old).unwrap().set_modified(long_ago).unwrap();
        drop(NewFolder::begin(&dir.path().join("model")).unwrap());
        assert_eq!(listed(dir.path()), [".model.tmp-2"]);
    }
}
