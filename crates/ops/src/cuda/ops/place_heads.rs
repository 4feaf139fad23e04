//! [`place_heads`](mod@crate::place_heads) on a GPU.

use moeworks_tensor::{DType, Tensor};

use super::elementwise::Rotation;
use super::{On, THREADS, name};
use crate::cuda::Launch;
use crate::cuda::sources::PLACE_HEADS;
use crate::place_heads::{Kept, Placing};

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
    let kernel = format!("place_heads_{}", name(q.dtype()));
    let (grid, shared) = ([rows, 3, 1], 4 * [q, k, v].iter().map(|x| x.cols()).max().unwrap_or(0));
    let launch = Launch { source: &PLACE_HEADS, kernel: &kernel, grid, threads: THREADS, shared, args: &args };
    // SAFETY: a block reads a row of one of the three and writes it to its place, which is within what is kept; positions are those of
    // the table.
    unsafe { on.gpu.launch(&launch) };
    queries
}
