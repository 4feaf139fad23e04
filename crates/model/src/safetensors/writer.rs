//! Writing safetensors files: one, or several with an index.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::Path;

use serde_json::{Map, Value, json};

use super::FileDType;
use crate::files::{FileError, write_through, write_whole};

/// A tensor to write. Its bytes are borrowed, so that a part of a stacked tensor needs no copy.
pub struct TensorBytes<'a> {
    /// Its name.
    pub name: String,
    /// Element type.
    pub dtype: FileDType,
    /// Sizes of the dims.
    pub shape: Vec<usize>,
    /// The elements, little-endian.
    pub bytes: Payload<'a>,
}

/// The bytes of a tensor to be written.
pub enum Payload<'a> {
    /// Bytes that are in memory.
    Lent(&'a [u8]),
    /// Bytes that are computed when they are written, so that a model is never in memory twice.
    Made {
        /// The number of bytes.
        len: usize,
        /// Computes the bytes.
        make: Box<dyn Fn() -> io::Result<Vec<u8>> + 'a>,
    },
}

impl<'a> From<&'a [u8]> for Payload<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self::Lent(bytes)
    }
}

impl Payload<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Lent(bytes) => bytes.len(),
            Self::Made { len, .. } => *len,
        }
    }

    fn write_to(&self, file: &mut impl Write) -> io::Result<()> {
        match self {
            Self::Lent(bytes) => file.write_all(bytes),
            Self::Made { make, .. } => file.write_all(&make()?),
        }
    }
}

/// Writes `tensors` to `path` under a temporary name, syncs and renames the file. Wider types come first so that
/// every tensor is aligned; otherwise the order is kept.
pub fn write(path: &Path, tensors: &[TensorBytes<'_>], metadata: &BTreeMap<String, String>) -> io::Result<()> {
    let refs: Vec<&TensorBytes<'_>> = tensors.iter().collect();
    write_refs(path, &refs, metadata)
}

fn write_refs(path: &Path, tensors: &[&TensorBytes<'_>], metadata: &BTreeMap<String, String>) -> io::Result<()> {
    let mut sorted = tensors.to_vec();
    sorted.sort_by_key(|tensor| std::cmp::Reverse(tensor.dtype.bits()));
    let mut header = Map::new();
    if !metadata.is_empty() {
        header.insert("__metadata__".to_owned(), json!(metadata));
    }
    let mut offset = 0;
    for tensor in &sorted {
        let end = offset + tensor.bytes.len();
        let entry = json!({"dtype": tensor.dtype.name(), "shape": tensor.shape, "data_offsets": [offset, end]});
        header.insert(tensor.name.clone(), entry);
        offset = end;
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    write_through(path, |file| {
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(&header)?;
        sorted.iter().try_for_each(|tensor| tensor.bytes.write_to(file))
    })
}

/// Writes `tensors` to `dir` as `model.safetensors`, or, if they exceed `max_shard_bytes`, as
/// `model-00001-of-0000N.safetensors` and so on with `model.safetensors.index.json`. The file or index of the other
/// form, which would contradict the new one, is removed.
pub fn write_shards(
    dir: &Path,
    tensors: &[TensorBytes<'_>],
    metadata: &BTreeMap<String, String>,
    max_shard_bytes: usize,
) -> Result<(), FileError> {
    let (whole, index) = (dir.join("model.safetensors"), dir.join("model.safetensors.index.json"));
    let total: usize = tensors.iter().map(|tensor| tensor.bytes.len()).sum();
    if total <= max_shard_bytes {
        write(&whole, tensors, metadata).map_err(FileError::at(&whole))?;
        return remove_if_there(&index);
    }
    let mut shards: Vec<(usize, Vec<&TensorBytes<'_>>)> = Vec::new();
    for tensor in tensors {
        match shards.last_mut() {
            Some((bytes, shard)) if *bytes + tensor.bytes.len() <= max_shard_bytes => {
                *bytes += tensor.bytes.len();
                shard.push(tensor);
            }
            _ => shards.push((tensor.bytes.len(), vec![tensor])),
        }
    }
    let mut weight_map = Map::new();
    for (number, (_, shard)) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{:05}.safetensors", number + 1, shards.len());
        let path = dir.join(&name);
        write_refs(&path, shard, metadata).map_err(FileError::at(&path))?;
        weight_map.extend(shard.iter().map(|tensor| (tensor.name.clone(), Value::from(name.clone()))));
    }
    let text = format!("{:#}\n", json!({"metadata": {"total_size": total}, "weight_map": weight_map}));
    write_whole(&index, text.as_bytes()).map_err(FileError::at(&index))?;
    remove_if_there(&whole)
}

fn remove_if_there(path: &Path) -> Result<(), FileError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(FileError::at(path)(error)),
        _ => Ok(()),
    }
}
