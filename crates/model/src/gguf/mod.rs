//! GGUF, llama.cpp's format: one file, or several that are parts of one model, with configuration, tokenizer and weights.
//!
//! The reader treats the file as hostile, like that of safetensors: every number is checked before it is used, and nothing
//! is allocated beyond what the file's own size justifies. Tensors are lent from the mapped file and multiplied as they are:
//! f32, bf16, f16, and blocks of small integers, `Q4_0`, `Q4_1`, `Q5_0`, `Q5_1`, `Q8_0`, `Q2_K` to `Q6_K`, `IQ4_NL` and `MXFP4`.

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

/// What a header says about a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor {
    /// How its elements are stored.
    pub ty: GgmlType,
    /// Sizes of the dims, outermost first.
    pub shape: Vec<usize>,
    /// Which of the model's files it is in, from 0.
    pub file: usize,
    /// Where its bytes are, from the start of that file.
    pub range: Range<usize>,
}

/// A GGUF file, or all parts of a model in several, mapped, headers read and checked.
pub struct GgufFile {
    /// The file that was named.
    path: PathBuf,
    /// Each file with its bytes.
    files: Vec<(PathBuf, Bytes)>,
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
    /// Opens the file at `path`, and the others of its model if it is one of several parts, and checks their whole headers: see
    /// [`GgufError`] for what is refused.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let parts::Parts { files, header } = parts::Parts::open(path)?;
        let header::Header { keys, tensors } = header;
        Ok(Self { path: path.to_owned(), files, keys, tensors })
    }

    /// A file that is in memory, checked as [`open`](Self::open) does; `path` is what errors call it.
    pub fn of_bytes(path: &Path, data: Bytes) -> Result<Self, GgufError> {
        let header::Header { keys, tensors } = header::read(path, (*data).as_ref())?;
        Ok(Self { path: path.to_owned(), files: vec![(path.to_owned(), data)], keys, tensors })
    }

    /// The file that was named.
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

    /// Looks for numbers that are none in the tensors; if they have more than `most` bytes, not in routed experts.
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

    /// The bytes of a tensor of this file.
    fn bytes(&self, tensor: &GgufTensor) -> &[u8] {
        // The header's check has seen to it that the range is inside the file.
        &(*self.files[tensor.file].1).as_ref()[tensor.range.clone()]
    }

    /// The value of a key that must be there and of a kind.
    fn key<'a, T>(&'a self, key: &str, of: impl Fn(&'a Value) -> Option<T>, kind: &str) -> Result<T, GgufError> {
        self.optional(key, of, kind)?.ok_or_else(|| self.wrong_key(key, format!("is missing: must be {kind}")))
    }

    /// Returns the value of a key that must be of a kind if it is there.
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

/// Whether a tensor is a matrix of one expert, as files of Mixtral's first months name it: `blk.0.ffn_up.3.weight`.
fn is_one_expert(name: &str) -> bool {
    name.contains("ffn_")
        && name.trim_end_matches(".weight").rsplit('.').next().is_some_and(|end| end.parse::<u32>().is_ok())
}
