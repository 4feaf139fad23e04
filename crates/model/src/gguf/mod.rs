//! GGUF, llama.cpp's format: one file, or several parts of one model, with configuration, tokenizer and weights.
//!
//! The reader treats the file as hostile: every number is checked before it is used, and no more is allocated than
//! the file's size justifies. Products read tensors from the mapped file as they are: f32, bf16, f16, and blocks of
//! small integers (`Q4_0`, `Q4_1`, `Q5_0`, `Q5_1`, `Q8_0`, `Q2_K` to `Q6_K`, `IQ4_NL` and `MXFP4`).

mod adjust;
mod blocks;
mod config;
mod error;
mod header;
mod key_table;
mod load;
mod parts;
mod tokenizer;
mod value;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

use moeworks_ops::Context;
use moeworks_tensor::Bytes;

pub use blocks::{GgmlType, block_types};
pub use error::GgufError;
pub(crate) use key_table::{architectures_of, keys_page};
pub(crate) use parts::PartName;
pub use value::{Numbers, Value};

use crate::scan::{Region, WeightCheck, scan, stored_as};

/// A tensor's entry in a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor {
    /// The storage type of its elements.
    pub ty: GgmlType,
    /// Sizes of the dims, outermost first.
    pub shape: Vec<usize>,
    /// The index of its file among the model's.
    pub file: usize,
    /// The range of its bytes in that file.
    pub range: Range<usize>,
}

/// A mapped GGUF file, or all parts of a model, with checked headers.
pub struct GgufFile {
    /// The file that was opened.
    path: PathBuf,
    /// The path and the bytes of each file.
    files: Vec<(PathBuf, Bytes)>,
    keys: BTreeMap<String, Value>,
    tensors: BTreeMap<String, GgufTensor>,
}

/// Returns true if the file at `path` begins like a GGUF file.
#[must_use]
pub fn is_gguf(path: &Path) -> bool {
    let mut magic = [0; 4];
    path.is_file() && File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && &magic == b"GGUF"
}

impl GgufFile {
    /// Opens the file at `path`, and the other parts of its model if it is one of several, and checks their headers.
    /// See [`GgufError`] for what is refused.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let parts::Parts { files, header } = parts::Parts::open(path)?;
        let header::Header { keys, tensors } = header;
        Ok(Self { path: path.to_owned(), files, keys, tensors })
    }

    /// Checks a file in memory like [`open`](Self::open); `path` is its name in errors.
    pub fn from_bytes(path: &Path, data: Bytes) -> Result<Self, GgufError> {
        let header::Header { keys, tensors } = header::read(path, (*data).as_ref())?;
        Ok(Self { path: path.to_owned(), files: vec![(path.to_owned(), data)], keys, tensors })
    }

    /// Returns the file that was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns every key with its value.
    #[must_use]
    pub fn keys(&self) -> &BTreeMap<String, Value> {
        &self.keys
    }

    /// Returns every tensor by name.
    #[must_use]
    pub fn tensors(&self) -> &BTreeMap<String, GgufTensor> {
        &self.tensors
    }

    /// Returns the value of `general.architecture`.
    pub fn architecture(&self) -> Result<&str, GgufError> {
        self.key("general.architecture", Value::as_text, "text")
    }

    /// Returns the chat template, if the file has one.
    #[must_use]
    pub fn chat_template(&self) -> Option<&str> {
        self.keys.get("tokenizer.chat_template").and_then(Value::as_text)
    }

    /// Scans the tensors for NaN and infinity. If they have more than `most` bytes, routed experts are left out.
    #[must_use]
    pub fn check_weights(&self, ctx: &Context, most: u64) -> WeightCheck {
        let region = |(name, tensor): (&String, &GgufTensor)| {
            let stored = stored_as(tensor.ty.own())?;
            let is_of_experts = name.contains("_exps.") || is_one_expert(name);
            let (name, shape) = (name.clone(), tensor.shape.clone());
            Some(Region { name, shape, stored, bytes: self.bytes(tensor), is_of_experts })
        };
        scan(ctx, &self.tensors.iter().filter_map(region).collect::<Vec<_>>(), most)
    }

    /// Returns the bytes of a tensor.
    fn bytes(&self, tensor: &GgufTensor) -> &[u8] {
        // The header's check ensures that the range is in the file.
        &(*self.files[tensor.file].1).as_ref()[tensor.range.clone()]
    }

    /// Returns the value of a required key, of the kind that `of` accepts.
    fn key<'a, T>(&'a self, key: &str, of: impl Fn(&'a Value) -> Option<T>, kind: &str) -> Result<T, GgufError> {
        self.optional(key, of, kind)?.ok_or_else(|| self.wrong_key(key, format!("is missing: must be {kind}")))
    }

    /// Returns the value of an optional key, which must be of the kind that `of` accepts.
    pub fn optional<'a, T>(
        &'a self,
        key: &str,
        of: impl Fn(&'a Value) -> Option<T>,
        kind: &str,
    ) -> Result<Option<T>, GgufError> {
        let Some(value) = self.keys.get(key) else { return Ok(None) };
        of(value).map(Some).ok_or_else(|| self.wrong_key(key, format!("must be {kind}")))
    }

    /// Returns the error of a key whose value is wrong.
    #[must_use]
    pub fn wrong_key(&self, key: &str, reason: String) -> GgufError {
        GgufError::Key { path: self.path.clone(), key: key.to_owned(), reason }
    }
}

/// Returns true if a tensor is the matrix of one expert, as files of Mixtral's first months have them:
/// `blk.0.ffn_up.3.weight`.
fn is_one_expert(name: &str) -> bool {
    name.contains("ffn_")
        && name.trim_end_matches(".weight").rsplit('.').next().is_some_and(|end| end.parse::<u32>().is_ok())
}
