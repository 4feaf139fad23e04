//! [`qkv_norm_rope_append`](mod@crate::qkv_norm_rope_append) on a GPU.

use moeworks_tensor::{DType, Tensor};

use super::elementwise::Rotation;
use super::{On, THREADS, name};
use crate::attention::AttentionShape;
use crate::qkv_norm_rope_append::{Kept, Placing};
use moeworks_gpu::sources::QKV_NORM_ROPE_APPEND;
use moeworks_gpu::{Arg, Launch};

/// Elements of a row that a block has room for.
const MAX_WIDTH: usize = 8192;

/// Whether there is a kernel for these.
pub(crate) fn takes(projections: [&Tensor; 3]) -> bool {
    projections.iter().all(|x| {
        let is_float = matches!(x.dtype(), DType::F32 | DType::BF16);
        is_float && x.dtype() == projections[0].dtype() && x.rows() > 0 && (1..=MAX_WIDTH).contains(&x.cols())
    })
}

pub(crate) fn run(
    on: On<'_>,
    [q, k, v]: [&Tensor; 3],
    how: &Placing<'_>,
    rotation: &Rotation<'_>,
    kept: &mut Kept<'_>,
) -> Tensor {
    let (rows, capacity) = (q.rows(), kept.keys.rows() / kept.num_sequences);
    let mut queries = on.empty(q.shape(), q.dtype());
    let norms = how.norms.map(|norm| norm.map(|norm| on.f32s(norm)));
    let norm_width = |norm: &Option<Tensor>, x: &Tensor| norm.as_ref().map_or(x.cols(), Tensor::len);
    let args = [
        on.read(q),
        on.read(k),
        on.read(v),
        on.write(&mut queries),
        on.write(kept.keys),
        on.write(kept.values),
        on.read_or_none(norms[0].as_ref()),
        on.read_or_none(norms[1].as_ref()),
        norm_width(&norms[0], q).into(),
        norm_width(&norms[1], k).into(),
        how.eps.into(),
        on.read(rotation.angles),
        on.read(how.positions),
        rotation.head_dim.into(),
        rotation.start.into(),
        rotation.half.into(),
        rotation.is_interleaved.into(),
        q.cols().into(),
        k.cols().into(),
        v.cols().into(),
        (rows / kept.num_sequences).into(),
        capacity.into(),
        kept.held.into(),
    ];
    let kernel = format!("qkv_norm_rope_append_{}", name(q.dtype()));
    let (grid, shared) = ([rows, 3, 1], 4 * [q, k, v].iter().map(|x| x.cols()).max().unwrap_or(0));
    let launch = Launch { source: &QKV_NORM_ROPE_APPEND, kernel: &kernel, grid, threads: THREADS, shared, args: &args };
    // SAFETY: a block reads a row of one of the three and writes it to its place, which is within what is kept; positions are those of
    // the table.
    unsafe { on.gpu.launch(&launch) };
    queries
}

/// The arguments of a kernel that does this beside its own work.
pub(super) type Placed = [Arg<'static>; 16];

/// Of one token of each sequence, in bf16: if that would be launched next, and makes the queries, the last key and the last value of so
/// shaped an attention, it is not launched, and who asks for it does it.
pub(super) fn take(on: On<'_>, qkv: [Arg<'_>; 3], shape: &AttentionShape) -> Option<Placed> {
    if shape.seq_len != 1 {
        return None;
    }
    let widths =
        [shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, shape.num_kv_heads * shape.value_dim];
    let node = on.gpu.fuse_with_last(|node| {
        let number = |at: usize| node.args[at].number() as usize;
        // Norms of whole rows or of heads.
        let is_known = |norm: usize, width: usize| {
            node.args[norm] == Arg::none() || [width, shape.head_dim].contains(&number(norm + 2))
        };
        node.kernel == "qkv_norm_rope_append_bf16"
            && node.grid[0] == shape.batch
            && node.args[3..6] == qkv
            && [17, 18, 19].map(number) == widths
            && [number(13), number(20)] == [shape.head_dim, 1]
            && [number(21), number(22) + 1] == [shape.kv_capacity, shape.kv_len]
            && is_known(6, widths[0])
            && is_known(7, widths[1])
    })?;
    let mut placed = [Arg::none(); 16];
    placed[..13].copy_from_slice(&node.args[..13]);
    placed[13..].copy_from_slice(&node.args[14..17]);
    Some(placed)
}
