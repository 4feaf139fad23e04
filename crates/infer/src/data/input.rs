//! A file as its readers see it.

use std::cell::RefCell;
use std::fs::File;
use std::path::Path;

use super::notes::{Note, Notes};
use super::watch::Pass;

/// A file with what goes along with reading it.
#[derive(Clone, Copy)]
pub(super) struct Input<'a> {
    /// The file, or a name for what came through a pipe.
    pub(super) path: &'a Path,
    /// The text that came through a pipe.
    pub(super) spool: Option<&'a File>,
    /// The field or column that holds the text.
    pub(super) field: &'a str,
    /// The pass that it is read in.
    pub(super) pass: &'a Pass<'a>,
    /// The notes that are taken on the way.
    pub(super) notes: &'a RefCell<Notes>,
}

impl Input<'_> {
    /// Notes something at a place in the file.
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
