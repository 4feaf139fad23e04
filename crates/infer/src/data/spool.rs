//! Text from a pipe, stored in an unnamed temporary file, because data is read twice.

use std::fs::{self, File};
use std::io::{self, IsTerminal, Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use super::watch::{Pass, ReadPhase, Watch};
use super::{DataError, decode};

/// The path that means standard input.
pub const STDIN: &str = "-";

/// Returns whether a user's path is standard input, possibly with a weight.
#[must_use]
pub fn is_stdin(path: &str) -> bool {
    path.strip_prefix(STDIN).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
}

/// Returns whether a user's path can be read only once, by this process: standard input, or a pipe opened by a shell.
#[must_use]
pub fn is_piped(path: &str) -> bool {
    is_stdin(path) || is_open_pipe(Path::new(path.rsplit_once('=').map_or(path, |(path, _)| path)))
}

/// The name of standard input in messages.
pub(super) const STDIN_NAME: &str = "standard input";

/// Returns whether `path` is a pipe that this process was started with, such as `/dev/stdin` or a shell's
/// `<(command)`. Opening it does not block.
pub(super) fn is_open_pipe(path: &Path) -> bool {
    let is_own = ["/dev/fd", "/dev/stdin", "/proc/self/fd"].iter().any(|start| path.starts_with(start));
    is_own && fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_fifo())
}

/// Reads all of standard input.
pub(super) fn read_stdin(watch: &Watch) -> Result<File, DataError> {
    if io::stdin().is_terminal() {
        let source = io::Error::other("it is a terminal; pipe a text in, or name a file");
        return Err(DataError::Unreadable { path: STDIN_NAME.into(), source });
    }
    spool(Path::new(STDIN_NAME), io::stdin().lock(), watch)
}

/// Reads all of the pipe at `path`.
pub(super) fn read_pipe(path: &Path, watch: &Watch) -> Result<File, DataError> {
    let pipe = File::open(path).map_err(|source| decode::unreadable(path, source))?;
    spool(path, pipe, watch)
}

fn spool(path: &Path, mut reader: impl Read, watch: &Watch) -> Result<File, DataError> {
    let pass = Pass::new(watch, ReadPhase::Piped, 1, 0);
    let unreadable = |source| decode::unreadable(path, source);
    let mut file = tempfile::tempfile().map_err(unreadable)?;
    let mut buffer = vec![0; 1 << 18];
    loop {
        watch.check()?;
        match reader.read(&mut buffer) {
            Ok(0) => return Ok(file),
            Ok(count) => {
                file.write_all(&buffer[..count]).map_err(unreadable)?;
                pass.add_bytes(count as u64);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(unreadable(error)),
        }
    }
}
