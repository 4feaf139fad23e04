//! [`linear`](crate::linear) on a GPU: products of one group.

use moeworks_tensor::{DType, Tensor};

use super::batched_gemm::BatchedGemm;
use super::grouped::{Groups, RowsProduct};
use super::{On, wgrad};
use crate::gemm::Form;
use crate::linear::Write;

pub(crate) fn forward(on: On<'_>, x: &Tensor, w: &Tensor, out: DType) -> Tensor {
    forward_onto(on, x, w, out, None)
}

/// Computes the product and adds `base` (f32), if there is one.
pub(crate) fn forward_onto(on: On<'_>, x: &Tensor, w: &Tensor, out: DType, base: Option<&Tensor>) -> Tensor {
    let batch = BatchedGemm { a: x, bs: &[w], base };
    let alone = || product(on, Form::Nt, x, w, out, base);
    batch.products(on, out).map_or_else(alone, |[y]| y)
}

/// Computes the products with several matrices, in one launch where there is a kernel for that.
pub(crate) fn forward_each<const N: usize>(on: On<'_>, x: &Tensor, ws: [&Tensor; N], out: DType) -> [Tensor; N] {
    let one_by_one = || ws.map(|w| forward(on, x, w, out));
    BatchedGemm { a: x, bs: &ws, base: None }.products(on, out).unwrap_or_else(one_by_one)
}

pub(crate) fn backward_input(on: On<'_>, dy: &Tensor, w: &Tensor, out: DType, base: Option<&Tensor>) -> Tensor {
    product(on, Form::Nn, dy, w, out, base)
}

/// Computes a product of one group, onto `base` if there is one.
fn product(on: On<'_>, form: Form, a: &Tensor, b: &Tensor, out: DType, base: Option<&Tensor>) -> Tensor {
    let (columns, depth) = if form == Form::Nt { (b.rows(), b.cols()) } else { (b.cols(), b.rows()) };
    let (rows, compute) = (a.rows(), b.dtype().of_activations());
    let groups = Groups::One { rows };
    let (gather, scattered, pair, scales, a_in_levels) = (None, None, None, None, false);
    RowsProduct {
        form,
        a,
        gather,
        b,
        scattered,
        group_rows: 0,
        columns,
        depth,
        pair,
        compute,
        groups,
        a_in_levels,
        scales,
    }
    .store_onto(on, rows, out, base)
}

pub(crate) fn backward_weight(on: On<'_>, dy: &Tensor, x: &Tensor, compute: DType, write: Write, dw: &mut Tensor) {
    wgrad::sums(on, dy, x, compute, write, dw);
}
