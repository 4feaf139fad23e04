//! [`rms_norm`](crate::rms_norm) on a GPU. Rows are read twice, the second time from the cache.

use moeworks_tensor::{DType, Tensor};

use super::{On, THREADS, WARPS, elementwise, name};
use crate::linear::Write;
use crate::rms_norm::RmsNormInputs;
use moeworks_gpu::sources::{GROUPED, RMS_NORM};
use moeworks_gpu::{Launch, Pending, PendingNorm};

/// The most rows that get a block each; more rows occupy a GPU with a warp each. (H100: 512 rows of 2,048 took 14 us
/// by warps, 256 rows 5 us by blocks.)
const FEW: usize = 4096;
/// Rows whose part of the weight's gradient one block sums.
const ROWS_EACH: usize = 16;
/// The most elements of a row that is normed by the block that has made it, from shared memory.
const MAX_KEPT: usize = 8192;

pub(crate) fn forward(on: On<'_>, x: &Tensor, weight: &Tensor, eps: f32, out: DType) -> (Tensor, Tensor) {
    let (width, rows) = (weight.len(), x.len() / weight.len());
    let (mut y, mut inv_rms) = (on.empty(x.shape(), out), on.empty(&[rows], DType::F32));
    let kernel = format!("rms_norm_{}_{}", name(x.dtype()), name(out));
    let weight = on.f32s(weight);
    let norm = PendingNorm {
        x: on.read(x),
        x_is_bf16: x.dtype() == DType::BF16,
        weight: on.read(&weight),
        eps: eps.into(),
        y: on.write(&mut y),
        y_is_bf16: out == DType::BF16,
        inv_rms: on.write(&mut inv_rms),
        rows,
        width,
    };
    if combine_and_norm(on, x, &norm) {
        return (y, inv_rms);
    }
    let args = [norm.x, norm.weight, norm.eps, norm.y, norm.inv_rms, rows.into(), width.into()];
    let blocks = if rows <= FEW { rows } else { rows.div_ceil(WARPS) };
    // SAFETY: a warp or a block reads and writes its row of `rows` by `width` elements.
    unsafe { on.launch_pending(&RMS_NORM, &kernel, blocks, &args, Pending::Norm(norm)) };
    (y, inv_rms)
}

/// Launches the kernel that combines experts' rows and norms the sums, in place of a pending combination that makes
/// the rows `x` of the norm. Returns whether it did. One row is left to the product that takes its norm
/// ([`fused_norm`](super::fused_norm)).
fn combine_and_norm(on: On<'_>, x: &Tensor, norm: &PendingNorm<'_>) -> bool {
    let PendingNorm { weight, eps, y, y_is_bf16, inv_rms, rows, width, .. } = *norm;
    let is_kept = (2..=FEW).contains(&rows) && width.is_multiple_of(8) && width <= MAX_KEPT && x.dtype() == DType::F32;
    let take = |pending| match pending {
        Pending::Combine(combine) => (is_kept && combine.y == norm.x && combine.tokens == rows).then_some(()),
        _ => None,
    };
    let Some(((), combined)) = on.gpu.fuse_with_last(take) else { return false };
    let args: Vec<_> = combined.args.into_iter().chain([weight, eps, y, y_is_bf16.into(), inv_rms]).collect();
    let (grid, shared) = ([rows, 1, 1], width * 4);
    let kernel = "combine_rows_normed";
    let launch = Launch { source: &GROUPED, kernel, grid, threads: THREADS, shared, args: &args };
    // SAFETY: that of both: a block writes its token's row of sums and of what is normed.
    unsafe { on.gpu.launch(&launch) };
    true
}

pub(crate) fn backward(
    on: On<'_>,
    dy: &Tensor,
    RmsNormInputs { x, weight, inv_rms }: RmsNormInputs<'_>,
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
