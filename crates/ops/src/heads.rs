//! Products by head: each head multiplies columns of its own of one matrix with rows of its own of another.
//!
//! Latent attention narrows the queries of a head, and widens what it has summed up, by that head's part of the matrix that
//! makes keys and values (DeepSeek-V2, 2405.04434, section 2.1.2).

use moeworks_tensor::Tensor;

use crate::Context;
use crate::columns::Columns;
use crate::cuda::{self, On};
use crate::gemm::source::Source;
use crate::gemm::store::Store;
use crate::gemm::{Compute, Form, Group, Product, run};
use crate::linear::Write;
use crate::parallel::Lent;
use crate::simd::with_float;

/// What belongs to each head: the columns of `x`, the rows of `w` and the columns of `y`; the first head's begin at `start`,
/// each next head's one `step` further.
#[derive(Clone, Copy, Debug)]
pub struct HeadParts {
    /// Heads.
    pub count: usize,
    /// The columns of `x`.
    pub x: Columns,
    /// The rows of `w`.
    pub w: Columns,
    /// The number of rows of `w` that a head has.
    pub num_rows: usize,
    /// The columns of `y`.
    pub y: Columns,
}

/// Writes `x_h w_h^T` to the columns of `y` of each head h, as many as a head has rows of `w [.., in]`; as many columns of
/// `x` are read as `w` has. `x`, `w` and `y` are f32 or bf16; products are taken as in [`linear`](crate::linear::linear).
/// Other columns of `y` stay.
pub fn linear_by_head(ctx: &Context, x: &Tensor, w: &Tensor, parts: &HeadParts, y: &mut Tensor) {
    by_head(ctx, Form::Nt, (x, w), parts, (w.cols(), parts.num_rows), y);
}

/// Writes `x_h w_h` to as many columns of `y` of each head h as `w` has; as many columns of `x` are read as a head has rows
/// of `w`. Types as in [`linear_by_head`].
pub fn transposed_linear_by_head(ctx: &Context, x: &Tensor, w: &Tensor, parts: &HeadParts, y: &mut Tensor) {
    by_head(ctx, Form::Nn, (x, w), parts, (parts.num_rows, w.cols()), y);
}

fn by_head(
    ctx: &Context,
    form: Form,
    (x, w): (&Tensor, &Tensor),
    parts: &HeadParts,
    (depth, columns): (usize, usize),
    y: &mut Tensor,
) {
    let fits = |at: Columns, width: usize, all: usize| {
        parts.count == 0 || at.start + (parts.count - 1) * at.step + width <= all
    };
    let is_apart = parts.count < 2 || parts.y.step >= columns;
    assert!(
        x.rows() == y.rows()
            && fits(parts.x, depth, x.cols())
            && fits(parts.w, parts.num_rows, w.rows())
            && fits(parts.y, columns, y.cols())
            && is_apart,
        "products by head: x {:?}, w {:?}, y {:?}, {parts:?}",
        x.shape(),
        w.shape(),
        y.shape(),
    );
    if y.is_empty() {
        return;
    }
    let types = [x.dtype(), w.dtype(), y.dtype()];
    if let Some(on) = On::taking(ctx, &types).filter(|_| depth > 0 && cuda::heads::takes(x)) {
        return cuda::heads::by_head(on, form, (x, w), parts, y);
    }
    let group = |head: usize| {
        let a = Source::rows(x, 0);
        let a = Source { offset: parts.x.start + head * parts.x.step, ..a };
        Group { a, b: Source::rows(w, parts.w.start + head * parts.w.step), rows: x.rows(), columns, depth }
    };
    let groups: Vec<Group<'_>> = (0..parts.count).map(group).collect();
    let offsets: Vec<usize> = (0..parts.count).map(|head| parts.y.start + head * parts.y.step).collect();
    let (product, stride) =
        (Product { form, compute: Compute::of(w.dtype()), groups: &groups, is_paired: false }, y.cols());
    with_float!(y.dtype(), T => {
        let to = Lent::new(y.slice_mut::<T>());
        run(ctx, &product, &Store { to, offsets: &offsets, stride, write: Write::Replace });
    });
}
