//! Output files at paths that the user gives. A command overwrites only files that the same command wrote.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use moeworks_model::files;

use crate::failure::Failure;

/// The number of bytes at the start of a file in which the mark is searched.
const BEGINNING: u64 = 4096;

/// A file to write.
pub(crate) struct Target<'a> {
    /// The option that gives the path.
    pub(crate) option: &'a str,
    pub(crate) path: &'a Path,
    /// A text near the start of every file that the command writes.
    pub(crate) mark: &'a str,
    /// True if a file of other origin may be overwritten.
    pub(crate) is_forced: bool,
}

impl Target<'_> {
    /// Returns an error if the path cannot be written or holds a file of other origin. Called before any work is
    /// done.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        let Self { option, path, .. } = self;
        let shown = path.display();
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        if path.is_dir() || path.file_name().is_none() {
            return Err(Failure::input(format!("{option} {shown}: is a folder; give the name of a file")));
        }
        if !dir.is_dir() {
            return Err(Failure::input(format!("{option} {shown}: there is no folder {}", dir.display())));
        }
        if !self.is_forced && path.exists() && !self.is_ours() {
            let message = format!("{option} {shown}: is there already and was not made by this command");
            return Err(Failure::input(format!("{message}; give another name, or --force to replace it")));
        }
        Ok(())
    }

    fn is_ours(&self) -> bool {
        let mut beginning = Vec::new();
        let read = File::open(self.path).and_then(|file| file.take(BEGINNING).read_to_end(&mut beginning));
        // An empty file may be overwritten.
        read.is_ok_and(|count| count == 0 || String::from_utf8_lossy(&beginning).contains(self.mark))
    }
}

/// Writes a file atomically.
pub(crate) fn write_whole(out: &Path, page: &str) -> Result<(), Failure> {
    files::write_whole(out, page.as_bytes())
        .map_err(|error| Failure::input(format!("cannot write {}: {error}", out.display())))
}
