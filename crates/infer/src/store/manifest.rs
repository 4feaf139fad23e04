//! The manifest of a checkpoint: the state of the run, and every file with its size and checksum.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use super::{MANIFEST_FILE, StoreError};

const FORMAT: u64 = 1;
/// The largest manifest that is read; this program writes none so large.
const MAX_MANIFEST_BYTES: u64 = 16 << 20;

/// The state of a run that a checkpoint holds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Metadata {
    /// The number of optimizer steps done.
    pub step: u64,
    /// The validation loss at this step, if there was an evaluation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub val_loss: Option<f64>,
    /// Other values of the trainer: position in the data, best loss so far, counters.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub extra: Map<String, Value>,
}

/// One file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    /// The path relative to the checkpoint, with '/'.
    path: String,
    bytes: u64,
    /// The 128-bit XXH3, as 32 hexadecimal digits.
    xxh3: String,
}

/// A checkpoint on disk whose manifest has been read.
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    /// The checkpoint folder.
    pub path: PathBuf,
    /// The state of the run.
    pub metadata: Metadata,
    entries: Vec<Entry>,
}

#[derive(Serialize, Deserialize)]
struct Manifest {
    format: u64,
    #[serde(flatten)]
    metadata: Metadata,
    files: Vec<Entry>,
}

impl Checkpoint {
    /// Makes the manifest of a folder that has just been written.
    pub(super) fn describe(path: &Path, metadata: &Metadata, files: &[String]) -> io::Result<Self> {
        let entry = |file: &String| {
            if !is_plain(file) || !fs::symlink_metadata(path.join(file))?.is_file() {
                let problem = format!("{file:?} is not a plain file with a plain name");
                return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
            }
            let (bytes, xxh3) = checksum(&path.join(file))?;
            Ok(Entry { path: file.clone(), bytes, xxh3 })
        };
        let entries = files.iter().map(entry).collect::<io::Result<_>>()?;
        Ok(Self { path: path.to_owned(), metadata: metadata.clone(), entries })
    }

    /// Returns the text of the manifest: its JSON on one line, then the checksum of that line.
    pub(super) fn to_json(&self) -> Vec<u8> {
        let manifest = Manifest { format: FORMAT, metadata: self.metadata.clone(), files: self.entries.clone() };
        // Strings, numbers and maps with string keys always become JSON; NaN becomes null, which reads back as None.
        let line = serde_json::to_string(&manifest).unwrap_or_default();
        let seal = hex(xxh3_128(line.as_bytes()));
        format!("{{\"manifest\":{line},\n\"xxh3\":\"{seal}\"}}\n").into_bytes()
    }

    /// Reads the manifest of a checkpoint folder and compares the sizes of its files, but not their contents.
    pub fn read(path: &Path) -> Result<Self, StoreError> {
        let manifest_path = path.join(MANIFEST_FILE);
        let damaged = |problem: &str| StoreError::Damaged { path: manifest_path.clone(), problem: problem.to_owned() };
        let text = read_small(&manifest_path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => StoreError::Damaged {
                path: path.to_owned(),
                problem: format!("not a complete checkpoint: {MANIFEST_FILE} is missing"),
            },
            _ => StoreError::Access { path: manifest_path.clone(), source: error },
        })?;
        let sealed = text.strip_prefix("{\"manifest\":").and_then(|text| text.strip_suffix("\"}\n"));
        let (line, seal) = sealed
            .and_then(|text| text.split_once(",\n\"xxh3\":\""))
            .ok_or_else(|| damaged("not a checkpoint manifest, or cut off"))?;
        if hex(xxh3_128(line.as_bytes())) != seal {
            return Err(damaged("its checksum is wrong: the file has been changed or damaged"));
        }
        let manifest: Manifest = serde_json::from_str(line).map_err(|error| damaged(&error.to_string()))?;
        if manifest.format != FORMAT {
            return Err(damaged(&format!("format {} is not known; this program reads {FORMAT}", manifest.format)));
        }
        if let Some(entry) = manifest.files.iter().find(|entry| !is_plain(&entry.path)) {
            return Err(damaged(&format!("names a file outside the checkpoint: {:?}", entry.path)));
        }
        let checkpoint = Self { path: path.to_owned(), metadata: manifest.metadata, entries: manifest.files };
        checkpoint.entries.iter().try_for_each(|entry| checkpoint.verify_size(entry))?;
        Ok(checkpoint)
    }

    fn verify_size(&self, entry: &Entry) -> Result<(), StoreError> {
        let path = self.path.join(&entry.path);
        let problem = match fs::symlink_metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => "missing from the checkpoint".to_owned(),
            Err(source) => return Err(StoreError::Access { path, source }),
            Ok(metadata) if !metadata.is_file() => "not a plain file".to_owned(),
            Ok(metadata) if metadata.len() == entry.bytes => return Ok(()),
            Ok(metadata) => format!("{} bytes long, {} were written", metadata.len(), entry.bytes),
        };
        Err(StoreError::Damaged { path, problem })
    }

    /// Reads every file and compares it with its checksum.
    ///
    /// # Errors
    /// Names the first file that was changed.
    pub fn verify(&self) -> Result<(), StoreError> {
        for entry in &self.entries {
            self.verify_size(entry)?;
            let path = self.path.join(&entry.path);
            let (_, xxh3) = checksum(&path).map_err(StoreError::access(&path))?;
            if xxh3 != entry.xxh3 {
                let problem = "its checksum is wrong: the file has been changed or damaged".to_owned();
                return Err(StoreError::Damaged { path, problem });
            }
        }
        Ok(())
    }

    /// Returns the validation loss, if there is one and it is a number.
    pub(super) fn finite_val_loss(&self) -> Option<f64> {
        self.metadata.val_loss.filter(|loss| loss.is_finite())
    }

    /// Returns whether the folder holds only files of the manifest, so that deleting it deletes no foreign files.
    pub(super) fn holds_nothing_else(&self) -> bool {
        let ours: BTreeSet<&str> =
            self.entries.iter().map(|entry| entry.path.as_str()).chain([MANIFEST_FILE]).collect();
        list_tree(&self.path).is_ok_and(|(files, _)| files.iter().all(|file| ours.contains(file.as_str())))
    }
}

/// Lists files and folders under `root`, relative to it, with '/', sorted. A folder comes before its contents.
pub(super) fn list_tree(root: &Path) -> io::Result<(Vec<String>, Vec<String>)> {
    let (mut files, mut dirs) = (Vec::new(), Vec::new());
    let mut pending = vec![String::new()];
    while let Some(dir) = pending.pop() {
        for entry in fs::read_dir(root.join(&dir))? {
            let entry = entry?;
            let name = entry.file_name().into_string().map_err(|name| {
                io::Error::new(io::ErrorKind::InvalidInput, format!("the name {} is not UTF-8", name.display()))
            })?;
            let path = if dir.is_empty() { name } else { format!("{dir}/{name}") };
            if entry.file_type()?.is_dir() {
                pending.push(path.clone());
                dirs.push(path);
            } else {
                files.push(path);
            }
        }
    }
    files.sort();
    dirs.sort();
    Ok((files, dirs))
}

/// Returns whether a path of a manifest stays inside the checkpoint.
fn is_plain(path: &str) -> bool {
    let is_name = |part: &str| !part.is_empty() && part != "." && part != ".." && !part.contains(['\\', ':', '\0']);
    path.split('/').all(is_name)
}

fn read_small(path: &Path) -> io::Result<String> {
    let file = File::open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not a plain file"));
    }
    let mut text = String::new();
    file.take(MAX_MANIFEST_BYTES).read_to_string(&mut text)?;
    Ok(text)
}

/// Returns length and checksum of a file.
fn checksum(path: &Path) -> io::Result<(u64, String)> {
    let mut file = File::open(path)?;
    let mut hasher = Xxh3::new();
    let mut buffer = vec![0; 1 << 20];
    let mut bytes = 0;
    loop {
        let count = match file.read(&mut buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            count => count?,
        };
        if count == 0 {
            return Ok((bytes, hex(hasher.digest128())));
        }
        hasher.update(&buffer[..count]);
        bytes += count as u64;
    }
}

fn hex(digest: u128) -> String {
    format!("{digest:032x}")
}
