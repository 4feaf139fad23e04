//! A writer of TensorBoard event files.
//!
//! An event file is a sequence of records, each framed by its length and two checksums (the TFRecord format: length
//! as u64, masked CRC-32C of the length, data, masked CRC-32C of the data; all little-endian). The data is a protocol
//! buffer message `Event`. TensorBoard needs only a few of its fields, so the messages are encoded by hand, without a
//! code generator. Field numbers: tensorflow/core/util/event.proto, tensorflow/core/framework/summary.proto and
//! tensor.proto.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

const FILE_PREFIX: &str = "events.out.tfevents.";

/// An event file that is being written.
#[derive(Debug)]
pub struct EventFile {
    file: File,
    path: PathBuf,
}

impl EventFile {
    /// Starts a new event file in `dir`. Its name sorts after those of existing event files, because TensorBoard
    /// reads them in that order. With `purge_step`, TensorBoard discards data of that step and later ones from
    /// earlier files.
    pub fn create(dir: &Path, purge_step: Option<u64>) -> io::Result<Self> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let newest = event_files(dir)?.iter().filter_map(|path| seconds_in_name(path)).max();
        let seconds = newest.map_or(now, |newest| now.max(newest + 1));
        let path = dir.join(format!("{FILE_PREFIX}{seconds:010}.{}", host_name()));
        let file = OpenOptions::new().create_new(true).append(true).open(&path)?;
        let mut events = Self { file, path };
        events.write(0, |event| event.string(3, "brain.Event:2"))?;
        if let Some(step) = purge_step {
            // SessionLog { status: START }
            events.write(step, |event| event.message(7, |log| log.uint(1, 1)))?;
        }
        Ok(events)
    }

    /// Removes every event file of `dir`.
    pub fn remove_all(dir: &Path) -> io::Result<()> {
        event_files(dir)?.iter().try_for_each(fs::remove_file)
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes numbers under their tags, all in one event of `step`.
    pub fn scalars(&mut self, step: u64, scalars: &[(String, f64)]) -> io::Result<()> {
        self.write(step, |event| {
            event.message(5, |summary| {
                for (tag, value) in scalars {
                    summary.message(1, |entry| {
                        entry.string(1, tag);
                        entry.float(2, *value as f32);
                    });
                }
            });
        })
    }

    /// Writes counts per index (tokens per expert) as histograms with one bucket per index: bucket `i` is `[i, i +
    /// 1)`.
    pub fn histograms(&mut self, step: u64, histograms: &[(String, &[u64])]) -> io::Result<()> {
        if histograms.is_empty() {
            return Ok(());
        }
        self.write(step, |event| {
            event.message(5, |summary| {
                for (tag, counts) in histograms {
                    summary.message(1, |entry| {
                        entry.string(1, tag);
                        entry.message(5, |histogram| histogram_of_indices(histogram, counts));
                    });
                }
            });
        })
    }

    /// Writes a text, which TensorBoard's text dashboard shows.
    pub fn text(&mut self, step: u64, tag: &str, text: &str) -> io::Result<()> {
        self.write(step, |event| {
            event.message(5, |summary| {
                summary.message(1, |entry| {
                    entry.string(1, tag);
                    // TensorProto { dtype: DT_STRING, tensor_shape: [], string_val }
                    entry.message(8, |tensor| {
                        tensor.uint(1, 7);
                        tensor.message(2, |_| {});
                        tensor.string(8, text);
                    });
                    // SummaryMetadata { plugin_data { plugin_name }, data_class: DATA_CLASS_TENSOR }
                    entry.message(9, |metadata| {
                        metadata.message(1, |plugin| plugin.string(1, "text"));
                        metadata.uint(4, 2);
                    });
                });
            });
        })
    }

    /// Flushes everything written to the disk.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Writes one event by one `write` call, so that a kill leaves at most the last event incomplete.
    fn write(&mut self, step: u64, fill: impl FnOnce(&mut Message)) -> io::Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
        let mut event = Message::default();
        event.double(1, now);
        event.uint(2, step);
        fill(&mut event);
        self.file.write_all(&frame(&event.bytes))
    }
}

fn histogram_of_indices(histogram: &mut Message, counts: &[u64]) {
    let indices = || counts.iter().enumerate().map(|(index, &count)| (index as f64 + 0.5, count as f64));
    histogram.double(1, 0.0);
    histogram.double(2, counts.len() as f64);
    histogram.double(3, indices().map(|(_, count)| count).sum());
    histogram.double(4, indices().map(|(at, count)| at * count).sum());
    histogram.double(5, indices().map(|(at, count)| at * at * count).sum());
    histogram.doubles(6, (1..=counts.len()).map(|limit| limit as f64));
    histogram.doubles(7, indices().map(|(_, count)| count));
}

/// A protocol buffer message under construction.
#[derive(Default)]
struct Message {
    bytes: Vec<u8>,
}

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.bytes.push(value as u8);
    }

    fn key(&mut self, field: u32, wire_type: u32) {
        self.varint(u64::from(field << 3 | wire_type));
    }

    fn uint(&mut self, field: u32, value: u64) {
        self.key(field, 0);
        self.varint(value);
    }

    fn double(&mut self, field: u32, value: f64) {
        self.key(field, 1);
        self.bytes.extend(value.to_le_bytes());
    }

    fn float(&mut self, field: u32, value: f32) {
        self.key(field, 5);
        self.bytes.extend(value.to_le_bytes());
    }

    fn bytes_field(&mut self, field: u32, bytes: &[u8]) {
        self.key(field, 2);
        self.varint(bytes.len() as u64);
        self.bytes.extend(bytes);
    }

    fn string(&mut self, field: u32, text: &str) {
        self.bytes_field(field, text.as_bytes());
    }

    fn doubles(&mut self, field: u32, values: impl Iterator<Item = f64>) {
        let packed: Vec<u8> = values.flat_map(f64::to_le_bytes).collect();
        self.bytes_field(field, &packed);
    }

    fn message(&mut self, field: u32, fill: impl FnOnce(&mut Message)) {
        let mut inner = Message::default();
        fill(&mut inner);
        self.bytes_field(field, &inner.bytes);
    }
}

/// Frames `data` as a TFRecord.
fn frame(data: &[u8]) -> Vec<u8> {
    let len = (data.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(data.len() + 16);
    record.extend(len);
    record.extend(masked_crc(&len).to_le_bytes());
    record.extend(data);
    record.extend(masked_crc(data).to_le_bytes());
    record
}

/// Computes the masked CRC-32C: rotated and offset, so that data that contains checksums still has a good checksum.
fn masked_crc(data: &[u8]) -> u32 {
    crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Computes CRC-32C (Castagnoli) byte by byte, which is fast enough for small events.
fn crc32c(data: &[u8]) -> u32 {
    !data.iter().fold(!0, |crc: u32, &byte| CRC_TABLE[((crc ^ u32::from(byte)) & 0xff) as usize] ^ (crc >> 8))
}

const CRC_TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

/// Lists the event files of a folder by name.
fn event_files(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(FILE_PREFIX) && entry.file_type()?.is_file() {
            files.push(entry.path());
        }
    }
    files.sort();
    Ok(files)
}

fn seconds_in_name(path: &Path) -> Option<u64> {
    path.file_name()?.to_str()?.strip_prefix(FILE_PREFIX)?.split('.').next()?.parse().ok()
}

/// Returns the machine's name for the file name, as TensorBoard's own writers do, reduced to letters, digits, '-' and
/// '_'. Without one it is `localhost`.
fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name: String = name.trim().chars().filter(|c| c.is_ascii_alphanumeric() || "-_".contains(*c)).collect();
    if name.is_empty() { "localhost".to_owned() } else { name }
}

#[cfg(test)]
#[path = "events_tests.rs"]
mod tests;
