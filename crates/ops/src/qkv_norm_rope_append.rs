//! The step between a layer's projections and cached attention: queries and keys are normed and rotated, keys and
//! values are appended to the cache. On a GPU it is one kernel, because in decoding the latency of many small
//! launches exceeds their work.

use moeworks_tensor::Tensor;

use crate::Context;
use crate::cuda::{self, On};
use crate::elementwise::copy_rows_of_each;
use crate::rms_norm::rms_norm;
use crate::rope::{RopeTable, Rotation, rope};

/// The norms and the rotation of queries and keys.
#[derive(Clone, Copy)]
pub struct Placing<'a> {
    /// The weights of the norms of queries and of keys, if there are any: see [`rms_norm`].
    pub norms: [Option<&'a Tensor>; 2],
    /// The term that the norms add to mean squares.
    pub eps: f32,
    /// The angles of [`rope`].
    pub table: &'a RopeTable,
    /// `[T]` u32: the position of each row.
    pub positions: &'a Tensor,
}

/// The cache that keys and values are appended to.
pub struct Kept<'a> {
    /// `[sequences capacity, ..]`
    pub keys: &'a mut Tensor,
    /// `[sequences capacity, ..]`
    pub values: &'a mut Tensor,
    /// Rows that each sequence has already.
    pub held: usize,
    /// The number of sequences. Each has an equal share of the T rows, one sequence behind the other.
    pub num_sequences: usize,
}

/// Norms and rotates the projections `q [T, H h]` and `k [T, G h]`, appends keys and values `v [T, ..]` to `kept`,
/// and returns the queries `[T, H h]`. All projections and the cache have one type, f32 or bf16. The norm's result is
/// rounded to that type before it is rotated.
#[must_use]
pub fn qkv_norm_rope_append(ctx: &Context, [q, k, v]: [Tensor; 3], how: &Placing<'_>, kept: &mut Kept<'_>) -> Tensor {
    let rows = q.rows();
    assert!(
        k.rows() == rows && v.rows() == rows,
        "qkv_norm_rope_append: {rows} rows, k {:?}, v {:?}",
        k.shape(),
        v.shape()
    );
    for (x, kept) in [(&k, &kept.keys), (&v, &kept.values)] {
        assert_eq!((x.cols(), x.dtype()), (kept.cols(), kept.dtype()), "qkv_norm_rope_append: what is kept");
    }
    if let Some(on) = On::of(ctx).filter(|_| cuda::qkv_norm_rope_append::takes([&q, &k, &v])) {
        let rotation = how.table.for_rows(ctx, &[&q, &k], how.positions);
        return cuda::qkv_norm_rope_append::run(on, [&q, &k, &v], how, &rotation, kept);
    }
    let [q, k] = [(q, how.norms[0]), (k, how.norms[1])].map(|(mut x, norm)| {
        if let Some(norm) = norm {
            x = rms_norm(ctx, &x, norm, how.eps, x.dtype()).0;
        }
        rope(ctx, &mut x, how.table, how.positions, Rotation::Forward);
        x
    });
    copy_rows_of_each(ctx, &k, kept.keys, kept.held, kept.num_sequences);
    copy_rows_of_each(ctx, &v, kept.values, kept.held, kept.num_sequences);
    q
}
