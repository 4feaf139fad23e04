//! FP8 matrices with one scale per 128 x 128 block, as DeepSeek-V3 was published: `NAME` is F8_E4M3 `[rows, cols]`,
//! and `NAME_scale_inv` is `[rows / 128, cols / 128]`, both rounded up. Despite its name, the scale is a factor of
//! the values.

use std::iter::StepBy;
use std::ops::Range;
use std::sync::Arc;

use moeworks_ops::Context;
use moeworks_tensor::{Bytes, DType, F8_BLOCK_LEN, F8Block, Place, Tensor, f8_value};
use serde_json::{Value, json};

use super::error::LoadError;
use super::names::TensorSlice;
use super::slices::{ReadElement, SliceReader};
use crate::safetensors::{FileDType, Payload, TensorBytes};

/// `quant_method` in `config.json`.
pub(crate) const METHOD: &str = "fp8";

/// Returns the name of the tensor with a matrix's scales.
pub(super) fn scales_name(name: &str) -> String {
    format!("{name}_scale_inv")
}

/// Returns the value of `quantization_config` of an FP8 folder: the one before, if it was of FP8, with the modules in
/// `floats`, which are not quantized.
pub(super) fn json(before: Option<&Value>, floats: &[String]) -> Value {
    let known = before.filter(|before| before["quant_method"] == METHOD);
    let mut json = known.cloned().unwrap_or_else(|| {
        json!({ "quant_method": METHOD, "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [F8_BLOCK_LEN, F8_BLOCK_LEN] })
    });
    if !floats.is_empty() {
        json["modules_to_not_convert"] = json!(floats);
    }
    json
}

/// Fails if the scales of a slice are missing or have another shape or type.
pub(super) fn check_scales(reader: &SliceReader<'_>, slice: &TensorSlice) -> Result<(), LoadError> {
    let known = [FileDType::F32, FileDType::BF16];
    reader.check_one(&scales_name(&slice.name), &scales_shape(&slice.shape), &known)?;
    Ok(())
}

fn scales_shape(shape: &[usize]) -> Vec<usize> {
    shape.iter().map(|dim| dim.div_ceil(F8_BLOCK_LEN)).collect()
}

/// Reads the scales of a checked slice.
fn scales(reader: &SliceReader<'_>, slice: &TensorSlice) -> Result<Vec<f32>, LoadError> {
    let name = scales_name(&slice.name);
    let (file, info) = reader.files.get(&name)?;
    let mut scales = vec![0.0_f32; info.shape.iter().product()];
    file.read_f32(&name, &mut scales)?;
    Ok(scales)
}

/// Returns a checked slice with its values mapped from the file and its scales in memory; none if its row length is
/// not a multiple of 128.
pub(super) fn lent(ctx: &Context, reader: &SliceReader<'_>, slice: &TensorSlice) -> Result<Option<Tensor>, LoadError> {
    let [_, cols] = *slice.shape else { return Ok(None) };
    if !cols.is_multiple_of(F8_BLOCK_LEN) {
        return Ok(None);
    }
    let scales: Vec<u8> = scales(reader, slice)?.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let owner: Bytes = Arc::new(scales);
    let scales = Place { owner, start: 0, step: cols / F8_BLOCK_LEN * 4, rows_each: F8_BLOCK_LEN };
    let numbers = reader.files.get(&slice.name)?.0.lines(&slice.name, cols)?;
    Ok(Tensor::with_split_scales(ctx.pool(), &slice.shape, DType::F8, [numbers, scales]))
}

/// Dequantizes a checked slice into `out`.
pub(super) fn read<T: ReadElement>(
    reader: &SliceReader<'_>,
    slice: &TensorSlice,
    out: &mut [T],
) -> Result<(), LoadError> {
    let bytes = reader.files.get(&slice.name)?.0.bytes(&slice.name)?;
    let scales = scales(reader, slice)?;
    let cols = slice.shape.last().copied().unwrap_or(1).max(1);
    let blocks_per_row = cols.div_ceil(F8_BLOCK_LEN);
    for (row, (out, bytes)) in out.chunks_exact_mut(cols).zip(bytes.chunks_exact(cols)).enumerate() {
        let scales = &scales[row / F8_BLOCK_LEN * blocks_per_row..];
        for (col, (out, &byte)) in out.iter_mut().zip(bytes).enumerate() {
            *out = T::rounded(f8_value(byte) * scales[col / F8_BLOCK_LEN]);
        }
    }
    Ok(())
}

/// Some rows of a matrix.
pub(super) struct MatrixRows<'a> {
    pub(super) matrix: &'a Tensor,
    pub(super) rows: Range<usize>,
}

/// Returns some rows of one of our matrices as the two tensors that they are on disk: values and scales.
pub(super) fn on_disk<'a>(part: MatrixRows<'a>, slice: &TensorSlice) -> [TensorBytes<'a>; 2] {
    let MatrixRows { matrix, rows } = part;
    let scales = scales_shape(&slice.shape);
    let made = |len: usize, rows: StepBy<Range<usize>>, which: usize| Payload::Made {
        len,
        make: Box::new(move || Ok(row_bytes(matrix, rows.clone(), which))),
    };
    [
        TensorBytes {
            name: slice.name.clone(),
            dtype: FileDType::F8E4M3,
            shape: slice.shape.clone(),
            bytes: made(slice.shape.iter().product(), rows.clone().step_by(1), 0),
        },
        TensorBytes {
            name: scales_name(&slice.name),
            dtype: FileDType::F32,
            bytes: made(4 * scales.iter().product::<usize>(), rows.step_by(F8_BLOCK_LEN), 1),
            shape: scales,
        },
    ]
}

/// Returns the values (`which` is 0) or the scales (`which` is 1) of some rows, concatenated.
fn row_bytes(matrix: &Tensor, rows: impl Iterator<Item = usize>, which: usize) -> Vec<u8> {
    let blocks = |row: usize| {
        let blocks_per_row = matrix.cols() / F8_BLOCK_LEN;
        &matrix.slice::<F8Block>()[row * blocks_per_row..][..blocks_per_row]
    };
    rows.flat_map(|row| match matrix.lines() {
        Some(lines) => lines[which].row(row).to_vec(),
        None if which == 0 => blocks(row).iter().flat_map(|block| block.values.as_flattened()).copied().collect(),
        None => blocks(row).iter().flat_map(|block| block.scale).collect(),
    })
    .collect()
}
