//! A file with the context of reading it.

use std::cell::RefCell;
use std::fs::File;
use std::path::Path;

use super::notes::{Note, Notes};
use super::watch::Pass;

/// A file with the context of reading it.
#[derive(Clone, Copy)]
pub(super) struct Input<'a> {
    /// The file, or a name for text from a pipe.
    pub(super) path: &'a Path,
    /// The stored text of a pipe.
    pub(super) spool: Option<&'a File>,
    /// The field or column that holds the text.
    pub(super) field: &'a str,
    /// The current pass over the data.
    pub(super) pass: &'a Pass<'a>,
    /// The notes on rows and files that are skipped or changed.
    pub(super) notes: &'a RefCell<Notes>,
}

impl Input<'_> {
    /// Adds a note with its place in the file.
    pub(super) fn note(&self, note: Note, place: impl FnOnce() -> String) {
        self.notes.borrow_mut().add(note, self.path, place);
    }
}

/// Calls `work` with the file at `path` as an input, for tests of single readers.
#[cfg(test)]
pub(super) fn with_input<R>(path: &Path, field: &str, work: impl FnOnce(Input<'_>) -> R) -> (R, Notes) {
    use super::watch::{ReadPhase, Watch};
    let watch = Watch::default();
    let pass = Pass::new(&watch, ReadPhase::Tokenising, 1, 0);
    let notes = RefCell::default();
    let result = work(Input { path, spool: None, field, pass: &pass, notes: &notes });
    (result, notes.into_inner())
}
