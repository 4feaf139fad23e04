//! Notes on rows and files that are skipped or changed, counted to be reported in one line.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// A kind of row or file that is skipped or changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Note {
    NotUtf8,
    Binary,
    Packed,
    Hidden,
    MadeByPrograms,
    Circle,
    Dangling,
    Special,
    Empty,
    Twice,
    PlainText,
    Nul,
    NullText,
    MissingText,
    EmptyText,
    Surrogate,
    Trailing,
}

/// The number of occurrences, and the first place.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Found {
    count: u64,
    path: PathBuf,
    /// The place in the file, such as `:11`, or nothing.
    place: String,
}

/// Counts of rows and files that are skipped or changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Notes {
    found: BTreeMap<Note, Found>,
}

/// A note as stored in a cache file: files have numbers, because names may change.
#[derive(Serialize, Deserialize)]
pub(super) struct StoredNote {
    note: Note,
    count: u64,
    file: usize,
    place: String,
}

impl Notes {
    pub(super) fn add(&mut self, note: Note, path: &Path, place: impl FnOnce() -> String) {
        let first = || Found { count: 0, path: path.into(), place: place() };
        self.found.entry(note).or_insert_with(first).count += 1;
    }

    /// Adds the notes of `other`.
    pub fn merge(&mut self, other: &Self) {
        for (&note, found) in &other.found {
            match self.found.get_mut(&note) {
                Some(known) => known.count += found.count,
                None => drop(self.found.insert(note, found.clone())),
            }
        }
    }

    /// Returns one line about all notes; `None` if there is none.
    #[must_use]
    pub fn line(&self) -> Option<String> {
        let told = |(&note, found): (&Note, &Found)| {
            let first = if found.count == 1 { "" } else { "first: " };
            format!("{} ({first}{}{})", words(note, found.count), shown(&found.path), found.place)
        };
        let parts: Vec<String> = self.found.iter().map(told).collect();
        // Names of files may hold line breaks.
        (!parts.is_empty()).then(|| parts.join("; ").replace(['\n', '\r'], " "))
    }

    /// Logs the line as a warning.
    pub fn warn(&self) {
        if let Some(line) = self.line() {
            tracing::warn!("{line}");
        }
    }

    /// Returns the notes with the files' numbers in `paths`.
    pub(super) fn store(&self, paths: &[&Path]) -> Vec<StoredNote> {
        let stored = |(&note, found): (&Note, &Found)| StoredNote {
            note,
            count: found.count,
            file: paths.iter().position(|path| *path == found.path).unwrap_or(0),
            place: found.place.clone(),
        };
        self.found.iter().map(stored).collect()
    }

    /// Restores notes that [`Self::store`] returned, with the current names of the files.
    pub(super) fn restore(stored: Vec<StoredNote>, paths: &[&Path]) -> Self {
        let found = stored.into_iter().map(|StoredNote { note, count, file, place }| {
            let path = paths.get(file).copied().unwrap_or(Path::new("")).into();
            (note, Found { count, path, place })
        });
        Self { found: found.collect() }
    }
}

/// Formats a path as a user would type it: relative to the current folder, if it is below.
pub(super) fn shown(path: &Path) -> String {
    let here = std::env::current_dir().unwrap_or_default();
    let below = path.strip_prefix(&here).ok().filter(|below| !below.as_os_str().is_empty());
    below.unwrap_or(path).display().to_string()
}

/// Returns the words for `count` notes of a kind.
fn words(note: Note, count: u64) -> String {
    let [one, many] = match note {
        Note::NotUtf8 => ["file skipped: not UTF-8", "files skipped: not UTF-8"],
        Note::Binary => ["file skipped: binary", "files skipped: binary"],
        Note::Packed => ["file skipped: an unsupported format", "files skipped: unsupported formats"],
        Note::Hidden => ["hidden file or folder skipped", "hidden files and folders skipped"],
        Note::MadeByPrograms => ["folder skipped: made by programs", "folders skipped: made by programs"],
        Note::Circle => ["linked folder skipped: leads back", "linked folders skipped: they lead back"],
        Note::Dangling => ["link skipped: leads nowhere", "links skipped: they lead nowhere"],
        Note::Special => ["pipe, socket or device skipped", "pipes, sockets and devices skipped"],
        Note::Empty => ["empty file", "empty files"],
        Note::Twice => ["file named more than once is read once", "files named more than once are read once"],
        Note::PlainText => [
            "file of rows without the text field is read as plain text",
            "files of rows without the text field are read as plain text",
        ],
        Note::Nul => ["file with NUL characters in its text", "files with NUL characters in their text"],
        Note::NullText => ["row skipped: its text is null", "rows skipped: their text is null"],
        Note::MissingText => ["row skipped: has no text field", "rows skipped: they have no text field"],
        Note::EmptyText => ["row skipped: its text is empty", "rows skipped: their text is empty"],
        Note::Surrogate => ["row with a lone surrogate, now U+FFFD", "rows with lone surrogates, now U+FFFD"],
        Note::Trailing => ["gzip file with other bytes behind its end", "gzip files with other bytes behind their end"],
    };
    format!("{count} {}", if count == 1 { one } else { many })
}
