//! Norms of few rows, fused into the kernels that multiply with their results.

use super::On;
use moeworks_gpu::{Arg, Pending, PendingNorm};

/// The most rows that a product's kernel norms.
const MAX_ROWS: usize = 8;

/// The arguments of a kernel that describe its norm.
pub(super) type Norm = [Arg<'static>; 7];

/// Returns the arguments of a kernel that norms nothing.
pub(super) fn nothing() -> Norm {
    let none = Arg::none;
    [none(), none(), Arg::from(0.0), none(), none(), false.into(), false.into()]
}

/// Takes back the pending norm of `rows` rows that makes `y`, if there is one. The caller's kernel does its work.
pub(super) fn take(on: On<'_>, y: Arg<'_>, rows: usize) -> Option<Norm> {
    let (norm, _) = on.gpu.fuse_with_last(|pending| match pending {
        Pending::Norm(norm) => (is_few(&norm) && norm.y == y && norm.rows == rows).then_some(norm),
        _ => None,
    })?;
    let PendingNorm { x, weight, eps, y, inv_rms, x_is_bf16, y_is_bf16, .. } = norm;
    Some([x, weight, eps, y, inv_rms, x_is_bf16.into(), y_is_bf16.into()])
}

/// Returns whether a product's kernel can norm so many rows of this width.
fn is_few(norm: &PendingNorm<'_>) -> bool {
    norm.rows <= MAX_ROWS && norm.width.is_multiple_of(4)
}
