//! The contents of a place that a command would write to.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::Path;

use super::{CHECKPOINTS_DIR, CONFIG_FILE, LOCK_FILE, MANIFEST_FILE, METRICS_JSONL};

/// The contents of a place, checked so that no foreign files are overwritten.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holding {
    /// No file, or an empty folder.
    Nothing,
    /// A file.
    File,
    /// A run.
    Run,
    /// A checkpoint of a run.
    Checkpoint,
    /// A model.
    Model,
    /// Other files, such as this one.
    Others(String),
}

impl Holding {
    /// Examines `path`.
    ///
    /// # Errors
    /// Fails if it cannot be read.
    pub fn new(path: &Path) -> io::Result<Self> {
        match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::Nothing),
            Ok(metadata) if !metadata.is_dir() => return Ok(Self::File),
            Err(error) => return Err(error),
            Ok(_) => {}
        }
        let has = |name: &str| path.join(name).exists();
        if has(MANIFEST_FILE) {
            return Ok(Self::Checkpoint);
        }
        if has(CONFIG_FILE) || has(METRICS_JSONL) || has(CHECKPOINTS_DIR) {
            return Ok(Self::Run);
        }
        if has("config.json") || has("model.safetensors") || has("model.safetensors.index.json") {
            return Ok(Self::Model);
        }
        for entry in fs::read_dir(path)? {
            let name = entry?.file_name();
            if !is_nothing(&name) {
                return Ok(Self::Others(name.to_string_lossy().into_owned()));
            }
        }
        Ok(Self::Nothing)
    }

    /// Describes the contents, as the end of a sentence that begins with the path; `None` for nothing.
    #[must_use]
    pub fn describe(&self) -> Option<String> {
        match self {
            Self::Nothing => None,
            Self::File => Some("is a file".to_owned()),
            Self::Run => Some("holds a run already".to_owned()),
            Self::Checkpoint => Some("holds a checkpoint of a run already".to_owned()),
            Self::Model => Some("holds a model already".to_owned()),
            Self::Others(name) => Some(format!("is not empty: it holds {name:?}")),
        }
    }
}

/// Returns whether a file can be overwritten without loss: files that file systems, desktops and version control put
/// into empty folders, and the lock of a run.
fn is_nothing(name: &OsStr) -> bool {
    [LOCK_FILE, "lost+found", ".DS_Store", ".gitkeep", ".gitignore", ".directory"].iter().any(|known| name == *known)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_what_it_holds() {
        let dir = tempfile::tempdir().unwrap();
        let make = |name: &str, files: &[&str]| {
            let path = dir.path().join(name);
            for file in files {
                let file = path.join(file);
                fs::create_dir_all(file.parent().unwrap()).unwrap();
                fs::write(file, "").unwrap();
            }
            Holding::new(&path).unwrap()
        };
        assert_eq!(make("missing", &[]), Holding::Nothing);
        assert_eq!(make("empty", &[".gitkeep"]), Holding::Nothing);
        assert_eq!(make("run", &["config.toml", ".lock"]), Holding::Run);
        assert_eq!(make("old", &["checkpoints/step-00000002/model.safetensors"]), Holding::Run);
        assert_eq!(make("step", &["checkpoint.json", "config.json"]), Holding::Checkpoint);
        assert_eq!(make("model", &["config.json"]), Holding::Model);
        assert_eq!(make("notes", &["notes.txt"]), Holding::Others("notes.txt".to_owned()));
        assert_eq!(Holding::new(&dir.path().join("notes/notes.txt")).unwrap(), Holding::File);
    }
}
