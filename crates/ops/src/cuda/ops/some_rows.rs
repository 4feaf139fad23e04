//! Products of up to some rows with weights as they lie: which types have kernels, and what these need.

use moeworks_tensor::{DType, Tensor};

use super::{On, WARPS, elementwise};
use crate::cuda::Source;
use crate::cuda::sources::{
    SOME_ROWS_BF16, SOME_ROWS_F8, SOME_ROWS_IQ4_NL, SOME_ROWS_MXFP4, SOME_ROWS_Q2K, SOME_ROWS_Q3K, SOME_ROWS_Q4,
    SOME_ROWS_Q4_1, SOME_ROWS_Q4K, SOME_ROWS_Q5_0, SOME_ROWS_Q5_1, SOME_ROWS_Q5K, SOME_ROWS_Q6K, SOME_ROWS_Q8,
};

/// Rows that are taken at once.
pub(super) const ROWS: usize = 32;
/// Lines of weights that a warp copies at a time, a tile; tiles of a block, and of one of those that are many.
pub(super) const LINES: usize = 16;
pub(super) const TILES: usize = 2;
pub(super) const MOST_TILES: usize = 8;
/// Blocks of most tiles that are enough to keep all multiprocessors busy, and the depth up to which so many tiles are worth having: blocks
/// that are at work for longer are shared out better if they are small.
pub(super) const MANY_BLOCKS: usize = 256;
pub(super) const SHORT_DEPTH: usize = 2048;
/// Chunks of them that it has room for, and elements that a depth is whole multiples of.
const STAGES: usize = 2;
const WHOLE_DEPTH: usize = 32;
/// Bytes of activations that a block has in shared memory at a time, where two blocks of a multiprocessor have room for so many and
/// elsewhere; and bytes of a block besides. Kernels take what they are given, whole chunks of the depth: the fewer are one chunk of 32 rows.
const STAGED_BYTES: [usize; 2] = [32 << 10, 16 << 10];
const OTHER_BYTES: usize = 2 << 10;
/// Rows that have room where they are normed.
const NORMED_ROWS: usize = 8;

/// The kernels for weights of a type, and what they are called behind what they do.
fn of_type(dtype: DType) -> Option<(&'static Source, &'static str)> {
    Some(match dtype {
        DType::BF16 => (&SOME_ROWS_BF16, "bf16"),
        DType::Q8 => (&SOME_ROWS_Q8, "q8"),
        DType::Q4 => (&SOME_ROWS_Q4, "q4"),
        DType::Q4K => (&SOME_ROWS_Q4K, "q4k"),
        DType::Q5K => (&SOME_ROWS_Q5K, "q5k"),
        DType::Q6K => (&SOME_ROWS_Q6K, "q6k"),
        DType::Mxfp4 => (&SOME_ROWS_MXFP4, "mxfp4"),
        DType::F8 => (&SOME_ROWS_F8, "f8"),
        DType::Q4_1 => (&SOME_ROWS_Q4_1, "q4_1"),
        DType::Q5_0 => (&SOME_ROWS_Q5_0, "q5_0"),
        DType::Q5_1 => (&SOME_ROWS_Q5_1, "q5_1"),
        DType::Q2K => (&SOME_ROWS_Q2K, "q2k"),
        DType::Q3K => (&SOME_ROWS_Q3K, "q3k"),
        DType::Iq4Nl => (&SOME_ROWS_IQ4_NL, "iq4_nl"),
        _ => return None,
    })
}

/// Whether there are kernels for weights of a type and depth.
pub(super) fn takes(dtype: DType, depth: usize) -> bool {
    of_type(dtype).is_some() && depth > 0 && depth.is_multiple_of(WHOLE_DEPTH)
}

/// The kernel that does `what` with weights of a type that there are kernels for.
pub(super) fn kernel(what: &str, dtype: DType) -> (&'static Source, String) {
    let (source, name) = of_type(dtype).expect("a type with kernels");
    (source, format!("some_{what}_{name}"))
}

/// The shared memory that they need: chunks of lines in whole pieces of 16 bytes, in which blocks may begin anywhere, with gaps; and
/// activations, as many as two blocks have room for.
pub(super) fn shared(on: On<'_>, dtype: DType) -> usize {
    let [many, few] = STAGED_BYTES.map(|bytes| chunk_bytes(dtype) + bytes);
    if 2 * (many + OTHER_BYTES) <= on.gpu.most_shared() { many } else { few }
}

/// The same where rows of so many elements are normed: all of them lie there then.
pub(super) fn shared_with_norm(on: On<'_>, dtype: DType, depth: usize) -> usize {
    shared(on, dtype).max(chunk_bytes(dtype) + depth * NORMED_ROWS * 2)
}

fn chunk_bytes(dtype: DType) -> usize {
    let line = match dtype {
        DType::BF16 => row_bytes(dtype, 128),
        _ => (((row_bytes(dtype, 256) + 2 * 15) / 16) | 1) * 16,
    };
    WARPS * STAGES * LINES * line
}

/// Bytes of a row of so many elements.
pub(super) fn row_bytes(dtype: DType, width: usize) -> usize {
    width / dtype.block_len() * dtype.size()
}

/// Activations as kernels multiply them with weights in blocks, bf16, where `are_many`: made so once, they are half as much for all blocks
/// that read them, which then is worth a launch. Others are as they were.
pub(super) fn rounded(on: On<'_>, x: &Tensor, weights: DType, are_many: bool) -> Tensor {
    let is_rounded = are_many && weights.is_quantized() && x.dtype() == DType::F32;
    if is_rounded { elementwise::cast(on, x, DType::BF16) } else { x.clone() }
}
