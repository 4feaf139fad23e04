//! The search for the files that a user's paths name.

use std::collections::HashSet;
use std::fs::{self, File};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use super::notes::{Note, Notes};
use super::watch::Watch;
use super::{DataError, decode, spool};

/// Hidden names that are common in data folders and never data; they are skipped without a note.
const KNOWN_HIDDEN: [&str; 6] = [".git", ".gitattributes", ".gitignore", ".DS_Store", ".cache", ".huggingface"];

/// A path that may hold data.
pub(super) struct Candidate {
    pub(super) path: PathBuf,
    /// The stored text of a pipe.
    pub(super) spool: Option<Arc<File>>,
    /// True if the user named this very file, so that skipping it would be wrong.
    pub(super) named: bool,
}

/// A search for files. Several sources of one data set share `seen`, so that no file is in two of them.
pub(super) struct Search<'w> {
    pub(super) candidates: Vec<Candidate>,
    pub(super) seen: HashSet<PathBuf>,
    pub(super) notes: Notes,
    watch: &'w Watch,
}

/// The rule for walking folders.
#[derive(Clone, Copy)]
pub(super) struct Walk<'r> {
    /// The predicate for wanted files.
    pub(super) is_wanted: &'r dyn Fn(&Path) -> bool,
    /// True if the folder is a checkout, which the user did not name.
    pub(super) is_checkout: bool,
}

impl<'w> Search<'w> {
    pub(super) fn new(watch: &'w Watch) -> Self {
        Self { candidates: Vec::new(), seen: HashSet::new(), notes: Notes::default(), watch }
    }

    /// Adds the files of a path, folder or glob of the user.
    pub(super) fn add(&mut self, given: &str) -> Result<(), DataError> {
        let path = Path::new(given);
        if given == spool::STDIN {
            return self.add_spool(Path::new(spool::STDIN_NAME), spool::read_stdin);
        }
        if spool::is_open_pipe(path) {
            return self.add_spool(path, |watch| spool::read_pipe(path, watch));
        }
        if is_glob(given) {
            return self.add_glob(given);
        }
        self.add_path(path, true)
    }

    /// Adds the text that `read` reads from a pipe, once.
    fn add_spool(
        &mut self,
        name: &Path,
        read: impl FnOnce(&Watch) -> Result<File, DataError>,
    ) -> Result<(), DataError> {
        if !self.seen.insert(name.into()) {
            self.notes.add(Note::Twice, name, String::new);
            return Ok(());
        }
        let spool = Some(Arc::new(read(self.watch)?));
        self.candidates.push(Candidate { path: name.into(), spool, named: true });
        Ok(())
    }

    fn add_glob(&mut self, pattern: &str) -> Result<(), DataError> {
        let wrong = |problem: String| DataError::Glob { pattern: pattern.into(), problem };
        let paths = glob::glob(pattern).map_err(|error| wrong(format!("not a glob: {error}")))?;
        let mut matched = false;
        for path in paths {
            self.watch.check()?;
            let path = path.map_err(|error| {
                let path = error.path().to_owned();
                decode::unreadable(&path, error.into())
            })?;
            // A pattern matches hidden files only if it says so, as in a shell. The crate's own option for this would
            // panic on names that are not UTF-8.
            if num_hidden(&path) <= num_hidden(Path::new(pattern)) {
                matched = true;
                self.add_path(&path, false)?;
            }
        }
        if matched { Ok(()) } else { Err(wrong("matches no file".into())) }
    }

    fn add_path(&mut self, path: &Path, named: bool) -> Result<(), DataError> {
        let file_type = fs::metadata(path).map_err(|source| decode::unreadable(path, source))?.file_type();
        if file_type.is_dir() {
            self.walk(path, Walk { is_wanted: &|_| true, is_checkout: false })
        } else if file_type.is_file() {
            self.push(path, named);
            Ok(())
        } else {
            Err(DataError::Special { path: path.into(), kind: decode::special_kind(file_type) })
        }
    }

    /// Adds the wanted files below `folder`, sorted by name in each folder.
    pub(super) fn walk(&mut self, folder: &Path, rule: Walk<'_>) -> Result<(), DataError> {
        let mut above = Vec::new();
        self.walk_below(folder, rule, &mut above)
    }

    /// Walks a folder. `above` holds the real paths of its parents, so that links cannot lead in circles.
    fn walk_below(&mut self, folder: &Path, rule: Walk<'_>, above: &mut Vec<PathBuf>) -> Result<(), DataError> {
        self.watch.check()?;
        let unreadable = |source| decode::unreadable(folder, source);
        let entries = fs::read_dir(folder).map_err(unreadable)?;
        let mut entries = entries.collect::<Result<Vec<_>, _>>().map_err(unreadable)?;
        entries.sort_by_key(fs::DirEntry::file_name);
        above.push(fs::canonicalize(folder).unwrap_or_else(|_| folder.into()));
        for entry in entries {
            let path = entry.path();
            let name = entry.file_name();
            if name.as_encoded_bytes().starts_with(b".") {
                if !KNOWN_HIDDEN.iter().any(|known| name == *known) {
                    self.notes.add(Note::Hidden, &path, String::new);
                }
                continue;
            }
            let is_link = entry.file_type().map_err(|source| decode::unreadable(&path, source))?.is_symlink();
            let Ok(metadata) = fs::metadata(&path) else {
                self.notes.add(Note::Dangling, &path, String::new);
                continue;
            };
            if metadata.is_dir() {
                self.enter(&path, is_link, rule, above)?;
            } else if !metadata.is_file() {
                self.notes.add(Note::Special, &path, String::new);
            } else if (rule.is_wanted)(&path) {
                self.push(&path, false);
            }
        }
        above.pop();
        Ok(())
    }

    /// Walks a subfolder, unless programs made it or it is a link that leads back.
    fn enter(&mut self, path: &Path, is_link: bool, rule: Walk<'_>, above: &mut Vec<PathBuf>) -> Result<(), DataError> {
        if is_made_by_programs(path, rule.is_checkout) {
            self.notes.add(Note::MadeByPrograms, path, String::new);
            return Ok(());
        }
        if is_link {
            let real = fs::canonicalize(path).unwrap_or_else(|_| path.into());
            // A checkout consists of the files inside it.
            if rule.is_checkout || above.iter().any(|folder| folder.starts_with(&real)) {
                self.notes.add(Note::Circle, path, String::new);
                return Ok(());
            }
        }
        self.walk_below(path, rule, above)
    }

    /// Adds a file once, even if several of the user's paths lead to it: otherwise it could be both trained on and
    /// held out.
    fn push(&mut self, path: &Path, named: bool) {
        let real = fs::canonicalize(path).unwrap_or_else(|_| path.into());
        if self.seen.insert(real) {
            self.candidates.push(Candidate { path: path.into(), spool: None, named });
        } else {
            self.notes.add(Note::Twice, path, String::new);
        }
    }
}

/// Returns whether a user's path is a pattern: it contains special characters, and is not itself a file.
pub(super) fn is_glob(given: &str) -> bool {
    given.contains(['*', '?', '[']) && !Path::new(given).exists()
}

/// Counts the hidden components of a path.
fn num_hidden(path: &Path) -> usize {
    let is_hidden =
        |part: &Component<'_>| matches!(part, Component::Normal(name) if name.as_encoded_bytes().starts_with(b"."));
    path.components().filter(is_hidden).count()
}

/// Returns whether programs made the contents of a folder: build outputs, runs of this program, installed packages.
/// Cargo and others leave a `CACHEDIR.TAG`, and a run has its metrics, whatever the folder's name. In a checkout
/// names decide too; a folder of data may well be called `target`.
fn is_made_by_programs(folder: &Path, is_checkout: bool) -> bool {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    matches!(&*name, "node_modules" | "__pycache__")
        || (is_checkout && matches!(&*name, "target" | "runs"))
        || ["pyvenv.cfg", "CACHEDIR.TAG", "metrics.jsonl"].iter().any(|mark| folder.join(mark).exists())
}
