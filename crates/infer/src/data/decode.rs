//! Opening of data files: compression and encoding are detected by the first bytes, not by the name.

use std::fs::{self, File};
use std::io::{self, BufReader, ErrorKind, Read, Seek};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use super::gzip::Members;
use super::input::Input;
use super::watch::Watched;
use super::wide::{Narrow, Wide};
use super::{DataError, foreign};

const GZIP: [u8; 2] = [0x1f, 0x8b];
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// The magic bytes of Zstandard's skippable frames, which parallel compressors begin with: 0x184D2A50 to 0x184D2A5F.
const ZSTD_SKIPPABLE: [u8; 3] = [0x2a, 0x4d, 0x18];

/// The largest window of a Zstandard frame as a power of two: that of `zstd --ultra`, 128 MiB of memory.
const ZSTD_WINDOW_LOG: u32 = 27;

/// Makes the error of a file that cannot be read.
pub(super) fn unreadable(path: &Path, source: io::Error) -> DataError {
    match source.kind() {
        ErrorKind::NotFound => DataError::Missing { path: path.into() },
        _ => DataError::Unreadable { path: path.into(), source },
    }
}

/// Names the kind of a path that may be neither a file nor a folder.
pub(super) fn special_kind(file_type: fs::FileType) -> &'static str {
    if file_type.is_fifo() {
        "a named pipe"
    } else if file_type.is_socket() {
        "a socket"
    } else {
        "a device"
    }
}

/// Opens a file as it is on disk.
pub(super) fn open_raw(input: &Input<'_>) -> Result<File, DataError> {
    let open = || {
        if let Some(spool) = input.spool {
            let mut file = spool.try_clone()?;
            file.rewind()?;
            return Ok(file);
        }
        // Opening a named pipe would wait for a writer that may never come.
        if !fs::metadata(input.path)?.is_file() {
            return Err(io::Error::new(ErrorKind::InvalidInput, "not a regular file"));
        }
        File::open(input.path)
    };
    open().map_err(|source| unreadable(input.path, source))
}

/// Opens a file and decompresses it. An unsupported archive or compression is an error.
pub(super) fn open<'a>(input: Input<'a>) -> Result<Box<dyn Read + 'a>, DataError> {
    let unreadable = |source| unreadable(input.path, source);
    let mut file = open_raw(&input)?;
    let start = read_start(&mut file).map_err(unreadable)?;
    file.rewind().map_err(unreadable)?;
    let reader = Watched { reader: file, pass: input.pass };
    if is_gzip(&start) {
        return peeled(input, Box::new(Members::new(BufReader::with_capacity(1 << 16, reader), input)));
    }
    if is_zstd(&start) {
        let open = || {
            let mut decoder = zstd::stream::read::Decoder::new(reader)?;
            decoder.window_log_max(ZSTD_WINDOW_LOG)?;
            Ok(decoder)
        };
        return peeled(input, Box::new(open().map_err(unreadable)?));
    }
    peeled(input, Box::new(reader))
}

/// Opens the text of a file as UTF-8: decompressed, and converted from UTF-16 and UTF-32. UTF-8's byte order mark
/// stays.
pub(super) fn open_text<'a>(input: Input<'a>) -> Result<Box<dyn Read + 'a>, DataError> {
    let mut reader = open(input)?;
    let mut start = Vec::with_capacity(4);
    (&mut reader).take(4).read_to_end(&mut start).map_err(|source| unreadable(input.path, source))?;
    Ok(match Wide::detect(&start) {
        Some((wide, mark)) => Box::new(Narrow::new(io::Cursor::new(start.split_off(mark)).chain(reader), wide)),
        None => Box::new(io::Cursor::new(start).chain(reader)),
    })
}

/// Returns the decompressed content, unless its format is not supported.
fn peeled<'a>(input: Input<'a>, mut reader: Box<dyn Read + 'a>) -> Result<Box<dyn Read + 'a>, DataError> {
    let mut start = Vec::with_capacity(foreign::START_BYTES);
    let read = (&mut reader).take(foreign::START_BYTES as u64).read_to_end(&mut start);
    read.map_err(|source| unreadable(input.path, source))?;
    if let Some(foreign::Foreign { kind, remedy }) = foreign::detect(&start) {
        return Err(DataError::Packed { path: input.path.into(), kind, remedy });
    }
    Ok(Box::new(io::Cursor::new(start).chain(reader)))
}

/// Returns whether a file is compressed as a whole.
pub(super) fn is_compressed(input: &Input<'_>) -> Result<bool, DataError> {
    let start =
        open_raw(input).and_then(|mut file| read_start(&mut file).map_err(|source| unreadable(input.path, source)))?;
    Ok(is_gzip(&start) || is_zstd(&start))
}

fn read_start(file: &mut File) -> io::Result<[u8; 4]> {
    let mut start = Vec::with_capacity(4);
    file.take(4).read_to_end(&mut start)?;
    start.resize(4, 0);
    Ok([start[0], start[1], start[2], start[3]])
}

fn is_gzip(start: &[u8; 4]) -> bool {
    start[..2] == GZIP
}

fn is_zstd(start: &[u8; 4]) -> bool {
    *start == ZSTD || (start[0] & 0xf0 == 0x50 && start[1..] == ZSTD_SKIPPABLE)
}
