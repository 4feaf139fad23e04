//! MXFP4 matrices (OCP Microscaling Formats 1.0), as GPT-OSS was published: `NAME_blocks` is U8 `[E, rows, blocks,
//! 16]` with two neighbouring values a byte, the first in its low half, and `NAME_scales` is U8 `[E, rows, blocks]`.
//! A block has 32 values.
//!
//! Products read values and scales [from the mapped file](Tensor::with_split_scales). A matrix whose gate and up rows
//! alternate is read as two matrices with twice the row stride.

use moeworks_ops::Context;
use moeworks_tensor::{BLOCK_LEN, DType, Mxfp4Block, Place, Tensor};
use serde_json::{Value, json};

use super::error::LoadError;
use super::names::{TensorSlice, View};
use super::slices::SliceReader;
use crate::safetensors::{FileDType, Payload, TensorBytes};
use crate::weights::part_shape;

/// `quant_method` in `config.json`.
pub(crate) const METHOD: &str = "mxfp4";

/// The size of a block's values in bytes.
const BYTES: usize = BLOCK_LEN / 2;

/// Returns the names of a matrix's two tensors, values and scales.
pub(super) fn names(name: &str) -> [String; 2] {
    [format!("{name}_blocks"), format!("{name}_scales")]
}

/// Returns the value of `quantization_config` of an MXFP4 folder: the one before, if it was of MXFP4.
pub(super) fn json(before: Option<&Value>) -> Value {
    let floats = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"];
    let known = before.filter(|before| before["quant_method"] == METHOD);
    known.cloned().unwrap_or_else(|| json!({ "quant_method": METHOD, "modules_to_not_convert": floats }))
}

/// Returns the shapes of a matrix's two tensors, values and scales.
fn shapes(shape: &[usize]) -> [Vec<usize>; 2] {
    let (cols, outer) = shape.split_last().unwrap_or((&0, &[]));
    let scales = [outer, &[cols / BLOCK_LEN]].concat();
    [[&*scales, &[BYTES]].concat(), scales]
}

/// Borrows a stack of MXFP4 matrices from the files, seen through `view`.
pub(super) fn read(
    ctx: &Context,
    reader: &SliceReader<'_>,
    slice: &TensorSlice,
    view: View,
) -> Result<Tensor, LoadError> {
    let places = places(reader, slice, view)?;
    let tensor = if view.is_interleaved {
        let all: Vec<usize> = (0..view.matrices).collect();
        pieces(ctx, &slice.shape, view, &places, &all)
    } else {
        Tensor::with_split_scales(ctx.pool(), &slice.shape, DType::Mxfp4, places)
    };
    Ok(tensor.expect("tensors whose shapes have been checked"))
}

/// Borrows some matrices of such a stack; see [`read`].
pub(super) fn read_experts(
    ctx: &Context,
    reader: &SliceReader<'_>,
    slice: &TensorSlice,
    view: View,
    experts: &[usize],
) -> Result<Tensor, LoadError> {
    let places = places(reader, slice, view)?;
    let tensor = pieces(ctx, &part_shape(&slice.shape, experts), view, &places, experts);
    Ok(tensor.expect("tensors whose shapes have been checked"))
}

/// Returns the places of values and scales in the files.
fn places(reader: &SliceReader<'_>, slice: &TensorSlice, view: View) -> Result<[Place; 2], LoadError> {
    let names = names(&slice.name);
    for (name, shape) in names.iter().zip(shapes(&slice.shape)) {
        reader.check_one(name, &shape, &[FileDType::U8])?;
    }
    if !view.cols.is_multiple_of(BLOCK_LEN) {
        let path = reader.files.get(&names[0])?.0.path().to_owned();
        let [tensor, _] = names;
        return Err(LoadError::PartOfBlock { path, tensor, cols: view.cols });
    }
    let steps = [view.cols / 2, view.cols / BLOCK_LEN];
    let lines =
        |which: usize| Ok::<_, LoadError>(reader.files.get(&names[which])?.0.lines(&names[which], steps[which])?);
    Ok([lines(0)?, lines(1)?])
}

/// Borrows matrices of a stack one by one. One whose gate and up rows alternate becomes two pieces.
fn pieces(ctx: &Context, shape: &[usize], view: View, places: &[Place; 2], matrices: &[usize]) -> Option<Tensor> {
    let num_parts = if view.is_interleaved { 2 } else { 1 };
    let piece = |first_row: usize| {
        let rows_from = |place: &Place| {
            let start = place.start + first_row * place.step;
            Place { owner: place.owner.clone(), start, step: num_parts * place.step, ..*place }
        };
        let shape = [view.rows / num_parts, view.cols];
        Tensor::with_split_scales(ctx.pool(), &shape, DType::Mxfp4, [&places[0], &places[1]].map(rows_from))
    };
    let first_rows = matrices.iter().flat_map(|matrix| (0..num_parts).map(move |part| matrix * view.rows + part));
    let pieces: Option<Vec<Tensor>> = first_rows.map(piece).collect();
    Tensor::of_pieces(ctx.pool(), pieces?, shape)
}

/// Returns a stack of matrices as the two tensors that they are on disk, values and scales.
pub(super) fn on_disk<'a>(tensor: &'a Tensor, slice: &TensorSlice, view: View) -> [TensorBytes<'a>; 2] {
    let [blocks, scales] = names(&slice.name);
    let [blocks_shape, scales_shape] = shapes(&slice.shape);
    [
        tensor_bytes(blocks, blocks_shape, move || laid_out(tensor, view, 0)),
        tensor_bytes(scales, scales_shape, move || laid_out(tensor, view, 1)),
    ]
}

fn tensor_bytes<'a>(name: String, shape: Vec<usize>, make: impl Fn() -> Vec<u8> + 'a) -> TensorBytes<'a> {
    let bytes = Payload::Made { len: shape.iter().product(), make: Box::new(move || Ok(make())) };
    TensorBytes { name, dtype: FileDType::U8, shape, bytes }
}

/// Returns the values (`which` is 0) or the scales (`which` is 1) in the file's order.
fn laid_out(tensor: &Tensor, view: View, which: usize) -> Vec<u8> {
    let blocks_per_row = view.cols / BLOCK_LEN;
    let row_bytes = blocks_per_row * [BYTES, 1][which];
    let mut bytes = vec![0; view.matrices * view.rows * row_bytes];
    let rows = tensor.parts().iter().flat_map(|part| (0..part.rows()).map(move |row| (part, row)));
    for (index, (part, row)) in rows.enumerate() {
        let there = index / view.rows * view.rows + view.row_there(index % view.rows);
        let to = &mut bytes[there * row_bytes..][..row_bytes];
        if let Some(lines) = part.lines() {
            to.copy_from_slice(lines[which].row(row));
            continue;
        }
        let blocks = &part.slice::<Mxfp4Block>()[row * blocks_per_row..][..blocks_per_row];
        for (to, block) in to.chunks_exact_mut([BYTES, 1][which]).zip(blocks) {
            let (values, scale) = block.parted();
            to.copy_from_slice(if which == 0 { &values } else { std::slice::from_ref(&scale) });
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeMap;

    use super::*;
    use crate::safetensors::{ModelFiles, write_shards};

    #[test]
    fn rows_that_end_inside_of_a_block_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let zeros = |name: &str, shape: Vec<usize>| {
            let len = shape.iter().product();
            tensor_bytes(name.to_owned(), shape, move || vec![0; len])
        };
        let shape = [1, 2, 33];
        let [blocks, scales] = shapes(&shape);
        let tensors = [zeros("a_blocks", blocks), zeros("a_scales", scales)];
        write_shards(dir.path(), &tensors, &BTreeMap::new(), usize::MAX).unwrap();
        let files = &ModelFiles::open(dir.path()).unwrap();
        let reader = SliceReader { files, used: RefCell::default() };
        let view = View { matrices: 1, rows: 2, cols: 33, start: 0, strides: [66, 33, 1], is_interleaved: false };
        let slice = TensorSlice { name: "a".to_owned(), shape: shape.to_vec(), view: Some(view), is_mxfp4: true };
        let error = read(&Context::cpu(1), &reader, &slice, view).unwrap_err();
        assert!(matches!(error, LoadError::PartOfBlock { cols: 33, .. }), "{error}");
    }
}
