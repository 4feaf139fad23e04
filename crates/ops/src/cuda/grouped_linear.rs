//! [`grouped_linear`](crate::grouped_linear) on a GPU.

use moeworks_tensor::{DType, Tensor};

use super::On;
use super::experts::{Rows, combine};
use super::grouped::RowsProduct;
use super::wgrad::WgradProduct;
use crate::gemm::Form;
use crate::grouped_linear::GroupedRows;
use crate::linear::Write;

/// Returns whether the groups' matrices begin at the weight's first row, where kernels expect them.
pub(crate) fn takes(groups: GroupedRows<'_>) -> bool {
    groups.first == 0
}

pub(crate) fn forward(on: On<'_>, x: &Tensor, w: &Tensor, groups: GroupedRows<'_>) -> Tensor {
    let map = Rows::new(on, groups.rows);
    product(&map, Form::Nt, x, w, groups.width, groups.width, x.cols()).store(on, map.len(), DType::F32)
}

pub(crate) fn backward_input(on: On<'_>, dy: &Tensor, w: &Tensor, groups: GroupedRows<'_>) -> Tensor {
    let map = Rows::new(on, groups.rows);
    let product = product(&map, Form::Nn, dy, w, groups.width, w.cols(), groups.width);
    let rows = product.store(on, map.len(), DType::F32);
    combine(on, &rows, groups.rows, None, &[map.num_tokens, w.cols()])
}

/// Returns the product of rows with matrices of `group_rows` rows.
fn product<'a>(
    map: &'a Rows<'_>,
    form: Form,
    a: &'a Tensor,
    b: &'a Tensor,
    group_rows: usize,
    columns: usize,
    depth: usize,
) -> RowsProduct<'a> {
    RowsProduct {
        form,
        a,
        gather: (form == Form::Nt).then_some(map.tokens.tensor()),
        b,
        scattered: None,
        group_rows,
        columns,
        depth,
        pair: None,
        compute: b.dtype().of_activations(),
        groups: map.groups(),
        a_in_levels: false,
        scales: None,
    }
}

pub(crate) fn backward_weight(
    on: On<'_>,
    dy: &Tensor,
    x: &Tensor,
    groups: GroupedRows<'_>,
    write: Write,
    dw: &mut Tensor,
) {
    let map = Rows::new(on, groups.rows);
    let (rows, columns, compute) = (groups.width, x.cols(), dy.dtype());
    let (a, b, offsets) = ((dy, None), (x, Some(map.tokens.tensor())), map.offsets.tensor());
    WgradProduct { a, b, rows, columns, offsets, compute, keeps_unused: write == Write::Add }.run(on, write, dw);
}
