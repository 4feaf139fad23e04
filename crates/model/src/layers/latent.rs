//! Queries, keys and values of multi-head latent attention (MLA; DeepSeek-V2, 2405.04434, section 2.1).
//!
//! The keys and values of all heads are up-projections of one normed latent vector per token. The rotated part of the
//! key is projected separately and shared by all heads. Of a head, N elements are plain, R are rotated, and w are its
//! value's; L is the latent width.
//!
//! The cache has the latent vector and the rotated part: L + R numbers per token, where keys and values of all heads
//! are H (N + R + w). Decoding does not up-project them again. Since `q (W c) = (q W) c`, the queries are
//! down-projected instead and attend to the latent vectors, which serve as keys and values; each head's sum is
//! up-projected at the end ("absorbed" weights, section 2.1.2).

use std::borrow::Cow;

use moeworks_ops::attention::{
    AttentionHeads, AttentionInputs as RaggedInputs, AttentionShape, RaggedShape, attention_ragged, is_for_host,
};
use moeworks_ops::columns::{Blocks, Columns, add_columns, copy_columns};
use moeworks_ops::elementwise::copy_rows;
use moeworks_ops::heads::{HeadParts, linear_by_head, transposed_linear_by_head};
use moeworks_ops::linear::{Write, linear, linear_backward_input};
use moeworks_ops::rms_norm::{rms_norm, rms_norm_backward};
use moeworks_ops::rope::{Rotation, rope};
use moeworks_ops::{Context, elementwise, quantized};
use moeworks_tensor::{DType, Device, Tensor};

use super::Pass;
use super::attention::attend;
use super::paged_attention::{PagedQueries, attend_to_blocks};
use super::projection::{attended_type, matrix_grad, project, project_grads};
use crate::config::LatentAttention;
use crate::kv_cache::LayerCache;
use crate::paged_kv_cache::PagedLayer;
use crate::weights::{LatentWeights, QueryDown};

/// The projections to queries, keys and values in latent attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Latent {
    pub(crate) sizes: LatentAttention,
    pub(crate) num_heads: usize,
    pub(crate) value_dim: usize,
    pub(crate) eps: f32,
}

/// A latent vector per token: before the norm, its 1/rms, and after the norm.
struct Narrow {
    x: Tensor,
    inv_rms: Tensor,
    normed: Tensor,
}

/// The activations that backward needs.
pub(crate) struct LatentSaved {
    /// `[T, D]`: the normed input.
    normed: Tensor,
    q: Option<Narrow>,
    kv: Narrow,
}

/// The gradients of the matrices, still to be computed.
pub(crate) struct LatentGradTask {
    saved: LatentSaved,
    dq: Tensor,
    dq_narrow: Option<Tensor>,
    d_heads: Tensor,
    d_kv_down: Tensor,
    compute: DType,
}

/// Returns one block of columns from `start` on, the same for every head.
fn at(start: usize) -> Columns {
    Columns { start, step: 0 }
}

impl Latent {
    fn key_dim(&self) -> usize {
        self.sizes.plain_dim + self.sizes.rotary_dim
    }

    /// Returns the width of a head's up-projection: its plain key, then its value.
    fn wide_dim(&self) -> usize {
        self.sizes.plain_dim + self.value_dim
    }

    fn per_head(&self, width: usize) -> Blocks {
        Blocks { count: self.num_heads, width }
    }

    fn turn(pass: &Pass<'_>, x: &mut Tensor, direction: Rotation) {
        if let Some(table) = &pass.rope {
            rope(pass.ctx, x, table, &pass.positions, direction);
        }
    }

    fn narrow(&self, ctx: &Context, x: Tensor, norm: &Tensor) -> Narrow {
        let (normed, inv_rms) = rms_norm(ctx, &x, norm, self.eps, x.dtype());
        Narrow { x, inv_rms, normed }
    }

    /// Projects `normed [T, D]` to queries, keys and values, ready for attention.
    pub(crate) fn forward(&self, pass: &Pass<'_>, w: &LatentWeights, normed: &Tensor) -> ([Tensor; 3], LatentSaved) {
        let (q, q_narrow) = self.queries(pass, w, normed);
        let (kv, key) = self.narrowed(pass, w, normed);
        let (k, v) = self.widened(pass.ctx, w, &kv.normed, &key);
        ([q, k, v], LatentSaved { normed: normed.clone(), q: q_narrow, kv })
    }

    /// Appends the next tokens `normed [T, D]` of the sequences in `cache`, and returns the heads' outputs, `[T, H
    /// w]`. `shape` returns the shape of attention for a number of keys and a capacity.
    pub(super) fn forward_cached(
        &self,
        pass: &Pass<'_>,
        w: &LatentWeights,
        normed: &Tensor,
        cache: &mut LayerCache,
        shape: &dyn Fn(usize, usize) -> AttentionShape,
        sinks: Option<&Tensor>,
    ) -> Tensor {
        let ctx = pass.ctx;
        let (q, _) = self.queries(pass, w, normed);
        let (kv, key) = self.narrowed(pass, w, normed);
        let row = self.joined(ctx, &kv.normed, &key);
        // A cache on the GPU would be copied to the host for each token.
        let place = &if is_for_host(ctx, row.cols(), row.dtype()) { ctx.on_host() } else { ctx.clone() };
        cache.append(place, &[&row]);
        let (held, kept) = (cache.held(), &cache.kept()[0]);
        // The rows of several sequences in the cache are not contiguous.
        let follows = held == pass.sequences.len || pass.sequences.count == 1;
        if follows && !ctx.is_batch_invariant() && self.should_widen(pass.sequences.len, held) {
            let (narrow, key) =
                if held == pass.sequences.len { (kv.normed, key) } else { self.parted(ctx, place, kept, held) };
            let (k, v) = self.widened(ctx, w, &narrow, &key);
            return attend(pass, RaggedInputs { q: &q, k: &k, v: &v, sinks }, &shape(held, held)).o;
        }
        let kv = &*numbers_of_kv(place, w, q.dtype());
        let q = self.narrow_queries(place, &q, kv);
        let row = self.row_dim();
        let shape = AttentionShape { num_kv_heads: 1, head_dim: row, value_dim: row, ..shape(held, cache.capacity()) };
        let sums = attend(pass, RaggedInputs { q: &q, k: kept, v: kept, sinks }, &shape).o;
        self.widened_sums(place, &sums, kv)
    }

    /// Writes the next tokens `normed [T, D]` of paged sequences to their blocks, and returns the heads' outputs,
    /// `[T, H w]`. `heads` are those of up-projected keys and values.
    pub(super) fn forward_paged(
        &self,
        pass: &Pass<'_>,
        w: &LatentWeights,
        normed: &Tensor,
        layer: &mut PagedLayer,
        heads: AttentionHeads,
        sinks: Option<&Tensor>,
    ) -> Tensor {
        let (ctx, segments) = (pass.ctx, pass.segments.as_ref().expect("a paged pass has segments"));
        let (q, _) = self.queries(pass, w, normed);
        let (kv, key) = self.narrowed(pass, w, normed);
        let row = self.joined(ctx, &kv.normed, &key);
        // A cache on the GPU would be copied to the host for each token.
        let place = &if is_for_host(ctx, row.cols(), row.dtype()) { ctx.on_host() } else { ctx.clone() };
        layer.write(place, &[&row], segments.runs());
        let is_cheaper_wide = segments.all(|count, held| self.should_widen(count, held));
        if segments.begin_here() && is_cheaper_wide && !ctx.is_batch_invariant() {
            let (k, v) = self.widened(ctx, w, &kv.normed, &key);
            let sequences = segments.own_sequences();
            let shape = RaggedShape { heads, sequences: &sequences };
            return attention_ragged(ctx, RaggedInputs { q: &q, k: &k, v: &v, sinks }, &shape).o;
        }
        let kv = &*numbers_of_kv(place, w, q.dtype());
        let (q, dim) = (self.narrow_queries(place, &q, kv), self.row_dim());
        let heads = AttentionHeads { num_kv_heads: 1, head_dim: dim, value_dim: dim, ..heads };
        let queries = PagedQueries { q: &q, sinks, heads };
        let sums = attend_to_blocks(ctx, &queries, layer, &segments.paged_sequences());
        self.widened_sums(place, &sums, kv)
    }

    /// Up-projects the heads' sums of latent vectors to values, `[T, H w]`.
    fn widened_sums(&self, place: &Context, sums: &Tensor, kv: &Tensor) -> Tensor {
        let mut o = place.empty_on_device(&[sums.rows(), self.num_heads * self.value_dim], sums.dtype());
        let parts = HeadParts {
            count: self.num_heads,
            x: Columns { start: 0, step: self.row_dim() },
            w: self.wide_columns(self.sizes.plain_dim),
            num_rows: self.value_dim,
            y: Columns { start: 0, step: self.value_dim },
        };
        linear_by_head(place, sums, kv, &parts, &mut o);
        o
    }

    /// Returns the width of a cached row.
    fn row_dim(&self) -> usize {
        self.sizes.kv_rank + self.sizes.rotary_dim
    }

    /// Returns true if it takes fewer products per head to up-project `held` tokens than to down-project `count`
    /// queries.
    fn should_widen(&self, count: usize, held: usize) -> bool {
        let pair = self.sizes.kv_rank * self.wide_dim();
        held * pair + count * held * (self.key_dim() + self.value_dim)
            <= count * pair + count * held * 2 * self.row_dim()
    }

    /// Projects to queries, `[T, H (N + R)]`; also returns their latent vectors.
    fn queries(&self, pass: &Pass<'_>, w: &LatentWeights, normed: &Tensor) -> (Tensor, Option<Narrow>) {
        let (ctx, dtype) = (pass.ctx, attended_type(pass.ctx, w.q.dtype()));
        let narrow =
            w.q_down.as_ref().map(|down| self.narrow(ctx, project(ctx, normed, &down.projection, dtype), &down.norm));
        let mut q = linear(ctx, narrow.as_ref().map_or(normed, |narrow| &narrow.normed), &w.q, dtype);
        Self::turn(pass, &mut q, Rotation::Forward);
        (q, narrow)
    }

    /// Projects to the latent vectors of keys and values, and to a key head `[T, N + R]` with only its rotated part
    /// filled.
    fn narrowed(&self, pass: &Pass<'_>, w: &LatentWeights, normed: &Tensor) -> (Narrow, Tensor) {
        let (ctx, dtype, rank) = (pass.ctx, attended_type(pass.ctx, w.q.dtype()), self.sizes.kv_rank);
        let down = project(ctx, normed, &w.kv_down, dtype);
        let mut x = ctx.empty_on_device(&[normed.rows(), rank], dtype);
        copy_columns(ctx, Blocks { count: 1, width: rank }, &down, at(0), &mut x, at(0));
        let mut key = ctx.zeros_on_device(&[normed.rows(), self.key_dim()], dtype);
        copy_columns(ctx, self.rotated_part(), &down, at(rank), &mut key, at(self.sizes.plain_dim));
        Self::turn(pass, &mut key, Rotation::Forward);
        (self.narrow(ctx, x, &w.kv_norm), key)
    }

    fn rotated_part(&self) -> Blocks {
        Blocks { count: 1, width: self.sizes.rotary_dim }
    }

    /// Up-projects to the keys and values of all heads.
    fn widened(&self, ctx: &Context, w: &LatentWeights, narrow: &Tensor, key: &Tensor) -> (Tensor, Tensor) {
        let (rows, plain) = (narrow.rows(), self.sizes.plain_dim);
        let heads = linear(ctx, narrow, &w.kv, narrow.dtype());
        let mut k = ctx.empty_on_device(&[rows, self.num_heads * self.key_dim()], narrow.dtype());
        copy_columns(ctx, self.per_head(plain), &heads, self.wide_columns(0), &mut k, self.key_columns(0));
        copy_columns(ctx, self.per_head(self.sizes.rotary_dim), key, at(plain), &mut k, self.key_columns(plain));
        let mut v = ctx.empty_on_device(&[rows, self.num_heads * self.value_dim], narrow.dtype());
        let to = Columns { start: 0, step: self.value_dim };
        copy_columns(ctx, self.per_head(self.value_dim), &heads, self.wide_columns(plain), &mut v, to);
        (k, v)
    }

    /// Joins the cached row of tokens, `[T, L + R]`: the latent vector and the rotated part.
    fn joined(&self, ctx: &Context, narrow: &Tensor, key: &Tensor) -> Tensor {
        let rank = self.sizes.kv_rank;
        let mut row = ctx.empty_on_device(&[narrow.rows(), self.row_dim()], narrow.dtype());
        copy_columns(ctx, Blocks { count: 1, width: rank }, narrow, at(0), &mut row, at(0));
        copy_columns(ctx, self.rotated_part(), key, at(self.sizes.plain_dim), &mut row, at(rank));
        row
    }

    /// Splits the first `count` rows that [`joined`](Self::joined) made, which are in the memory of `place`.
    fn parted(&self, ctx: &Context, place: &Context, kept: &Tensor, count: usize) -> (Tensor, Tensor) {
        let (rank, dtype) = (self.sizes.kv_rank, kept.dtype());
        let mut rows = place.empty_on_device(&[count, self.row_dim()], dtype);
        copy_rows(place, kept, 0, &mut rows, 0, count);
        let mut narrow = ctx.empty_on_device(&[count, rank], dtype);
        copy_columns(ctx, Blocks { count: 1, width: rank }, &rows, at(0), &mut narrow, at(0));
        let mut key = ctx.zeros_on_device(&[count, self.key_dim()], dtype);
        copy_columns(ctx, self.rotated_part(), &rows, at(rank), &mut key, at(self.sizes.plain_dim));
        (narrow, key)
    }

    /// Down-projects queries to attend to cached rows, `[T, H (L + R)]`.
    fn narrow_queries(&self, ctx: &Context, q: &Tensor, kv: &Tensor) -> Tensor {
        let (rank, step) = (self.sizes.kv_rank, self.row_dim());
        let mut narrow = ctx.empty_on_device(&[q.rows(), self.num_heads * step], q.dtype());
        let parts = HeadParts {
            count: self.num_heads,
            x: self.key_columns(0),
            w: self.wide_columns(0),
            num_rows: self.sizes.plain_dim,
            y: Columns { start: 0, step },
        };
        transposed_linear_by_head(ctx, q, kv, &parts, &mut narrow);
        let (from, to) = (self.key_columns(self.sizes.plain_dim), Columns { start: rank, step });
        copy_columns(ctx, self.per_head(self.sizes.rotary_dim), q, from, &mut narrow, to);
        narrow
    }

    /// Returns the columns from element `start` of each head of keys.
    fn key_columns(&self, start: usize) -> Columns {
        Columns { start, step: self.key_dim() }
    }

    /// Returns the columns from element `start` of each head of the up-projection.
    fn wide_columns(&self, start: usize) -> Columns {
        Columns { start, step: self.wide_dim() }
    }

    /// Returns the gradient of `normed` from those of queries, keys and values, and the task that computes the
    /// matrices' gradients. The gradients of norm weights are written to `grads` as `write` says.
    pub(crate) fn backward(
        &self,
        pass: &Pass<'_>,
        w: &LatentWeights,
        saved: LatentSaved,
        [mut dq, mut dk, dv]: [Tensor; 3],
        write: Write,
        grads: &mut LatentWeights,
    ) -> (Tensor, LatentGradTask) {
        let ctx = pass.ctx;
        Self::turn(pass, &mut dq, Rotation::Inverse);
        Self::turn(pass, &mut dk, Rotation::Inverse);
        let mut d_normed = linear_backward_input(ctx, &dq, &w.q, DType::F32);
        let mut dq_narrow = None;
        if let (Some(narrow), Some(QueryDown { projection: down, norm }), Some(QueryDown { norm: d_norm, .. })) =
            (&saved.q, &w.q_down, &mut grads.q_down)
        {
            let dx = rms_norm_backward(ctx, &d_normed, &narrow.x, norm, &narrow.inv_rms, write, d_norm);
            d_normed = linear_backward_input(ctx, &dx, &down.weight, DType::F32);
            dq_narrow = Some(dx);
        }
        let (d_heads, d_kv_down) = self.backward_kv(ctx, w, &saved.kv, [&dk, &dv], write, &mut grads.kv_norm);
        let from_kv = linear_backward_input(ctx, &d_kv_down, &w.kv_down.weight, DType::F32);
        elementwise::add_assign(ctx, &mut d_normed, &from_kv);
        let compute = w.q.dtype();
        (d_normed, LatentGradTask { saved, dq, dq_narrow, d_heads, d_kv_down, compute })
    }

    /// Returns the gradients of the up-projection `[T, H (N + w)]` and of the down-projection `[T, Lkv + R]`.
    fn backward_kv(
        &self,
        ctx: &Context,
        w: &LatentWeights,
        narrow: &Narrow,
        [dk, dv]: [&Tensor; 2],
        write: Write,
        d_norm: &mut Tensor,
    ) -> (Tensor, Tensor) {
        let rows = dk.rows();
        let mut d_heads = ctx.empty_on_device(&[rows, self.num_heads * self.wide_dim()], DType::F32);
        let (plain, rank, rotary) = (self.sizes.plain_dim, self.sizes.kv_rank, self.sizes.rotary_dim);
        let (from, to) = (self.key_columns(0), self.wide_columns(0));
        copy_columns(ctx, self.per_head(plain), dk, from, &mut d_heads, to);
        let from = Columns { start: 0, step: self.value_dim };
        copy_columns(ctx, self.per_head(self.value_dim), dv, from, &mut d_heads, self.wide_columns(plain));
        let d_narrow = linear_backward_input(ctx, &d_heads, &w.kv, DType::F32);
        let d_narrow = rms_norm_backward(ctx, &d_narrow, &narrow.x, &w.kv_norm, &narrow.inv_rms, write, d_norm);
        let mut d_down = ctx.zeros_on_device(&[rows, rank + rotary], DType::F32);
        copy_columns(ctx, Blocks { count: 1, width: rank }, &d_narrow, at(0), &mut d_down, at(0));
        let (from, to) = (self.key_columns(plain), at(rank));
        add_columns(ctx, self.per_head(rotary), dk, from, &mut d_down, to);
        (d_heads, d_down)
    }
}

impl LatentGradTask {
    pub(crate) fn run(self, ctx: &Context, write: Write, grads: &mut LatentWeights) {
        let Self { saved, dq, dq_narrow, d_heads, d_kv_down, compute } = self;
        let q_input = saved.q.as_ref().map_or(&saved.normed, |narrow| &narrow.normed);
        matrix_grad(ctx, &dq, q_input, compute, write, &mut grads.q);
        if let (Some(d), Some(QueryDown { projection: down, .. })) = (dq_narrow, &mut grads.q_down) {
            project_grads(ctx, &d, &saved.normed, compute, write, down);
        }
        matrix_grad(ctx, &d_heads, &saved.kv.normed, compute, write, &mut grads.kv);
        project_grads(ctx, &d_kv_down, &saved.normed, compute, write, &mut grads.kv_down);
    }
}

/// Returns `kv` as products by head need it. Dequantizing it takes the CPU longer than the product, so the CPU caches
/// the result.
fn numbers_of_kv<'a>(place: &Context, w: &'a LatentWeights, dtype: DType) -> Cow<'a, Tensor> {
    if !w.kv.dtype().is_quantized() {
        return Cow::Borrowed(&w.kv);
    }
    let kept = if place.device() == Device::Cpu { w.kv_numbers.get(place, &w.kv, dtype) } else { None };
    kept.map_or_else(|| Cow::Owned(quantized::dequantize(place, &w.kv, dtype)), Cow::Borrowed)
}
