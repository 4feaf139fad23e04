//! Grouped-query causal attention, computed block by block (Dao et al., 2205.14135): never S x S numbers in memory.
//!
//! Query head `n` uses key and value head `n / (H / G)`. The last query is aligned with the last key, so query i sees
//! keys `0..=i + kv_len - seq_len`: that serves training (`kv_len = seq_len`), prefill in pieces and decoding from a
//! cache alike.
//!
//! All queries that share a key head, ordered by position and then by head, form the rows of one matrix, cut into blocks
//! of 64: so keys and values are read once for a whole group of heads, and a decoding step is the same
//! code with a short block. Scores are held transposed, keys by rows: then neither keys nor values need a transposed
//! copy, and the softmax runs down columns without sums across lanes. Products, softmax and sums are f32 whatever the
//! tensors' types. Blocks that the causal mask hides are skipped, down to panels of 8 keys.

mod backward;
mod blocks;
mod forward;

use moeworks_tensor::{DType, Tensor};

use crate::Context;

/// The sizes of an attention. H query heads share G key and value heads, h elements each.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: usize,
    /// Queries of each sequence.
    pub seq_len: usize,
    /// Keys of each sequence that are used, at least `seq_len`.
    pub kv_len: usize,
    /// Rows that each sequence has in `k` and `v`, at least `kv_len`.
    pub kv_capacity: usize,
    /// H, a multiple of G.
    pub num_heads: usize,
    /// G.
    pub num_kv_heads: usize,
    /// h.
    pub head_dim: usize,
    /// Multiplies the scores; usually `1 / sqrt(h)`.
    pub scale: f32,
}

/// `softmax(scale q k^T, causal) v`. `q` `[batch seq_len, H h]`, `k` and `v` `[batch kv_capacity, G h]`, each f32 or
/// bf16. Returns `o` in the shape and type of `q`, and the log of each softmax's sum, `[batch, H, seq_len]` f32, which
/// backward needs.
#[must_use]
pub fn attention(ctx: &Context, q: &Tensor, k: &Tensor, v: &Tensor, shape: &AttentionShape) -> (Tensor, Tensor) {
    shape.check(q, k, v);
    let mut o = ctx.empty(q.shape(), q.dtype());
    let mut lse = ctx.empty(&[shape.batch, shape.num_heads, shape.seq_len], DType::F32);
    forward::run(ctx, (q, k, v), shape, &mut o, &mut lse);
    (o, lse)
}

/// The gradients of [`attention`] for `q`, `k` and `v`, f32 in their shapes; rows of `k` and `v` beyond `kv_len` get
/// zeros. `d_o` is the gradient of `o`, f32 or bf16; `o` and `lse` are what forward returned.
///
/// With `p` the softmax, recomputed from `lse`: `dv = p^T d_o`, `ds = p (d_o v^T - rowsum(d_o o))`,
/// `dq = scale ds k`, `dk = scale ds^T q`. A task owns the keys that it sums over, in the order of the queries.
#[must_use]
pub fn attention_backward(
    ctx: &Context,
    d_o: &Tensor,
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    (o, lse): (&Tensor, &Tensor),
    shape: &AttentionShape,
) -> (Tensor, Tensor, Tensor) {
    shape.check(q, k, v);
    let num_rows = shape.batch * shape.num_heads * shape.seq_len;
    assert_eq!((d_o.len(), o.len(), lse.len()), (q.len(), q.len(), num_rows), "attention backward: {shape:?}");
    let mut grads = backward::Grads {
        dq: ctx.empty(q.shape(), DType::F32),
        dk: ctx.zeros(k.shape(), DType::F32),
        dv: ctx.zeros(v.shape(), DType::F32),
    };
    let inputs =
        backward::Inputs { d_o: d_o.into(), q: q.into(), k: k.into(), v: v.into(), o: o.into(), lse: lse.f32s() };
    backward::run(ctx, &inputs, shape, &mut grads);
    (grads.dq, grads.dk, grads.dv)
}

impl AttentionShape {
    fn check(&self, q: &Tensor, k: &Tensor, v: &Tensor) {
        let (rows, kv_rows) = (self.batch * self.seq_len, self.batch * self.kv_capacity);
        assert!(self.num_kv_heads > 0 && self.num_heads.is_multiple_of(self.num_kv_heads), "attention: {self:?}");
        assert!(self.seq_len <= self.kv_len && self.kv_len <= self.kv_capacity, "attention: {self:?}");
        assert_eq!(q.len(), rows * self.num_heads * self.head_dim, "attention: q {:?}, {self:?}", q.shape());
        assert_eq!(k.len(), kv_rows * self.num_kv_heads * self.head_dim, "attention: k {:?}, {self:?}", k.shape());
        assert_eq!(v.len(), k.len(), "attention: k {:?}, v {:?}", k.shape(), v.shape());
    }
}
