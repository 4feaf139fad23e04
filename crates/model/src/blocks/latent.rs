//! Queries, keys and values of multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1).
//!
//! Keys and values of all heads are made from one narrow normed vector a token; the rotated part of the key is made apart
//! and shared by all heads. N elements of a head are plain, R rotated, w are its values; L is the narrow width.

use moeworks_ops::columns::{Blocks, Columns, add_columns, copy_columns};
use moeworks_ops::linear::{Write, linear, linear_backward_input, linear_backward_weight};
use moeworks_ops::rms_norm::{rms_norm, rms_norm_backward};
use moeworks_ops::rope::{Rotation, rope};
use moeworks_ops::{Context, elementwise};
use moeworks_tensor::{DType, Tensor};

use super::Pass;
use super::projection::{project, project_grads};
use crate::config::LatentAttention;
use crate::weights::LatentWeights;

/// Makes queries, keys and values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Latent {
    pub(crate) sizes: LatentAttention,
    pub(crate) num_heads: usize,
    pub(crate) value_dim: usize,
    pub(crate) eps: f32,
}

/// A narrow vector a token: before the norm, its 1/rms, after the norm.
struct Narrow {
    x: Tensor,
    inv_rms: Tensor,
    normed: Tensor,
}

/// What backward needs of forward.
pub(crate) struct LatentSaved {
    q: Option<Narrow>,
    kv: Narrow,
}

/// The gradients of the matrices, still to be computed.
pub(crate) struct LatentGradTask {
    normed: Tensor,
    saved: LatentSaved,
    dq: Tensor,
    dq_narrow: Option<Tensor>,
    d_heads: Tensor,
    d_kv_down: Tensor,
    compute: DType,
}

impl Latent {
    fn key_dim(&self) -> usize {
        self.sizes.plain_dim + self.sizes.rotary_dim
    }

    /// Elements that one head has of the widened vector: its plain key, then its values.
    fn wide_dim(&self) -> usize {
        self.sizes.plain_dim + self.value_dim
    }

    fn per_head(&self, width: usize) -> Blocks {
        Blocks { count: self.num_heads, width }
    }

    fn turn(pass: &Pass<'_>, x: &mut Tensor, direction: Rotation) {
        if let Some(table) = &pass.rope {
            rope(pass.ctx, x, table, pass.positions.u32s(), direction);
        }
    }

    fn narrow(&self, ctx: &Context, x: Tensor, norm: &Tensor) -> Narrow {
        let (normed, inv_rms) = rms_norm(ctx, &x, norm, self.eps, x.dtype());
        Narrow { x, inv_rms, normed }
    }

    /// Queries, keys and values of `normed [T, D]`.
    pub(crate) fn forward(&self, pass: &Pass<'_>, w: &LatentWeights, normed: &Tensor) -> ([Tensor; 3], LatentSaved) {
        let (ctx, dtype, rows) = (pass.ctx, w.q.dtype().of_activations(), normed.rows());
        let q_narrow = w.q_down.as_ref().map(|(down, norm)| self.narrow(ctx, project(ctx, normed, down, dtype), norm));
        let mut q = linear(ctx, q_narrow.as_ref().map_or(normed, |narrow| &narrow.normed), &w.q, dtype);
        Self::turn(pass, &mut q, Rotation::Forward);

        let down = project(ctx, normed, &w.kv_down, dtype);
        let rank = self.sizes.kv_rank;
        let mut x = ctx.empty(&[rows, rank], dtype);
        let first = Columns { start: 0, step: 0 };
        copy_columns(ctx, Blocks { count: 1, width: rank }, (&down, first), (&mut x, first));
        let kv = self.narrow(ctx, x, &w.kv_norm);
        let heads = linear(ctx, &kv.normed, &w.kv, dtype);
        let mut k = ctx.empty(&[rows, self.num_heads * self.key_dim()], dtype);
        let (from, to) = (self.wide_columns(0), self.key_columns(0));
        copy_columns(ctx, self.per_head(self.sizes.plain_dim), (&heads, from), (&mut k, to));
        let (from, to) = (Columns { start: rank, step: 0 }, self.key_columns(self.sizes.plain_dim));
        copy_columns(ctx, self.per_head(self.sizes.rotary_dim), (&down, from), (&mut k, to));
        Self::turn(pass, &mut k, Rotation::Forward);
        let mut v = ctx.empty(&[rows, self.num_heads * self.value_dim], dtype);
        let to = Columns { start: 0, step: self.value_dim };
        let from = self.wide_columns(self.sizes.plain_dim);
        copy_columns(ctx, self.per_head(self.value_dim), (&heads, from), (&mut v, to));
        ([q, k, v], LatentSaved { q: q_narrow, kv })
    }

    /// From element `start` of each head of keys.
    fn key_columns(&self, start: usize) -> Columns {
        Columns { start, step: self.key_dim() }
    }

    /// From element `start` of each head of the widened vector.
    fn wide_columns(&self, start: usize) -> Columns {
        Columns { start, step: self.wide_dim() }
    }

    /// The gradient of `normed` from those of queries, keys and values, and the task that finds the matrices' gradients. The
    /// norm weights' gradients are written to `grads` as `write` says.
    pub(crate) fn backward(
        &self,
        pass: &Pass<'_>,
        w: &LatentWeights,
        (normed, saved): (Tensor, LatentSaved),
        [mut dq, mut dk, dv]: [Tensor; 3],
        write: Write,
        grads: &mut LatentWeights,
    ) -> (Tensor, LatentGradTask) {
        let ctx = pass.ctx;
        Self::turn(pass, &mut dq, Rotation::Inverse);
        Self::turn(pass, &mut dk, Rotation::Inverse);
        let mut d_normed = linear_backward_input(ctx, &dq, &w.q, DType::F32);
        let mut dq_narrow = None;
        if let (Some(narrow), Some((down, norm)), Some((_, d_norm))) = (&saved.q, &w.q_down, &mut grads.q_down) {
            let dx = rms_norm_backward(ctx, &d_normed, &narrow.x, norm, &narrow.inv_rms, write, d_norm);
            d_normed = linear_backward_input(ctx, &dx, &down.weight, DType::F32);
            dq_narrow = Some(dx);
        }
        let (d_heads, d_kv_down) = self.backward_kv(ctx, w, &saved.kv, (&dk, &dv), write, &mut grads.kv_norm);
        let from_kv = linear_backward_input(ctx, &d_kv_down, &w.kv_down.weight, DType::F32);
        elementwise::add_assign(ctx, &mut d_normed, &from_kv);
        let compute = w.q.dtype();
        (d_normed, LatentGradTask { normed, saved, dq, dq_narrow, d_heads, d_kv_down, compute })
    }

    /// The gradients of the widened vector `[T, H (N + w)]` and of the down-projection `[T, Lkv + R]`.
    fn backward_kv(
        &self,
        ctx: &Context,
        w: &LatentWeights,
        narrow: &Narrow,
        (dk, dv): (&Tensor, &Tensor),
        write: Write,
        d_norm: &mut Tensor,
    ) -> (Tensor, Tensor) {
        let rows = dk.rows();
        let mut d_heads = ctx.empty(&[rows, self.num_heads * self.wide_dim()], DType::F32);
        let (plain, rank, rotary) = (self.sizes.plain_dim, self.sizes.kv_rank, self.sizes.rotary_dim);
        let (from, to) = (self.key_columns(0), self.wide_columns(0));
        copy_columns(ctx, self.per_head(plain), (dk, from), (&mut d_heads, to));
        let from = Columns { start: 0, step: self.value_dim };
        copy_columns(ctx, self.per_head(self.value_dim), (dv, from), (&mut d_heads, self.wide_columns(plain)));
        let d_narrow = linear_backward_input(ctx, &d_heads, &w.kv, DType::F32);
        let d_narrow = rms_norm_backward(ctx, &d_narrow, &narrow.x, &w.kv_norm, &narrow.inv_rms, write, d_norm);
        let mut d_down = ctx.zeros(&[rows, rank + rotary], DType::F32);
        let first = Columns { start: 0, step: 0 };
        copy_columns(ctx, Blocks { count: 1, width: rank }, (&d_narrow, first), (&mut d_down, first));
        let (from, to) = (self.key_columns(plain), Columns { start: rank, step: 0 });
        add_columns(ctx, self.per_head(rotary), (dk, from), (&mut d_down, to));
        (d_heads, d_down)
    }
}

impl LatentGradTask {
    pub(crate) fn run(self, ctx: &Context, write: Write, grads: &mut LatentWeights) {
        let Self { normed, saved, dq, dq_narrow, d_heads, d_kv_down, compute } = self;
        let q_input = saved.q.as_ref().map_or(&normed, |narrow| &narrow.normed);
        linear_backward_weight(ctx, &dq, q_input, compute, write, &mut grads.q);
        if let (Some(d), Some((down, _))) = (dq_narrow, &mut grads.q_down) {
            project_grads(ctx, (&d, &normed), compute, write, down);
        }
        linear_backward_weight(ctx, &d_heads, &saved.kv.normed, compute, write, &mut grads.kv);
        project_grads(ctx, (&d_kv_down, &normed), compute, write, &mut grads.kv_down);
    }
}
