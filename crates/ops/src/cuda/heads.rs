//! [`heads`](crate::heads) on a GPU: kernels for the few rows of a decoding step.

use moeworks_tensor::{DType, Tensor};

use super::{On, THREADS, WARPS};
use crate::gemm::Form;
use crate::heads::HeadParts;
use moeworks_gpu::sources::HEADS;
use moeworks_gpu::{Arg, Launch};

/// Rows of a block.
const AT_ONCE: usize = 4;
/// Columns of a block of the form `A B` (`heads.cu`).
const COLUMNS: usize = 256;
/// The most blocks of the grid's third dimension.
const MAX_BLOCKS: usize = 65_535;

/// Returns whether there are few enough rows for the kernels' grid.
pub(crate) fn takes(x: &Tensor) -> bool {
    x.rows().div_ceil(AT_ONCE) <= MAX_BLOCKS
}

/// Computes either form of product by head; rows and columns have been checked.
pub(crate) fn by_head(on: On<'_>, form: Form, x: &Tensor, w: &Tensor, parts: &HeadParts, y: &mut Tensor) {
    let rows = x.rows();
    // Heads begin at a row of `w`, so its start within a row is 0.
    let starts = [x.cols(), parts.x.start, parts.x.step, w.cols()];
    let is_whole = starts.iter().all(|columns| columns.is_multiple_of(8));
    let (kernel, columns) = match form {
        Form::Nt => ("heads_nt", parts.num_rows.div_ceil(WARPS)),
        _ => ("heads_nn", w.cols().div_ceil(COLUMNS)),
    };
    let types = [x.dtype(), w.dtype(), y.dtype()].map(|dtype| Arg::from(dtype == DType::BF16));
    let y_width = y.cols();
    let mut args: Vec<Arg<'_>> = vec![on.read(x), on.read(w), on.write(y)];
    args.extend(types);
    args.extend([Arg::from(rows), parts.num_rows.into(), is_whole.into()]);
    for (width, at) in [(x.cols(), parts.x), (w.cols(), parts.w), (y_width, parts.y)] {
        args.extend([width, at.start, at.step].map(Arg::from));
    }
    let grid = [columns, parts.count, rows.div_ceil(AT_ONCE)];
    let launch = Launch { source: &HEADS, kernel, grid, threads: THREADS, shared: 0, args: &args };
    // SAFETY: the parts lie within x, w and y, and each block writes its own columns of its rows.
    unsafe { on.gpu.launch(&launch) };
}
