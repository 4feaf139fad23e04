//! [`logits`](crate::logits) on a GPU: f32 numbers are split into three bf16 parts, so that tensor cores multiply
//! them.

use moeworks_tensor::{DType, Tensor};

use super::grouped::{self, Groups, RowsProduct};
use super::{On, THREADS, elementwise, wgrad};
use crate::gemm::Form;
use crate::linear::Write;
use moeworks_gpu::sources::LOGITS;

/// Parts of a number.
const PARTS: usize = 3;
/// The parts of two numbers whose products are summed, the smallest first.
const PAIRS: [(u32, u32); 6] = [(0, 2), (1, 1), (2, 0), (0, 1), (1, 0), (0, 0)];
/// The fewest tokens for which tensor cores are faster in backward.
const MIN_BACKWARD_TOKENS: usize = 256;

/// Returns whether tensor cores take the logits of T tokens and E experts from D activations of a type. Few tokens
/// have a kernel of their own.
pub(crate) fn takes([t, e, d]: [usize; 3], of: DType) -> bool {
    takes_sizes(e, d, of) && !grouped::are_few_tiles(t, e)
}

/// Returns whether tensor cores take the gradients.
pub(crate) fn takes_backward([t, e, d]: [usize; 3], of: DType) -> bool {
    takes_sizes(e, d, of) && t >= MIN_BACKWARD_TOKENS
}

fn takes_sizes(e: usize, d: usize, of: DType) -> bool {
    of == DType::BF16 && e > 0 && d > 0 && e.is_multiple_of(8) && d.is_multiple_of(8)
}

pub(crate) fn forward(on: On<'_>, x: &Tensor, w: &Tensor) -> Tensor {
    let (t, e, d) = (x.rows(), w.rows(), w.cols());
    let w = cut(on, w, 1, &[0, 1, 2]);
    let sums = product(Form::Nt, x, &w, t, PARTS * e, d).store(on, t, DType::F32);
    let mut logits = on.empty(&[t, e], DType::F32);
    elementwise::add_parts(on, &sums, t, PARTS, Write::Replace, &mut logits);
    logits
}

/// Computes the gradient of the activations and adds `base` (f32), if there is one.
pub(crate) fn backward_input(on: On<'_>, dlogits: &Tensor, w: &Tensor, base: Option<&Tensor>) -> Tensor {
    let (t, e, d) = (dlogits.rows(), w.rows(), w.cols());
    let dlogits = cut(on, dlogits, t, &PAIRS.map(|(of_logits, _)| of_logits));
    let w = cut(on, w, 1, &PAIRS.map(|(_, of_w)| of_w));
    product(Form::Nn, &dlogits, &w, t, d, PAIRS.len() * e).store_onto(on, t, DType::F32, base)
}

/// Returns the product of the parts of one group.
fn product<'a>(form: Form, a: &'a Tensor, b: &'a Tensor, rows: usize, columns: usize, depth: usize) -> RowsProduct<'a> {
    RowsProduct {
        form,
        a,
        gather: None,
        b,
        scattered: None,
        group_rows: 0,
        columns,
        depth,
        pair: None,
        compute: DType::BF16,
        groups: Groups::One { rows },
        a_in_levels: false,
        scales: None,
    }
}

pub(crate) fn backward_weight(on: On<'_>, dlogits: &Tensor, x: &Tensor, write: Write, dw: &mut Tensor) {
    let dlogits = cut(on, dlogits, x.rows(), &[0, 1, 2]);
    let (sums, num_parts) = wgrad::sums_in_parts(on, &dlogits, x, DType::BF16);
    elementwise::add_parts(on, &sums, 1, num_parts * PARTS, write, dw);
}

/// Returns the named parts of each of `rows` rows of `x`, one part of all of a row's numbers behind the other.
fn cut(on: On<'_>, x: &Tensor, rows: usize, parts: &[u32]) -> Tensor {
    let width = x.len() / rows.max(1);
    let shape = if rows == 1 { [parts.len() * x.rows(), x.cols()] } else { [rows, parts.len() * width] };
    let mut to = on.empty(&shape, DType::BF16);
    let names = parts.iter().rev().fold(0, |names, part| names << 2 | part);
    let args = [on.read(x), on.write(&mut to), x.len().into(), width.into(), names.into(), parts.len().into()];
    // SAFETY: a thread reads its numbers and writes the parts of each.
    unsafe { on.launch(&LOGITS, "cut_numbers", x.len().div_ceil(2 * THREADS), &args) };
    to
}
