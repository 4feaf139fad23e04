//! [`linear`](crate::linear) on a GPU: products of one group.

use moeworks_tensor::{DType, Tensor};

use super::On;
use super::grouped::{self, Groups, RowsProduct};
use crate::gemm::Form;
use crate::linear::Write;

pub(crate) fn forward(on: On<'_>, x: &Tensor, w: &Tensor, out: DType) -> Tensor {
    product(on, (Form::Nt, x, w), (w.rows(), w.cols()), out)
}

pub(crate) fn backward_input(on: On<'_>, dy: &Tensor, w: &Tensor, out: DType) -> Tensor {
    product(on, (Form::Nn, dy, w), (w.cols(), w.rows()), out)
}

fn product(on: On<'_>, (form, a, b): (Form, &Tensor, &Tensor), (columns, depth): (usize, usize), out: DType) -> Tensor {
    let (rows, compute) = (a.rows(), b.dtype().of_activations());
    let groups = Groups::One { rows };
    let (gather, addresses, pair, scales) = (None, None, None, None);
    RowsProduct { form, a, gather, b, addresses, group_rows: 0, columns, depth, pair, compute, groups, scales }
        .store(on, rows, out)
}

pub(crate) fn backward_weight(on: On<'_>, dy: &Tensor, x: &Tensor, compute: DType, write: Write, dw: &mut Tensor) {
    grouped::sums(on, (dy, x), compute, write, dw);
}
