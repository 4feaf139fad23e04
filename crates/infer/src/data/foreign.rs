//! Unsupported formats, detected by their first bytes, each with a remedy.

/// The number of first bytes that are needed for detection.
pub(super) const START_BYTES: usize = 512;

/// An unsupported format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Foreign {
    /// The kind of the file.
    pub(super) kind: &'static str,
    /// The way to make it readable.
    pub(super) remedy: &'static str,
}

const DECOMPRESS: &str = "decompress it, or compress it by gzip or zstd instead";
const UNPACK: &str = "unpack it and name the folder";
const AS_PARQUET: &str = "write it as Parquet or JSON lines";
const TEXT_OF_IT: &str = "give the text that is in it";

/// First bytes, the format, and the remedy.
const KINDS: [(&[u8], &str, &str); 20] = [
    (b"\xfd7zXZ\0", "compressed by xz", DECOMPRESS),
    (b"BZh", "compressed by bzip2", DECOMPRESS),
    (b"\x04\x22\x4d\x18", "compressed by lz4", DECOMPRESS),
    (b"\xff\x06\0\0sNaPpY", "compressed by snappy", DECOMPRESS),
    (b"\x1f\x9d", "compressed by compress (.Z)", DECOMPRESS),
    (b"LZIP", "compressed by lzip", DECOMPRESS),
    (b"PK\x03\x04", "a zip archive", UNPACK),
    (b"PK\x05\x06", "an empty zip archive", UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    (b"Rar!\x1a\x07", "a rar archive", UNPACK),
    (b"ARROW1", "an Arrow file", AS_PARQUET),
    (b"FEA1", "a Feather file", AS_PARQUET),
    (b"ORC", "an ORC file", AS_PARQUET),
    (b"Obj\x01", "an Avro file", AS_PARQUET),
    (b"SQLite format 3\0", "an SQLite database", AS_PARQUET),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", AS_PARQUET),
    (b"\x93NUMPY", "a NumPy array", TEXT_OF_IT),
    (b"GGUF", "a GGUF model", TEXT_OF_IT),
    (b"%PDF-", "a PDF", TEXT_OF_IT),
    (
        b"version https://git-lfs.github.com/spec/",
        "a pointer of Git LFS, not the data",
        "`git lfs pull` fetches what it stands for",
    ),
];

/// Returns the unsupported format of a file that begins with `start`, if it has one.
pub(super) fn detect(start: &[u8]) -> Option<Foreign> {
    if start.get(257..262) == Some(b"ustar") {
        return Some(Foreign { kind: "a tar archive", remedy: UNPACK });
    }
    let found = KINDS.iter().find(|(magic, ..)| start.starts_with(magic))?;
    let &(magic, kind, remedy) = found;
    // Short marks are letters that a text may begin with: the bytes after them must not be text.
    let is_text =
        || start.iter().skip(magic.len()).take(64).all(|&byte| byte.is_ascii_graphic() || byte.is_ascii_whitespace());
    let is_word = magic.iter().all(u8::is_ascii_graphic) && magic.len() < 5;
    if is_word && is_text() { None } else { Some(Foreign { kind, remedy }) }
}
