//! [`e4m3`](crate::e4m3) on a GPU: numbers rounded to FP8, stored as bf16, or as bytes with separate scales for
//! products that take these.

use moeworks_tensor::{DType, Tensor};

use super::{On, THREADS, WARPS};
use crate::e4m3::BLOCK;
use moeworks_gpu::sources::E4M3;
use moeworks_gpu::{Arg, Launch};

/// FP8 bytes, four in each element of a tensor, and the scales of their blocks (f32).
pub(super) struct Packed {
    pub(super) bytes: Tensor,
    pub(super) scales: Tensor,
}

/// The destination of rounded numbers.
enum To<'a> {
    Rounded(&'a mut Tensor),
    Packed(&'a mut Packed),
}

/// Rounds rows to FP8, stored as bf16.
pub(crate) fn round_rows(on: On<'_>, x: &Tensor) -> Tensor {
    let mut y = on.empty(x.shape(), DType::BF16);
    rows(on, x, To::Rounded(&mut y));
    y
}

/// Packs rows as FP8: bytes `[.., N / 4]` and scales `[.., N / 128]`. N is a multiple of 16.
pub(super) fn pack_rows(on: On<'_>, x: &Tensor) -> Packed {
    let (count, columns) = (x.rows(), x.cols());
    let mut packed = Packed {
        bytes: on.empty(&[count, columns / 4], DType::U32),
        scales: on.empty(&[count, columns.div_ceil(BLOCK)], DType::F32),
    };
    rows(on, x, To::Packed(&mut packed));
    packed
}

/// Rounds rows to the destination.
fn rows(on: On<'_>, x: &Tensor, to: To<'_>) {
    let blocks = x.rows() * x.cols().div_ceil(BLOCK);
    let [rounded, bytes, scales] = match to {
        To::Rounded(y) => [on.write(y), Arg::none(), Arg::none()],
        To::Packed(to) => [Arg::none(), on.write(&mut to.bytes), on.write(&mut to.scales)],
    };
    let is_bf16 = Arg::from(x.dtype() == DType::BF16);
    let args = [on.read(x), is_bf16, rounded, bytes, scales, x.cols().into(), Arg::elements(blocks)];
    // SAFETY: a warp reads and writes its columns of its row.
    unsafe { on.launch(&E4M3, "e4m3_rows", blocks.div_ceil(WARPS), &args) };
}

/// Rounds matrices of `rows` rows to FP8, stored as bf16. With `offsets` `[groups + 1]` matrices of groups without
/// rows are skipped, and their elements are unspecified.
pub(crate) fn round_matrices(on: On<'_>, weights: &Tensor, rows: usize, offsets: Option<&Tensor>) -> Tensor {
    let mut y = on.empty(weights.shape(), DType::BF16);
    let args = [on.write(&mut y), Arg::none(), Arg::none(), Arg::none()];
    launch(on, weights, rows, offsets, args);
    y
}

/// Packs matrices as FP8: bytes `[.., N / 4]` and a scale for each block of each matrix. N is a multiple of 16.
pub(super) fn pack_matrices(on: On<'_>, weights: &Tensor, rows: usize, offsets: &Tensor) -> Packed {
    let mut to = Packed::for_matrices(on, weights, rows);
    let args = [Arg::none(), on.write(&mut to.bytes), Arg::none(), on.write(&mut to.scales)];
    launch(on, weights, rows, Some(offsets), args);
    to
}

/// Packs the transposes `[N, M]` of each group's matrices, side by side, with their blocks' scales. `rows` is a
/// multiple of 16, and of [`BLOCK`] where a group has several matrices.
pub(super) fn pack_transposed_matrices(on: On<'_>, weights: &Tensor, rows: usize, offsets: &Tensor) -> Packed {
    let mut to = Packed::for_matrices(on, weights, rows);
    let args = [Arg::none(), Arg::none(), on.write(&mut to.bytes), on.write(&mut to.scales)];
    launch(on, weights, rows, Some(offsets), args);
    to
}

impl Packed {
    /// Allocates bytes and scales for matrices of `rows` rows.
    fn for_matrices(on: On<'_>, weights: &Tensor, rows: usize) -> Self {
        let matrices = weights.len() / (rows * weights.cols()).max(1);
        let blocks = matrices * rows.div_ceil(BLOCK) * weights.cols().div_ceil(BLOCK);
        Self { bytes: on.empty(&[weights.len() / 4], DType::U32), scales: on.empty(&[blocks], DType::F32) }
    }
}

/// Launches the kernel that rounds matrices.
fn launch(
    on: On<'_>,
    weights: &Tensor,
    rows: usize,
    offsets: Option<&Tensor>,
    [rounded, bytes, transposed, scales]: [Arg<'_>; 4],
) {
    let columns = weights.cols();
    let matrices = weights.len() / (rows * columns).max(1);
    let of_group = offsets.map_or(1, |offsets| matrices / (offsets.len() - 1).max(1)).max(1);
    let args = [
        on.read(weights),
        (weights.dtype() == DType::BF16).into(),
        on.read_or_none(offsets),
        rounded,
        bytes,
        transposed,
        scales,
        rows.into(),
        columns.into(),
        of_group.into(),
    ];
    let grid = [columns.div_ceil(BLOCK), rows.div_ceil(BLOCK), matrices];
    let launch = Launch { source: &E4M3, kernel: "e4m3_matrices", grid, threads: THREADS, shared: 0, args: &args };
    // SAFETY: a block reads and writes its rows and columns of its matrix; there are offsets for each group of
    // matrices.
    unsafe { on.gpu.launch(&launch) };
}
