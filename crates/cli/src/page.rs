//! Pages that a command writes: where they may be, and all or nothing.

use std::fs;
use std::path::{Path, PathBuf};

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

/// Writes beside and renames, so that there is a whole page or none.
pub(crate) fn write_whole(out: &Path, page: &str) -> Result<(), Failure> {
    let mut name = std::ffi::OsString::from(".");
    name.push(out.file_name().unwrap_or_default());
    name.push(".new");
    let beside: PathBuf = out.with_file_name(name);
    fs::write(&beside, page).and_then(|()| fs::rename(&beside, out)).map_err(|error| {
        // The page is of no use where it cannot get its name.
        let _ = fs::remove_file(&beside);
        Failure::input(format!("cannot write {}: {error}", out.display()))
    })
}
