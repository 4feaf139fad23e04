//! Matrices in blocks of 32 four-bit floats (OCP Microscaling Formats 1.0), as GPT-OSS was published: `NAME_blocks` U8
//! `[E, rows, blocks, 16]` with two neighbours a byte, the first in its low half, and `NAME_scales` U8 `[E, rows, blocks]`.
//!
//! Products take such blocks as GGUF files have them ([`Mxfp4Block`]): the scale in front, the first 16 values in the low halves.
//! So the bytes are put into that order once when a folder is loaded, and back when it is saved. That copy has the size that the
//! file has, 4.25 bits a weight.

use moeworks_ops::Context;
use moeworks_tensor::{BLOCK_LEN, DType, Mxfp4Block, Tensor};
use serde_json::{Value, json};

use super::error::LoadError;
use super::names::{Piece, View};
use super::pieces::PieceReader;
use crate::safetensors::{FileDType, Payload, TensorBytes};

/// `quant_method` in `config.json`.
pub(crate) const METHOD: &str = "mxfp4";

/// The bytes of a block's values.
const BYTES: usize = BLOCK_LEN / 2;

/// The two tensors of a matrix.
pub(super) fn names(name: &str) -> [String; 2] {
    [format!("{name}_blocks"), format!("{name}_scales")]
}

/// What `config.json` says about a folder of such matrices; what it said before, if it was one.
pub(super) fn json(before: Option<&Value>) -> Value {
    let floats = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"];
    let known = before.filter(|before| before["quant_method"] == METHOD);
    known.cloned().unwrap_or_else(|| json!({ "quant_method": METHOD, "modules_to_not_convert": floats }))
}

/// The shapes of the two tensors.
fn shapes(shape: &[usize]) -> [Vec<usize>; 2] {
    let (cols, outer) = shape.split_last().unwrap_or((&0, &[]));
    let scales = [outer, &[cols / BLOCK_LEN]].concat();
    [[&*scales, &[BYTES]].concat(), scales]
}

/// Reads the stack of matrices of a piece in this form.
pub(super) fn read(
    ctx: &Context,
    reader: &PieceReader<'_>,
    (piece, view): (&Piece, View),
) -> Result<Tensor, LoadError> {
    let names = names(&piece.name);
    for (name, shape) in names.iter().zip(shapes(&piece.shape)) {
        reader.check_one(name, &shape, &[FileDType::U8])?;
    }
    let bytes = |name: &str| -> Result<&[u8], LoadError> { Ok(reader.files.get(name)?.0.bytes(name)?) };
    let (blocks, scales) = (bytes(&names[0])?.as_chunks::<BYTES>().0, bytes(&names[1])?);
    if !view.cols.is_multiple_of(BLOCK_LEN) {
        let path = reader.files.get(&names[0])?.0.path().to_owned();
        let [tensor, _] = names;
        return Err(LoadError::PartOfBlock { path, tensor, cols: view.cols });
    }
    let mut tensor = ctx.empty(&piece.shape, DType::Mxfp4);
    let blocks_per_row = view.cols / BLOCK_LEN;
    ctx.threads().run_pieces(tensor.slice_mut::<Mxfp4Block>(), view.rows * blocks_per_row, |matrix, to| {
        for (row, to) in to.chunks_exact_mut(blocks_per_row).enumerate() {
            let from = (matrix * view.rows + view.row_there(row)) * blocks_per_row;
            to.iter_mut().zip(from..).for_each(|(to, from)| *to = joined(scales[from], &blocks[from]));
        }
    });
    Ok(tensor)
}

/// A stack of matrices as the two tensors that they are on disk.
pub(super) fn on_disk<'a>(tensor: &'a Tensor, piece: &Piece, view: View) -> [TensorBytes<'a>; 2] {
    let [blocks, scales] = names(&piece.name);
    let [blocks_shape, scales_shape] = shapes(&piece.shape);
    [
        tensor_bytes(blocks, blocks_shape, move || laid_out(tensor, view, values)),
        tensor_bytes(scales, scales_shape, move || laid_out(tensor, view, |block| [block.bytes()[0]])),
    ]
}

fn tensor_bytes<'a>(name: String, shape: Vec<usize>, make: impl Fn() -> Vec<u8> + 'a) -> TensorBytes<'a> {
    let bytes = Payload::Made { len: shape.iter().product(), make: Box::new(move || Ok(make())) };
    TensorBytes { name, dtype: FileDType::U8, shape, bytes }
}

/// Bytes of each block, in the order of the file.
fn laid_out<const N: usize>(tensor: &Tensor, view: View, of: impl Fn(&Mxfp4Block) -> [u8; N]) -> Vec<u8> {
    let blocks_per_row = view.cols / BLOCK_LEN;
    let mut bytes = vec![[0; N]; view.matrices * view.rows * blocks_per_row];
    let rows = tensor.parts().iter().flat_map(|part| part.slice::<Mxfp4Block>().chunks_exact(blocks_per_row));
    for (row, blocks) in rows.enumerate() {
        let there = row / view.rows * view.rows + view.row_there(row % view.rows);
        let to = &mut bytes[there * blocks_per_row..][..blocks_per_row];
        to.iter_mut().zip(blocks).for_each(|(to, block)| *to = of(block));
    }
    bytes.into_flattened()
}

/// A block from its scale and from its values as neighbours.
fn joined(scale: u8, values: &[u8; BYTES]) -> Mxfp4Block {
    let value = |i: usize| values[i / 2] >> (4 * (i % 2)) & 15;
    let mut block = [scale; 1 + BYTES];
    for (i, to) in block[1..].iter_mut().enumerate() {
        *to = value(i) | value(i + BYTES) << 4;
    }
    Mxfp4Block([block])
}

/// A block's values as neighbours.
fn values(block: &Mxfp4Block) -> [u8; BYTES] {
    let value = |i: usize| block.bytes()[1 + i % BYTES] >> (4 * (i / BYTES)) & 15;
    std::array::from_fn(|i| value(2 * i) | value(2 * i + 1) << 4)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeMap;

    use moeworks_ops::quantized::decode;

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
        let reader = PieceReader { files, used: RefCell::default() };
        let view = View { matrices: 1, rows: 2, cols: 33, start: 0, strides: [66, 33, 1], is_interleaved: false };
        let piece = Piece { name: "a".to_owned(), shape: shape.to_vec(), view: Some(view), is_mxfp4: true };
        let error = read(&Context::cpu(1), &reader, (&piece, view)).unwrap_err();
        assert!(matches!(error, LoadError::PartOfBlock { cols: 33, .. }), "{error}");
    }

    #[test]
    fn values_come_low_half_first_times_their_block_s_power_of_two_and_go_back_as_they_were() {
        let mut bytes = [0; BYTES];
        (bytes[0], bytes[8], bytes[15]) = (0x7a, 0x01, 0x90);
        let block = joined(128, &bytes);
        let mut numbers = [9.0; BLOCK_LEN];
        decode(DType::Mxfp4, block.bytes(), &mut numbers);
        assert_eq!((numbers[0], numbers[1], numbers[2]), (-2.0, 12.0, 0.0));
        assert_eq!((numbers[16], numbers[17], numbers[31]), (1.0, 0.0, -1.0));
        assert_eq!(values(&block), bytes);
    }
}
