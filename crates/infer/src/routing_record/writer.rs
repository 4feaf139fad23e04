//! Writing of records, block by block.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_64;

use super::reader::{BLOCK_HEAD_BYTES, BLOCK_MAGIC};
use super::{Block, RecordError, RecordHeader, RecordReader};

/// A writer of a record. Each block is handed to the system at once and whole, so that a process that is killed
/// leaves the blocks before.
#[derive(Debug)]
pub struct RecordWriter {
    file: File,
    path: PathBuf,
    header: RecordHeader,
    num_blocks: u64,
}

impl RecordWriter {
    /// Begins a file, which replaces one that is there.
    ///
    /// # Errors
    /// If the file cannot be written, or the header's sizes are wrong.
    pub fn create(path: &Path, header: RecordHeader) -> Result<Self, RecordError> {
        let bytes = header.to_bytes(path)?;
        let mut file = File::create(path).map_err(RecordError::io(path))?;
        file.write_all(&bytes).map_err(RecordError::io(path))?;
        Ok(Self { file, path: path.to_owned(), header, num_blocks: 0 })
    }

    /// Goes on with a file, after its blocks up to the first that `keep` refuses or that is damaged. Begins a file
    /// where there is none.
    ///
    /// # Errors
    /// If the file cannot be read or written, is no record, or is one of another model.
    pub fn resume(path: &Path, header: RecordHeader, keep: impl Fn(&Block) -> bool) -> Result<Self, RecordError> {
        if !path.exists() {
            return Self::create(path, header);
        }
        let mut reader = RecordReader::open(path)?;
        if let Some(problem) = reader.header().difference(&header) {
            return Err(RecordError::OtherModel { path: path.to_owned(), problem });
        }
        let (mut end, mut num_blocks) = (reader.block_end(), 0);
        while let Some(block) = reader.next_block()? {
            if !keep(&block) || reader.damage().num_bad_blocks > 0 {
                break;
            }
            (end, num_blocks) = (reader.block_end(), num_blocks + 1);
        }
        let header = reader.header().clone();
        let file = OpenOptions::new().write(true).open(path);
        let cut = |mut file: File| {
            file.set_len(end)?;
            file.seek(SeekFrom::Start(end))?;
            Ok(file)
        };
        let file = file.and_then(cut).map_err(RecordError::io(path))?;
        Ok(Self { file, path: path.to_owned(), header, num_blocks })
    }

    /// Returns the header.
    #[must_use]
    pub fn header(&self) -> &RecordHeader {
        &self.header
    }

    /// Returns the file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the blocks in the file.
    #[must_use]
    pub fn num_blocks(&self) -> u64 {
        self.num_blocks
    }

    /// Writes a block.
    ///
    /// # Errors
    /// If its sizes contradict each other or the header, or the file cannot be written.
    pub fn write(&mut self, block: &Block) -> Result<(), RecordError> {
        let payload = block.to_bytes(&self.header)?;
        let mut bytes = Vec::with_capacity(BLOCK_HEAD_BYTES + payload.len());
        bytes.extend(BLOCK_MAGIC);
        bytes.extend((payload.len() as u32).to_le_bytes());
        let head_sum = xxh3_64(&bytes) as u32;
        bytes.extend(head_sum.to_le_bytes());
        bytes.extend(xxh3_64(&payload).to_le_bytes());
        bytes.extend(payload);
        self.file.write_all(&bytes).map_err(RecordError::io(&self.path))?;
        self.num_blocks += 1;
        Ok(())
    }

    /// Waits until the blocks are on the disk.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn sync(&self) -> Result<(), RecordError> {
        self.file.sync_data().map_err(RecordError::io(&self.path))
    }
}
