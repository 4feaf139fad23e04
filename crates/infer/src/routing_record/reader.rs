//! Reading of records, as far as they are whole.

use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_64;

use super::block::{Block, MAX_BLOCK_BYTES};
use super::header::{MAGIC, MAX_HEADER_BYTES, PREFIX_BYTES, VERSION};
use super::{RecordError, RecordHeader};

/// The first bytes of every block.
pub(super) const BLOCK_MAGIC: [u8; 4] = *b"MRB1";
/// The bytes before a payload: magic, length, checksum of both, checksum of the payload.
pub(super) const BLOCK_HEAD_BYTES: usize = 20;

/// The parts of a file that could not be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Damage {
    /// Blocks whose content is damaged, with whole blocks behind them.
    pub num_bad_blocks: u64,
    /// The bytes of these blocks.
    pub bad_bytes: u64,
    /// The position of the first damaged byte, of a damaged block or at the end.
    pub first_at: Option<u64>,
    /// Bytes at the end that are no whole block.
    pub cut_bytes: u64,
    /// The problem of the first damaged place.
    pub problem: &'static str,
}

impl Damage {
    /// Returns whether everything was read.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.first_at.is_none()
    }

    fn add(&mut self, at: u64, problem: &'static str) {
        if self.first_at.is_none() {
            (self.first_at, self.problem) = (Some(at), problem);
        }
    }
}

/// Prints what was left out, such as `210 bytes at the end were left out (from byte 4196: a cut block)`.
impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(at) = self.first_at else { return f.write_str("nothing was left out") };
        let mut parts = Vec::new();
        if self.num_bad_blocks > 0 {
            let s = if self.num_bad_blocks == 1 { "" } else { "s" };
            parts.push(format!("{} damaged block{s} of {} bytes", self.num_bad_blocks, self.bad_bytes));
        }
        if self.cut_bytes > 0 {
            parts.push(format!("{} bytes at the end", self.cut_bytes));
        }
        write!(f, "{} were left out (from byte {at}: {})", parts.join(" and "), self.problem)
    }
}

/// A reader of the blocks of a record.
pub struct RecordReader<R> {
    input: R,
    path: PathBuf,
    header: RecordHeader,
    /// The position in the file.
    position: u64,
    /// The position behind the last block that was read.
    block_end: u64,
    damage: Damage,
    is_done: bool,
}

/// Returns whether the file at `path` begins as a record does.
#[must_use]
pub fn is_record(path: &Path) -> bool {
    let mut start = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MAGIC.len() as u64).read_to_end(&mut start));
    read.is_ok() && start == MAGIC
}

impl RecordReader<BufReader<File>> {
    /// Opens a file.
    ///
    /// # Errors
    /// If it cannot be read, is no record, or its header is damaged.
    pub fn open(path: &Path) -> Result<Self, RecordError> {
        if path.is_dir() {
            return Err(RecordError::NotARecord { path: path.to_owned() });
        }
        Self::new(BufReader::new(File::open(path).map_err(RecordError::io(path))?), path)
    }
}

impl<R: Read> RecordReader<R> {
    /// Reads the header from `input`, which errors call `path`.
    ///
    /// # Errors
    /// If it is no record, or the header is damaged.
    pub fn new(mut input: R, path: &Path) -> Result<Self, RecordError> {
        let header_error = |problem: String| RecordError::Header { path: path.to_owned(), problem };
        let prefix = read_up_to(&mut input, PREFIX_BYTES).map_err(RecordError::io(path))?;
        if prefix.get(..MAGIC.len()) != Some(&MAGIC) {
            return Err(RecordError::NotARecord { path: path.to_owned() });
        }
        let [v0, v1] = *prefix.get(8..10).and_then(|v| v.first_chunk()).ok_or_else(|| header_error("is cut".into()))?;
        let found = u16::from_le_bytes([v0, v1]);
        if found != VERSION {
            return Err(RecordError::Version { path: path.to_owned(), found, expected: VERSION });
        }
        let (Some(len), Some(sum)) = (number(&prefix, 12..16), number(&prefix, 16..24)) else {
            return Err(header_error("is cut".to_owned()));
        };
        if len > MAX_HEADER_BYTES as u64 {
            return Err(header_error(format!("states {len} bytes: must be at most {MAX_HEADER_BYTES}")));
        }
        let text = read_up_to(&mut input, len as usize).map_err(RecordError::io(path))?;
        if (text.len() as u64) < len {
            return Err(header_error("is cut".to_owned()));
        }
        if xxh3_64(&text) != sum {
            return Err(header_error("is damaged: its checksum differs".to_owned()));
        }
        let header: RecordHeader =
            serde_json::from_slice(&text).map_err(|error| header_error(format!("is not understood: {error}")))?;
        if let Some(problem) = header.problem() {
            return Err(header_error(problem));
        }
        let position = PREFIX_BYTES as u64 + len;
        let (damage, path) = (Damage::default(), path.to_owned());
        Ok(Self { input, path, header, position, block_end: position, damage, is_done: false })
    }

    /// Returns the header.
    #[must_use]
    pub fn header(&self) -> &RecordHeader {
        &self.header
    }

    /// Returns what was left out of the part that is read.
    #[must_use]
    pub fn damage(&self) -> &Damage {
        &self.damage
    }

    /// Returns the position behind the block that was read last, or behind the header.
    #[must_use]
    pub fn block_end(&self) -> u64 {
        self.block_end
    }

    /// Reads the next whole block; none at the end, or where the rest is no block. A block with a damaged content is
    /// passed over.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn next_block(&mut self) -> Result<Option<Block>, RecordError> {
        while !self.is_done {
            match self.read_payload()? {
                Some(Ok(block)) => return Ok(Some(block)),
                Some(Err(_)) => {}
                None => self.is_done = true,
            }
        }
        Ok(None)
    }

    /// Reads the head and the payload of a block. The inner error is a damaged payload behind which another block may
    /// begin.
    fn read_payload(&mut self) -> Result<Option<Result<Block, &'static str>>, RecordError> {
        let start = self.position;
        let head = self.read(BLOCK_HEAD_BYTES)?;
        if head.is_empty() {
            return Ok(None);
        }
        let fields = (number(&head, 4..8), number(&head, 8..12), number(&head, 12..20));
        let (Some(len), Some(head_sum), Some(sum)) = fields else { return self.cut(start, "a cut block") };
        let is_head = head[..4] == BLOCK_MAGIC && head_sum == xxh3_64(&head[..8]) & 0xffff_ffff;
        if !is_head || len > MAX_BLOCK_BYTES as u64 {
            return self.cut(start, "no block begins here");
        }
        let payload = self.read(len as usize)?;
        if (payload.len() as u64) < len {
            return self.cut(start, "a cut block");
        }
        let block = match xxh3_64(&payload) == sum {
            true => Block::from_bytes(&payload, &self.header),
            false => Err("a checksum that differs"),
        };
        match block {
            Ok(_) => self.block_end = self.position,
            Err(problem) => {
                self.damage.add(start, problem);
                self.damage.num_bad_blocks += 1;
                self.damage.bad_bytes += self.position - start;
            }
        }
        Ok(Some(block))
    }

    /// Ends the reading: all bytes from `start` on are left out.
    fn cut<T>(&mut self, start: u64, problem: &'static str) -> Result<Option<T>, RecordError> {
        let rest = io::copy(&mut self.input, &mut io::sink()).map_err(RecordError::io(&self.path))?;
        self.position += rest;
        self.damage.add(start, problem);
        self.damage.cut_bytes = self.position - start;
        Ok(None)
    }

    fn read(&mut self, count: usize) -> Result<Vec<u8>, RecordError> {
        let bytes = read_up_to(&mut self.input, count).map_err(RecordError::io(&self.path))?;
        self.position += bytes.len() as u64;
        Ok(bytes)
    }
}

/// Reads `count` bytes, or as many as there are. Memory grows with what is read, not with what is asked for.
fn read_up_to(input: &mut impl Read, count: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    match input.take(count as u64).read_to_end(&mut bytes) {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(bytes),
        result => result.map(|_| bytes),
    }
}

/// Returns the number in these bytes; none if they are not there.
fn number(bytes: &[u8], range: std::ops::Range<usize>) -> Option<u64> {
    Some(bytes.get(range)?.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)))
}
