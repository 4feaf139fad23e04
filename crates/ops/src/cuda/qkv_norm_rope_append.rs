//! [`qkv_norm_rope_append`](mod@crate::qkv_norm_rope_append) on a GPU.

use moeworks_tensor::{DType, Tensor};

use super::elementwise::Rotation;
use super::{On, THREADS, name};
use crate::attention::AttentionShape;
use crate::qkv_norm_rope_append::{Kept, Placing};
use moeworks_gpu::sources::QKV_NORM_ROPE_APPEND;
use moeworks_gpu::{Arg, Launch, Pending, PendingQkvAppend};

/// The widest row that fits a block's shared memory.
const MAX_WIDTH: usize = 8192;

/// Returns whether there is a kernel for these projections.
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
    let append = PendingQkvAppend {
        projections: [on.read(q), on.read(k), on.read(v)],
        is_bf16: q.dtype() == DType::BF16,
        to: [on.write(&mut queries), on.write(kept.keys), on.write(kept.values)],
        norms: norms.each_ref().map(|norm| on.read_or_none(norm.as_ref())),
        norm_widths: [norm_width(&norms[0], q), norm_width(&norms[1], k)],
        eps: how.eps.into(),
        angles: on.read(rotation.angles),
        positions: on.read(how.positions),
        head_dim: rotation.head_dim,
        start: rotation.start.into(),
        half: rotation.half.into(),
        is_interleaved: rotation.is_interleaved.into(),
        widths: [q, k, v].map(Tensor::cols),
        rows,
        rows_each: rows / kept.num_sequences,
        capacity,
        held: kept.held,
    };
    let kernel = format!("qkv_norm_rope_append_{}", name(q.dtype()));
    let (grid, shared) = ([rows, 3, 1], 4 * [q, k, v].iter().map(|x| x.cols()).max().unwrap_or(0));
    let args = &args(&append);
    let launch = Launch { source: &QKV_NORM_ROPE_APPEND, kernel: &kernel, grid, threads: THREADS, shared, args };
    // SAFETY: a block reads a row of one of the three and writes it to its place, which is within what is kept;
    // positions are those of the table.
    unsafe { on.gpu.launch_pending(&launch, Pending::QkvAppend(append)) };
    queries
}

/// Returns the arguments of the kernel in its order.
fn args<'a>(append: &PendingQkvAppend<'a>) -> [Arg<'a>; 23] {
    let &PendingQkvAppend { projections: [q, k, v], to: [queries, keys, values], norms, norm_widths, .. } = append;
    let [q_norm_width, k_norm_width] = norm_widths.map(Arg::from);
    let [q_width, k_width, v_width] = append.widths.map(Arg::from);
    [
        q,
        k,
        v,
        queries,
        keys,
        values,
        norms[0],
        norms[1],
        q_norm_width,
        k_norm_width,
        append.eps,
        append.angles,
        append.positions,
        append.head_dim.into(),
        append.start,
        append.half,
        append.is_interleaved,
        q_width,
        k_width,
        v_width,
        append.rows_each.into(),
        append.capacity.into(),
        append.held.into(),
    ]
}

/// The arguments of a kernel that does this in addition to its own work.
pub(super) type Placed = [Arg<'static>; 16];

/// Takes back the pending operation of one token of each sequence, in bf16, if it makes the queries, the last key and
/// the last value `qkv` of an attention of this shape. The caller's kernel does its work.
pub(super) fn take(on: On<'_>, qkv: [Arg<'_>; 3], shape: &AttentionShape) -> Option<Placed> {
    let (append, _) = on.gpu.fuse_with_last(|pending| match pending {
        Pending::QkvAppend(append) => (append.to == qkv && is_for(&append, shape)).then_some(append),
        _ => None,
    })?;
    let PendingQkvAppend { projections: [q, k, v], to: [queries, keys, values], norms: [q_norm, k_norm], .. } = append;
    let [q_norm_width, k_norm_width] = append.norm_widths.map(Arg::from);
    let (angles, positions) = (append.angles, append.positions);
    let of_norms = [q_norm, k_norm, q_norm_width, k_norm_width, append.eps];
    let mut placed = [Arg::none(); 16];
    placed[..6].copy_from_slice(&[q, k, v, queries, keys, values]);
    placed[6..11].copy_from_slice(&of_norms);
    placed[11..].copy_from_slice(&[angles, positions, append.start, append.half, append.is_interleaved]);
    Some(placed)
}

/// Returns whether the operation handles one token of each sequence of an attention, in bf16, with norms of whole
/// rows or of heads.
fn is_for(append: &PendingQkvAppend<'_>, shape: &AttentionShape) -> bool {
    let widths =
        [shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, shape.num_kv_heads * shape.value_dim];
    let is_known = |index: usize| {
        let width = append.norm_widths[index];
        append.norms[index] == Arg::none() || [widths[index], shape.head_dim].contains(&width)
    };
    append.is_bf16
        && (shape.seq_len, append.rows_each) == (1, 1)
        && append.rows == shape.batch
        && append.widths == widths
        && append.head_dim == shape.head_dim
        && (append.capacity, append.held + 1) == (shape.kv_capacity, shape.kv_len)
        && is_known(0)
        && is_known(1)
}
