//! The safetensors format: a length, a JSON header that lists tensors, and their bytes.
//!
//! The reader is our own because files come from outside. Every number in the header is checked before it is used, no
//! more is allocated than the file's size justifies, and every kind of fault has an error that names file and tensor.
//! Tensors are borrowed from the mapped file where their type and alignment allow it.

mod error;
mod files;
mod header;
mod writer;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use moeworks_ops::{Context, MappedFile};
use moeworks_tensor::{Bytes, DType, Place, Tensor, bf16, f16};

pub use error::SafetensorsError;
pub use files::ModelFiles;
pub use writer::{Payload, TensorBytes, write, write_shards};

/// An element type that a file can name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // The names say it all.
pub enum FileDType {
    Bool,
    U8,
    I8,
    F8E4M3,
    F8E5M2,
    F8E8M0,
    U16,
    I16,
    F16,
    BF16,
    U32,
    I32,
    F32,
    U64,
    I64,
    F64,
    C64,
    F4,
    F6E2M3,
    F6E3M2,
}

/// Every type with its name and its size in bits.
const DTYPES: [(FileDType, &str, u64); 20] = [
    (FileDType::Bool, "BOOL", 8),
    (FileDType::U8, "U8", 8),
    (FileDType::I8, "I8", 8),
    (FileDType::F8E4M3, "F8_E4M3", 8),
    (FileDType::F8E5M2, "F8_E5M2", 8),
    (FileDType::F8E8M0, "F8_E8M0", 8),
    (FileDType::U16, "U16", 16),
    (FileDType::I16, "I16", 16),
    (FileDType::F16, "F16", 16),
    (FileDType::BF16, "BF16", 16),
    (FileDType::U32, "U32", 32),
    (FileDType::I32, "I32", 32),
    (FileDType::F32, "F32", 32),
    (FileDType::U64, "U64", 64),
    (FileDType::I64, "I64", 64),
    (FileDType::F64, "F64", 64),
    (FileDType::C64, "C64", 64),
    (FileDType::F4, "F4", 4),
    (FileDType::F6E2M3, "F6_E2M3", 6),
    (FileDType::F6E3M2, "F6_E3M2", 6),
];

impl FileDType {
    fn entry(self) -> (&'static str, u64) {
        DTYPES.iter().find(|entry| entry.0 == self).map_or(("", 0), |entry| (entry.1, entry.2))
    }

    /// Returns its name in headers.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.entry().0
    }

    fn parse(name: &str) -> Option<Self> {
        DTYPES.iter().find(|entry| entry.1 == name).map(|entry| entry.0)
    }

    pub(crate) fn bits(self) -> u64 {
        self.entry().1
    }

    /// Returns our type with the same elements, if there is one.
    fn own(self) -> Option<DType> {
        [DType::F32, DType::BF16, DType::F16, DType::U32].into_iter().find(|&dtype| Self::from(dtype) == self)
    }
}

impl From<DType> for FileDType {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Self::F32,
            DType::BF16 => Self::BF16,
            DType::F16 => Self::F16,
            DType::U32 => Self::U32,
            // The format has no blocks, so they are stored as bytes.
            _ => Self::U8,
        }
    }
}

impl fmt::Display for FileDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A tensor's entry in a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Element type.
    pub dtype: FileDType,
    /// Sizes of the dims, outermost first.
    pub shape: Vec<usize>,
    /// The range of its bytes in the file.
    pub range: Range<usize>,
}

/// A mapped safetensors file with a checked header.
pub struct SafetensorsFile {
    path: PathBuf,
    data: Bytes,
    tensors: BTreeMap<String, TensorInfo>,
    metadata: BTreeMap<String, String>,
}

impl SafetensorsFile {
    /// Opens the file at `path` and checks its whole header. See [`SafetensorsError`] for what is refused.
    pub fn open(path: &Path) -> Result<Self, SafetensorsError> {
        let map = MappedFile::open(path).map_err(|source| SafetensorsError::Io { path: path.to_owned(), source })?;
        Self::from_bytes(path, Arc::new(map))
    }

    /// Checks a file in memory like [`open`](Self::open); `path` is its name in errors.
    pub fn from_bytes(path: &Path, data: Bytes) -> Result<Self, SafetensorsError> {
        let (tensors, metadata) = header::read(path, (*data).as_ref())?;
        Ok(Self { path: path.to_owned(), data, tensors, metadata })
    }

    /// Returns the file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns every tensor by name.
    #[must_use]
    pub fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    /// Returns the file's free-text metadata.
    #[must_use]
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Returns the header's entry of the tensor `name`.
    pub fn info(&self, name: &str) -> Result<&TensorInfo, SafetensorsError> {
        self.tensors
            .get(name)
            .ok_or_else(|| SafetensorsError::Missing { path: self.path.clone(), tensor: name.to_owned() })
    }

    /// Returns the bytes of the tensor `name`.
    pub fn bytes(&self, name: &str) -> Result<&[u8], SafetensorsError> {
        let range = self.info(name)?.range.clone();
        // The header's check ensures that the range is in the file.
        Ok(&(*self.data).as_ref()[range])
    }

    /// Returns the tensor `name`: F32, BF16, F16 or U32, borrowed from the file if it is aligned there and copied
    /// otherwise. Fails on other types.
    pub fn tensor(&self, ctx: &Context, name: &str) -> Result<Tensor, SafetensorsError> {
        let info = self.info(name)?;
        let dtype = info.dtype.own().ok_or_else(|| self.unsupported(name, info.dtype))?;
        if let Some(tensor) = self.lent(name)? {
            return Ok(tensor);
        }
        let mut tensor = ctx.empty(&info.shape, dtype);
        let bytes = self.bytes(name)?;
        match dtype {
            DType::BF16 => decode_into(bytes, tensor.bf16s_mut(), bf16::from_le_bytes),
            DType::F16 => decode_into(bytes, tensor.slice_mut(), f16::from_le_bytes),
            DType::F32 => decode_into(bytes, tensor.f32s_mut(), f32::from_le_bytes),
            DType::U32 => decode_into(bytes, tensor.u32s_mut(), u32::from_le_bytes),
            _ => tensor.bytes_mut().copy_from_slice(bytes),
        }
        Ok(tensor)
    }

    /// Borrows the tensor `name` from the file, if we have its type and it is aligned.
    pub(crate) fn lent(&self, name: &str) -> Result<Option<Tensor>, SafetensorsError> {
        let info = self.info(name)?;
        let owner = self.data.clone();
        let dtype = info.dtype.own().filter(|_| cfg!(target_endian = "little"));
        Ok(dtype.and_then(|dtype| Tensor::from_foreign(owner, info.range.clone(), &info.shape, dtype)))
    }

    /// Borrows the bytes of `name` as blocks of `dtype`; none if their number is not that of this shape. Blocks are
    /// plain bytes, in the same order on every machine, and need no alignment.
    pub(crate) fn blocks(&self, name: &str, shape: &[usize], dtype: DType) -> Result<Option<Tensor>, SafetensorsError> {
        Ok(Tensor::from_foreign(self.data.clone(), self.info(name)?.range.clone(), shape, dtype))
    }

    /// Returns the place of consecutive rows of `step` bytes in the tensor `name`.
    pub(crate) fn lines(&self, name: &str, step: usize) -> Result<Place, SafetensorsError> {
        Ok(Place { owner: self.data.clone(), start: self.info(name)?.range.start, step, rows_each: 1 })
    }

    /// Reads the elements of `name` into `out` as f32. Panics unless `out` has their number.
    pub(crate) fn read_f32(&self, name: &str, out: &mut [f32]) -> Result<(), SafetensorsError> {
        let (info, bytes) = (self.info(name)?, self.bytes(name)?);
        match info.dtype {
            FileDType::F32 => decode_into(bytes, out, f32::from_le_bytes),
            FileDType::BF16 => decode_into(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
            FileDType::F16 => decode_into(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
            dtype => return Err(self.unsupported(name, dtype)),
        }
        Ok(())
    }

    /// Reads the elements of `name`, which must be BF16, into `out`. Panics unless `out` has their number.
    pub(crate) fn read_bf16(&self, name: &str, out: &mut [bf16]) -> Result<(), SafetensorsError> {
        self.read_halves(name, FileDType::BF16, out, bf16::from_le_bytes)
    }

    /// Reads the elements of `name`, which must be F16, into `out`. Panics unless `out` has their number.
    pub(crate) fn read_f16(&self, name: &str, out: &mut [f16]) -> Result<(), SafetensorsError> {
        self.read_halves(name, FileDType::F16, out, f16::from_le_bytes)
    }

    fn read_halves<T>(
        &self,
        name: &str,
        dtype: FileDType,
        out: &mut [T],
        decode: impl Fn([u8; 2]) -> T,
    ) -> Result<(), SafetensorsError> {
        let (info, bytes) = (self.info(name)?, self.bytes(name)?);
        if info.dtype != dtype {
            return Err(self.unsupported(name, info.dtype));
        }
        decode_into(bytes, out, decode);
        Ok(())
    }

    fn unsupported(&self, name: &str, dtype: FileDType) -> SafetensorsError {
        SafetensorsError::UnsupportedDType { path: self.path.clone(), tensor: name.to_owned(), dtype }
    }
}

/// Decodes little-endian elements of N bytes.
fn decode_into<const N: usize, T>(bytes: &[u8], out: &mut [T], decode: impl Fn([u8; N]) -> T) {
    let (elements, _) = bytes.as_chunks::<N>();
    assert_eq!(elements.len(), out.len(), "elements of a tensor");
    out.iter_mut().zip(elements).for_each(|(out, &element)| *out = decode(element));
}
