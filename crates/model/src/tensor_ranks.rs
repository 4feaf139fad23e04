//! Tensor parallelism: the collectives of a group whose ranks shard matrices and pass the same tokens.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use moeworks_comm::{Communicator, Reduce};
use moeworks_moe::{ConfigError, ExpertIds, ExpertRanks, RouterInput};
use moeworks_ops::Context;
use moeworks_ops::elementwise;
use moeworks_ops::embedding::{embedding, embedding_backward};
use moeworks_ops::head_loss::VocabularyPart;
use moeworks_ops::linear::Write;
use moeworks_ops::rms_norm::{RmsNormInputs, rms_norm_part, rms_norm_part_backward, row_products};
use moeworks_tensor::{DType, Tensor};

use crate::config::ModelConfig;
use crate::layers::Pass;
use crate::split::TensorSplit;
use crate::weights::WeightTable;

/// A rank's membership in a tensor-parallel group. Clones share it.
///
/// After a communication fails, the rest of the pass communicates no more; [`ExpertRanks::failure`] of
/// [`experts`](Self::experts) returns the error.
#[derive(Clone)]
pub struct TensorRanks {
    inner: Arc<Inner>,
}

struct Inner {
    group: Arc<dyn Communicator>,
    split: TensorSplit,
    experts: ExpertRanks,
}

/// The width of a norm that is sharded across ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShardedWidth {
    /// The width over all ranks.
    pub(crate) width: usize,
    /// False if a lower rank holds the same part, and counts it.
    pub(crate) is_counted: bool,
}

/// The input of a sharded norm, for its backward.
#[derive(Clone, Copy)]
pub(crate) struct NormedPart<'a> {
    pub(crate) x: &'a Tensor,
    pub(crate) weight: &'a Tensor,
    pub(crate) inv_rms: &'a Tensor,
}

impl TensorRanks {
    /// Joins `group`, whose ranks have the same tokens and shard the matrices of `table`, of a model of `config`.
    /// `experts` is this rank's membership in layers with experts, where each rank of `group` has tokens of its own.
    /// Fails if there are more ranks than heads, hidden units or ids to shard.
    pub fn new(
        config: &ModelConfig,
        table: &WeightTable,
        group: Arc<dyn Communicator>,
        experts: ExpertRanks,
    ) -> Result<Self, ConfigError> {
        let split = TensorSplit::new(config, table, group.rank(), group.size())?;
        Ok(Self { inner: Arc::new(Inner { group, split, experts }) })
    }

    /// Returns the parts of tensors that this rank holds.
    #[must_use]
    pub fn split(&self) -> &TensorSplit {
        &self.inner.split
    }

    /// Returns the ranks that shard the matrices.
    #[must_use]
    pub fn group(&self) -> &dyn Communicator {
        &*self.inner.group
    }

    /// Returns this rank's membership in layers with experts.
    #[must_use]
    pub fn experts(&self) -> &ExpertRanks {
        &self.inner.experts
    }

    /// All-reduces `x`, f32, over the group; all ranks get the same bits.
    pub(crate) fn sum(&self, x: &mut Tensor) {
        let experts = self.experts();
        let sum = || self.group().all_reduce(x.f32s_mut(), Reduce::Sum);
        experts.time("tensor parallel: sum", || experts.attempt((), sum));
    }

    /// All-reduces `x`, f32, and adds the bias, which all ranks hold whole, to each row.
    pub(crate) fn sum_biased(&self, ctx: &Context, x: &mut Tensor, bias: Option<&Tensor>) {
        self.sum(x);
        if let Some(bias) = bias {
            elementwise::add_rows(ctx, x, bias);
        }
    }

    /// RMSNorm over a width that is sharded across ranks, `width` in all; returns `y` and 1/rms. The ranks all-reduce
    /// one sum of squares per row. If several ranks hold the same part, only the first is `counted`.
    pub(crate) fn norm_part(
        &self,
        ctx: &Context,
        x: &Tensor,
        weight: &Tensor,
        ShardedWidth { width, is_counted }: ShardedWidth,
        eps: f32,
        out: DType,
    ) -> (Tensor, Tensor) {
        let mut sums = row_products(ctx, x, x, weight.len(), None);
        if !is_counted {
            sums.f32s_mut().fill(0.0);
        }
        self.sum(&mut sums);
        let inv_rms = |sum: &mut f32| *sum = 1.0 / (*sum / width as f32 + eps).sqrt();
        sums.f32s_mut().iter_mut().for_each(inv_rms);
        (rms_norm_part(ctx, x, weight, &sums, out), sums)
    }

    /// Backward of [`norm_part`](Self::norm_part) with the same `inv_rms`: returns the gradient of `x` from `dy`, and
    /// writes that of the weight as `write` says. The ranks all-reduce one number per row. If several ranks hold the
    /// same part, their gradients have to be summed.
    pub(crate) fn norm_part_backward(
        &self,
        ctx: &Context,
        dy: &Tensor,
        NormedPart { x, weight, inv_rms }: NormedPart<'_>,
        ShardedWidth { width, is_counted }: ShardedWidth,
        write: Write,
        d_weight: &mut Tensor,
    ) -> Tensor {
        let mut means = row_products(ctx, dy, x, weight.len(), Some(weight));
        self.sum(&mut means);
        let factor = if is_counted { 1.0 / width as f32 } else { 0.0 };
        elementwise::scale_assign(ctx, &mut means, factor);
        rms_norm_part_backward(ctx, dy, RmsNormInputs { x, weight, inv_rms }, &means, write, d_weight)
    }

    /// Gathers the rows `[T, D]` f32 of all ranks, `counts` per rank.
    fn gather(&self, ctx: &Context, rows: &Tensor, counts: &[usize]) -> Tensor {
        let experts = self.experts();
        let mut all = ctx.zeros(&[counts.iter().sum::<usize>(), rows.cols()], DType::F32);
        let counts: Vec<usize> = counts.iter().map(|count| count * rows.cols()).collect();
        let gather = || self.group().all_gather_v(rows.f32s(), all.f32s_mut(), &counts);
        experts.time("tensor parallel: gather", || experts.attempt((), gather));
        all
    }

    /// Embeds `ids` as `[T, D]` f32 with a table that is sharded by the vocabulary.
    pub(crate) fn embed(&self, ctx: &Context, ids: &[u32], table: &Tensor) -> Tensor {
        let (own, places) = self.own_ids(ids);
        let rows = embedding(ctx, &own, table, DType::F32);
        let mut x = ctx.zeros(&[ids.len(), table.cols()], DType::F32);
        let width = table.cols();
        for (row, place) in rows.f32s().chunks_exact(width).zip(places) {
            x.f32s_mut()[place * width..(place + 1) * width].copy_from_slice(row);
        }
        self.sum(&mut x);
        x
    }

    /// Adds rows of `dx` `[T, D]` f32 to the gradients of the table's rows that this rank holds.
    pub(crate) fn embed_backward(&self, ctx: &Context, ids: &[u32], dx: &Tensor, d_table: &mut Tensor) {
        let (own, places) = self.own_ids(ids);
        let width = dx.cols();
        let mut rows = ctx.empty(&[own.len(), width], DType::F32);
        for (row, place) in rows.f32s_mut().chunks_exact_mut(width).zip(places) {
            row.copy_from_slice(&dx.f32s()[place * width..(place + 1) * width]);
        }
        embedding_backward(ctx, &own, &rows, d_table);
    }

    /// Returns the `ids` in this rank's part of the vocabulary, relative to its start, with their positions.
    fn own_ids(&self, ids: &[u32]) -> (Vec<u32>, Vec<usize>) {
        let starts = self.split().vocabulary();
        let own = starts[self.split().rank()] as u32..starts[self.split().rank() + 1] as u32;
        ids.iter().zip(0..).filter(|(id, _)| own.contains(id)).map(|(id, place)| (id - own.start, place)).unzip()
    }

    /// Gathers the logits `[T, V]` f32 of the whole vocabulary from those of each rank's part.
    pub(crate) fn whole_logits(&self, ctx: &Context, own: &Tensor) -> Tensor {
        let (num_tokens, starts) = (own.rows(), self.split().vocabulary());
        let vocab_size = starts[self.split().size()];
        let counts: Vec<usize> = starts.windows(2).map(|part| (part[1] - part[0]) * num_tokens).collect();
        let (experts, mut parts) = (self.experts(), vec![0.0; vocab_size * num_tokens]);
        let gather = || self.group().all_gather_v(own.f32s(), &mut parts, &counts);
        experts.time("tensor parallel: gather", || experts.attempt((), gather));
        let mut whole = ctx.empty(&[num_tokens, vocab_size], DType::F32);
        for part in starts.windows(2) {
            let (rows, width) = (&parts[part[0] * num_tokens..part[1] * num_tokens], part[1] - part[0]);
            for (row, into) in rows.chunks_exact(width).zip(whole.f32s_mut().chunks_exact_mut(vocab_size)) {
                into[part[0]..part[1]].copy_from_slice(row);
            }
        }
        whole
    }

    /// Calls `head` with this rank's part of the vocabulary.
    pub(crate) fn with_vocabulary<R>(&self, head: impl FnOnce(&mut VocabularyPart<'_>) -> R) -> R {
        let experts = self.experts();
        let mut gather = |own: &[f32]| {
            let mut all = vec![0.0; own.len() * self.split().size()];
            let gather = || self.group().all_gather(own, &mut all);
            experts.time("tensor parallel: softmax", || experts.attempt((), gather));
            all
        };
        head(&mut VocabularyPart { starts: self.split().vocabulary(), rank: self.split().rank(), gather: &mut gather })
    }
}

impl fmt::Debug for TensorRanks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.split().rank(), self.split().size())
    }
}

/// The run of a pass's tokens that this rank takes through a layer with experts.
pub(crate) struct Run<'a> {
    ranks: &'a TensorRanks,
    /// The number of tokens of each rank of the group.
    counts: Vec<usize>,
    own: Range<usize>,
}

impl<'a> Run<'a> {
    /// Returns the run of `pass`, of whole sequences or not; none without tensor parallelism.
    pub(crate) fn new(pass: &Pass<'a>, are_whole: bool) -> Option<Self> {
        let ranks = pass.tensor?;
        let split = ranks.split();
        let run = |rank| split.run_of(rank, pass.sequences.count, pass.sequences.len, are_whole);
        Some(Self { ranks, counts: (0..split.size()).map(|rank| run(rank).len()).collect(), own: run(split.rank()) })
    }

    /// Copies the rows of `x` `[T, D]` that belong to the run.
    pub(crate) fn rows(&self, ctx: &Context, x: &Tensor) -> Tensor {
        let row_bytes = x.cols() * x.dtype().size();
        let mut rows = ctx.empty(&[self.own.len(), x.cols()], x.dtype());
        rows.bytes_mut().copy_from_slice(&x.bytes()[self.own.start * row_bytes..self.own.end * row_bytes]);
        rows
    }

    /// Returns the expert ids of the run out of those of the whole pass.
    pub(crate) fn expert_ids(&self, ctx: &Context, ids: &ExpertIds) -> ExpertIds {
        ids.rows(ctx, self.own.clone())
    }

    /// Returns the router's other inputs for the run. Logits of the previous layer are those of the run already.
    pub(crate) fn input<'b>(&self, input: &RouterInput<'b>) -> RouterInput<'b> {
        let token_ids = if input.token_ids.is_empty() { &[] } else { &input.token_ids[self.own.clone()] };
        RouterInput { token_ids, first_token: input.first_token + self.own.start, ..*input }
    }

    /// Gathers `[T, D]` f32 of all tokens from each rank's run.
    pub(crate) fn whole(&self, ctx: &Context, rows: &Tensor) -> Tensor {
        self.ranks.gather(ctx, rows, &self.counts)
    }
}
