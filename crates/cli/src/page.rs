//! Pages that a command writes: where they may be, and all or nothing.

use std::path::Path;

use moeworks_model::files;

use crate::failure::Failure;

/// Refuses a place where no file can be, before any work is done.
pub(crate) fn check_place(out: &Path) -> Result<(), Failure> {
    let dir = out.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if out.is_dir() || out.file_name().is_none() {
        return Err(Failure::input(format!("--out {}: is a folder; give the name of a file", out.display())));
    }
    if !dir.is_dir() {
        return Err(Failure::input(format!("--out {}: there is no folder {}", out.display(), dir.display())));
    }
    Ok(())
}

/// Writes a whole page or none.
pub(crate) fn write_whole(out: &Path, page: &str) -> Result<(), Failure> {
    files::write_whole(out, page.as_bytes())
        .map_err(|error| Failure::input(format!("cannot write {}: {error}", out.display())))
}
