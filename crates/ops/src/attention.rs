//! Grouped-query causal attention, computed block by block (Dao et al., 2205.14135): never S x S numbers in memory.
//!
//! Query head `n` uses key and value head `n / (H / G)`. The last query is aligned with the last key, so query i sees
//! keys `0..=i + kv_len - seq_len`: that serves training (`kv_len = seq_len`) and decoding from a cache alike.

use moeworks_tensor::{DType, Tensor};

use crate::Context;
use crate::linear::store;

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

/// `softmax(scale q k^T, causal) v`. `q` `[batch seq_len, H h]`, `k` and `v` `[batch kv_capacity, G h]`, each f32 or bf16.
/// Returns `o` in the shape and type of `q`, and the log of each softmax's sum, `[batch, H, seq_len]` f32, which backward needs.
#[must_use]
pub fn attention(ctx: &Context, q: &Tensor, k: &Tensor, v: &Tensor, shape: &AttentionShape) -> (Tensor, Tensor) {
    shape.check(q, k, v);
    let s = *shape;
    let (q_values, k_values, v_values) = (q.to_f32_vec(), k.to_f32_vec(), v.to_f32_vec());
    let mut o = vec![0.0; q.len()];
    let mut lse = ctx.empty(&[s.batch, s.num_heads, s.seq_len], DType::F32);
    s.for_each_query(|batch, head, query, num_keys| {
        let q = &q_values[s.query_at(batch, head, query)..][..s.head_dim];
        let dot = |key| dot(q, &k_values[s.key_at(batch, head, key)..]) * s.scale;
        let scores: Vec<f32> = (0..num_keys).map(dot).collect();
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f32 = scores.iter().map(|x| (x - max).exp()).sum();
        lse.f32s_mut()[(batch * s.num_heads + head) * s.seq_len + query] = max + sum.ln();
        let o = &mut o[s.query_at(batch, head, query)..][..s.head_dim];
        for (key, score) in scores.iter().enumerate() {
            let p = (score - max).exp() / sum;
            o.iter_mut().zip(&v_values[s.key_at(batch, head, key)..]).for_each(|(o, v)| *o += p * v);
        }
    });
    (store(ctx, q.shape(), &o, q.dtype()), lse)
}

/// The gradients of [`attention`] for `q`, `k` and `v`, f32 in their shapes; rows of `k` and `v` beyond `kv_len` get zeros. `d_o` is the
/// gradient of `o`, f32 or bf16; `o` and `lse` are what forward returned.
#[must_use]
pub fn attention_backward(
    ctx: &Context,
    d_o: &Tensor,
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    (o, lse): (&Tensor, &Tensor),
    shape: &AttentionShape,
) -> (Tensor, Tensor, Tensor) {
    shape.check(q, k, v);
    let s = *shape;
    let (q_values, k_values, v_values) = (q.to_f32_vec(), k.to_f32_vec(), v.to_f32_vec());
    let (d_o, o, lse) = (d_o.to_f32_vec(), o.to_f32_vec(), lse.f32s());
    let mut dq = ctx.zeros(q.shape(), DType::F32);
    let mut dk = ctx.zeros(k.shape(), DType::F32);
    let mut dv = ctx.zeros(v.shape(), DType::F32);
    s.for_each_query(|batch, head, query, num_keys| {
        let at = s.query_at(batch, head, query);
        let (q, d_o, o) = (&q_values[at..][..s.head_dim], &d_o[at..][..s.head_dim], &o[at..][..s.head_dim]);
        let delta = dot(d_o, o);
        let lse = lse[(batch * s.num_heads + head) * s.seq_len + query];
        for key in 0..num_keys {
            let key_at = s.key_at(batch, head, key);
            let (k, v) = (&k_values[key_at..][..s.head_dim], &v_values[key_at..][..s.head_dim]);
            let p = (dot(q, k) * s.scale - lse).exp();
            let ds = p * (dot(d_o, v) - delta) * s.scale;
            for i in 0..s.head_dim {
                dv.f32s_mut()[key_at + i] += p * d_o[i];
                dk.f32s_mut()[key_at + i] += ds * q[i];
                dq.f32s_mut()[at + i] += ds * k[i];
            }
        }
    });
    (dq, dk, dv)
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

    fn for_each_query(&self, mut visit: impl FnMut(usize, usize, usize, usize)) {
        for batch in 0..self.batch {
            for head in 0..self.num_heads {
                for query in 0..self.seq_len {
                    visit(batch, head, query, query + self.kv_len - self.seq_len + 1);
                }
            }
        }
    }

    fn query_at(&self, batch: usize, head: usize, query: usize) -> usize {
        ((batch * self.seq_len + query) * self.num_heads + head) * self.head_dim
    }

    fn key_at(&self, batch: usize, head: usize, key: usize) -> usize {
        let kv_head = head / (self.num_heads / self.num_kv_heads);
        ((batch * self.kv_capacity + key) * self.num_kv_heads + kv_head) * self.head_dim
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
