//! Files written so that a reader finds the old one or the whole new one, never a part.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Writes `path` by way of `path.tmp`: `write` fills the file, which is then synced and renamed. On failure nothing is
/// left behind and a file that was there before is as it was.
pub(crate) fn write_through(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> io::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(".tmp");
    let tmp = PathBuf::from(name);
    let filled = fill(&tmp, write).and_then(|()| fs::rename(&tmp, path));
    if filled.is_err() {
        let _ = fs::remove_file(&tmp);
    }
    filled
}

fn fill(tmp: &Path, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> io::Result<()> {
    let mut file = BufWriter::with_capacity(1 << 20, File::create(tmp)?);
    write(&mut file)?;
    file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
}

/// Writes `path` with these bytes, synced, or leaves it as it was.
///
/// # Errors
/// What the system says.
pub fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write_through(path, |file| file.write_all(bytes))
}
