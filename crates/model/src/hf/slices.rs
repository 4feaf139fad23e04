//! Reading slices of tensors: as they are, through strides, or dequantized from FP8.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::PathBuf;

use moeworks_ops::Context;
use moeworks_tensor::{DType, Element, Tensor, bf16, f16};

use super::error::LoadError;
use super::fp8;
use super::mxfp4;
use super::names::TensorSlice;
use crate::safetensors::{FileDType, ModelFiles, SafetensorsError, SafetensorsFile};

/// An element type that slices are read into.
pub(super) trait ReadElement: Element {
    fn read(file: &SafetensorsFile, name: &str, out: &mut [Self]) -> Result<(), SafetensorsError>;
    fn rounded(x: f32) -> Self;
}

impl ReadElement for f32 {
    fn read(file: &SafetensorsFile, name: &str, out: &mut [Self]) -> Result<(), SafetensorsError> {
        file.read_f32(name, out)
    }

    fn rounded(x: f32) -> Self {
        x
    }
}

impl ReadElement for bf16 {
    fn read(file: &SafetensorsFile, name: &str, out: &mut [Self]) -> Result<(), SafetensorsError> {
        file.read_bf16(name, out)
    }

    fn rounded(x: f32) -> Self {
        Self::from_f32(x)
    }
}

impl ReadElement for f16 {
    fn read(file: &SafetensorsFile, name: &str, out: &mut [Self]) -> Result<(), SafetensorsError> {
        file.read_f16(name, out)
    }

    fn rounded(x: f32) -> Self {
        Self::from_f32(x)
    }
}

/// Reads slices from a folder's files, and records which tensors were used.
pub(super) struct SliceReader<'a> {
    pub(super) files: &'a ModelFiles,
    pub(super) used: RefCell<BTreeSet<String>>,
}

impl SliceReader<'_> {
    /// Returns true if the slice's tensor is in the files.
    pub(super) fn has(&self, slice: &TensorSlice) -> bool {
        let [blocks, _] = mxfp4::names(&slice.name);
        self.files.find(if slice.is_mxfp4 { &blocks } else { &slice.name }).is_some()
    }

    /// Returns the type that a slice is read as. Fails if it is missing, or has another shape or a type that weights
    /// cannot have.
    pub(super) fn check(&self, slice: &TensorSlice) -> Result<DType, LoadError> {
        let known = [FileDType::F32, FileDType::BF16, FileDType::F16, FileDType::F8E4M3];
        match self.check_one(&slice.name, &slice.shape, &known)? {
            FileDType::BF16 => Ok(DType::BF16),
            FileDType::F16 => Ok(DType::F16),
            FileDType::F8E4M3 => {
                fp8::check_scales(self, slice)?;
                Ok(DType::BF16)
            }
            _ => Ok(DType::F32),
        }
    }

    /// Returns the type of the tensor `name`. Fails if it is missing, or has another shape or a type that is not in
    /// `known`.
    pub(super) fn check_one(&self, name: &str, shape: &[usize], known: &[FileDType]) -> Result<FileDType, LoadError> {
        let (file, info) = self.files.get(name)?;
        let (path, tensor): (PathBuf, String) = (file.path().to_owned(), name.to_owned());
        if info.shape != shape {
            let (found, expected) = (info.shape.clone(), shape.to_vec());
            return Err(LoadError::WrongShape { path, tensor, found, expected });
        }
        if !known.contains(&info.dtype) {
            return Err(SafetensorsError::UnsupportedDType { path, tensor, dtype: info.dtype }.into());
        }
        self.used.borrow_mut().insert(tensor);
        Ok(info.dtype)
    }

    /// Borrows the tensor from the file, if its type is one that products compute with.
    pub(super) fn lent(&self, ctx: &Context, name: &str) -> Result<Option<Tensor>, LoadError> {
        let (file, info) = self.files.get(name)?;
        let is_ours = matches!(info.dtype, FileDType::F32 | FileDType::BF16 | FileDType::F16);
        Ok(if is_ours { Some(file.tensor(ctx, name)?) } else { None })
    }

    /// Borrows the tensors of checked slices from the files, without a copy; none if one of them has to be converted
    /// or rearranged. FP8 is borrowed only if `may_be_blocks`.
    pub(super) fn all_lent(
        &self,
        ctx: &Context,
        slices: &[TensorSlice],
        may_be_blocks: bool,
    ) -> Result<Option<Vec<Tensor>>, LoadError> {
        let mut tensors = Vec::with_capacity(slices.len());
        for slice in slices {
            if slice.view.is_some() {
                return Ok(None);
            }
            let (file, info) = self.files.get(&slice.name)?;
            let lent = match info.dtype {
                FileDType::F8E4M3 if may_be_blocks => fp8::lent(ctx, self, slice)?,
                _ => file.lent(&slice.name)?,
            };
            match lent {
                Some(tensor) => tensors.push(tensor),
                None => return Ok(None),
            }
        }
        Ok(Some(tensors))
    }

    /// Borrows the tensor `name` in blocks of `dtype`, whose shape on disk is `on_disk`; none if it is not in the
    /// files.
    pub(super) fn blocks(
        &self,
        name: &str,
        on_disk: &[usize],
        shape: &[usize],
        dtype: DType,
    ) -> Result<Option<Tensor>, LoadError> {
        if self.files.find(name).is_none() {
            return Ok(None);
        }
        self.check_one(name, on_disk, &[FileDType::U8])?;
        Ok(self.files.get(name)?.0.blocks(name, shape, dtype)?)
    }

    /// Reads the elements of a checked slice into `out`.
    pub(super) fn read<T: ReadElement>(&self, slice: &TensorSlice, out: &mut [T]) -> Result<(), LoadError> {
        let Some(view) = &slice.view else { return self.read_whole(slice, out) };
        let mut values = vec![T::rounded(0.0); out.len().max(slice.shape.iter().product())];
        let values = &mut values[..slice.shape.iter().product()];
        self.read_whole(slice, values)?;
        view.for_each(|ours, theirs| out[ours] = values[theirs]);
        Ok(())
    }

    fn read_whole<T: ReadElement>(&self, slice: &TensorSlice, out: &mut [T]) -> Result<(), LoadError> {
        let (file, info) = self.files.get(&slice.name)?;
        if info.dtype == FileDType::F8E4M3 {
            return fp8::read(self, slice, out);
        }
        Ok(T::read(file, &slice.name, out)?)
    }
}
