//! The header of a GGUF file: keys with values, and a list of tensors. Everything in it is checked before it is used,
//! because the file may come from anywhere.
//!
//! Layout (`ggml/docs/gguf.md`, version 3; version 2 is the same for little-endian files):
//! - magic, version, the number of tensors and the number of keys;
//! - for each key a string, a type and a value;
//! - for each tensor its name, its dims from the innermost outwards, its type and the offset of its data, counted
//!   from the first multiple of the alignment after the header.

use std::collections::BTreeMap;
use std::path::Path;

use super::GgufTensor;
use super::blocks::GgmlType;
use super::error::GgufError;
use super::value::{Numbers, Value};
use crate::file_kind;

const MAGIC: &[u8; 4] = b"GGUF";
/// The alignment of data unless the file gives one.
const DEFAULT_ALIGNMENT: usize = 32;
/// The largest alignment that is accepted.
const MAX_ALIGNMENT: usize = 1 << 20;
/// The deepest nesting of arrays that is accepted.
const MAX_DEPTH: usize = 4;
/// The longest key and the longest tensor name, in bytes. The format allows 65,535 for keys and 64 for names.
const MAX_NAME: usize = 65_535;
/// The largest number of dims of a tensor.
const MAX_DIMS: u32 = 4;

pub(super) struct Header {
    pub(super) keys: BTreeMap<String, Value>,
    pub(super) tensors: BTreeMap<String, GgufTensor>,
}

/// Reads and checks the header of the file with these bytes.
pub(super) fn read(path: &Path, bytes: &[u8]) -> Result<Header, GgufError> {
    let mut reader = Reader { path, bytes, at: 0 };
    let not_gguf = |reason: String| GgufError::NotGguf { path: path.to_owned(), reason };
    match bytes.first_chunk::<4>() {
        Some(MAGIC) => reader.at = 4,
        _ => {
            let what = file_kind::describe(bytes).map_or_else(String::new, |what| format!("; this is {what}"));
            return Err(not_gguf(format!("it does not begin with GGUF{what}")));
        }
    }
    match reader.u32("the version")? {
        2 | 3 => {}
        version if version.swap_bytes() == 2 || version.swap_bytes() == 3 => {
            let advice = "get a little-endian file, or convert it with llama.cpp's gguf_convert_endian.py";
            return Err(not_gguf(format!("its numbers are big-endian; {advice}")));
        }
        1 => return Err(not_gguf("its version is 1, of August 2023: get the model in a newer file".to_owned())),
        version => return Err(not_gguf(format!("its version is {version}"))),
    }
    let num_tensors = reader.u64("the number of tensors")?;
    let num_keys = reader.u64("the number of keys")?;
    // Nothing is allocated for these numbers: a false one fails at the end of the file.
    let mut keys = BTreeMap::new();
    for _ in 0..num_keys {
        let key = reader.string("a key", MAX_NAME)?;
        let ty = reader.u32(&key)?;
        let value = reader.value(&key, ty, 0)?;
        if keys.insert(key.clone(), value).is_some() {
            return Err(reader.bad(format!("duplicate key {key:?}")));
        }
    }
    let alignment = alignment(&reader, &keys)?;
    let mut infos = Vec::new();
    for _ in 0..num_tensors {
        infos.push(reader.tensor()?);
    }
    let start = reader
        .at
        .checked_next_multiple_of(alignment)
        .ok_or_else(|| reader.bad("the header's end cannot be aligned".to_owned()))?;
    let mut tensors = BTreeMap::new();
    for info in infos {
        let (name, tensor) = info.place(&reader, start, alignment)?;
        if tensors.contains_key(&name) {
            return Err(reader.bad(format!("duplicate tensor {name:?}")));
        }
        tensors.insert(name, tensor);
    }
    check_overlaps(&reader, &tensors)?;
    Ok(Header { keys, tensors })
}

fn alignment(reader: &Reader<'_>, keys: &BTreeMap<String, Value>) -> Result<usize, GgufError> {
    match keys.get("general.alignment") {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(value) => value
            .as_usize()
            .filter(|&alignment| alignment.is_power_of_two() && (8..=MAX_ALIGNMENT).contains(&alignment))
            .ok_or_else(|| {
                let found = value.as_f64().map_or_else(|| "no number".to_owned(), |x| x.to_string());
                reader.bad(format!("general.alignment is {found}: must be a power of two from 8 to {MAX_ALIGNMENT}"))
            }),
    }
}

/// Fails if two tensors share bytes.
fn check_overlaps(reader: &Reader<'_>, tensors: &BTreeMap<String, GgufTensor>) -> Result<(), GgufError> {
    let mut ranges: Vec<_> =
        tensors.iter().filter(|(_, t)| !t.range.is_empty()).map(|(n, t)| (t.range.clone(), n)).collect();
    ranges.sort_by_key(|(range, _)| range.start);
    match ranges.windows(2).find(|pair| pair[1].0.start < pair[0].0.end) {
        Some(pair) => Err(reader.bad(format!("the tensors {:?} and {:?} overlap", pair[0].1, pair[1].1))),
        None => Ok(()),
    }
}

/// A tensor's entry in the header.
struct TensorInfo {
    name: String,
    /// Outermost first.
    shape: Vec<usize>,
    ty: GgmlType,
    offset: u64,
}

impl TensorInfo {
    /// Computes the range of the tensor's bytes. Fails unless all of it is in the file.
    fn place(self, reader: &Reader<'_>, start: usize, alignment: usize) -> Result<(String, GgufTensor), GgufError> {
        let Self { name, shape, ty, offset } = self;
        let row = shape.last().copied().unwrap_or(1);
        if !row.is_multiple_of(ty.block_len()) {
            let len = ty.block_len();
            return Err(reader.bad(format!(
                "tensor {name:?}: rows of {row} are not a multiple of {}'s block length, {len}",
                ty.name()
            )));
        }
        let blocks = shape.iter().try_fold(1_usize, |product, &dim| product.checked_mul(dim));
        let bytes = blocks.and_then(|elements| (elements / ty.block_len()).checked_mul(ty.block_bytes()));
        let offset = usize::try_from(offset).ok().filter(|offset| offset.is_multiple_of(alignment));
        let begin = offset.and_then(|offset| start.checked_add(offset));
        let end = begin.zip(bytes).and_then(|(begin, bytes)| begin.checked_add(bytes));
        match begin.zip(end) {
            None => Err(reader.bad(format!("tensor {name:?}: the size or offset is out of range: {shape:?}"))),
            Some((_, end)) if end > reader.bytes.len() => Err(reader.truncated(&format!("tensor {name:?}"))),
            Some((begin, end)) => Ok((name, GgufTensor { ty, shape, file: 0, range: begin..end })),
        }
    }
}

/// A cursor over the header.
struct Reader<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn bad(&self, reason: String) -> GgufError {
        GgufError::Header { path: self.path.to_owned(), reason }
    }

    fn truncated(&self, what: &str) -> GgufError {
        GgufError::Truncated { path: self.path.to_owned(), what: what.to_owned() }
    }

    fn read_bytes(&mut self, len: usize, what: &str) -> Result<&'a [u8], GgufError> {
        let end = self.at.checked_add(len).filter(|&end| end <= self.bytes.len());
        let end = end.ok_or_else(|| self.truncated(what))?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], GgufError> {
        let bytes = self.read_bytes(N, what)?;
        bytes.try_into().map_err(|_| self.truncated(what))
    }

    fn u32(&mut self, what: &str) -> Result<u32, GgufError> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, GgufError> {
        self.array(what).map(u64::from_le_bytes)
    }

    fn string(&mut self, what: &str, max: usize) -> Result<String, GgufError> {
        let len = self.u64(what)?;
        let len = usize::try_from(len).ok().filter(|&len| len <= max.min(self.bytes.len()));
        let len = len.ok_or_else(|| self.truncated(what))?;
        let bytes = self.read_bytes(len, what)?;
        let text = std::str::from_utf8(bytes).map_err(|_| self.bad(format!("{what} is not UTF-8")))?;
        Ok(text.to_owned())
    }

    /// Reads a value of the type with this number.
    fn value(&mut self, key: &str, ty: u32, depth: usize) -> Result<Value, GgufError> {
        match ty {
            8 => self.string(key, usize::MAX).map(Value::Text),
            9 => self.values(key, depth),
            _ => {
                let size = Numbers::size_of(ty);
                let size = size.ok_or_else(|| self.bad(format!("{key}: unknown value type {ty}")))?;
                let bytes = self.read_bytes(size, key)?;
                Numbers::new(ty, bytes).get(0).ok_or_else(|| self.bad(format!("{key}: a boolean must be 0 or 1")))
            }
        }
    }

    /// Reads an array. Its memory grows with the bytes that are read, not with the length that is announced.
    fn values(&mut self, key: &str, depth: usize) -> Result<Value, GgufError> {
        if depth == MAX_DEPTH {
            return Err(self.bad(format!("{key}: arrays are nested more than {MAX_DEPTH} deep")));
        }
        let (ty, len) = (self.u32(key)?, self.u64(key)?);
        // An element takes at least one byte of the file.
        let len = usize::try_from(len).ok().filter(|&len| len <= self.bytes.len() - self.at);
        let len = len.ok_or_else(|| self.truncated(key))?;
        match Numbers::size_of(ty) {
            Some(size) => {
                let bytes = len.checked_mul(size).ok_or_else(|| self.truncated(key))?;
                Ok(Value::Numbers(Numbers::new(ty, self.read_bytes(bytes, key)?)))
            }
            None if ty == 8 => {
                (0..len).map(|_| self.string(key, usize::MAX)).collect::<Result<_, _>>().map(Value::Texts)
            }
            None => (0..len).map(|_| self.value(key, ty, depth + 1)).collect::<Result<_, _>>().map(Value::Arrays),
        }
    }

    fn tensor(&mut self) -> Result<TensorInfo, GgufError> {
        let name = self.string("a tensor's name", MAX_NAME)?;
        let num_dims = self.u32(&name)?;
        if num_dims == 0 || num_dims > MAX_DIMS {
            return Err(self.bad(format!("tensor {name:?} has {num_dims} dims: must have 1 to {MAX_DIMS}")));
        }
        let mut shape = Vec::new();
        for _ in 0..num_dims {
            let dim = self.u64(&name)?;
            let dim =
                usize::try_from(dim).map_err(|_| self.bad(format!("tensor {name:?}: dim {dim} is out of range")))?;
            shape.insert(0, dim);
        }
        let number = self.u32(&name)?;
        let ty = GgmlType::from_number(number).ok_or_else(|| GgufError::UnsupportedType {
            path: self.path.to_owned(),
            tensor: name.clone(),
            number,
        })?;
        Ok(TensorInfo { offset: self.u64(&name)?, name, shape, ty })
    }
}
