//! Opening data files: gzip and Zstandard are told by their first bytes, not by the name.

use std::fs::{self, File};
use std::io::{self, BufReader, ErrorKind, Read, Seek};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use super::DataError;

const GZIP: [u8; 2] = [0x1f, 0x8b];
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// Zstandard's frames without content, which parallel compressors begin with: 0x184D2A50 to 0x184D2A5F.
const ZSTD_SKIPPABLE: [u8; 3] = [0x2a, 0x4d, 0x18];

/// Largest window of a Zstandard frame as a power of two: what `zstd --ultra` writes, 128 MiB of memory.
const ZSTD_WINDOW_LOG: u32 = 27;

/// Turns a failure to read into an error that names the file.
pub(super) fn unreadable(path: &Path, source: io::Error) -> DataError {
    match source.kind() {
        ErrorKind::NotFound => DataError::Missing { path: path.into() },
        _ => DataError::Unreadable { path: path.into(), source },
    }
}

/// What a path is that may be neither a file nor a folder.
pub(super) fn special_kind(file_type: fs::FileType) -> &'static str {
    if file_type.is_fifo() {
        "a named pipe"
    } else if file_type.is_socket() {
        "a socket"
    } else {
        "a device"
    }
}

/// The content of the regular file at `path`, decompressed.
pub(super) fn open(path: &Path) -> Result<Box<dyn Read>, DataError> {
    try_open(path).map_err(|source| unreadable(path, source))
}

/// Whether the file at `path` is compressed.
pub(super) fn is_compressed(path: &Path) -> Result<bool, DataError> {
    let magic =
        File::open(path).and_then(|mut file| read_magic(&mut file)).map_err(|source| unreadable(path, source))?;
    Ok(is_gzip(magic) || is_zstd(magic))
}

fn try_open(path: &Path) -> io::Result<Box<dyn Read>> {
    // Opening a pipe would wait for a writer that may never come.
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::new(ErrorKind::InvalidInput, "not a regular file"));
    }
    let mut file = File::open(path)?;
    let magic = read_magic(&mut file)?;
    file.rewind()?;
    if is_gzip(magic) {
        return Ok(Box::new(flate2::bufread::MultiGzDecoder::new(BufReader::with_capacity(1 << 16, file))));
    }
    if is_zstd(magic) {
        let mut decoder = zstd::stream::read::Decoder::new(file)?;
        decoder.window_log_max(ZSTD_WINDOW_LOG)?;
        return Ok(Box::new(decoder));
    }
    Ok(Box::new(file))
}

fn read_magic(file: &mut File) -> io::Result<[u8; 4]> {
    let mut start = Vec::with_capacity(4);
    file.take(4).read_to_end(&mut start)?;
    start.resize(4, 0);
    Ok([start[0], start[1], start[2], start[3]])
}

fn is_gzip(magic: [u8; 4]) -> bool {
    magic[..2] == GZIP
}

fn is_zstd(magic: [u8; 4]) -> bool {
    magic == ZSTD || (magic[0] & 0xf0 == 0x50 && magic[1..] == ZSTD_SKIPPABLE)
}
