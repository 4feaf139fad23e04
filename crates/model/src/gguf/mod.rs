//! GGUF, llama.cpp's format: one file with configuration, tokenizer and weights.
//!
//! The reader treats the file as hostile, like that of safetensors: every number is checked before it is used, and nothing
//! is allocated beyond what the file's own size justifies. Tensors are lent from the mapped file and multiplied as they are:
//! f32, bf16, f16, and blocks of small integers, `Q4_0`, `Q4_1`, `Q5_0`, `Q5_1`, `Q8_0`, `Q2_K` to `Q6_K`, `IQ4_NL` and `MXFP4`.

mod adjust;
mod blocks;
mod config;
mod error;
mod header;
mod load;
mod tokenizer;
mod value;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use moeworks_ops::MappedFile;
use moeworks_tensor::Bytes;

pub use blocks::{GgmlType, block_types};
pub use error::GgufError;
pub use value::{Numbers, Value};

/// What a header says about a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor {
    /// How its elements are stored.
    pub ty: GgmlType,
    /// Sizes of the dims, outermost first.
    pub shape: Vec<usize>,
    /// Where its bytes are, from the start of the file.
    pub range: Range<usize>,
}

/// A GGUF file, mapped, its header read and checked.
pub struct GgufFile {
    path: PathBuf,
    data: Bytes,
    keys: BTreeMap<String, Value>,
    tensors: BTreeMap<String, GgufTensor>,
}

/// Whether the file at `path` begins as a GGUF file does.
#[must_use]
pub fn is_gguf(path: &Path) -> bool {
    let mut magic = [0; 4];
    path.is_file() && File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && &magic == b"GGUF"
}

impl GgufFile {
    /// Opens the file at `path` and checks its whole header: see [`GgufError`] for what is refused.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let map = MappedFile::open(path).map_err(|source| GgufError::Io { path: path.to_owned(), source })?;
        Self::of_bytes(path, Arc::new(map))
    }

    /// A file that is in memory, checked as [`open`](Self::open) does; `path` is what errors call it.
    pub fn of_bytes(path: &Path, data: Bytes) -> Result<Self, GgufError> {
        let header::Header { keys, tensors } = header::read(path, (*data).as_ref())?;
        Ok(Self { path: path.to_owned(), data, keys, tensors })
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Every key with its value.
    #[must_use]
    pub fn keys(&self) -> &BTreeMap<String, Value> {
        &self.keys
    }

    /// Every tensor by name.
    #[must_use]
    pub fn tensors(&self) -> &BTreeMap<String, GgufTensor> {
        &self.tensors
    }

    /// `general.architecture`.
    pub fn architecture(&self) -> Result<&str, GgufError> {
        self.key("general.architecture", Value::as_text, "text")
    }

    /// The chat template, if the file has one.
    #[must_use]
    pub fn chat_template(&self) -> Option<&str> {
        self.keys.get("tokenizer.chat_template").and_then(Value::as_text)
    }

    /// The bytes of a tensor of this file.
    fn bytes(&self, tensor: &GgufTensor) -> &[u8] {
        // The header's check has seen to it that the range is inside the file.
        &(*self.data).as_ref()[tensor.range.clone()]
    }

    /// The value of a key that must be there and of a kind.
    fn key<'a, T>(&'a self, key: &str, of: impl Fn(&'a Value) -> Option<T>, kind: &str) -> Result<T, GgufError> {
        self.optional(key, of, kind)?.ok_or_else(|| self.wrong_key(key, format!("is missing: must be {kind}")))
    }

    /// The value of a key that must be of a kind if it is there.
    pub(crate) fn optional<'a, T>(
        &'a self,
        key: &str,
        of: impl Fn(&'a Value) -> Option<T>,
        kind: &str,
    ) -> Result<Option<T>, GgufError> {
        let Some(value) = self.keys.get(key) else { return Ok(None) };
        of(value).map(Some).ok_or_else(|| self.wrong_key(key, format!("must be {kind}")))
    }

    pub(crate) fn wrong_key(&self, key: &str, reason: String) -> GgufError {
        GgufError::Key { path: self.path.clone(), key: key.to_owned(), reason }
    }
}
