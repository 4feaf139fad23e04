//! Reading and checking the header of a safetensors file.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::path::Path;

use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};

use super::{FileDType, SafetensorsError, TensorInfo};
use crate::file_kind;

/// The largest header that is read, in bytes: the limit of the reference implementation.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The size of the header's length field in bytes.
const LEN_BYTES: usize = 8;

type Contents = (BTreeMap<String, TensorInfo>, BTreeMap<String, String>);

/// Reads the tensors and the metadata of the file with these bytes. A file of another known format is reported as
/// such.
pub(super) fn read(path: &Path, file: &[u8]) -> Result<Contents, SafetensorsError> {
    read_header(path, file).map_err(|error| {
        match file_kind::describe(file).filter(|_| !file.is_empty() && !file_kind::is_safetensors(file)) {
            Some(what) => SafetensorsError::Foreign { path: path.to_owned(), what },
            None => error,
        }
    })
}

fn read_header(path: &Path, file: &[u8]) -> Result<Contents, SafetensorsError> {
    let len = file.len() as u64;
    let truncated = |needed| SafetensorsError::Truncated { path: path.to_owned(), len, needed };
    let (len_bytes, rest) = file.split_first_chunk::<LEN_BYTES>().ok_or_else(|| truncated(LEN_BYTES as u64))?;
    let header_len = u64::from_le_bytes(*len_bytes);
    if header_len > MAX_HEADER_BYTES {
        return Err(SafetensorsError::HeaderTooLarge { path: path.to_owned(), len: header_len });
    }
    if header_len > rest.len() as u64 {
        return Err(truncated(LEN_BYTES as u64 + header_len));
    }
    let (header, data) = rest.split_at(header_len as usize);
    let bad_header = |reason: String| SafetensorsError::Header { path: path.to_owned(), reason };
    let text = std::str::from_utf8(header).map_err(|error| bad_header(format!("not UTF-8: {error}")))?;
    if !text.starts_with('{') {
        return Err(bad_header("it does not begin with '{': this is not a safetensors file".to_owned()));
    }
    let Header { metadata, tensors } = serde_json::from_str(text).map_err(|error| bad_header(error.to_string()))?;
    let data_start = LEN_BYTES + header.len();
    let check = Check { path, data_len: data.len() as u64 };
    let mut checked = BTreeMap::new();
    for (name, raw) in tensors {
        let info = check.tensor(&name, &raw, data_start)?;
        checked.insert(name, info);
    }
    check.coverage(&checked, data_start)?;
    Ok((checked, metadata))
}

/// The header's JSON before any check.
struct Header {
    metadata: BTreeMap<String, String>,
    tensors: BTreeMap<String, RawInfo>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct RawInfo {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// A map of text to text without duplicate keys.
struct Metadata(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut metadata = None;
        let mut tensors = BTreeMap::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                let value: Metadata = map.next_value().map_err(|e| de::Error::custom(format!("__metadata__: {e}")))?;
                if metadata.replace(value.0).is_some() {
                    return Err(de::Error::custom("duplicate key __metadata__"));
                }
                continue;
            }
            let info = map.next_value::<RawInfo>().map_err(|e| de::Error::custom(format!("tensor {name:?}: {e}")))?;
            insert_once(&mut tensors, name, info)?;
        }
        Ok(Header { metadata: metadata.unwrap_or_default(), tensors })
    }
}

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor;
        impl<'de> Visitor<'de> for TextVisitor {
            type Value = Metadata;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of texts")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Metadata, A::Error> {
                let mut texts = BTreeMap::new();
                while let Some((key, value)) = map.next_entry::<String, String>()? {
                    insert_once(&mut texts, key, value)?;
                }
                Ok(Metadata(texts))
            }
        }
        deserializer.deserialize_map(TextVisitor)
    }
}

fn insert_once<V, E: de::Error>(map: &mut BTreeMap<String, V>, key: String, value: V) -> Result<(), E> {
    match map.entry(key) {
        Entry::Occupied(entry) => Err(E::custom(format!("duplicate key {:?}", entry.key()))),
        Entry::Vacant(entry) => {
            entry.insert(value);
            Ok(())
        }
    }
}

struct Check<'a> {
    path: &'a Path,
    data_len: u64,
}

impl Check<'_> {
    /// Checks type, size and offsets of one tensor.
    fn tensor(&self, name: &str, raw: &RawInfo, data_start: usize) -> Result<TensorInfo, SafetensorsError> {
        let (path, tensor) = (self.path.to_owned(), name.to_owned());
        let Some(dtype) = FileDType::parse(&raw.dtype) else {
            return Err(SafetensorsError::UnknownDType { path, tensor, dtype: raw.dtype.clone() });
        };
        let bits = raw.shape.iter().try_fold(dtype.bits(), |bits, &dim| bits.checked_mul(dim));
        let Some(expected) = bits.filter(|bits| bits.is_multiple_of(8)).map(|bits| bits / 8) else {
            return Err(SafetensorsError::Size { path, tensor, dtype, shape: raw.shape.clone() });
        };
        let ((begin, end), data_len) = (raw.data_offsets, self.data_len);
        if begin > end || end > data_len {
            return Err(SafetensorsError::OffsetsOutOfRange { path, tensor, begin, end, data_len });
        }
        if end - begin != expected {
            return Err(SafetensorsError::SizeMismatch { path, tensor, expected, found: end - begin });
        }
        // A dim of 0 makes the size 0 whatever the others are, but their product must still not overflow.
        let shape: Option<Vec<usize>> = raw.shape.iter().map(|&dim| usize::try_from(dim).ok()).collect();
        let non_zero =
            raw.shape.iter().filter(|dim| **dim > 0).try_fold(dtype.bits(), |bits, &dim| bits.checked_mul(dim));
        let (Some(shape), Some(_)) = (shape, non_zero) else {
            return Err(SafetensorsError::Size { path, tensor, dtype, shape: raw.shape.clone() });
        };
        Ok(TensorInfo { dtype, shape, range: data_start + begin as usize..data_start + end as usize })
    }

    /// Fails unless every byte of the data belongs to exactly one tensor: nothing is hidden, nothing is read twice.
    fn coverage(&self, tensors: &BTreeMap<String, TensorInfo>, data_start: usize) -> Result<(), SafetensorsError> {
        let mut sorted: Vec<(&String, &TensorInfo)> = tensors.iter().collect();
        sorted.sort_by_key(|(_, info)| (info.range.start, info.range.end));
        let path = || self.path.to_owned();
        let hole = |begin: usize, end: usize| SafetensorsError::Hole {
            path: path(),
            begin: (begin - data_start) as u64,
            end: (end - data_start) as u64,
        };
        let mut covered = (data_start, "");
        for (name, info) in sorted {
            if info.range.start < covered.0 {
                return Err(SafetensorsError::Overlap {
                    path: path(),
                    first: covered.1.to_owned(),
                    second: name.clone(),
                });
            }
            if info.range.start > covered.0 {
                return Err(hole(covered.0, info.range.start));
            }
            covered = (info.range.end, name);
        }
        let end = data_start + self.data_len as usize;
        if covered.0 < end { Err(hole(covered.0, end)) } else { Ok(()) }
    }
}
