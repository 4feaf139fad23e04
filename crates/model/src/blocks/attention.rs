//! Grouped-query causal attention with rotary positions and an optional norm of queries and keys.
//!
//! T tokens, D width, H query heads, G key and value heads, h head width.

use moeworks_ops::attention::{AttentionShape, attention, attention_backward};
use moeworks_ops::linear::{Write, linear, linear_backward_input, linear_backward_weight};
use moeworks_ops::rms_norm::{rms_norm, rms_norm_backward};
use moeworks_ops::rope::{Rotation, rope};
use moeworks_ops::{Context, elementwise};
use moeworks_tensor::{DType, Tensor};

use super::Pass;
use crate::config::ModelConfig;
use crate::generation::LayerCache;
use crate::weights::{AttentionWeights, LayerWeights};

/// An attention block.
#[derive(Clone, Debug)]
pub(crate) struct AttentionBlock {
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    eps: f32,
}

/// What backward needs of forward, besides the block's input.
pub(crate) struct AttentionSaved {
    inv_rms: Tensor,
    normed: Tensor,
    q: Projected,
    k: Projected,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
}

/// Queries or keys as attention takes them, and what their norm's backward needs.
struct Projected {
    rotated: Tensor,
    /// The projection before the norm, and the norm's 1/rms; none without a norm.
    before_norm: Option<(Tensor, Tensor)>,
}

/// The gradients of the block's matrices, still to be computed.
pub(crate) struct AttentionGradTask {
    normed: Tensor,
    o: Tensor,
    dy: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    compute: DType,
}

impl AttentionBlock {
    pub(crate) fn new(config: &ModelConfig) -> Self {
        let ModelConfig { num_heads, num_kv_heads, head_dim, norm_eps: eps, .. } = *config;
        Self { num_heads, num_kv_heads, head_dim, eps }
    }

    fn shape(&self, pass: &Pass<'_>, kv_len: usize, kv_capacity: usize) -> AttentionShape {
        AttentionShape {
            batch: pass.num_sequences,
            seq_len: pass.seq_len,
            kv_len,
            kv_capacity,
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            value_dim: self.head_dim,
            window: None,
            scale: (self.head_dim as f32).sqrt().recip(),
        }
    }

    /// `x [T, D]` f32 to `y [T, D]` f32. With a cache, which holds one sequence, the new keys and values are appended to it
    /// and the queries see all of it.
    pub(crate) fn forward(
        &self,
        pass: &Pass<'_>,
        weights: &LayerWeights,
        x: &Tensor,
        cache: Option<&mut LayerCache>,
    ) -> (Tensor, AttentionSaved) {
        let (ctx, w) = (pass.ctx, &weights.attention);
        let (normed, inv_rms) = rms_norm(ctx, x, &weights.attention_norm, self.eps, w.q.dtype());
        let q = self.project(pass, &normed, &w.q, w.q_norm.as_ref());
        let k = self.project(pass, &normed, &w.k, w.k_norm.as_ref());
        let v = linear(ctx, &normed, &w.v, w.v.dtype());
        let (o, lse) = match cache {
            None => {
                let shape = self.shape(pass, pass.seq_len, pass.seq_len);
                attention(ctx, &q.rotated, &k.rotated, &v, &shape)
            }
            Some(cache) => {
                cache.append(ctx, &k.rotated, &v);
                let shape = self.shape(pass, cache.len(), cache.capacity());
                attention(ctx, &q.rotated, cache.keys(), cache.values(), &shape)
            }
        };
        let mut y = linear(ctx, &o, &w.o, DType::F32);
        elementwise::add_assign(ctx, &mut y, x);
        (y, AttentionSaved { inv_rms, normed, q, k, v, o, lse })
    }

    /// The projection of `normed`, normed and rotated.
    fn project(&self, pass: &Pass<'_>, normed: &Tensor, w: &Tensor, norm: Option<&Tensor>) -> Projected {
        let projected = linear(pass.ctx, normed, w, w.dtype());
        let (mut rotated, before_norm) = match norm {
            None => (projected, None),
            Some(norm) => {
                let (y, inv_rms) = rms_norm(pass.ctx, &projected, norm, self.eps, w.dtype());
                (y, Some((projected, inv_rms)))
            }
        };
        rope(pass.ctx, &mut rotated, pass.rope, pass.positions.u32s(), Rotation::Forward);
        Projected { rotated, before_norm }
    }

    /// The gradient of `x` from that of `y`, and the task that finds the matrices' gradients. The norm weights' gradients
    /// are written to `grads` as `write` says.
    pub(crate) fn backward(
        &self,
        pass: &Pass<'_>,
        weights: &LayerWeights,
        (x, saved): (&Tensor, AttentionSaved),
        dy: &Tensor,
        write: Write,
        grads: &mut LayerWeights,
    ) -> (Tensor, AttentionGradTask) {
        let (ctx, w) = (pass.ctx, &weights.attention);
        let AttentionSaved { inv_rms, normed, q, k, v, o, lse } = saved;
        let d_o = linear_backward_input(ctx, dy, &w.o, w.o.dtype());
        let shape = self.shape(pass, pass.seq_len, pass.seq_len);
        let (dq, dk, dv) = attention_backward(ctx, &d_o, (&q.rotated, &k.rotated, &v), (&o, &lse), &shape);
        drop(d_o);
        let g = &mut grads.attention;
        let dq = project_backward(pass, dq, q, w.q_norm.as_ref(), write, g.q_norm.as_mut());
        let dk = project_backward(pass, dk, k, w.k_norm.as_ref(), write, g.k_norm.as_mut());
        let mut d_normed = linear_backward_input(ctx, &dq, &w.q, DType::F32);
        for (d, w) in [(&dk, &w.k), (&dv, &w.v)] {
            elementwise::add_assign(ctx, &mut d_normed, &linear_backward_input(ctx, d, w, DType::F32));
        }
        let d_norm = &mut grads.attention_norm;
        let mut dx = rms_norm_backward(ctx, &d_normed, x, &weights.attention_norm, &inv_rms, write, d_norm);
        elementwise::add_assign(ctx, &mut dx, dy);
        (dx, AttentionGradTask { normed, o, dy: dy.clone(), dq, dk, dv, compute: w.q.dtype() })
    }
}

/// The gradient of a projection before its norm and rotation from that after them.
fn project_backward(
    pass: &Pass<'_>,
    mut d: Tensor,
    saved: Projected,
    norm: Option<&Tensor>,
    write: Write,
    d_norm: Option<&mut Tensor>,
) -> Tensor {
    rope(pass.ctx, &mut d, pass.rope, pass.positions.u32s(), Rotation::Inverse);
    match (saved.before_norm, norm, d_norm) {
        (Some((x, inv_rms)), Some(norm), Some(d_norm)) => {
            rms_norm_backward(pass.ctx, &d, &x, norm, &inv_rms, write, d_norm)
        }
        _ => d,
    }
}

impl AttentionGradTask {
    /// Writes the gradients of the four matrices.
    pub(crate) fn run(self, ctx: &Context, write: Write, grads: &mut AttentionWeights) {
        let Self { normed, o, dy, dq, dk, dv, compute } = self;
        linear_backward_weight(ctx, &dy, &o, compute, write, &mut grads.o);
        linear_backward_weight(ctx, &dq, &normed, compute, write, &mut grads.q);
        linear_backward_weight(ctx, &dk, &normed, compute, write, &mut grads.k);
        linear_backward_weight(ctx, &dv, &normed, compute, write, &mut grads.v);
    }
}
