//! [`rms_norm`](crate::rms_norm) on a GPU. Rows are read twice and come from the cache the second time.

use moeworks_tensor::{DType, Tensor};

use super::{On, WARPS, elementwise, name};
use crate::cuda::sources::RMS_NORM;
use crate::linear::Write;

/// Rows that get a block each: more keep a GPU busy by warps. (512 rows of 2,048 by warps took an H100 14 us, 256 by blocks 5.)
const FEW: usize = 4096;
/// Rows whose part of the weight's gradient one block adds up.
const ROWS_EACH: usize = 16;

pub(crate) fn forward(on: On<'_>, x: &Tensor, weight: &Tensor, eps: f32, out: DType) -> (Tensor, Tensor) {
    let (width, rows) = (weight.len(), x.len() / weight.len());
    let (mut y, mut inv_rms) = (on.empty(x.shape(), out), on.empty(&[rows], DType::F32));
    let kernel = format!("rms_norm_{}_{}", name(x.dtype()), name(out));
    let weight = on.f32s(weight);
    let args =
        [on.read(x), on.read(&weight), eps.into(), on.write(&mut y), on.write(&mut inv_rms), rows.into(), width.into()];
    let blocks = if rows <= FEW { rows } else { rows.div_ceil(WARPS) };
    // SAFETY: a warp or a block reads and writes its row of `rows` by `width` elements.
    unsafe { on.launch(&RMS_NORM, &kernel, blocks, &args) };
    (y, inv_rms)
}

pub(crate) fn backward(
    on: On<'_>,
    dy: &Tensor,
    (x, weight, inv_rms): (&Tensor, &Tensor, &Tensor),
    base: Option<&Tensor>,
    write: Write,
    dweight: &mut Tensor,
) -> Tensor {
    let (width, rows) = (weight.len(), x.len() / weight.len());
    let parts = rows.div_ceil(ROWS_EACH);
    let (mut dx, mut partials) = (on.empty(x.shape(), DType::F32), on.empty(&[parts, width], DType::F32));
    let kernel = format!("rms_norm_backward_{}_{}", name(x.dtype()), name(dy.dtype()));
    let weight = on.f32s(weight);
    let args = [
        on.read(dy),
        on.read(x),
        on.read(&weight),
        on.read(inv_rms),
        on.read_or_none(base),
        on.write(&mut dx),
        on.write(&mut partials),
        rows.into(),
        width.into(),
    ];
    // SAFETY: a block reads and writes its rows and its row of the partial sums.
    unsafe { on.launch(&RMS_NORM, &kernel, parts, &args) };
    elementwise::sum_rows(on, &partials, write, dweight);
    dx
}
