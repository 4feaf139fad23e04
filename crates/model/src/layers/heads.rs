//! Queries, keys and values with a matrix each, an optional norm of queries and keys, then the rotary embedding.

use moeworks_ops::linear::{Write, linear_backward_input, linear_backward_input_onto};
use moeworks_ops::qkv_norm_rope_append::{Kept, Placing, qkv_norm_rope_append};
use moeworks_ops::rms_norm::{rms_norm, rms_norm_backward};
use moeworks_ops::rope::{Rotation, rope};
use moeworks_ops::{Context, elementwise};
use moeworks_tensor::{DType, Tensor};

use super::Pass;
use super::projection::{attended_type, project_each, project_grads};
use crate::kv_cache::{LayerCache, RowType};
use crate::tensor_ranks::{NormedPart, ShardedWidth, TensorRanks};
use crate::weights::HeadWeights;

/// The projections to queries, keys and values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads {
    pub(crate) eps: f32,
    /// The limit that projections are clamped to on both sides; 0: none.
    pub(crate) clip: f32,
    /// True if heads are sharded over tensor-parallel ranks.
    pub(crate) is_cut: bool,
}

/// The activations that backward needs.
pub(crate) struct HeadsSaved {
    /// `[T, D]`: the normed input.
    normed: Tensor,
    q: Saved,
    k: Saved,
    /// The clamped values, if there is a limit.
    clipped_v: Option<Tensor>,
}

/// The activations of queries or keys that backward needs.
#[derive(Default)]
struct Saved {
    /// The projection before the norm, and 1/rms.
    before_norm: Option<(Tensor, Tensor)>,
    /// The clamped projection.
    clipped: Option<Tensor>,
}

/// The gradients of the matrices, still to be computed.
pub(crate) struct HeadsGradTask {
    normed: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    compute: DType,
}

/// The weight of a norm, with the tensor that its gradient is written to.
struct NormGrads<'a> {
    weight: &'a Tensor,
    d_weight: &'a mut Tensor,
}

impl<'a> NormGrads<'a> {
    fn new(weight: Option<&'a Tensor>, d_weight: Option<&'a mut Tensor>) -> Option<Self> {
        weight.zip(d_weight).map(|(weight, d_weight)| Self { weight, d_weight })
    }
}

/// The kind of a projection.
#[derive(Clone, Copy)]
enum Made {
    Queries,
    Keys,
}

impl Made {
    /// Returns the ranks whose heads share a norm, the norm's width over all of them, and false if another rank
    /// already contributes this part. None if a norm does not cross ranks.
    fn parts<'a>(self, heads: &Heads, pass: &Pass<'a>) -> Option<(&'a TensorRanks, ShardedWidth)> {
        let ranks = pass.tensor.filter(|_| heads.is_cut)?;
        let [queries, keys] = ranks.split().normed_widths()?;
        let part = match self {
            Self::Queries => ShardedWidth { width: queries, is_counted: true },
            Self::Keys => ShardedWidth { width: keys, is_counted: ranks.split().is_first_with_keys() },
        };
        Some((ranks, part))
    }
}

impl Heads {
    /// Projects `normed [T, D]` to queries, keys and values.
    fn projected(pass: &Pass<'_>, w: &HeadWeights, normed: &Tensor) -> [Tensor; 3] {
        // GGUF files may have the three matrices in different types.
        let matrices = [&w.q, &w.k, &w.v].map(|w| attended_type(pass.ctx, w.weight.dtype()));
        let dtype = if matrices.contains(&DType::F32) { DType::F32 } else { matrices[0] };
        project_each(pass.ctx, normed, [&w.q, &w.k, &w.v], dtype)
    }

    /// Returns the queries of `normed [T, D]`, and appends its keys and values to `cache`.
    pub(crate) fn forward_cached(
        &self,
        pass: &Pass<'_>,
        w: &HeadWeights,
        normed: &Tensor,
        cache: &mut LayerCache,
    ) -> Tensor {
        let (ctx, is_whole) =
            (pass.ctx, [Made::Queries, Made::Keys].iter().all(|made| made.parts(self, pass).is_none()));
        let Some(table) = pass.rope.as_ref().filter(|_| is_whole && self.clip == 0.0) else {
            let ([q, k, v], _) = self.forward(pass, w, normed);
            cache.append(ctx, &[&k, &v]);
            return q;
        };
        let [q, k, v] = Self::projected(pass, w, normed);
        let norms = [w.q_norm.as_ref(), w.k_norm.as_ref()];
        let placing = Placing { norms, eps: self.eps, table, positions: &pass.positions };
        let (num_sequences, kinds) = (cache.num_sequences(), [&k, &v].map(RowType::new));
        cache.append_with(ctx, q.rows(), &kinds, |kept, held| {
            let [keys, values] = kept else { unreachable!("a layer keeps keys and values") };
            qkv_norm_rope_append(ctx, [q, k, v], &placing, &mut Kept { keys, values, held, num_sequences })
        })
    }

    /// Projects `normed [T, D]` to queries, keys and values, ready for attention.
    pub(crate) fn forward(&self, pass: &Pass<'_>, w: &HeadWeights, normed: &Tensor) -> ([Tensor; 3], HeadsSaved) {
        let [q, k, mut v] = Self::projected(pass, w, normed);
        let (q, q_saved) = self.rotated(pass, q, w.q_norm.as_ref(), Made::Queries);
        let (k, k_saved) = self.rotated(pass, k, w.k_norm.as_ref(), Made::Keys);
        let clipped_v = self.clip(pass.ctx, &mut v);
        ([q, k, v], HeadsSaved { normed: normed.clone(), q: q_saved, k: k_saved, clipped_v })
    }

    /// Applies norm, clamp and rotary embedding to a projection.
    fn rotated(&self, pass: &Pass<'_>, mut x: Tensor, norm: Option<&Tensor>, made: Made) -> (Tensor, Saved) {
        let dtype = x.dtype();
        let mut saved = Saved::default();
        if let Some(norm) = norm {
            let (y, inv_rms) = match made.parts(self, pass) {
                Some((ranks, part)) => ranks.norm_part(pass.ctx, &x, norm, part, self.eps, dtype),
                None => rms_norm(pass.ctx, &x, norm, self.eps, dtype),
            };
            saved.before_norm = Some((std::mem::replace(&mut x, y), inv_rms));
        }
        saved.clipped = self.clip(pass.ctx, &mut x);
        if let Some(table) = &pass.rope {
            rope(pass.ctx, &mut x, table, &pass.positions, Rotation::Forward);
        }
        (x, saved)
    }

    /// Clamps `x`; returns a copy of the result, if there is a limit.
    fn clip(&self, ctx: &Context, x: &mut Tensor) -> Option<Tensor> {
        (self.clip > 0.0).then(|| {
            elementwise::clip_assign(ctx, x, self.clip);
            // A copy on the device, not by way of the host.
            elementwise::cast(ctx, x, x.dtype())
        })
    }

    /// Returns the gradient of `normed` from those of queries, keys and values, and the task that computes the
    /// matrices' gradients. The gradients of norm weights are written to `grads` as `write` says.
    pub(crate) fn backward(
        &self,
        pass: &Pass<'_>,
        w: &HeadWeights,
        saved: HeadsSaved,
        [dq, dk, mut dv]: [Tensor; 3],
        write: Write,
        grads: &mut HeadWeights,
    ) -> (Tensor, HeadsGradTask) {
        let ctx = pass.ctx;
        let q_norm = NormGrads::new(w.q_norm.as_ref(), grads.q_norm.as_mut());
        let dq = self.rotated_backward(pass, dq, Made::Queries, saved.q, q_norm, write);
        let k_norm = NormGrads::new(w.k_norm.as_ref(), grads.k_norm.as_mut());
        let dk = self.rotated_backward(pass, dk, Made::Keys, saved.k, k_norm, write);
        if let Some(clipped) = &saved.clipped_v {
            elementwise::clip_backward_assign(ctx, &mut dv, clipped, self.clip);
        }
        let [dq, dk, dv] = [dq, dk, dv].map(|d| elementwise::into_type(ctx, d, w.q.weight.dtype()));
        let mut d_normed = linear_backward_input(ctx, &dq, &w.q.weight, DType::F32);
        for (d, w) in [(&dk, &w.k.weight), (&dv, &w.v.weight)] {
            d_normed = linear_backward_input_onto(ctx, d, w, &d_normed);
        }
        (d_normed, HeadsGradTask { normed: saved.normed, dq, dk, dv, compute: w.q.weight.dtype() })
    }

    /// Backward of [`rotated`](Self::rotated): returns the gradient of the projection.
    fn rotated_backward(
        &self,
        pass: &Pass<'_>,
        mut d: Tensor,
        made: Made,
        saved: Saved,
        norm: Option<NormGrads<'_>>,
        write: Write,
    ) -> Tensor {
        if let Some(table) = &pass.rope {
            rope(pass.ctx, &mut d, table, &pass.positions, Rotation::Inverse);
        }
        if let Some(clipped) = &saved.clipped {
            elementwise::clip_backward_assign(pass.ctx, &mut d, clipped, self.clip);
        }
        match (saved.before_norm, norm) {
            (Some((x, inv_rms)), Some(NormGrads { weight: norm, d_weight: d_norm })) => match made.parts(self, pass) {
                Some((ranks, part)) => {
                    let input = NormedPart { x: &x, weight: norm, inv_rms: &inv_rms };
                    ranks.norm_part_backward(pass.ctx, &d, input, part, write, d_norm)
                }
                None => rms_norm_backward(pass.ctx, &d, &x, norm, &inv_rms, write, d_norm),
            },
            _ => d,
        }
    }
}

impl HeadsGradTask {
    pub(crate) fn run(self, ctx: &Context, write: Write, grads: &mut HeadWeights) {
        let Self { normed, dq, dk, dv, compute } = self;
        project_grads(ctx, &dq, &normed, compute, write, &mut grads.q);
        project_grads(ctx, &dk, &normed, compute, write, &mut grads.k);
        project_grads(ctx, &dv, &normed, compute, write, &mut grads.v);
    }
}
