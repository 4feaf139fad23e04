//! Norms of few rows, fused into the kernels that multiply with their results.

use super::On;
use moeworks_gpu::Arg;

/// Rows that kernels norm at most.
const MAX_ROWS: usize = 8;

/// The arguments of a kernel's norm.
pub(super) type Norm = [Arg<'static>; 7];

/// The arguments of a kernel that norms nothing.
pub(super) fn nothing() -> Norm {
    let none = Arg::none;
    [none(), none(), Arg::from(0.0), none(), none(), false.into(), false.into()]
}

/// The norm that would be launched next, if what it makes is `y`, so many rows: it is not launched, and who asks for it does it.
pub(super) fn take(on: On<'_>, y: Arg<'_>, rows: usize) -> Option<Norm> {
    if rows > MAX_ROWS {
        return None;
    }
    let mut types = None;
    let norm = on.gpu.fuse_with_last(|node| {
        types = types_of(&node.kernel);
        // (x, weight, eps, y, inv_rms, rows, width): rms_norm.rs.
        types.is_some()
            && node.args[3] == y
            && node.args[5].number() as usize == rows
            && node.args[6].number().is_multiple_of(4)
    })?;
    let [x, weight, eps, y, inv_rms] = *norm.args.first_chunk()?;
    let [x_is_bf16, y_is_bf16] = types?;
    Some([x, weight, eps, y, inv_rms, x_is_bf16.into(), y_is_bf16.into()])
}

/// Whether x and y of a norm's kernel are bf16.
fn types_of(kernel: &str) -> Option<[bool; 2]> {
    let (x, y) = kernel.strip_prefix("rms_norm_")?.split_once('_')?;
    let is_bf16 = |name| match name {
        "bf16" => Some(true),
        "f32" => Some(false),
        _ => None,
    };
    Some([is_bf16(x)?, is_bf16(y)?])
}
