//! [Quantized](crate::quantized) weights on a GPU.
//!
//! Products of few rows read them as they are stored (`small_m_gemm.rs`). For more rows they are dequantised to bf16
//! for each product; of a layer's experts only those that have rows. Activations are rounded to bf16, not to integers
//! as on the host.

use moeworks_tensor::{DType, Tensor};

use super::scattered::Scattered;
use super::small_m_gemm::row_bytes;
use super::{On, THREADS};
use crate::deferred::List;
use moeworks_gpu::sources::BLOCKS;
use moeworks_gpu::{Arg, Launch};

/// Returns the number by which kernels know a quantized type.
fn type_code(dtype: DType) -> u32 {
    match dtype {
        DType::Q8 => 0,
        DType::Q4 => 1,
        DType::Q4_1 => 2,
        DType::Q5_0 => 3,
        DType::Q5_1 => 4,
        DType::Q2K => 5,
        DType::Q3K => 6,
        DType::Q4K => 7,
        DType::Q5K => 8,
        DType::Q6K => 9,
        DType::Iq4Nl => 10,
        DType::Mxfp4 => 11,
        DType::F8 => 12,
        dtype => panic!("{dtype:?} is no type of blocks"),
    }
}

/// Dequantises `blocks` `[groups, rows, width]` to bf16.
///
/// With `offsets` `[groups + 1]` groups without rows are skipped, and their elements are unspecified. With `apart`
/// the result has the matrices of its groups alone, one behind the other.
pub(super) fn to_bf16(
    on: On<'_>,
    blocks: &Tensor,
    offsets: Option<&Tensor>,
    scattered: Option<Scattered<'_>>,
) -> Tensor {
    let (dtype, width) = (blocks.dtype(), blocks.cols());
    let groups = offsets.map_or(1, |offsets| offsets.len() - 1);
    let rows = blocks.len() / (groups * width).max(1);
    let count = scattered.map_or(groups, |scattered| scattered.groups.len());
    let mut y = on.empty(&[count, rows, width], DType::BF16);
    let names = scattered.map(|scattered| on.u32s(scattered.groups));
    let args = [
        on.read(scattered.map_or(blocks, |scattered| scattered.addresses)),
        on.write(&mut y),
        on.read_or_none(offsets),
        type_code(dtype).into(),
        rows.into(),
        width.into(),
        row_bytes(dtype, width).into(),
        on.read_or_none(names.as_ref()),
    ];
    let grid = [rows, count, 1];
    let launch = Launch { source: &BLOCKS, kernel: "blocks_to_bf16", grid, threads: THREADS, shared: 0, args: &args };
    // SAFETY: a block reads its row of the blocks and writes that of `y`.
    unsafe { on.gpu.launch(&launch) };
    y
}

/// Computes [`dequantize`](crate::quantized::dequantize) to bf16.
pub(crate) fn dequantized(on: On<'_>, blocks: &Tensor) -> Tensor {
    to_bf16(on, blocks, None, None).reshaped(blocks.shape())
}

/// Returns rows of a quantized table; the ids are rows of it.
pub(crate) fn embedding(on: On<'_>, ids: List<'_, u32>, table: &Tensor, out: DType) -> Tensor {
    let (dtype, width) = (table.dtype(), table.cols());
    let (mut y, list) = (on.empty(&[ids.len(), width], out), on.list(ids));
    let args: [Arg<'_>; 7] = [
        on.read(list.tensor()),
        on.read(table),
        on.write(&mut y),
        (out == DType::BF16).into(),
        type_code(dtype).into(),
        width.into(),
        row_bytes(dtype, width).into(),
    ];
    // SAFETY: the ids are rows of the table, and a block writes its row.
    unsafe { on.launch(&BLOCKS, "gather_block_rows", ids.len(), &args) };
    y
}
