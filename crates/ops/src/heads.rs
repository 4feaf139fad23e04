//! Products by head: each head multiplies its columns of one matrix with its rows of another.
//!
//! Latent attention projects a head's queries down, and its weighted sums up, with that head's part of the matrix
//! that makes keys and values (DeepSeek-V2, 2405.04434, section 2.1.2).

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

/// The share of each head: columns of `x`, rows of `w` and columns of `y`. The first head's begin at `start`, each
/// next head's `step` further.
#[derive(Clone, Copy, Debug)]
pub struct HeadParts {
    /// Number of heads.
    pub count: usize,
    /// The columns of `x`.
    pub x: Columns,
    /// The rows of `w`.
    pub w: Columns,
    /// Rows of `w` per head.
    pub num_rows: usize,
    /// The columns of `y`.
    pub y: Columns,
}

/// Writes `x_h w_h^T` to the columns of `y` of each head h, as many as a head has rows of `w [.., in]`, reading as
/// many columns of `x` as `w` has. `x`, `w` and `y` are f32 or bf16; products are taken as in
/// [`linear`](crate::linear::linear). Other columns of `y` stay as they are.
pub fn linear_by_head(ctx: &Context, x: &Tensor, w: &Tensor, parts: &HeadParts, y: &mut Tensor) {
    by_head(ctx, Form::Nt, x, w, parts, y);
}

/// Writes `x_h w_h` to the columns of `y` of each head h, as many as `w` has, reading as many columns of `x` as a
/// head has rows of `w`. Types are as in [`linear_by_head`].
pub fn transposed_linear_by_head(ctx: &Context, x: &Tensor, w: &Tensor, parts: &HeadParts, y: &mut Tensor) {
    by_head(ctx, Form::Nn, x, w, parts, y);
}

fn by_head(ctx: &Context, form: Form, x: &Tensor, w: &Tensor, parts: &HeadParts, y: &mut Tensor) {
    let (depth, columns) = if form == Form::Nt { (w.cols(), parts.num_rows) } else { (parts.num_rows, w.cols()) };
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
        return cuda::heads::by_head(on, form, x, w, parts, y);
    }
    let group = |head: usize| {
        let a = Source::rows(x, 0);
        let a = Source { offset: parts.x.start + head * parts.x.step, ..a };
        Group { a, b: Source::rows(w, parts.w.start + head * parts.w.step), rows: x.rows(), columns, depth }
    };
    let groups: Vec<Group<'_>> = (0..parts.count).map(group).collect();
    let offsets: Vec<usize> = (0..parts.count).map(|head| parts.y.start + head * parts.y.step).collect();
    let (product, stride) =
        (Product { form, compute: Compute::from_dtype(w.dtype()), groups: &groups, is_paired: false }, y.cols());
    with_float!(y.dtype(), T => {
        let to = Lent::new(y.slice_mut::<T>());
        run(ctx, &product, &Store { to, offsets: &offsets, stride, write: Write::Replace });
    });
}
