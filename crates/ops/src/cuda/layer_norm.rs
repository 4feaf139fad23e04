//! [`layer_norm`](crate::layer_norm) on a GPU. Rows are read several times and come from the cache after the first.

use moeworks_tensor::{DType, Tensor};

use super::{On, WARPS, elementwise, name};
use crate::layer_norm::LayerNormWeights;
use crate::linear::Write;
use moeworks_gpu::sources::LAYER_NORM;

/// Rows whose part of the gradients of weight and bias one block sums.
const ROWS_EACH: usize = 16;

pub(crate) fn forward(on: On<'_>, x: &Tensor, weights: LayerNormWeights<'_>, eps: f32, out: DType) -> (Tensor, Tensor) {
    let (width, rows) = (weights.weight.len(), x.len() / weights.weight.len());
    let (mut y, mut statistics) = (on.empty(x.shape(), out), on.empty(&[rows, 2], DType::F32));
    let kernel = format!("layer_norm_{}_{}", name(x.dtype()), name(out));
    let (weight, bias) = (on.f32s(weights.weight), on.f32s(weights.bias));
    let args = [
        on.read(x),
        on.read(&weight),
        on.read(&bias),
        eps.into(),
        on.write(&mut y),
        on.write(&mut statistics),
        rows.into(),
        width.into(),
    ];
    // SAFETY: a warp reads and writes its row of `rows` by `width` elements.
    unsafe { on.launch(&LAYER_NORM, &kernel, rows.div_ceil(WARPS), &args) };
    (y, statistics)
}

/// The input, the statistics of its rows and the weight, which backward needs.
#[derive(Clone, Copy)]
pub(crate) struct LayerNormSaved<'a> {
    pub(crate) x: &'a Tensor,
    pub(crate) statistics: &'a Tensor,
    pub(crate) weight: &'a Tensor,
}

pub(crate) fn backward(
    on: On<'_>,
    dy: &Tensor,
    LayerNormSaved { x, statistics, weight }: LayerNormSaved<'_>,
    write: Write,
    dweight: &mut Tensor,
    dbias: &mut Tensor,
) -> Tensor {
    let (width, rows) = (weight.len(), x.len() / weight.len());
    let parts = rows.div_ceil(ROWS_EACH);
    let [mut weights, mut biases] = [(); 2].map(|()| on.empty(&[parts, width], DType::F32));
    let (mut dx, weight) = (on.empty(x.shape(), DType::F32), on.f32s(weight));
    let kernel = format!("layer_norm_backward_{}_{}", name(x.dtype()), name(dy.dtype()));
    let args = [
        on.read(dy),
        on.read(x),
        on.read(&weight),
        on.read(statistics),
        on.write(&mut dx),
        on.write(&mut weights),
        on.write(&mut biases),
        rows.into(),
        width.into(),
    ];
    // SAFETY: a block reads and writes its rows and its rows of the partial sums.
    unsafe { on.launch(&LAYER_NORM, &kernel, parts, &args) };
    elementwise::sum_rows(on, &weights, write, dweight);
    elementwise::sum_rows(on, &biases, write, dbias);
    dx
}
